"""Vectors in PostgreSQL: HNSW on a space's own shard, and what an operator is told."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray
from psycopg import sql

from kb_pipeline.errors import Misconfigured, Transient
from kb_pipeline.indexes import pgvector
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.registry import open_adapter
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, open_pool, transaction
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.indexes.bench import DIMENSION, Bench, bench_maker, best, entries, vec_id, vectors


@pytest.fixture
def bench(make_app: Callable[..., FakedApp], request: pytest.FixtureRequest) -> Bench:
    return bench_maker("pgvector", make_app(), request)()


@pytest.fixture(scope="module")
def large(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, database_url: str
) -> Iterator[tuple[Bench, NDArray[np.float32]]]:
    """A promoted space with 6,000 vectors and the index that settle() built. One in 40 is for principal 1 only."""
    from kb_pipeline.settings import Settings
    from kb_pipeline.store.migrations import migrations

    settings = Settings(
        home=tmp_path_factory.mktemp("large") / ".kb", database_url=database_url, embedder="hashing", own_shard_chunks=10
    )
    app = FakedApp(settings, pool, migrations()[-1].version)
    space = app.add_space("large", embedder_options={"dimension": DIMENSION})
    with transaction(pool) as c:
        ref = spaces.serving_index(c, space.id)
    index = app.engine.index(ref)
    assert promote_if_large(app.engine, space, promised_chunks=11) is not None
    made = vectors(6000, seed=3)
    index.upsert(ref, entries(made, lambda n: (1,) if n % 40 == 7 else (2,)))
    assert index.settle(ref) is True
    yield Bench(app, space, index, ref), made


def leaf_of(bench: Bench) -> str:
    with transaction(bench.app.pool) as c:
        return f"kb_vector_m{bench.ref.model_id}_{c.execute('SELECT shard FROM kb_space WHERE id = %s', [bench.space.id]).fetchone().shard}"


def test_settling_builds_hnsw_once(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, _ = large
    assert bench.index.settle(bench.ref) is False
    with transaction(bench.app.pool) as c:
        query = "SELECT i.indisvalid AS valid FROM pg_index i JOIN pg_class k ON k.oid = i.indexrelid WHERE k.relname = %s"
        assert [r.valid for r in c.execute(query, [f"{leaf_of(bench)}_hnsw"])] == [True]


def test_settles_at_once_build_one_index(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, made = large
    name = f"{leaf_of(bench)}_hnsw"
    with bench.app.pool.connection() as c:
        c.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))
    results: list[object] = []

    def settle() -> None:
        try:
            results.append(bench.index.settle(bench.ref))
        except BaseException as e:
            results.append(e)

    threads = [threading.Thread(target=settle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(map(type, results)) == {bool} and True in results, results
    assert bench.index.settle(bench.ref) is False
    test_search_goes_through_hnsw_and_finds_nearly_everything(large)


def test_an_index_whose_build_was_killed_is_built_anew(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, made = large
    name = f"{leaf_of(bench)}_hnsw"
    with psycopg.connect(bench.app.pool.conninfo, autocommit=True) as c:
        c.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))
        c.execute("SET statement_timeout = '20ms'")
        build = "CREATE INDEX CONCURRENTLY {} ON {} USING hnsw (v halfvec_cosine_ops)"
        with pytest.raises(psycopg.errors.QueryCanceled):
            c.execute(sql.SQL(build).format(sql.Identifier(name), sql.Identifier(leaf_of(bench))))
    assert bench.index.settle(bench.ref) is True
    test_search_goes_through_hnsw_and_finds_nearly_everything(large)


def test_search_goes_through_hnsw_and_finds_nearly_everything(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, made = large
    right = 0
    for query in vectors(20, seed=4):
        found = bench.index.search(bench.ref, query, 10, None)
        assert len(found) == 10
        assert sorted((x.score for x in found), reverse=True) == [x.score for x in found]
        right += len({x.chunk_id for x in found} & set(best(made, query, 10)))
    assert right >= 180
    assert f"{leaf_of(bench)}_hnsw" in plan(bench, None)


def test_a_filter_over_hnsw_still_returns_k_rows_that_it_permits(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, made = large
    few = [n for n in range(6000) if n % 40 == 7]
    for query in vectors(10, seed=5):
        assert [x.chunk_id for x in bench.index.search(bench.ref, query, 10, [1])] == best(made, query, 10, few)
        found = bench.index.search(bench.ref, query, 10, [2])
        assert len(found) == 10 and not {x.chunk_id for x in found} & set(few)
        assert len(bench.index.search(bench.ref, query, 1500, None)) == 1500  # more than ef_search


def test_a_filter_that_leaves_few_rows_never_goes_through_hnsw(
    large: tuple[Bench, NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To turn index scans off was not enough: PostgreSQL 18 took the index all the same, and one in three was missed."""
    bench, made = large
    monkeypatch.setattr(pgvector.SQL, "search", pgvector.SQL.search_exactly)
    assert "_hnsw" not in plan(bench, [1])
    monkeypatch.setattr(pgvector.SQL, "search", "no statement")
    few = [n for n in range(6000) if n % 40 == 7]
    for query in vectors(5, seed=7):
        assert [x.chunk_id for x in bench.index.search(bench.ref, query, 10, [1])] == best(made, query, 10, few)


def test_hnsw_sees_what_was_written_and_deleted_after_it_was_built(large: tuple[Bench, NDArray[np.float32]]) -> None:
    bench, _ = large
    query = vectors(1, seed=6)[0]
    late = VectorEntry(vec_id(99_999), 99_999, 1, query.astype("<f2").tobytes(), (), 0, 0, int(vec_id(99_999).hex[:3], 16))
    bench.index.upsert(bench.ref, [late])
    assert bench.index.search(bench.ref, query, 1, None)[0].chunk_id == 99_999
    bench.index.delete(bench.ref, [late.vec_id])
    assert bench.index.search(bench.ref, query, 1, None)[0].chunk_id != 99_999


def plan(bench: Bench, acl: list[int] | None) -> str:
    """What the server does for a search of this space."""
    query = sql.SQL("EXPLAIN ") + sql.SQL(pgvector.SQL.search).format(
        table=sql.Identifier(f"kb_vector_m{bench.ref.model_id}"), dimension=sql.SQL(str(DIMENSION))
    )
    with transaction(bench.app.pool) as c:
        shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [bench.space.id]).fetchone().shard  # type: ignore[union-attr]
        c.execute(pgvector.SQL.search_settings, {"ef": "100"})
        text = "[" + ",".join(["0.25"] * DIMENSION) + "]"
        values = {"shard": shard, "space": bench.space.id, "index": bench.ref.index_id, "q": text, "k": 10, "acl": acl}
        return "\n".join(r[0] for r in c.execute(query, values))


def test_a_server_without_pgvector_is_told_what_to_install(server: Server) -> None:
    """A database that has no such extension and a server that could not make one."""
    index, ref, pool = _bare(server)
    with (
        _extension(None, None),
        pytest.raises(Misconfigured, match="no extension 'vector': install pgvector 0.7 or later") as e,
    ):
        index.ensure(ref)
    assert e.value.code == "no_pgvector"
    pool.close()


@pytest.mark.parametrize(("installed", "available"), [("0.6.2", "0.8.0"), ("0.5.1", None), (None, "0.6.0")])
def test_a_pgvector_without_halfvec_is_named_with_the_version_that_is_needed(
    server: Server, installed: str | None, available: str | None
) -> None:
    index, ref, pool = _bare(server)
    with (
        _extension(installed, available),
        pytest.raises(Misconfigured, match=f"pgvector {installed or available} is too old: 0.7") as e,
    ):
        index.ensure(ref)
    assert e.value.code == "pgvector_too_old"
    pool.close()


@pytest.mark.parametrize("call", ["present", "search", "digest", "ids", "upsert", "delete", "settle", "drop"])
def test_a_database_that_went_away_is_a_temporary_error_of_ours(bench: Bench, call: str, database_url: str) -> None:
    pool = open_pool(database_url, max_size=1)
    index = open_adapter("index", "pgvector", {}, pool)
    pool.close()
    arguments: dict[str, tuple[Any, ...]] = {"present": ([vec_id(1)],), "search": (vectors(1)[0], 5, None), "ids": (1,),
        "upsert": (entries(vectors(1)),), "delete": ([vec_id(1)],)}  # fmt: skip
    with pytest.raises(Transient) as e:
        getattr(index, call)(bench.ref, *arguments.get(call, ()))
    assert e.value.code == "index_down"
    assert getattr(bench.index, call)(bench.ref, *arguments.get(call, ())) in ({}, [], None, False, 0)


def _bare(server: Server) -> tuple[pgvector.PgVectorIndex, IndexRef, Pool]:
    pool = open_pool(server.url, max_size=1)
    return pgvector.PgVectorIndex(pgvector.Config(), pool), IndexRef(1, 1, 1, "kb_1", DIMENSION), pool


class _extension:
    """pg_extension and pg_available_extensions answer this, for a while."""

    def __init__(self, installed: str | None, available: str | None) -> None:
        self.answer = sql.SQL("SELECT {}::text AS installed, {}::text AS available").format(installed, available).as_string()

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pgvector.SQL, "extension", self.answer)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
