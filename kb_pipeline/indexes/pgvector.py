"""Vectors in PostgreSQL itself, as float16 (halfvec): scanned exactly in shared shards, HNSW only on a space's own shard.

Rows live in one table per model, partitioned by the same shard as the chunks. So each write is a transaction that takes the
shared space lock, reads the shard behind it and finds its index row living: a late write of a zombie hits nothing.
Needs pgvector 0.7 or later (halfvec), 0.8 for filtered search in large spaces (iterative scan).
"""

import struct
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.sql import SQL as Sql
from psycopg.sql import Composed, Identifier
from psycopg_pool import ConnectionPool
from pydantic import BaseModel, ConfigDict

from kb_pipeline.errors import Fatal, Misconfigured, StateError, Transient
from kb_pipeline.model import Bucket, Candidate, IndexRef, VectorEntry
from kb_pipeline.statements import load_statements

SQL = load_statements(__package__, "pgvector.sql")
_COLUMNS = ("uuid", "int8", "int8", "int8", "int4", "int2", "int4[]", "bytea")
OLDEST = (0, 7)


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ef_search: int = 100  # HNSW candidates a search looks at
    m: int = 16
    ef_construction: int = 64


class PgVectorIndex:
    """The pool must lead to the database of the chunks: both sides are compared in one snapshot."""

    def __init__(self, config: Config, pool: ConnectionPool[psycopg.Connection[Any]]) -> None:
        self._config = config
        self._pool = pool

    def ensure(self, ref: IndexRef) -> None:
        """Extension and tables of the model. Raises Misconfigured naming what the operator has to do."""
        with self._pool.connection() as c:
            self._require_extension(c)
            c.execute(SQL.ensure_table, {"model": ref.model_id, "dimension": ref.dimension})

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        if not entries:
            return
        with self._writing(ref) as (c, shard):
            c.execute(SQL.stage)
            with c.cursor().copy(SQL.copy) as copy:
                copy.set_types(_COLUMNS)
                for e in entries:
                    row = (e.vec_id, e.chunk_id, e.doc_id, e.acl_seq, e.checksum, e.bucket, list(e.acl), _as_halfvec(e.vector))
                    copy.write_row(row)
            c.execute(_named(SQL.upsert, ref), {"space": ref.space_id, "index": ref.index_id, "shard": shard})

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        rows = self._read(ref, SQL.present, ids=list(vec_ids))
        return {r.vec_id: r.acl_seq for r in rows}

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        with self._writing(ref) as (c, shard):
            c.execute(
                _named(SQL.delete, ref), {"space": ref.space_id, "shard": shard, "index": ref.index_id, "ids": list(vec_ids)}
            )

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """Exact unless the planner takes the space's own HNSW; a filter that leaves few rows is always exact."""
        query = "[" + ",".join(f"{x:.6g}" for x in vector.astype("<f2")) + "]"
        acl_list = None if acl is None else list(acl)
        with self._pool.connection() as c, c.transaction():
            shard = self._shard(c, ref)
            c.execute(SQL.search_settings, {"ef": str(max(self._config.ef_search, min(k, 1000)))})
            if acl_list is not None:
                few = c.execute(
                    _named(SQL.permitted_few, ref),
                    {"shard": shard, "index": ref.index_id, "space": ref.space_id, "acl": acl_list},
                )
                if few.fetchone().few:  # type: ignore[union-attr]
                    c.execute(SQL.exact)
            where = {"shard": shard, "space": ref.space_id, "index": ref.index_id, "q": query, "k": k, "acl": acl_list}
            rows = c.execute(_named(SQL.search, ref, dimension=ref.dimension), where).fetchall()
        return [Candidate(r.vec_id, r.chunk_id, r.doc_id, r.score) for r in rows]

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        return {r.bucket: Bucket(r.n, int(r.total)) for r in self._read(ref, SQL.digest)}

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        return {r.vec_id: r.ck for r in self._read(ref, SQL.ids, bucket=bucket)}

    def drop(self, ref: IndexRef) -> int:
        """Delete this index's rows in batches, in every shard it was ever in. The tables are shared by spaces and stay."""
        with self._pool.connection() as c:
            if c.execute(SQL.table_exists, {"name": _table(ref)}).fetchone().found is None:  # type: ignore[union-attr]
                return 0
            for row in c.execute(SQL.shards, {"space": ref.space_id}).fetchall():
                values = {"shard": row.shard, "space": ref.space_id, "index": ref.index_id}
                while c.execute(_named(SQL.drop_batch, ref), values).rowcount:
                    c.commit()
            return int(c.execute(_named(SQL.count_left, ref), {"space": ref.space_id, "index": ref.index_id}).fetchone().n)  # type: ignore[union-attr]

    def settle(self, ref: IndexRef) -> bool:
        """HNSW on the space's own leaf, built once after the bulk load and beside writers. False: it is small, or built."""
        with self._pool.connection() as c:
            row = c.execute(SQL.own_shard, {"space": ref.space_id}).fetchone()
            if row is None:
                return False
            c.commit()
            leaf = f"{_table(ref)}_{row.shard}"
            c.autocommit = True
            try:
                return self._build(c, ref, leaf)
            finally:
                c.autocommit = False

    def _build(self, c: psycopg.Connection[Any], ref: IndexRef, leaf: str) -> bool:
        name = f"{leaf}_hnsw"
        state = c.execute(SQL.index_state, {"name": name}).fetchone()
        if state is not None and state.valid:
            return False
        if state is not None:  # a build that was killed
            c.execute(Sql("DROP INDEX CONCURRENTLY IF EXISTS {}").format(Identifier(name)))
        c.execute(Sql(SQL.no_index_cleanup).format(leaf=Identifier(leaf)))
        options = {"m": Sql(str(int(self._config.m))), "ef": Sql(str(int(self._config.ef_construction)))}
        c.execute(Sql(SQL.build).format(name=Identifier(name), leaf=Identifier(leaf), **options))
        return True

    def _read(self, ref: IndexRef, statement: Any, **values: Any) -> list[Any]:
        with self._pool.connection() as c, c.transaction():
            where = {"shard": self._shard(c, ref), "space": ref.space_id, "index": ref.index_id, **values}
            return c.execute(_named(statement, ref), where).fetchall()

    def _shard(self, c: psycopg.Connection[Any], ref: IndexRef) -> int:
        row = c.execute(SQL.living, {"space": ref.space_id, "index": ref.index_id}).fetchone()
        if row is None:
            raise StateError(f"index {ref.name} is gone", code="index_gone")
        return int(row.shard)

    def _writing(self, ref: IndexRef) -> "_Writing":
        return _Writing(self._pool, ref)

    def _require_extension(self, c: psycopg.Connection[Any]) -> None:
        row = c.execute(SQL.extension).fetchone()
        installed, available = (row.installed, row.available) if row else (None, None)
        if installed is None and available is None:
            raise Misconfigured(
                "this PostgreSQL has no extension 'vector': install pgvector 0.7 or later on its server, "
                "or choose another vector index",
                code="no_pgvector",
            )
        version = installed or available
        if tuple(int(x) for x in str(version).split(".")[:2]) < OLDEST:
            raise Misconfigured(
                f"pgvector {version} is too old: 0.7 or later is needed (ALTER EXTENSION vector UPDATE)",
                code="pgvector_too_old",
            )
        if installed is None:
            try:
                c.execute(SQL.create_extension)
            except psycopg.errors.InsufficientPrivilege as e:
                raise Misconfigured(
                    "the database user may not create the extension 'vector': "
                    "let an administrator run CREATE EXTENSION vector in this database",
                    code="missing_right",
                ) from e


class _Writing:
    """The transaction of one write: shared space lock, living index row FOR SHARE, then the shard."""

    def __init__(self, pool: ConnectionPool[psycopg.Connection[Any]], ref: IndexRef) -> None:
        self._lease = pool.connection()
        self._ref = ref

    def __enter__(self) -> tuple[psycopg.Connection[Any], int]:
        c = self._lease.__enter__()
        try:
            c.execute(SQL.lock_space, {"space": self._ref.space_id})
            row = c.execute(SQL.lock_living, {"space": self._ref.space_id, "index": self._ref.index_id}).fetchone()
            if row is None:
                raise StateError(f"index {self._ref.name} is gone", code="index_gone")
        except BaseException as e:
            self._lease.__exit__(type(e), e, e.__traceback__)
            raise
        return c, int(row.shard)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._lease.__exit__(kind, value, trace)
        if isinstance(value, psycopg.errors.DiskFull):
            raise Fatal("the vector index's disk is full", code="index_full") from value
        if isinstance(value, psycopg.OperationalError):
            raise Transient(f"vector index: {type(value).__name__}", code="index_down") from value


def _table(ref: IndexRef) -> str:
    return f"kb_vector_m{ref.model_id}"


def _named(statement: Any, ref: IndexRef, **numbers: int) -> Composed:
    return Sql(statement).format(table=Identifier(_table(ref)), **{k: Sql(str(v)) for k, v in numbers.items()})


def _as_halfvec(vector: bytes) -> bytes:
    """halfvec's binary form: dimension and a zero as int16, then float16, big-endian (pgvector src/halfvec.c, halfvec_recv)."""
    return struct.pack(">hh", len(vector) // 2, 0) + np.frombuffer(vector, "<f2").astype(">f2").tobytes()
