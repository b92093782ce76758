"""An HNSW that is full of dead entries is rebuilt beside its readers, one that is not is left alone."""

from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql

from kb_pipeline.maintenance.sweep import compact_index
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.store import spaces
from kb_pipeline.store.database import connection, transaction
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.flow.scenario import Flow, article


@pytest.fixture
def flow(server: Server, make_flow: Callable[..., Flow]) -> Flow:
    """A space with a shard, and so an HNSW, of its own."""
    if not server.has_pgvector:
        pytest.skip("this server has no pgvector")
    made = make_flow({f"d{n}.md": article(f"doc{n}", 2) for n in range(15)}, own_shard_chunks=5)
    made.sync()
    return made


def _leaf(flow: Flow) -> str:
    with transaction(flow.app.pool) as c:
        return f"kb_vector_m{flow.space.model_id}_{spaces.lock_shared(c, flow.space)}"


def _hnsw(flow: Flow) -> list[tuple[str, bool, int]]:
    rows = flow.execute(
        "SELECT c.relname, i.indisvalid, c.relfilenode FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid "
        "WHERE starts_with(c.relname, %(name)s) ORDER BY c.relname",
        name=f"{_leaf(flow)}_hnsw",
    )
    return [(r.relname, r.indisvalid, r.relfilenode) for r in rows]


def _forget(flow: Flow, documents: int) -> None:
    """So many documents shrink by a chunk, which the GC erases."""
    for n in range(documents):
        flow.memory.put(f"d{n}.md", article(f"doc{n}", 1))
    flow.walk()
    flow.ingest()
    assert collect_vectors(flow.engine, flow.space) == documents


def test_it_is_rebuilt_once_a_tenth_is_dead(flow: Flow) -> None:
    ((name, valid, file),) = _hnsw(flow)
    assert valid
    assert compact_index(flow.engine, flow.space) is False
    _forget(flow, 2)
    assert compact_index(flow.engine, flow.space) is False
    for n in range(2, 9):
        flow.memory.put(f"d{n}.md", article(f"doc{n}", 1))
    flow.sync()
    assert compact_index(flow.engine, flow.space) is True
    ((rebuilt, valid, new_file),) = _hnsw(flow)
    assert (rebuilt, valid) == (name, True) and new_file != file
    assert compact_index(flow.engine, flow.space) is False  # nothing is dead any more
    assert flow.showing("doc14word0x5") == {"d14.md"}
    flow.assert_whole()


def test_dead_rows_count_although_a_vacuum_without_index_cleanup_has_been_there(flow: Flow) -> None:
    for n in range(9):
        flow.memory.put(f"d{n}.md", article(f"doc{n}", 1))
    flow.sync()
    with connection(flow.app.pool) as c:
        c.execute(sql.SQL("VACUUM {}").format(sql.Identifier(_leaf(flow))))  # the leaf's own setting: no index cleanup
    assert compact_index(flow.engine, flow.space) is True


def test_what_a_killed_rebuild_left_is_dropped(flow: Flow) -> None:
    """A rebuild that ends while it waits leaves an invalid index under this name; so does a build that finds duplicates."""
    leaf = _leaf(flow)
    with connection(flow.app.pool) as c, pytest.raises(psycopg.errors.UniqueViolation):
        c.execute(
            sql.SQL("CREATE UNIQUE INDEX CONCURRENTLY {} ON {} (shard)").format(
                *map(sql.Identifier, (f"{leaf}_hnsw_ccnew", leaf))
            )
        )
    assert [valid for _, valid, _ in _hnsw(flow)] == [True, False]
    compact_index(flow.engine, flow.space)
    assert [(name, valid) for name, valid, _ in _hnsw(flow)] == [(f"{leaf}_hnsw", True)]


def test_a_space_in_a_shared_shard_has_nothing_to_rebuild(make_flow: Callable[..., Flow]) -> None:
    small = make_flow({"a.md": article("aa", 1)})
    small.sync()
    assert compact_index(small.engine, small.space) is False


def test_an_index_that_needs_no_rebuilding_is_left_alone(lying: Flow) -> None:
    assert compact_index(lying.engine, lying.space) is False
