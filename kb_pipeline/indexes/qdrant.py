"""Vectors in Qdrant, one collection per index: a server or cluster by ``url``, or the client's own local mode by ``path``.

One collection per index and not one per model, because the promises rest on the server then: it answers 404 to a late write for
an index that was dropped, a drop is whole and exact, two indexes of one space stand side by side with the same ids, and
quantization, HNSW and replicas, which belong to a collection, can differ.
"""

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from qdrant_client import QdrantClient
from qdrant_client import models as q
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, StateError, TooLarge, Transient
from kb_pipeline.model import Bucket, Candidate, IndexRef, VectorEntry
from kb_pipeline.ports import IndexCapabilities

OLDEST = (1, 16)  # the first that knows update_filter; an older one ignores it and would write unconditionally
EVERYBODY = -1  # what an entry without an ACL holds, so that one indexed condition is the whole filter
REQUEST_BYTES = 16 * 2**20  # half of what a server takes unless it is told otherwise (service.max_request_size_mb)
NUMBER_BYTES = 20  # of one number in JSON, at most
PAGE = 2000
IN_MEMORY = ":memory:"
ALL, STRONG = q.ReadConsistencyType.ALL, q.WriteOrdering.STRONG
INDEXED = ("acl", "bucket")  # looked up; the condition of an upsert looks at its own points only


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""  # http://host:6333
    path: str = ""  # a folder for local mode instead, one process at a time, for trials; ":memory:" keeps nothing, for tests
    api_key: str = Field("", repr=False)
    prefix: str = ""  # of collections, where installations share a server
    timeout_seconds: int = 60
    datatype: Literal["float16", "float32"] = "float16"
    quantization: Literal["none", "scalar", "binary"] = "none"
    m: int = 16
    ef_construct: int = 100
    hnsw_ef: int = 128  # HNSW candidates a search looks at
    on_disk: bool = False  # vectors and HNSW are read from disk
    replicas: int = 1
    write_consistency: int = 0  # replicas that must have a write; 0: every one

    @model_validator(mode="after")
    def _one_place(self) -> "Config":
        if bool(self.url) == bool(self.path):
            raise ValueError("give url (of a server) or path (of a folder for local mode)")
        return self


class QdrantIndex:
    def __init__(self, config: Config) -> None:
        self._config = config

    capabilities = IndexCapabilities(digest=False, named=True)

    @cached_property
    def _opened(self) -> tuple[QdrantClient, AbstractContextManager[Any]]:
        """The client, and what one call at a time must hold: nothing with a server."""
        c = self._config
        if c.path:
            return _open_local(c.path if c.path == IN_MEMORY else str(Path(c.path).absolute()))
        client = QdrantClient(url=c.url, api_key=c.api_key or None, timeout=c.timeout_seconds, check_compatibility=False)
        return client, nullcontext()

    @contextmanager
    def _client(self, ref: IndexRef | None = None) -> Iterator[tuple[QdrantClient, str]]:
        """The client and the collection's name. What it raises comes out as ours."""
        try:
            client, lock = self._opened
            with lock:
                yield client, self._config.prefix + ref.name if ref else ""
        except UnexpectedResponse as e:
            raise _from_status(ref, e) from e
        except ResourceExhaustedResponse as e:
            raise RateLimited("Qdrant asks to wait", code="index_busy", retry_after=e.retry_after_s) from e
        except ResponseHandlingException as e:
            raise _from_transport(httpx.URL(self._config.url).host, e.source) from e
        except ValueError as e:  # local mode refuses like this; of a server it is an answer that is no JSON
            raise _from_local(ref, e) if self._config.path else _from_transport(httpx.URL(self._config.url).host, e) from e

    def ensure(self, ref: IndexRef) -> None:
        """Collection and payload indexes. Raises Misconfigured for a server that is too old, or a name that is taken."""
        with self._client(ref) as (client, name):
            version = client.info().version
            if tuple(int(x) for x in version.split(".")[:2]) < OLDEST:
                raise Misconfigured(
                    f"Qdrant {version} is too old: {'.'.join(map(str, OLDEST))} or later is needed, upgrade the server",
                    code="qdrant_too_old",
                )
            if not client.collection_exists(name):
                try:
                    client.create_collection(name, **self._layout(ref))
                except (UnexpectedResponse, ValueError):  # another process was first
                    if not client.collection_exists(name):
                        raise
            held = client.get_collection(name).config.params.vectors
            if not isinstance(held, q.VectorParams) or held.size != ref.dimension:
                raise Misconfigured(
                    f"Qdrant has a collection {name} that is not of {ref.dimension} dimensions: it belongs to another "
                    "installation. Give this one a prefix: --index-option prefix=...",
                    code="index_name_taken",
                )
            if not self._config.path:  # local mode has none and warns
                schema = q.IntegerIndexParams(type=q.IntegerIndexType.INTEGER, lookup=True, range=False)
                for field in INDEXED:
                    client.create_payload_index(name, field, schema, wait=True)

    def _layout(self, ref: IndexRef) -> dict[str, Any]:
        c = self._config
        quantized = {
            "none": None,
            "scalar": q.ScalarQuantization(
                scalar=q.ScalarQuantizationConfig(type=q.ScalarType.INT8, quantile=0.99, always_ram=True)
            ),
            "binary": q.BinaryQuantization(binary=q.BinaryQuantizationConfig(always_ram=True)),
        }
        return {
            "vectors_config": q.VectorParams(
                size=ref.dimension, distance=q.Distance.COSINE, datatype=q.Datatype(c.datatype), on_disk=c.on_disk
            ),
            "hnsw_config": q.HnswConfigDiff(m=c.m, ef_construct=c.ef_construct, on_disk=c.on_disk),
            "quantization_config": quantized[c.quantization],
            "replication_factor": c.replicas,
            "write_consistency_factor": c.write_consistency or c.replicas,
        }

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        """One request holds one acl_seq: a point that has a later one is left as it is by the server."""
        size = max(1, min(self.capabilities.max_batch, REQUEST_BYTES // (max(ref.dimension, 1) * NUMBER_BYTES)))
        with self._client(ref) as (client, name):
            for acl_seq, group in groupby(sorted(entries, key=lambda e: e.acl_seq), key=lambda e: e.acl_seq):
                same = list(group)
                not_later = q.Filter(must=[q.FieldCondition(key="acl_seq", range=q.Range(lte=acl_seq))])
                for part in _parts(same, size):
                    _require(client.upsert(name, _batch(part), wait=True, ordering=STRONG, update_filter=not_later))

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        """What every replica has: whichever of them answers a search then finds it."""
        found: dict[UUID, int] = {}
        with self._client(ref) as (client, name):
            for part in _parts(vec_ids, self.capabilities.max_batch):
                ids = [str(i) for i in part]
                points = client.retrieve(name, ids, with_payload=["acl_seq"], with_vectors=False, consistency=ALL)
                found |= {UUID(str(p.id)): int((p.payload or {})["acl_seq"]) for p in points}
        return found

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        with self._client(ref) as (client, name):
            for part in _parts(vec_ids, self.capabilities.max_batch):
                gone = q.PointIdsList(points=[str(i) for i in part])
                _require(client.delete(name, gone, wait=True, ordering=STRONG))

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """Exact until the server has built HNSW (above its indexing threshold), and where a filter leaves few points."""
        c = self._config
        permitted = q.FieldCondition(key="acl", match=q.MatchAny(any=[EVERYBODY, *(acl or ())]))
        rescored = None if c.quantization == "none" else q.QuantizationSearchParams(rescore=True, oversampling=2.0)
        params = q.SearchParams(hnsw_ef=max(c.hnsw_ef, k), quantization=rescored)
        with self._client(ref) as (client, name):
            points = client.query_points(
                name,
                query=vector.astype("<f2").tolist(),  # as what is stored, so that equal texts score 1
                limit=k,
                query_filter=None if acl is None else q.Filter(must=[permitted]),
                with_payload=["chunk_id", "doc_id"],
                search_params=None if c.path else params,  # local mode compares with every point, and warns
            ).points
        held = [(p, p.payload or {}) for p in points]
        return [Candidate(UUID(str(p.id)), int(h["chunk_id"]), int(h["doc_id"]), p.score) for p, h in held]

    def settle(self, ref: IndexRef) -> bool:
        """The server's optimizer builds HNSW by itself, beside readers and writers."""
        with self._client(ref) as (client, name):
            client.get_collection(name)
        return False

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        """Reads the numbers of every point, page by page, in the order of ids."""
        found: dict[int, Bucket] = {}
        for _, held in self._scroll(ref, ["bucket", "ck"]):
            old = found.get(held["bucket"], Bucket(0, 0))
            found[held["bucket"]] = Bucket(old.count + 1, old.checksum_sum + held["ck"])
        return found

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        one = q.Filter(must=[q.FieldCondition(key="bucket", match=q.MatchValue(value=bucket))])
        return {vec_id: held["ck"] for vec_id, held in self._scroll(ref, ["ck"], one)}

    def _scroll(self, ref: IndexRef, fields: list[str], where: q.Filter | None = None) -> Iterator[tuple[UUID, dict[str, int]]]:
        offset: Any = None
        while True:
            with self._client(ref) as (client, name):
                points, offset = client.scroll(
                    name, where, limit=PAGE, offset=offset, with_payload=fields, with_vectors=False, consistency=ALL
                )
            for p in points:
                yield UUID(str(p.id)), p.payload or {}
            if offset is None:
                return

    def drop(self, ref: IndexRef) -> int:
        with self._client(ref) as (client, name):
            client.delete_collection(name)
            return client.count(name).count if client.collection_exists(name) else 0

    def names(self) -> list[str]:
        with self._client() as (client, _):
            held = [c.name for c in client.get_collections().collections]
        return [n.removeprefix(self._config.prefix) for n in held if n.startswith(f"{self._config.prefix}kb_")]


def _batch(entries: Sequence[VectorEntry]) -> q.Batch:
    vectors = np.frombuffer(b"".join(e.vector for e in entries), "<f2").reshape(len(entries), -1)
    payloads: list[dict[str, Any]] = [
        {"chunk_id": e.chunk_id, "doc_id": e.doc_id, "acl": list(e.acl) or [EVERYBODY], "acl_seq": e.acl_seq,
         "ck": e.checksum, "bucket": e.bucket}
        for e in entries
    ]  # fmt: skip
    return q.Batch(ids=[str(e.vec_id) for e in entries], vectors=vectors.tolist(), payloads=payloads)


def _require(result: q.UpdateResult) -> None:
    """A server that stops waiting says so with 200: the write may happen later, or not."""
    if result.status != q.UpdateStatus.COMPLETED:
        raise Transient(f"Qdrant has not applied a write in time ({result.status.value})", code="index_slow")


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- local mode: the client locks its folder, so there is one per folder and process, and it knows no threads -------------

_local: dict[str, tuple[QdrantClient, threading.RLock]] = {}
_opening = threading.Lock()


def _open_local(path: str) -> tuple[QdrantClient, threading.RLock]:
    with _opening:
        if path not in _local:
            try:
                client = (
                    QdrantClient(path) if path == IN_MEMORY else QdrantClient(path=path, force_disable_check_same_thread=True)
                )
            except RuntimeError as e:
                raise Transient(
                    f"another process has the Qdrant folder {path} open: wait until it ends, or run a server and give its url",
                    code="index_busy",
                ) from e
            atexit.register(client.close)
            _local[path] = client, threading.RLock()
        return _local[path]


# --- errors --------------------------------------------------------------------------------------------------------------


def _from_status(ref: IndexRef | None, e: UnexpectedResponse) -> KbError:
    name, status, text = ref.name if ref else "list", e.status_code or 0, e.content[:300].decode("utf-8", "replace")
    if status == 404 and "ollection" in text:
        return _gone(name)
    if status in (401, 403):
        return Misconfigured(
            f"Qdrant refuses the api_key ({status}): give one that may read and write {name}", code="forbidden"
        )
    if status == 404:
        return Misconfigured("what answers at url is not a Qdrant server (404): correct url", code="not_qdrant")
    if status == 429:
        return RateLimited("Qdrant asks to wait (429)", code="index_busy")
    if "No space left" in text or "out of disk" in text.lower():
        return Fatal("Qdrant's disk is full: free some space and run the same command again", code="index_full")
    if status == 413:
        return TooLarge(f"Qdrant refuses a request to {name} as too large: raise service.max_request_size_mb")
    if 400 <= status < 500 and status != 408:
        return Rejected(f"Qdrant refuses a request for {name} ({status}): {text}", code="index_refused")
    return Transient(f"Qdrant answered {status}: {text}", code="index_down")


def _from_transport(host: str, cause: Exception) -> KbError:
    if isinstance(cause, httpx.TimeoutException):
        return Transient(
            f"Qdrant at {host} did not answer in time; what was asked may still happen ({type(cause).__name__})",
            code="index_slow",
        )
    return Transient(f"Qdrant at {host} cannot be reached or read: {type(cause).__name__}", code="index_down")


def _from_local(ref: IndexRef | None, e: ValueError) -> KbError:
    name = ref.name if ref else "list"
    return (
        _gone(name)
        if str(e).startswith("Collection ")
        else Rejected(f"Qdrant refuses entries of {name}: {e}", code="index_refused")
    )


def _gone(name: str) -> StateError:
    return StateError(f"index {name} is gone", code="index_gone")
