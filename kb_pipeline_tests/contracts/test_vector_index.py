"""What every vector index must keep: those of the registry on the embedded server, and the fake that tests work with."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray
from psycopg import sql

from kb_pipeline.errors import Misconfigured, StateError, Transient
from kb_pipeline.indexes import pgvector
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.model import Bucket, IndexRef, VectorEntry
from kb_pipeline.ports import VectorIndex
from kb_pipeline.registry import INDEXES, open_adapter
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, open_pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex

DIMENSION = 16
_number = count(1)


@dataclass
class Bench:
    """An index of its own space, ready for writing."""

    app: FakedApp
    space: Space
    index: VectorIndex
    ref: IndexRef

    def drop(self) -> int:
        """As a space's deletion does it: the row first, then the index."""
        with transaction(self.app.pool) as c:
            c.execute("UPDATE kb_index SET status = 'DROPPING' WHERE id = %s", [self.ref.index_id])
        return self.index.drop(self.ref)


@pytest.fixture(params=[*sorted(INDEXES), "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_bench(kind: str, make_app: Callable[..., FakedApp], pool: Pool) -> Callable[[], Bench]:
    app = make_app()
    index: VectorIndex = MemoryIndex() if kind == "memory" else open_adapter("index", kind, {}, pool)

    def make() -> Bench:
        space = app.add_space(f"bench-{next(_number)}", embedder_options={"dimension": DIMENSION})
        with transaction(pool) as c:
            ref = spaces.serving_index(c, space.id)
        index.ensure(ref)
        return Bench(app, space, index, ref)

    return make


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


def vectors(n: int, seed: int = 0) -> NDArray[np.float32]:
    made = np.random.default_rng(seed).standard_normal((n, DIMENSION)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def vec_id(n: int) -> UUID:
    return UUID(bytes=hashlib.sha256(str(n).encode()).digest()[:16])


def entries(made: NDArray[np.float32], acl: Callable[[int], tuple[int, ...]] = lambda _: ()) -> list[VectorEntry]:
    """Chunk n has vector n and belongs to document n // 10."""
    ids = [vec_id(n) for n in range(len(made))]
    return [
        VectorEntry(v, n, n // 10, made[n].astype("<f2").tobytes(), acl(n), 0, n - 1000, int(v.hex[:3], 16))
        for n, v in enumerate(ids)
    ]


def best(made: NDArray[np.float32], query: NDArray[np.float32], k: int, among: Sequence[int] | None = None) -> list[int]:
    """The exact answer over what is stored: float16 on both sides."""
    scores = made.astype("<f2").astype(np.float64) @ query.astype("<f2").astype(np.float64)
    scores /= np.linalg.norm(made.astype("<f2").astype(np.float64), axis=1)
    rows = np.arange(len(made)) if among is None else np.asarray(among)
    return [int(i) for i in rows[np.argsort(-scores[rows])][:k]]


# --- writing ------------------------------------------------------------------------------------------------------------


def test_ensuring_again_keeps_what_is_there(bench: Bench) -> None:
    bench.index.upsert(bench.ref, entries(vectors(3)))
    bench.index.ensure(bench.ref)
    bench.index.ensure(bench.ref)
    assert len(bench.index.present(bench.ref, [vec_id(n) for n in range(3)])) == 3


def test_what_was_written_is_there_at_once_and_once(bench: Bench) -> None:
    made = entries(vectors(50))
    for _ in range(3):
        bench.index.upsert(bench.ref, made)
    assert bench.index.present(bench.ref, [e.vec_id for e in made]) == dict.fromkeys([e.vec_id for e in made], 0)
    assert sum(b.count for b in bench.index.digest(bench.ref).values()) == 50
    assert len(bench.index.search(bench.ref, vectors(1)[0], 100, None)) == 50


def test_writing_and_deleting_nothing_is_nothing(bench: Bench) -> None:
    bench.index.upsert(bench.ref, [])
    bench.index.delete(bench.ref, [])
    bench.index.delete(bench.ref, [vec_id(1)])
    assert bench.index.present(bench.ref, []) == {}
    assert bench.index.search(bench.ref, vectors(1)[0], 5, None) == []
    assert bench.index.digest(bench.ref) == {}


def test_an_older_acl_never_replaces_a_newer_one_and_the_same_may(bench: Bench) -> None:
    old, *_ = entries(vectors(1), lambda _: (1,))
    newer = replace(old, acl=(2,), acl_seq=5, checksum=7)
    bench.index.upsert(bench.ref, [newer])
    bench.index.upsert(bench.ref, [replace(old, acl_seq=4)])
    assert bench.index.present(bench.ref, [old.vec_id]) == {old.vec_id: 5}
    assert bench.index.search(bench.ref, vectors(1)[0], 5, [1]) == []
    assert bench.index.ids(bench.ref, old.bucket) == {old.vec_id: 7}
    bench.index.upsert(bench.ref, [replace(newer, checksum=8)])
    bench.index.upsert(bench.ref, [replace(newer, acl=(3,), acl_seq=6, checksum=9)])
    assert bench.index.present(bench.ref, [old.vec_id]) == {old.vec_id: 6}
    assert [x.vec_id for x in bench.index.search(bench.ref, vectors(1)[0], 5, [3])] == [old.vec_id]


def test_deleting_by_id_takes_those_and_no_others(bench: Bench) -> None:
    made = entries(vectors(20))
    bench.index.upsert(bench.ref, made)
    gone = [e.vec_id for e in made[::2]]
    for _ in range(2):
        bench.index.delete(bench.ref, [*gone, vec_id(999)])
    assert set(bench.index.present(bench.ref, [e.vec_id for e in made])) == {e.vec_id for e in made[1::2]}
    assert {x.chunk_id for x in bench.index.search(bench.ref, vectors(1)[0], 50, None)} == set(range(1, 20, 2))


def test_indexes_do_not_see_each_other(make_bench: Callable[[], Bench]) -> None:
    one, two = make_bench(), make_bench()
    one.index.upsert(one.ref, entries(vectors(5)))
    assert two.index.search(two.ref, vectors(1)[0], 5, None) == []
    two.index.delete(two.ref, [vec_id(0)])
    two.index.upsert(two.ref, [replace(e, vec_id=vec_id(100 + n)) for n, e in enumerate(entries(vectors(3)))])
    assert two.drop() == 0
    assert len(one.index.present(one.ref, [vec_id(n) for n in range(5)])) == 5


# --- searching ----------------------------------------------------------------------------------------------------------


def test_search_over_two_thousand_vectors_is_exact_and_best_first(bench: Bench) -> None:
    made = vectors(2000)
    bench.index.upsert(bench.ref, entries(made))
    for query in vectors(10, seed=1):
        found = bench.index.search(bench.ref, query, 10, None)
        assert [x.chunk_id for x in found] == best(made, query, 10)
        assert [x.vec_id for x in found] == [vec_id(x.chunk_id) for x in found]
        assert [x.doc_id for x in found] == [x.chunk_id // 10 for x in found]
        assert sorted((x.score for x in found), reverse=True) == [x.score for x in found]
        assert found[0].score == pytest.approx(float(made[found[0].chunk_id] @ query), abs=2e-3)


def test_a_vector_comes_back_as_it_was_stored_in_float16(bench: Bench) -> None:
    made = vectors(30)
    made[0] = 0
    made[0, :4] = [1.0, 6e-8, -6.1e-5, 1e-3]  # the smallest float16 there is, and subnormal ones
    bench.index.upsert(bench.ref, entries(made))
    for n, query in enumerate(made):
        (found,) = bench.index.search(bench.ref, query, 1, None)
        assert found.chunk_id == n
        assert found.score == pytest.approx(1.0, abs=1e-3)


def test_a_filter_returns_k_of_what_it_permits(bench: Bench) -> None:
    """Principal 1 may read one in 40, principal 2 the rest; one in 100 is for everybody."""
    made = vectors(2000)
    everybody, few = set(range(0, 2000, 100)), set(range(7, 2000, 40))
    bench.index.upsert(bench.ref, entries(made, lambda n: () if n in everybody else (1,) if n in few else (2, 3)))
    query = vectors(1, seed=2)[0]
    for asker, permitted in (([1], everybody | few), ([], everybody), ([9], everybody), ([3, 1], set(range(2000)))):
        found = [x.chunk_id for x in bench.index.search(bench.ref, query, 10, asker)]
        assert found == best(made, query, 10, sorted(permitted)), asker
    assert len(bench.index.search(bench.ref, query, 5000, None)) == 2000


def test_digest_and_ids_tell_exactly_what_is_held(bench: Bench) -> None:
    made = entries(vectors(300))
    bench.index.upsert(bench.ref, made)
    expected: dict[int, Bucket] = {}
    for e in made:
        old = expected.get(e.bucket, Bucket(0, 0))
        expected[e.bucket] = Bucket(old.count + 1, old.checksum_sum + e.checksum)
    assert bench.index.digest(bench.ref) == expected
    bucket = made[0].bucket
    assert bench.index.ids(bench.ref, bucket) == {e.vec_id: e.checksum for e in made if e.bucket == bucket}
    assert bench.index.ids(bench.ref, next(b for b in range(4096) if b not in expected)) == {}


def test_a_checksum_may_be_any_signed_32_bit_number(bench: Bench) -> None:
    first, second = entries(vectors(2))
    made = [replace(first, checksum=-(2**31), bucket=5), replace(second, checksum=-(2**31), bucket=5)]
    bench.index.upsert(bench.ref, made)
    assert bench.index.digest(bench.ref) == {5: Bucket(2, -(2**32))}


def test_settling_a_small_index_changes_no_answer(bench: Bench) -> None:
    made = vectors(100)
    bench.index.upsert(bench.ref, entries(made))
    bench.index.settle(bench.ref)
    assert [x.chunk_id for x in bench.index.search(bench.ref, made[3], 10, None)] == best(made, made[3], 10)


# --- the end ------------------------------------------------------------------------------------------------------------


def test_a_dropped_index_takes_no_write_and_is_not_made_again_by_one(bench: Bench) -> None:
    made = entries(vectors(5))
    bench.index.upsert(bench.ref, made)
    assert bench.drop() == 0
    for late in (
        lambda: bench.index.upsert(bench.ref, made),
        lambda: bench.index.delete(bench.ref, [made[0].vec_id]),
        lambda: bench.index.search(bench.ref, vectors(1)[0], 5, None),
        lambda: bench.index.present(bench.ref, [made[0].vec_id]),
    ):
        with pytest.raises(StateError) as e:
            late()
        assert e.value.code == "index_gone"
    assert bench.index.drop(bench.ref) == 0


def test_dropping_an_index_that_was_never_made_is_done(bench: Bench) -> None:
    never = replace(bench.ref, index_id=10**6, model_id=10**6, name="kb_never")
    assert bench.index.drop(never) == 0


def test_writers_at_once_lose_nothing(bench: Bench) -> None:
    made = entries(vectors(400))
    parts = [made[n * 80 : n * 80 + 160] for n in range(4)]  # they overlap
    errors: list[BaseException] = []

    def write(part: list[VectorEntry]) -> None:
        try:
            bench.index.upsert(bench.ref, part)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(b.count for b in bench.index.digest(bench.ref).values()) == 400


# --- pgvector alone: HNSW on a space's own shard, and what an operator is told --------------------------------------------


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
    index = app.engine.index(space)
    with transaction(pool) as c:
        ref = spaces.serving_index(c, space.id)
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
def test_a_database_that_went_away_is_a_temporary_error_of_ours(bench: Bench, kind: str, call: str, database_url: str) -> None:
    if kind != "pgvector":
        pytest.skip("a fake in memory does not go away like this")
    pool = open_pool(database_url, max_size=1)
    index = open_adapter("index", kind, {}, pool)
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
