"""Vectors in Milvus, one collection per index: a server or cluster by ``url``, or Milvus Lite in a local file by ``path``.

One collection per index and not one per model with a partition key, because the promises rest on the server then: a late write
for an index that was dropped finds no collection, a drop is whole and exact, and index type and datatype, which belong to a
collection, can differ. Every read is Strong: it waits until the query nodes have what was written before it was asked.
Upserts are unconditional, so an older ACL may come back; reconciliation repairs it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, TypeVar
from uuid import UUID

import grpc
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import DataNotMatchException, MilvusException, ParamError

from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, StateError, Transient
from kb_pipeline.model import Bucket, Candidate, IndexRef, VectorEntry
from kb_pipeline.ports import IndexCapabilities

EVERYBODY = -1  # what an entry without an ACL holds, so that one condition is the whole filter
MOST_PRINCIPALS = 4096  # of an array field; a longer ACL is stored as everybody's, for the filter is a hint only
MOST_HITS = 16384  # of one search
REQUEST_BYTES = 16 * 2**20  # a quarter of what a server takes unless it is told otherwise (proxy.grpc.serverMaxRecvSize)
PAGE = 2000
STRONG = "Strong"
ILLEGAL = 6  # an argument, as Milvus Lite says it; a server has other codes
NOT_LOADED = (101, 103)  # codes of the server (pkg/util/merr/errors.go), as are those of _from_code
T = TypeVar("T")


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""  # http://host:19530
    path: str = ""  # a file *.db of Milvus Lite instead: no server, one process at a time, for trials
    token: str = Field("", repr=False)  # user:password, or an API key
    database: str = ""
    prefix: str = ""  # of collections, where installations share a database
    timeout_seconds: float = 60.0
    datatype: Literal["float16", "float32"] = "float16"  # Milvus Lite has float32 only
    index_type: Literal["HNSW", "FLAT", "AUTOINDEX"] = "HNSW"
    m: int = 16
    ef_construction: int = 100
    ef: int = 128  # HNSW candidates a search looks at
    replicas: int = 1  # in memory, of a loaded collection

    @model_validator(mode="after")
    def _one_place(self) -> "Config":
        if bool(self.url) == bool(self.path):
            raise ValueError("give url (of a server) or path (of a file for Milvus Lite)")
        if self.path and not self.path.endswith(".db"):
            raise ValueError("path must end with .db")
        return self


class MilvusIndex:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._timeout = {"timeout": config.timeout_seconds}

    capabilities = IndexCapabilities(digest=False, conditional=False, named=True)

    @cached_property
    def _client(self) -> MilvusClient:
        """Connects. Clients of one local file share its server, which ends with the process."""
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs the traceback of each error that it raises, too
        c = self._config
        if c.path:
            logging.getLogger("grpc._server").setLevel(logging.CRITICAL)  # what Milvus Lite does not have, it tells there
        return MilvusClient(uri=c.path or c.url, token=c.token, db_name=c.database, timeout=c.timeout_seconds)

    def _ask(self, ref: IndexRef, call: Callable[[MilvusClient, str], T]) -> T:
        """A released collection is loaded again by who needs it; that makes nothing that was dropped."""
        with _translated(ref.name):
            client, name = self._client, self._config.prefix + ref.name
            try:
                return call(client, name)
            except MilvusException as e:
                if e.code not in NOT_LOADED:
                    raise
                client.load_collection(name, replica_number=self._config.replicas, **self._timeout)
                return call(client, name)

    def ensure(self, ref: IndexRef) -> None:
        """Collection, its indexes, and loaded for search. Raises Misconfigured if the name is taken."""
        self._ask(ref, lambda client, name: self._ensure(ref, client, name))

    def _ensure(self, ref: IndexRef, client: MilvusClient, name: str) -> None:
        if not client.has_collection(name, **self._timeout):
            try:
                client.create_collection(name, schema=self._schema(ref), consistency_level=STRONG, **self._timeout)
            except MilvusException:  # another process was first
                if not client.has_collection(name, **self._timeout):
                    raise
        held = {f["name"]: f["params"] for f in client.describe_collection(name, **self._timeout)["fields"]}
        if int(held.get("vector", {}).get("dim", 0)) != ref.dimension:
            raise Misconfigured(
                f"Milvus has a collection {name} that is not of {ref.dimension} dimensions: it belongs to another "
                "installation. Give this one a prefix: --index-option prefix=...",
                code="index_name_taken",
            )
        if missing := self._indexes(client.list_indexes(name, **self._timeout)):
            client.create_index(name, missing, **self._timeout)
        client.load_collection(name, replica_number=self._config.replicas, **self._timeout)

    @property
    def _half(self) -> bool:
        return self._config.datatype == "float16" and not self._config.path

    def _schema(self, ref: IndexRef) -> Any:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("vec_id", DataType.VARCHAR, is_primary=True, max_length=36)
        for field, kind in (("chunk_id", DataType.INT64), ("doc_id", DataType.INT64), ("acl_seq", DataType.INT64),
                            ("ck", DataType.INT32), ("bucket", DataType.INT16)):  # fmt: skip
            schema.add_field(field, kind)
        schema.add_field("acl", DataType.ARRAY, element_type=DataType.INT64, max_capacity=MOST_PRINCIPALS)
        schema.add_field("vector", DataType.FLOAT16_VECTOR if self._half else DataType.FLOAT_VECTOR, dim=ref.dimension)
        return schema

    def _indexes(self, made: Sequence[str]) -> Any:
        """The ones that are not made yet."""
        c = self._config
        hnsw = {"M": c.m, "efConstruction": c.ef_construction} if c.index_type == "HNSW" else {}
        kinds: dict[str, dict[str, Any]] = {
            "vector": {"index_type": c.index_type, "metric_type": "COSINE", "params": hnsw},
            "bucket": {"index_type": "INVERTED"},
        }
        if not c.path:  # Milvus Lite has no index of arrays
            kinds["acl"] = {"index_type": "INVERTED"}
        params = MilvusClient.prepare_index_params()
        for field in kinds.keys() - set(made):
            params.add_index(field, index_name=field, **kinds[field])
        return params

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        size = max(1, min(self.capabilities.max_batch, REQUEST_BYTES // (max(ref.dimension, 1) * 4)))
        for part in _parts(entries, size):
            rows = self._rows(part)
            self._ask(ref, lambda client, name, rows=rows: client.upsert(name, rows, **self._timeout))  # type: ignore[misc]

    def _rows(self, entries: Sequence[VectorEntry]) -> list[dict[str, Any]]:
        stored = np.frombuffer(b"".join(e.vector for e in entries), "<f2").reshape(len(entries), -1)
        vectors = stored if self._half else stored.astype(np.float32)
        return [
            {"vec_id": str(e.vec_id), "chunk_id": e.chunk_id, "doc_id": e.doc_id, "acl_seq": e.acl_seq, "ck": e.checksum,
             "bucket": e.bucket, "acl": list(e.acl) if 0 < len(e.acl) <= MOST_PRINCIPALS else [EVERYBODY], "vector": v}
            for e, v in zip(entries, vectors, strict=True)
        ]  # fmt: skip

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        found: dict[UUID, int] = {}
        for part in _parts(vec_ids, self.capabilities.max_batch):  # none is never asked for: it would mean all
            ids = [str(i) for i in part]
            rows = self._ask(
                ref,
                lambda client, name, ids=ids: client.query(  # type: ignore[misc]
                    name, ids=ids, output_fields=["vec_id", "acl_seq"], consistency_level=STRONG, **self._timeout
                ),
            )
            found |= {UUID(r["vec_id"]): int(r["acl_seq"]) for r in rows}
        return found

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        for part in _parts(vec_ids, self.capabilities.max_batch):
            ids = [str(i) for i in part]
            self._ask(ref, lambda client, name, ids=ids: client.delete(name, ids=ids, **self._timeout))  # type: ignore[misc]

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """At most 16,384, the server's limit. Exact in segments that are small or still growing."""
        c = self._config
        k = min(k, MOST_HITS)
        params = {"ef": max(c.ef, k)} if c.index_type == "HNSW" else {}
        hits = self._ask(
            ref,
            lambda client, name: client.search(
                name,
                data=[vector.astype("<f2").astype(np.float16 if self._half else np.float32)],  # as what is stored
                anns_field="vector",
                limit=k,
                filter="" if acl is None else f"ARRAY_CONTAINS_ANY(acl, {[EVERYBODY, *acl]})",
                output_fields=["vec_id", "chunk_id", "doc_id"],
                search_params={"metric_type": "COSINE", "params": params},
                consistency_level=STRONG,
                **self._timeout,
            )[0],
        )
        held = [(h["entity"], float(h["distance"])) for h in hits]
        return [Candidate(UUID(e["vec_id"]), int(e["chunk_id"]), int(e["doc_id"]), score) for e, score in held]

    def settle(self, ref: IndexRef) -> bool:
        """The server seals and indexes segments by itself; what still grows is searched too, so nothing is flushed here."""
        self._ask(ref, lambda client, name: client.describe_collection(name, **self._timeout))
        return False

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        """Reads the numbers of every entry, page by page, as of one moment."""
        found: dict[int, Bucket] = {}
        for row in self._iterate(ref, "", ["bucket", "ck"]):
            old = found.get(row["bucket"], Bucket(0, 0))
            found[row["bucket"]] = Bucket(old.count + 1, old.checksum_sum + row["ck"])
        return found

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        return {UUID(r["vec_id"]): int(r["ck"]) for r in self._iterate(ref, f"bucket == {int(bucket)}", ["vec_id", "ck"])}

    def _iterate(self, ref: IndexRef, where: str, fields: list[str]) -> Iterator[dict[str, Any]]:
        pages = self._ask(
            ref,
            lambda client, name: client.query_iterator(
                name, batch_size=PAGE, filter=where, output_fields=fields, consistency_level=STRONG, **self._timeout
            ),
        )
        while rows := self._ask(ref, lambda *_: pages.next()):
            yield from rows
        pages.close()

    def drop(self, ref: IndexRef) -> int:
        with _translated(ref.name):
            client, name = self._client, self._config.prefix + ref.name
            client.drop_collection(name, **self._timeout)
            if not client.has_collection(name, **self._timeout):
                return 0
            return int(client.get_collection_stats(name, **self._timeout)["row_count"])

    def names(self) -> list[str]:
        with _translated("list"):
            held = self._client.list_collections(**self._timeout)
        return [n.removeprefix(self._config.prefix) for n in held if n.startswith(f"{self._config.prefix}kb_")]


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- errors --------------------------------------------------------------------------------------------------------------


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (ParamError, DataNotMatchException) as e:  # the client refuses it before it is sent
        raise Rejected(f"Milvus refuses a request for {name}: {e.message}", code="index_refused") from e
    except MilvusException as e:
        raise _from_code(name, e) if isinstance(e.code, int) else _from_grpc(name, e.code) from e
    except grpc.RpcError as e:
        raise _from_grpc(name, e.code()) from e


def _from_code(name: str, e: MilvusException) -> KbError:
    text = str(e.message)[:300]
    if e.code == 100:
        return StateError(f"index {name} is gone", code="index_gone")
    if e.code in (1400, 1401, 1800) or "auth check failure" in text:
        return Misconfigured(f"Milvus refuses the token: give one that may read and write {name}", code="forbidden")
    if e.code == 800:
        return Misconfigured("Milvus has no such database: create it, or correct the option database", code="no_database")
    if e.code in (3, 7, 9, 102, 250):  # memory, disk, quota, collections: it denies them until there is room
        return Fatal(f"Milvus has no room: {text}. Free some and run the same command again", code="index_full")
    if e.code == 8:
        return RateLimited(f"Milvus asks to wait: {text}", code="index_busy")
    if e.code == e.compatible_code == ILLEGAL or e.is_input_error or e.code in (1100, 1101, 1102):
        return Rejected(f"Milvus refuses a request for {name} ({e.code}): {text}", code="index_refused")
    return Transient(f"Milvus: {text} ({e.code})", code="index_down")


def _from_grpc(name: str, code: Any) -> KbError:
    said = getattr(code, "name", str(code))
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Misconfigured(f"Milvus refuses the token: give one that may read and write {name}", code="forbidden")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Transient(f"Milvus did not answer in time; what was asked may still happen ({said})", code="index_slow")
    return Transient(f"Milvus cannot be reached: {said}", code="index_down")
