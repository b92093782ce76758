"""Objects in an S3 bucket or a compatible store. Credentials come from boto3's own chain.

The bucket should have lifecycle rules: one that aborts uploads a killed writer left incomplete, and, where it keeps versions,
one that expires those of deleted objects.
"""

import errno
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import islice
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from kb_pipeline.blobs import checked_key
from kb_pipeline.errors import Fatal, KbError, RateLimited, Rejected, Transient
from kb_pipeline.s3 import S3Failure, Trouble, failures, open_client, trouble_of

_THREADS = 8
_IN_FLIGHT = 32  # objects taken from the caller at a time, of at most _PART bytes each in memory
_PART = 8 * 2**20  # from here on an object is sent in parts
_DELETE = 1000  # the most that DeleteObjects takes


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(min_length=1)
    prefix: str = ""
    endpoint: str = ""  # empty: AWS
    region: str = "us-east-1"


class S3Blobs:
    def __init__(self, config: Config) -> None:
        self._bucket = config.bucket
        self._prefix = f"{config.prefix.strip('/')}/" if config.prefix.strip("/") else ""
        self._client = open_client(
            f"object store s3://{config.bucket}",
            "KB_BLOBS, KB_S3_ENDPOINT, KB_S3_REGION",
            endpoint=config.endpoint,
            region=config.region,
            threads=_THREADS,
        )

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        """File objects stay the caller's; they must stay open until this returns."""
        rest = iter(objects)
        with ThreadPoolExecutor(_THREADS, "s3-put") as pool:
            while batch := list(islice(rest, _IN_FLIGHT)):
                list(pool.map(lambda pair: self._put(*pair), batch))

    def _put(self, key: str, content: bytes | BinaryIO) -> None:
        from boto3.s3.transfer import TransferConfig

        name = self._prefix + checked_key(key)
        with self._errors(key):
            if not isinstance(content, bytes):
                start = content.tell()
                head = content.read(_PART)
                if len(head) == _PART:
                    content.seek(start)
                    # One part at a time, in this thread: what is in memory is one part, and small files next to it go on.
                    parts = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, use_threads=False)
                    self._client.upload_fileobj(content, self._bucket, name, Config=parts)
                    return
                content = head
            self._client.put_object(Bucket=self._bucket, Key=name, Body=content)

    def get(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(self._body(key)["Body"].read())

    def open(self, key: str) -> BinaryIO:
        """A copy that can seek: in memory when small, in a temporary file when large."""
        with self._errors(key):
            answer = self._body(key)
            data: BinaryIO = BytesIO() if answer["ContentLength"] <= _PART else tempfile.TemporaryFile()  # noqa: SIM115
            try:
                for piece in answer["Body"].iter_chunks(2**20):
                    data.write(piece)
                data.seek(0)
            except BaseException:
                data.close()
                raise
            return data

    def _body(self, key: str) -> Any:
        return self._client.get_object(Bucket=self._bucket, Key=self._prefix + checked_key(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while batch := list(islice(rest, _DELETE)):
            named = {"Objects": [{"Key": self._prefix + checked_key(key)} for key in batch], "Quiet": True}
            with self._errors(f"{len(batch)} objects"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=named)
            for error in answer.get("Errors", ()):
                code = error.get("Code", "")
                if (trouble := trouble_of(code, 0)) is not Trouble.NO_OBJECT:
                    raise self._error(error.get("Key", "").removeprefix(self._prefix), S3Failure(trouble, code))

    def clear(self, folder: str) -> None:
        # Uploads first: one that is completed meanwhile is an object, and those are deleted next.
        self._abort_uploads(self._prefix + folder)
        self.delete_many(self.keys(folder))

    def _abort_uploads(self, prefix: str) -> None:
        with self._errors(f"{prefix.removeprefix(self._prefix)}*"):
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    if not upload["Key"].startswith(prefix):
                        continue  # there are stores that answer with those of the whole bucket
                    with suppress(self._client.exceptions.NoSuchUpload):  # its writer has ended it
                        self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def keys(self, prefix: str) -> Iterator[str]:
        if base := prefix.rpartition("/")[0]:
            checked_key(base)
        with self._errors(f"{prefix}*"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            for page in pages:
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):  # what consoles create to show a folder
                        yield entry["Key"].removeprefix(self._prefix)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            with failures():
                yield
        except S3Failure as e:
            raise self._error(key, e) from e
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                way_out = f"free some in {tempfile.gettempdir()}"
                raise Transient(f"{self._what(key)}: no space for a temporary copy: {way_out}", code="no_temp_space") from e
            way_out = "check that the store can be reached"
            raise Transient(f"{self._what(key)}: {type(e).__name__}: {way_out}", code="blob_store_error") from e

    def _error(self, key: str, e: S3Failure) -> KbError:
        what = f"{self._what(key)}: {e.detail}"
        match e.trouble:
            case Trouble.NO_OBJECT:
                return Rejected(f"{what}: restore it from a backup", code="blob_missing")
            case Trouble.NO_BUCKET:
                return Fatal(f"{what}: create the bucket, or correct KB_BLOBS and KB_S3_REGION", code="blob_store_missing")
            case Trouble.FULL:
                return Transient(f"{what}: free some space, or raise the quota", code="blob_store_full")
            case Trouble.SLOW_DOWN:
                return RateLimited(f"{what}: the store asks for fewer requests", retry_after=e.retry_after)
            case Trouble.RETRY | Trouble.CHANGED:
                return Transient(f"{what}: it is tried again", code="blob_store_error")
            case Trouble.UNREACHABLE:
                return Transient(f"{what}: check that the store can be reached", code="blob_store_error")
            case Trouble.NO_KEYS:
                way_out = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
            case Trouble.BAD_KEYS:
                way_out = "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and check this machine's clock"
            case _:
                way_out = "allow GetObject, PutObject, DeleteObject, ListBucket on it"
        return Fatal(f"{what}: {way_out}", code="blob_store_denied")

    def _what(self, key: str) -> str:
        return f"object store s3://{self._bucket}/{self._prefix}{key}"
