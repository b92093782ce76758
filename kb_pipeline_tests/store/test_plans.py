"""What the hot statements cost: one leaf, by its key, and few locks. Read off the plans of both servers, never off a clock."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
import pytest
from psycopg import sql

from kb_pipeline.indexes import pgvector
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.settings import Settings
from kb_pipeline.store import answers, chunks, embeddings, erasure, publications, tasks
from kb_pipeline.store.database import Pool, copy_rows, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex
from kb_pipeline_tests.store.shelf import Shelf

CHUNKS, DOCUMENTS = 20_000, 2_000
FILL = """
INSERT INTO kb_doc (space_id, source_id, external_id, title, uri, current_ver, last_ver, status)
SELECT %(space)s, %(source)s, 'd' || n, 't', 'u', 1, 1, 'AVAILABLE' FROM generate_series(1, %(documents)s) n;
INSERT INTO kb_chunk (shard, id, space_id, doc_id, content_hash, occurrence, tokens, content)
SELECT %(shard)s, nextval('kb_chunk_id'), %(space)s, (SELECT min(id) FROM kb_doc WHERE space_id = %(space)s) + n %% %(documents)s,
       sha256(n::text::bytea), 0, 10, repeat('text of ' || n, 10) FROM generate_series(1, %(chunks)s) n;
INSERT INTO kb_chunk_state (shard, id, space_id, doc_id, hash, occurrence, vec_id, ck, bucket, payload, vec_status, in_current)
SELECT shard, id, space_id, doc_id, encode(substring(content_hash FROM 1 FOR 16), 'hex')::uuid, 0, w.vec_id, 0, kb_bucket(w.vec_id), 0, 1, true
FROM kb_chunk CROSS JOIN LATERAL (SELECT kb_vec_id(id, md5(id::text)::uuid, 0) AS vec_id) w WHERE shard = %(shard)s;
INSERT INTO kb_doc_version (doc_id, version, space_id, status, chunk_ids)
SELECT doc_id, 1, space_id, 'READY', array_agg(id) FROM kb_chunk WHERE shard = %(shard)s GROUP BY doc_id, space_id;
INSERT INTO ingestion_task (space_id, doc_id, version, status) SELECT space_id, id, 1,
       CASE WHEN id %% 10 = 0 THEN 'PENDING' ELSE 'SUCCESS' END FROM kb_doc WHERE space_id = %(space)s;
INSERT INTO kb_embedding (model_id, content_hash, vector) SELECT %(model)s, content_hash, '\\x00' FROM kb_chunk WHERE shard = %(shard)s;
"""


@dataclass(frozen=True)
class Library:
    """A space with 20,000 analysed chunks, and 64 of them, as a search finds them."""

    shelf: Shelf
    ids: list[int]
    docs: list[int]
    vectors: list[UUID]

    @property
    def where(self) -> dict[str, int]:
        return {"space": self.shelf.space.id, "shard": self.shelf.shard}

    @property
    def leaves(self) -> set[str]:
        shard, model = self.shelf.shard, self.shelf.space.model_id
        return {f"kb_chunk_{shard}", f"kb_chunk_state_{shard}", f"kb_embedding_m{model}", f"kb_vector_m{model}_{shard}"}

    def explained(self, statement: Any, values: Mapping[str, Any], c: Any) -> list[dict[str, Any]]:
        """All nodes of the plan."""
        query = sql.SQL("EXPLAIN (FORMAT JSON) ") + (sql.SQL(statement) if isinstance(statement, str) else statement)
        plan = c.execute(query, {**self.where, **values}).fetchone()[0]
        found, waiting = [], [(plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += node.get("Plans", [])
        return found


@pytest.fixture(scope="module")
def library(pool: Pool, server: Server, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    settings = Settings(home=tmp_path_factory.mktemp("library") / ".kb", database_url=database_url, embedder="hashing")
    app = FakedApp(settings, pool, migrations()[-1].version, index=None if server.has_pgvector else MemoryIndex())
    space = app.add_space("library", embedder_options={"dimension": 8})
    shelf = Shelf(pool, space)
    values = {"space": space.id, "shard": shelf.shard, "source": shelf.source.id, "model": space.model_id}
    with psycopg.connect(database_url, autocommit=True, cursor_factory=psycopg.ClientCursor) as c:
        c.execute(FILL, {**values, "chunks": CHUNKS, "documents": DOCUMENTS})
        c.execute("ANALYZE")
    query = "SELECT id, doc_id, vec_id FROM kb_chunk_state WHERE shard = %(shard)s AND space_id = %(space)s ORDER BY md5(id::text) LIMIT 64"
    rows = shelf.rows(query, shard=shelf.shard)
    yield Library(shelf, [r.id for r in rows], [r.doc_id for r in rows], [r.vec_id for r in rows])


def partitions_locked(c: Any) -> set[str]:
    query = """SELECT DISTINCT k.relname FROM pg_locks l JOIN pg_class k ON k.oid = l.relation
               WHERE l.pid = pg_backend_pid() AND k.relispartition AND k.relkind = 'r'"""
    return {r.relname for r in c.execute(query)}


def statements(library: Library) -> dict[str, tuple[Any, dict[str, Any]]]:
    ids = {"ids": library.ids}
    docs = {"docs": library.docs[:20], "versions": [1] * 20, "at": datetime.now(UTC)}
    join = {"vectors": library.vectors, "chunks": library.ids, "docs": library.docs, "scores": [0.5] * 64, "principals": ["a"]}
    join |= {"since": "2020-01-01", "k": 16}
    return {
        "wanted": (publications.SQL.wanted, ids),
        "revive": (publications.SQL.revive, ids),
        "texts": (chunks.SQL.texts, ids),
        "needed": (embeddings.SQL.needed, {**ids, "model": library.shelf.space.model_id}),
        "embedded texts": (embeddings.SQL.texts, ids),
        "vectors": (embeddings.SQL.vectors, {**ids, "model": library.shelf.space.model_id}),
        "join": (answers.join_statement(library.shelf.shard), join),
        "fresh": (chunks.SQL.fresh, {}),
        "restated": (chunks.SQL.restated, {}),
        "reference": (chunks.SQL.reference, {**docs, "recipes": ["r"] * 20}),
        "publish": (publications.SQL.publish, docs),
        "erase": (erasure.SQL.erase, {**docs, "limit": None}),
        "mark erasing": (erasure.SQL.mark_erasing, docs),
        "drop living": (erasure.SQL.drop_living, docs),
    }


NAMES = ["wanted", "revive", "texts", "needed", "embedded texts", "vectors", "join", "fresh", "restated", "reference", "publish", "erase",
         "mark erasing", "drop living"]  # fmt: skip


@pytest.fixture
def c(pool: Pool, library: Library) -> Iterator[Any]:
    """A transaction with twenty staged chunks, as the CHUNKER has it; nothing of it stays."""
    with pytest.raises(ZeroDivisionError):
        with transaction(pool) as c:
            c.execute(chunks.SQL.stage)
            keys = [(d, 1, 0, b"%032d" % d, 0, 0) for d in library.docs[:20]]
            copy_rows(c, chunks.SQL.copy_keys, ("int8", "int4", "int4", "bytea", "int4", "int4"), keys)
            yield c
            raise ZeroDivisionError


@pytest.mark.parametrize("name", NAMES)
def test_a_hot_statement_reads_one_leaf_by_its_key(library: Library, name: str, c: Any) -> None:
    statement, values = statements(library)[name]
    nodes = library.explained(statement, values, c)
    scans = [n for n in nodes if n["Node Type"].endswith("Scan") and "Relation Name" in n]
    read = {n["Relation Name"] for n in scans if n["Relation Name"].startswith(("kb_chunk", "kb_embedding"))}
    assert read and read <= library.leaves | {"kb_chunk_restated"}
    assert [n for n in scans if n["Node Type"] == "Seq Scan" and n["Relation Name"] in library.leaves] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_hot_statement_never_locks_every_partition(library: Library, name: str, c: Any) -> None:
    """The sixth run of a prepared statement would, when the server builds a generic plan to compare costs."""
    statement, values = statements(library)[name]
    for _ in range(8):
        c.execute(statement, {**library.where, **values})
        assert partitions_locked(c) <= library.leaves


def test_claiming_goes_by_the_queue_and_never_walks_what_is_done(library: Library, c: Any) -> None:
    values = {"nodes": ["FETCHER"], "generation": 1, "limit": 10, "me": "me", "ttl": 60, "floor": 0}
    nodes = library.explained(tasks.SQL.claim, values, c)
    assert "ingestion_task_ready" in {n.get("Index Name") for n in nodes}
    assert "ingestion_task" not in {n.get("Relation Name") for n in nodes if n["Node Type"] == "Seq Scan"}


@pytest.mark.parametrize("statement", ["present", "delete", "upsert"])
def test_the_vectors_of_a_space_are_reached_by_their_key_in_one_leaf(
    library: Library, server: Server, pool: Pool, statement: str
) -> None:
    if not server.has_pgvector:
        pytest.skip("this server has no pgvector")
    ref = library.shelf.index()
    index = pgvector.PgVectorIndex(pgvector.Config(), pool)
    _fill(index, ref, pool)
    with transaction(pool) as c:
        c.execute(pgvector.SQL.stage)
        query = sql.SQL(getattr(pgvector.SQL, statement)).format(table=sql.Identifier(f"kb_vector_m{ref.model_id}"))
        values = {"ids": [UUID(int=n << 116) for n in range(64)], "index": ref.index_id}
        nodes = library.explained(query, values, c)
        if statement != "upsert":
            leaf = f"kb_vector_m{ref.model_id}_{library.shelf.shard}"
            assert {n["Relation Name"] for n in nodes if n["Node Type"].endswith("Scan") and "Relation Name" in n} == {leaf}
            assert f"{leaf}_pkey" in {n.get("Index Name") for n in nodes}
        for _ in range(8):
            c.execute(query, {**library.where, **values})
            assert partitions_locked(c) <= library.leaves


def _fill(index: pgvector.PgVectorIndex, ref: IndexRef, pool: Pool) -> None:
    vector = np.ones(8, "<f2").tobytes()
    index.upsert(ref, [VectorEntry(UUID(int=n << 112), n, n, vector, (), 0, 0, n >> 4) for n in range(4000)])
    with pool.connection() as c:
        c.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(f"kb_vector_m{ref.model_id}_{_shard(c, ref)}")))


def _shard(c: Any, ref: IndexRef) -> int:
    return int(c.execute("SELECT shard FROM kb_space WHERE id = %s", [ref.space_id]).fetchone().shard)
