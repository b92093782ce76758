"""A bucket: every object below ``prefix`` is an item, its key behind the prefix the external id.

Order      The service lists keys in the order of their UTF-8 bytes, so a checkpoint is only the last key, and a listing goes on
           behind it. A store that answers in another order is refused: behind a checkpoint it would leave objects out.
Revision   The ETag, in a ``versioned`` bucket with the version id. LastModified proves nothing: it is the time at which an
           upload began, in whole seconds. An ETag is compared and never taken for a hash: for parts and under KMS it is none.
Reading    One GET is one revision, whatever is written meanwhile. A broken one goes on where it ended, on condition that the
           ETag is still the same.
Deletion   Without ListBucket the service answers 403 for a missing key too. So only a 404 says GONE, and only while the bucket
           itself can be listed; a delete marker is a 404.
Scopes     ``scopes`` names the prefixes that are listed side by side, and nothing else belongs to the source then.
           ``scope_depth=1`` takes every first folder for one, and what lies beside them for one more.
"""

import base64
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import BytesIO
from itertools import islice, pairwise
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kb_pipeline.connectors import Globs, Selection
from kb_pipeline.errors import Fatal, KbError, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.model import BadItem, Fetched, Item, Json, Page, Presence
from kb_pipeline.ports import WHOLE, Capabilities
from kb_pipeline.s3 import S3Failure, Trouble, failures, open_client, time_of

_EXCLUDE = (".*", "~$*", "*~", "*.tmp", "*.part", "*_$folder$", "Thumbs.db", "desktop.ini", "__MACOSX", "__pycache__")
_LOOSE = "."  # the scope of what lies in no folder: the others end with a slash
_LIST = 1000  # keys an answer holds at most
_IN_MEMORY = 8 * 2**20
_PIECE = 2**20
_THREADS = 8
_BROKEN_READS = 3  # in a row, without a byte between them


def _prefixes(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _disjoint(scopes: tuple[str, ...]) -> tuple[str, ...]:
    in_order = sorted(scopes, key=str.encode)
    for scope, following in pairwise(in_order):
        if following.startswith(scope):
            raise ValueError(f"{scope!r} holds what {following!r} lists too: an object must belong to one scope")
    return tuple(in_order)


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(min_length=1)
    prefix: str = ""  # a folder
    include: Globs = ()  # empty: everything
    exclude: Globs = _EXCLUDE  # given: replaces the defaults
    endpoint: str = ""  # empty: AWS
    region: str = "us-east-1"
    access_key: str = ""  # empty: boto3's own chain
    secret_key: str = Field("", repr=False)
    versioned: bool = False  # the version id is part of the revision
    scopes: Annotated[tuple[str, ...], BeforeValidator(_prefixes), AfterValidator(_disjoint)] = ()  # below prefix
    scope_depth: Literal[0, 1, "0", "1"] = 0

    @model_validator(mode="after")
    def _together(self) -> "Config":
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("access_key and secret_key go together: give both, or none for boto3's own chain")
        if self.scopes and int(self.scope_depth):
            raise ValueError("scopes and scope_depth exclude each other: give one of them")
        return self


class S3Objects:
    def __init__(self, config: Config) -> None:
        self._config, self._bucket = config, config.bucket
        self._prefix = f"{config.prefix.strip('/')}/" if config.prefix.strip("/") else ""
        self._selection = Selection(config.include, config.exclude)
        self._by_folder = int(config.scope_depth) == 1
        # A digest costs a reading, and S3 knows no moves that it would find: the gate before a version is the ETag alone.
        self.capabilities = Capabilities(order_stable=True, probe=True, digest=False, snapshot_digest=True)
        if config.scopes or self._by_folder:
            self.capabilities = replace(self.capabilities, scopes=True)
        self._client = open_client(
            f"source {self._name()}",
            "endpoint, region",
            endpoint=config.endpoint,
            region=config.region,
            threads=2 * _THREADS,
            keys=(config.access_key, config.secret_key) if config.access_key else None,
        )

    def check(self) -> Json:
        before = time.time()
        answer = self._first_answer()
        found: Json = {
            "bucket": self._bucket,
            "prefix": self._prefix,
            "objects": f"more than {_LIST}" if answer.get("IsTruncated") else len(answer.get("Contents", ())),
            "clock_skew_seconds": round(time_of(answer) - (before + time.time()) / 2, 1),
        }
        if self._config.versioned:
            with self._errors(""):
                self._client.list_object_versions(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
            found["versioned"] = True
        if self.capabilities.scopes:
            found["scopes"] = len(self.scopes())
        return found

    def clock(self) -> float:
        return time_of(self._first_answer(1))

    # --- listing

    def scopes(self) -> list[str]:
        if not self._by_folder:
            return list(self._config.scopes) or [WHOLE]
        found = [_LOOSE]
        for answer in self._answers("list_objects_v2", "", one_scope=False, Delimiter="/"):
            found += [p["Prefix"].removeprefix(self._prefix) for p in answer.get("CommonPrefixes", ())]
        return [scope for scope in found if scope == _LOOSE or not self._is_excluded(scope)]

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        return self.scope_pages(WHOLE, checkpoint, limit)

    def scope_pages(self, scope: str, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        last, first = str((checkpoint or {}).get("after", "")), True
        entries = self._entries(scope, last)
        while True:
            items, bad = list[Item](), list[BadItem]()
            for external_id, entry in islice(entries, limit):
                last = external_id
                if "\0" in external_id:
                    name = external_id.replace("\0", "\\x00")
                    bad.append(BadItem(name, "name_not_storable", f"{name}: the key has a NUL: copy it to another key"))
                else:
                    items.append(self._item(external_id, entry))
            found = len(items) + len(bad)
            if found or first:
                yield Page(tuple(items), tuple(bad), {"after": last} if last else {})
            first = False
            if found < limit:
                return

    def listing_digest(self) -> str | None:
        digest = hashlib.sha256()
        try:
            for external_id, entry in self._entries(WHOLE, ""):
                if "\0" in external_id:
                    return None
                digest.update(f"{external_id}\0{self._revision(entry)}\0".encode())
        except Rejected:
            return None  # a scope that may not be listed
        return digest.hexdigest()

    def _entries(self, scope: str, after: str) -> Iterator[tuple[str, Any]]:
        """Selected objects of a scope, or of all, behind the id ``after``. Raises Fatal for a store that lists in no order."""
        versions = self._config.versioned
        previous = (self._prefix + after).encode() if after else b""
        for answer in self._listing(scope, after):
            for entry in answer.get("Versions" if versions else "Contents", ()):
                if versions and not entry["IsLatest"]:
                    continue
                if (raw := entry["Key"].encode()) <= previous:
                    way_out = "use another store, or copy the objects to one that lists by key"
                    raise Fatal(f"{self._name()}: the store does not list keys in order: {way_out}", code="unordered_listing")
                previous, external_id = raw, entry["Key"].removeprefix(self._prefix)
                if not external_id or (external_id.endswith("/") and not entry["Size"]):
                    continue  # made by consoles, to show a folder
                if self._selection.has(external_id.encode().split(b"/")):
                    yield external_id, entry

    def _listing(self, scope: str, after: str) -> Iterator[Any]:
        """The answers of one scope; those of all scopes follow each other in the order of their keys."""
        of_all = self._config.scopes if scope == WHOLE and self._config.scopes else ("",)
        operation = "list_object_versions" if self._config.versioned else "list_objects_v2"
        for part in of_all if scope in (WHOLE, _LOOSE) else (scope,):
            options = {"Delimiter": "/"} if scope == _LOOSE else {}
            if after:
                options["KeyMarker" if self._config.versioned else "StartAfter"] = self._prefix + after
            yield from self._answers(operation, part, one_scope=self.capabilities.scopes, **options)

    def _answers(self, operation: str, scope: str, *, one_scope: bool, **options: Any) -> Iterator[Any]:
        """Of a listing, 1,000 keys each; boto3 asks for keys in a form that XML can hold."""
        size = {"PageSize": _LIST}
        answers = iter(
            self._client.get_paginator(operation).paginate(
                Bucket=self._bucket, Prefix=self._prefix + scope, PaginationConfig=size, **options
            )
        )
        answer: Any = {}
        while True:
            cut = answer.get("IsTruncated")
            with self._errors("", one_scope=scope if one_scope else None):
                if (answer := next(answers, None)) is None:
                    break
            yield answer
        if cut:  # boto3 takes a missing token for the end
            raise Transient(f"{self._name(scope)}: the store cut its listing and does not say how to go on", code="listing_cut")

    def _item(self, external_id: str, entry: Any) -> Item:
        return Item(
            external_id=external_id,
            revision=self._revision(entry),
            title=external_id.rpartition("/")[2] or external_id,
            uri=f"s3://{self._bucket}/{quote(self._prefix + external_id)}",
            size_bytes=entry["Size"],
            modified_at=entry["LastModified"],
        )

    def _revision(self, answer: Any) -> str:
        """Of a listed entry or an answer to a reading; without an ETag it is read again every time. No version id is null."""
        etag = str(answer.get("ETag", "")).strip('"')
        return f"{etag} {answer.get('VersionId') or 'null'}" if self._config.versioned else etag

    # --- reading

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        try:
            with self._reading(external_id, ChecksumMode="ENABLED") as answer:
                if (stored := _stored_sha256(answer)) is not None:
                    return self._revision(answer), stored
                digest = hashlib.sha256()
                for piece in self._pieces(external_id, answer):
                    digest.update(piece)
                return self._revision(answer), digest.digest()
        except Rejected as e:
            if e.code == "gone":
                return None
            raise

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        with self._reading(external_id) as answer, ExitStack() as undo:
            size = answer["ContentLength"]
            if size > max_bytes:
                way_out = "split the object, exclude it, or raise KB_MAX_FILE_BYTES"
                raise TooLarge(f"{external_id}: {size} bytes, the limit is {max_bytes}: {way_out}")
            data: BinaryIO = BytesIO() if size <= _IN_MEMORY else tempfile.TemporaryFile()  # noqa: SIM115
            undo.callback(data.close)
            try:
                for piece in self._pieces(external_id, answer):
                    data.write(piece)
                data.seek(0)
            except OSError as e:
                way_out = f"free some in {tempfile.gettempdir()}"
                raise Transient(f"{external_id}: no space for a temporary copy: {way_out}", code="no_temp_space") from e
            undo.pop_all()
        return Fetched(data, size, self._revision(answer))

    @contextmanager
    def _reading(self, external_id: str, **options: Any) -> Iterator[Any]:
        """The answer to a GET, its body unread. Raises Rejected, Transient, Fatal."""
        if not self._has(external_id):
            raise Rejected(f"{external_id}: excluded by the patterns or scopes: the next sync takes it out", code="gone")
        with self._errors(external_id):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + external_id, **options)
        try:
            yield answer
        finally:
            answer["Body"].close()

    def _pieces(self, external_id: str, answer: Any) -> Iterator[bytes]:
        """The whole content of one revision. Raises Transient when it is no longer there to go on with."""
        size, done, broken, body = answer["ContentLength"], 0, 0, answer["Body"]
        while done < size:
            try:
                with failures():
                    if body is None:
                        body = self._rest(external_id, answer, done)
                    piece = body.read(_PIECE)
                    if not piece:
                        raise S3Failure(Trouble.UNREACHABLE, "the answer ended early")
            except S3Failure as e:
                broken, body = broken + 1, None
                if e.trouble is not Trouble.UNREACHABLE or broken == _BROKEN_READS:
                    raise self._error(external_id, e) from e
                continue
            done, broken = done + len(piece), 0
            yield piece

    def _rest(self, external_id: str, answer: Any, done: int) -> Any:
        same = {"IfMatch": answer["ETag"]} if "ETag" in answer else {}
        rest = self._client.get_object(Bucket=self._bucket, Key=self._prefix + external_id, Range=f"bytes={done}-", **same)
        # Compatible stores pass over conditions that they do not know, and ranges too.
        if (
            not same
            or self._revision(rest) != self._revision(answer)
            or rest["ContentLength"] != answer["ContentLength"] - done
        ):
            rest["Body"].close()
            raise S3Failure(Trouble.CHANGED, "another revision by now")
        return rest["Body"]

    # --- probing

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        if not external_ids:
            return []
        with ThreadPoolExecutor(min(_THREADS, len(external_ids)), "s3-head") as pool:
            found = list(pool.map(self._probe, external_ids))
        return found if set(found) <= {Presence.PRESENT, Presence.UNKNOWN} else self._doubted(found)

    def _doubted(self, found: list[Presence]) -> list[Presence]:
        """A HEAD does not say whose fault it is: without the bucket it is a 404 too, with a wrong secret a 403."""
        try:
            self._first_answer(1)
        except KbError as e:
            doubtful = {Presence.GONE} if e.code == "denied" else {Presence.GONE, Presence.FORBIDDEN}
            return [Presence.UNKNOWN if p in doubtful else p for p in found]
        return found

    def _probe(self, external_id: str) -> Presence:
        if not self._has(external_id):
            return Presence.GONE  # the configuration took it out of the source
        try:
            with failures():
                self._client.head_object(Bucket=self._bucket, Key=self._prefix + external_id)
        except S3Failure as e:
            return _PRESENCE.get(e.trouble, Presence.UNKNOWN)
        return Presence.PRESENT

    def _has(self, external_id: str) -> bool:
        scopes = self._config.scopes
        inside = not scopes or external_id.startswith(scopes)
        return inside and self._selection.has(external_id.encode().split(b"/"))

    def _is_excluded(self, scope: str) -> bool:
        name = scope.rstrip("/").encode()
        return self._selection.exclude.match(name, name)

    def _first_answer(self, keys: int = _LIST) -> Any:
        with self._errors(""):
            return self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=keys)

    # --- errors

    @contextmanager
    def _errors(self, external_id: str, *, one_scope: str | None = None) -> Iterator[None]:
        """``one_scope``: that this one may not be listed says nothing about the others."""
        try:
            with failures():
                yield
        except S3Failure as e:
            if one_scope is not None and e.trouble is Trouble.DENIED:
                way_out = "allow s3:ListBucket on this prefix, or take it out of scopes"
                raise Rejected(f"{self._name(one_scope)}: {e.detail}: {way_out}", code="forbidden") from e
            raise self._error(external_id, e) from e

    def _error(self, external_id: str, e: S3Failure) -> KbError:
        """``external_id`` empty: it is about the source as a whole."""
        what = f"{self._name(external_id)}: {e.detail}"
        match e.trouble:
            case Trouble.NO_OBJECT if external_id:
                return Rejected(f"{what}: the next sync takes it out", code="gone")
            case Trouble.NO_OBJECT | Trouble.NO_BUCKET:
                return Fatal(f"{what}: create the bucket, or correct bucket, endpoint and region", code="bucket_missing")
            case Trouble.SLOW_DOWN:
                return RateLimited(f"{what}: the store asks for fewer requests: it is tried again", retry_after=e.retry_after)
            case Trouble.CHANGED:
                return Transient(f"{what}: it is read again later", code="changed_while_reading")
            case Trouble.ARCHIVED:
                return Rejected(f"{what}: restore it from its archive class, or exclude it", code="archived")
            case Trouble.NO_KEYS:
                return Fatal(
                    f"{what}: give access_key and secret_key as references, a profile, or a role", code="no_credentials"
                )
            case Trouble.BAD_KEYS:
                way_out = "correct access_key and secret_key, and check this machine's clock"
                return Fatal(f"{what}: {way_out}", code="bad_credentials")
            case Trouble.DENIED if external_id:
                return Rejected(f"{what}: allow s3:GetObject on it, or exclude it", code="forbidden")
            case Trouble.DENIED:
                return Fatal(f"{what}: allow s3:ListBucket on the bucket and s3:GetObject below the prefix", code="denied")
            case _:
                return Transient(f"{what}: check that the store can be reached", code="unreadable")

    def _name(self, external_id: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{external_id}"


_PRESENCE = {Trouble.NO_OBJECT: Presence.GONE, Trouble.DENIED: Presence.FORBIDDEN, Trouble.ARCHIVED: Presence.PRESENT}


def _stored_sha256(answer: Any) -> bytes | None:
    """The checksum that was stored with the object, if it is one over the whole content."""
    stored = answer.get("ChecksumSHA256", "")
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in stored
    return base64.b64decode(stored) if stored and whole else None
