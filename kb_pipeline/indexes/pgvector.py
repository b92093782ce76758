"""Vectors in PostgreSQL itself, as float16 (halfvec): scanned exactly in shared shards, HNSW only on a space's own shard.

Rows live in one table per model, partitioned by the same shard as the chunks. So each write is a transaction that takes the
shared space lock, reads the shard behind it and finds its index row living: a late write of a zombie hits nothing.
Needs pgvector 0.7 or later (halfvec), 0.8 for filtered search in large spaces (iterative scan).

With ``keyword`` an index has its words in kb_words, written and deleted in the same transaction as its vectors, and a vector
table of its own, so that it can be built beside one without words.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.sql import SQL as Sql
from psycopg.sql import Composed, Identifier
from psycopg_pool import ConnectionPool
from pydantic import BaseModel, ConfigDict

from kb_pipeline.errors import Fatal, Misconfigured, Rejected, StateError, Transient
from kb_pipeline.model import Bucket, Candidate, IndexRef, VectorEntry
from kb_pipeline.ports import IndexCapabilities
from kb_pipeline.statements import load_statements
from kb_pipeline.terms import Frequency, document_keys, question_keys, weighed

SQL = load_statements(__package__, "pgvector.sql")
_COLUMNS = ("uuid", "int8", "int8", "int8", "int4", "int2", "int4[]", "bytea")
_WORD_COLUMNS = ("uuid", "int8", "int8", "int4[]")
OLDEST = (0, 7)
Connection = psycopg.Connection[Any]
Pool = ConnectionPool[Connection]
DEAD_SHARE = 0.1
MATCHES = 1000  # entries with one of a question's rare terms, all of which are ranked; three times as many in all
SAMPLE = 400  # entries that tell how many there are, how long, and how frequent a frequent term is


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ef_search: int = 100  # HNSW candidates a search looks at
    m: int = 16
    ef_construction: int = 64
    keyword: bool = False  # searched by words, too


class PgVectorIndex:
    """The pool must lead to the database of the chunks: both sides are compared in one snapshot."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self._config = config
        self._pool = pool
        self.capabilities = IndexCapabilities(keyword=config.keyword)

    def ensure(self, ref: IndexRef) -> None:
        """Extension and tables of the model. Raises Misconfigured naming what the operator has to do."""
        with _connected(self._pool) as c:
            self._require_extension(c)
            c.execute(SQL.ensure_table, {"model": ref.model_id, "dimension": ref.dimension, "words": self._config.keyword})

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
            where = {"space": ref.space_id, "index": ref.index_id, "shard": shard}
            c.execute(self._named(SQL.upsert, ref), where)
            if self._config.keyword:
                self._put_words(c, ref, entries, where)

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        rows = self._read(ref, SQL.present, ids=list(vec_ids))
        return {r.vec_id: r.acl_seq for r in rows}

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        with self._writing(ref) as (c, shard):
            where = {"space": ref.space_id, "shard": shard, "index": ref.index_id, "ids": list(vec_ids)}
            c.execute(self._named(SQL.delete, ref), where)
            if self._config.keyword:
                c.execute(SQL.delete_words, where)

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """Exact unless the planner takes the space's own HNSW; a filter that leaves few rows is always exact."""
        query = "[" + ",".join(f"{x:.6g}" for x in vector.astype("<f2")) + "]"
        acl_list = None if acl is None else list(acl)
        with _connected(self._pool) as c, c.transaction():
            shard = self._shard(c, ref)
            c.execute(SQL.search_settings, {"ef": str(max(self._config.ef_search, min(k, 1000)))})
            where = {"shard": shard, "space": ref.space_id, "index": ref.index_id, "q": query, "k": k, "acl": acl_list}
            few = acl_list is not None and c.execute(self._named(SQL.permitted_few, ref), where).fetchone().few  # type: ignore[union-attr]
            statement = SQL.search_exactly if few else SQL.search
            rows = c.execute(self._named(statement, ref, dimension=ref.dimension), where).fetchall()
        rows.sort(key=lambda r: -r.score)  # an iterative scan gives them in nearly this order
        return [Candidate(r.vec_id, r.chunk_id, r.doc_id, r.score) for r in rows]

    def keyword(self, ref: IndexRef, text: str, k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """BM25 over text and title, by the first 256 terms of the question. Whatever has one of its rare terms is ranked; of
        what has frequent ones alone, a part."""
        keys = question_keys(text, ref.index_id)
        with _connected(self._pool) as c, c.transaction():
            where = {"shard": self._shard(c, ref), "space": ref.space_id, "index": ref.index_id}
            names = {"table": Identifier(self._table(ref)), "words": Identifier(f"kb_words_{where['shard']}")}
            if not keys:
                return []
            most = max(MATCHES, k)
            c.execute(SQL.word_settings)
            words = {"keys": keys, "most": most + 1, "sample": SAMPLE}
            counted = c.execute(Sql(SQL.frequencies).format(**names), {**where, **words}).fetchall()
            shape = counted[0]
            total = shape.n if shape.n < SAMPLE else shape.n / float(shape.part)
            asked = weighed([Frequency(r.key, r.counted, r.sampled) for r in counted], total, max(shape.n, 1), most)
            given = {
                "rare": asked.rare, "one": [a for a, _ in asked.frequent], "other": [b for _, b in asked.frequent],
                "keys": asked.keys, "weights": asked.weights, "length": float(shape.length), "most": most, "k": k,
                "acl": None if acl is None else list(acl),
            }  # fmt: skip
            rows = c.execute(Sql(SQL.keyword).format(**names), {**where, **given}).fetchall()
        return [Candidate(r.vec_id, r.chunk_id, r.doc_id, r.score) for r in rows]

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        return {r.bucket: Bucket(r.n, int(r.total)) for r in self._read(ref, SQL.digest)}

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        first = bucket << 116  # the bucket is the first 12 bits: a range of the primary key
        low, high = UUID(int=first), UUID(int=first | (1 << 116) - 1)
        return {r.vec_id: r.ck for r in self._read(ref, SQL.ids, low=low, high=high)}

    def drop(self, ref: IndexRef) -> int:
        """Delete this index's rows in batches, in every shard it was ever in. The tables are shared by spaces and stay."""
        with _connected(self._pool) as c:
            if c.execute(SQL.table_exists, {"name": self._table(ref)}).fetchone().found is None:  # type: ignore[union-attr]
                return 0
            where, left = {"space": ref.space_id, "index": ref.index_id}, 0
            shards = [row.shard for row in c.execute(SQL.shards, where)]
            for table in (self._table(ref), *(("kb_words",) if self._config.keyword else ())):
                names = {"table": Identifier(table)}
                for shard in shards:
                    while c.execute(Sql(SQL.drop_batch).format(**names), {"shard": shard, **where}).rowcount:
                        c.commit()
                left += c.execute(Sql(SQL.count_left).format(**names), where).fetchone().n  # type: ignore[union-attr]
            return left

    def settle(self, ref: IndexRef) -> bool:
        """HNSW on the space's own leaf, built once after the bulk load and beside writers. False: it is small, or built.

        Words that wait in a list, which every search reads to its end, are sorted in.
        """
        if self._config.keyword:
            with _connected(self._pool) as c:
                c.execute(SQL.sort_words_in, {"leaf": f"kb_words_{self._shard(c, ref)}"})
        with self._own_leaf(ref) as (c, leaf):
            return leaf is not None and self._build(c, ref, leaf)

    def compact(self, ref: IndexRef) -> bool:
        """Rebuild the HNSW once a tenth of its rows is dead: VACUUM alone takes longer over each deleted row than a rebuild.

        ANALYZE counts the dead: it sees the line pointers that a vacuum without index cleanup has left.
        """
        with self._own_leaf(ref) as (c, leaf):
            if (
                leaf is None
                or (state := c.execute(SQL.index_state, {"name": f"{leaf}_hnsw"}).fetchone()) is None
                or not state.valid
            ):
                return False
            for left in c.execute(SQL.leftovers, {"name": f"{leaf}_hnsw"}).fetchall():  # of a rebuild that was killed
                c.execute(Sql(SQL.drop_index).format(name=Identifier(left.name)))
            c.execute(SQL.flush_counts)  # ANALYZE leaves out what this connection has deleted and not reported yet
            c.execute(Sql(SQL.count_dead).format(leaf=Identifier(leaf)))
            if not c.execute(SQL.is_dead, {"name": leaf, "share": DEAD_SHARE}).fetchone().much:  # type: ignore[union-attr]
                return False
            c.execute(Sql(SQL.rebuild).format(name=Identifier(f"{leaf}_hnsw")))
            c.execute(Sql(SQL.vacuum).format(leaf=Identifier(leaf)))
            return True

    @contextmanager
    def _own_leaf(self, ref: IndexRef) -> Iterator[tuple[Connection, str | None]]:
        """A connection outside of a transaction, and the leaf that belongs to the space alone; None if there is none.

        None also while another process is at it: builds on one leaf wait for each other's snapshots, a deadlock. The lock
        is an open transaction's, so that it works behind a transaction pooler and ends with its process.
        """
        with _connected(self._pool) as guard:
            row = guard.execute(SQL.own_shard, {"space": ref.space_id}).fetchone()
            # Without parameters, as a simple query: an open portal would keep its snapshot, and the build would wait for that.
            alone = Sql(SQL.alone).format(space=Sql(str(int(ref.space_id))))
            if row is None or not guard.execute(alone).fetchone().alone:  # type: ignore[union-attr]
                yield guard, None
                return
            with _connected(self._pool) as c:
                c.autocommit = True
                try:
                    yield c, f"{self._table(ref)}_{row.shard}"
                finally:
                    if not c.closed:
                        c.autocommit = False

    def _build(self, c: Connection, ref: IndexRef, leaf: str) -> bool:
        name = f"{leaf}_hnsw"
        state = c.execute(SQL.index_state, {"name": name}).fetchone()
        if state is not None and (state.valid or state.building):  # a killed client does not stop the server's build
            return False
        if state is not None:  # a build that was killed
            c.execute(Sql(SQL.drop_index).format(name=Identifier(name)))
        c.execute(Sql(SQL.no_index_cleanup).format(leaf=Identifier(leaf)))
        options = {"m": Sql(str(int(self._config.m))), "ef": Sql(str(int(self._config.ef_construction)))}
        c.execute(Sql(SQL.build).format(name=Identifier(name), leaf=Identifier(leaf), **options))
        c.execute(Sql(SQL.analyze).format(leaf=Identifier(leaf)))  # without statistics the planner sorts the whole leaf
        return True

    def _put_words(self, c: Connection, ref: IndexRef, entries: Sequence[VectorEntry], where: Mapping[str, int]) -> None:
        c.execute(SQL.stage_words)
        with c.cursor().copy(SQL.copy_words) as copy:
            copy.set_types(_WORD_COLUMNS)
            for e in entries:
                copy.write_row((e.vec_id, e.chunk_id, e.doc_id, document_keys(e.text, e.title, ref.index_id)))
        c.execute(SQL.upsert_words, where)

    def _table(self, ref: IndexRef) -> str:
        return f"kb_vector_m{ref.model_id}{'w' if self._config.keyword else ''}"

    def _named(self, statement: Any, ref: IndexRef, **numbers: int) -> Composed:
        return Sql(statement).format(table=Identifier(self._table(ref)), **{k: Sql(str(v)) for k, v in numbers.items()})

    def _read(self, ref: IndexRef, statement: Any, **values: Any) -> list[Any]:
        with _connected(self._pool) as c, c.transaction():
            where = {"shard": self._shard(c, ref), "space": ref.space_id, "index": ref.index_id, **values}
            return c.execute(self._named(statement, ref), where).fetchall()

    def _shard(self, c: Connection, ref: IndexRef) -> int:
        row = c.execute(SQL.living, {"space": ref.space_id, "index": ref.index_id}).fetchone()
        if row is None:
            raise StateError(f"index {ref.name} is gone", code="index_gone")
        return int(row.shard)

    @contextmanager
    def _writing(self, ref: IndexRef) -> Iterator[tuple[Connection, int]]:
        """The transaction of one write, and the shard: shared space lock, then the living index row FOR SHARE."""
        with _connected(self._pool) as c:
            c.execute(SQL.lock_space, {"space": ref.space_id})
            row = c.execute(SQL.lock_living, {"space": ref.space_id, "index": ref.index_id}).fetchone()
            if row is None:
                raise StateError(f"index {ref.name} is gone", code="index_gone")
            yield c, int(row.shard)

    def _require_extension(self, c: Connection) -> None:
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


@contextmanager
def _connected(pool: Pool) -> Iterator[Connection]:
    """A connection whose vendor errors come out as ours."""
    try:
        with pool.connection() as c:
            yield c
    except psycopg.errors.DiskFull as e:
        raise Fatal("the vector index's disk is full: free some space and run the same command again", code="index_full") from e
    except psycopg.errors.DataException as e:  # a vector of another length
        raise Rejected(f"vector index: the database refuses an entry: {e.diag.message_primary}", code="index_refused") from e
    except psycopg.OperationalError as e:
        raise Transient(f"vector index: {type(e).__name__}", code="index_down") from e


def _as_halfvec(vector: bytes) -> bytes:
    """halfvec's binary form: dimension and a zero as int16, then float16, big-endian (pgvector src/halfvec.c, halfvec_recv)."""
    return struct.pack(">hh", len(vector) // 2, 0) + np.frombuffer(vector, "<f2").astype(">f2").tobytes()
