"""A space that is deleted leaves nothing, wherever it was interrupted, and nothing of its neighbours goes with it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import psycopg
import pytest

from kb_pipeline.indexes.pgvector import PgVectorIndex
from kb_pipeline.maintenance import delete_space as delete_module
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.model import IndexRef
from kb_pipeline.store import removal, spaces, tasks
from kb_pipeline.store.database import DatabaseBusy, Pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.fakes import FakedApp, MemorySource
from kb_pipeline_tests.store.shelf import Shelf

_number = count(1)
# Rows of a space: every table that has a column for it, partitions through their parents.
TABLES = """SELECT DISTINCT c.table_name FROM information_schema.columns c JOIN pg_class k ON k.relname = c.table_name
            WHERE c.column_name = 'space_id' AND c.table_schema = 'public' AND k.relkind IN ('r', 'p') AND NOT k.relispartition"""


class Interrupted(Exception):
    pass


def loaded(app: FakedApp, documents: int = 6) -> Space:
    """A space with documents, answers to come, retained versions, tombstones, objects and a cache."""
    space = app.add_space(f"space-to-go-{next(_number)}")
    source = MemorySource({f"{n}.txt": f"words of document {n}" for n in range(documents)})
    app.add_fake_source(space, source)
    sync_space(app.engine, space)
    source.put("0.txt", "quite other words")
    source.remove("1.txt")
    sync_space(app.engine, space)
    Shelf(app.pool, space, "more").add("waiting")
    return space


def left(pool: Pool, space: Space) -> dict[str, int]:
    """Rows by table that still name the space, shards that it owns included."""
    found = {}
    with transaction(pool) as c:
        for row in c.execute(TABLES).fetchall():
            query = psycopg.sql.SQL("SELECT count(*) AS n FROM {} WHERE space_id = %s").format(
                psycopg.sql.Identifier(row.table_name)
            )
            found[row.table_name] = c.execute(query, [space.id]).fetchone().n  # type: ignore[union-attr]
    assert {"kb_chunk", "kb_chunk_state", "kb_doc", "kb_shard", "kb_source", "ingestion_task"} <= set(found)
    return {table: n for table, n in found.items() if n}


def own_shard(app: FakedApp, space: Space) -> int:
    engine = replace(app.engine, limits=replace(app.engine.limits, own_shard_chunks=1))
    shard = promote_if_large(engine, space)
    assert shard is not None
    return shard


@pytest.mark.parametrize("promoted", [False, True], ids=["shared shard", "own shard"])
def test_a_deleted_space_leaves_nothing_but_its_row(app: FakedApp, pool: Pool, promoted: bool) -> None:
    space = loaded(app)
    neighbour = loaded(app)
    before = left(pool, neighbour)
    shard = own_shard(app, space) if promoted else None
    assert left(pool, space)
    residue = delete_space(app.engine, space)
    assert set(residue.values()) == {0} and "objects" in residue
    assert left(pool, space) == {}
    assert list(app.engine.blobs.keys(f"spaces/{space.id}/")) == []
    assert left(pool, neighbour) == before
    with transaction(pool) as c:
        (status,) = c.execute("SELECT status FROM kb_space WHERE id = %s", [space.id]).fetchone()  # type: ignore[misc]
        assert status == "DELETED"
        if shard is not None:
            row = c.execute("SELECT state, space_id FROM kb_shard WHERE shard = %s", [shard]).fetchone()
            assert tuple(row) == ("SPARE", None)  # type: ignore[arg-type]
    if promoted:  # the shard comes back to the next space that needs one
        assert own_shard(app, neighbour) == shard
        assert left(pool, neighbour)["kb_chunk"] == 2 * before["kb_chunk"]  # its left copy waits for the grace


def test_vectors_in_an_own_shard_are_truncated_with_it_and_not_deleted_row_by_row(
    app: FakedApp, pool: Pool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.has_pgvector:
        pytest.skip("needs vectors that lie beside the chunks")
    space = loaded(app)
    own_shard(app, space)
    with transaction(pool) as c:  # the grace is over: what lies in the shared shard is cleared
        spaces.clear_left(c, space.id, before=datetime.now(UTC) + timedelta(hours=1), limit=1000)
    table = f"kb_vector_m{space.model_id}"
    drop = PgVectorIndex.drop
    found: list[int] = []

    def counted(index: PgVectorIndex, ref: IndexRef) -> int:
        found.append(left(pool, space).get(table, 0))
        return drop(index, ref)

    assert left(pool, space)[table]
    monkeypatch.setattr(PgVectorIndex, "drop", counted)
    assert set(delete_space(app.engine, space).values()) == {0}
    assert found == [0]


def test_a_key_of_a_deleted_space_begins_anew(app: FakedApp) -> None:
    space = loaded(app)
    delete_space(app.engine, space)
    again = app.add_space(space.key)
    assert again.id != space.id
    app.add_fake_source(again, MemorySource({"0.txt": "words of document 0"}))
    assert sync_space(app.engine, again).ingest.published == 1


@pytest.mark.parametrize("step", ["drop_given_up", "_clear_shards", "_delete_objects", "_delete_rows", "_residue"])
@pytest.mark.parametrize("promoted", [False, True], ids=["shared", "own"])
def test_a_deletion_that_was_interrupted_is_finished_by_the_next_one(
    app: FakedApp, pool: Pool, step: str, promoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = loaded(app, 3)
    if promoted:
        own_shard(app, space)
    work: Callable[..., object] = getattr(delete_module, step)

    def interrupted(*args: object) -> object:
        work(*args)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(delete_module, step, interrupted)
        with pytest.raises(Interrupted):
            delete_space(app.engine, space)
    assert set(delete_space(app.engine, space).values()) == {0}
    assert left(pool, space) == {}


def test_from_its_first_step_on_nothing_of_the_space_is_written(app: FakedApp, pool: Pool) -> None:
    space = app.add_space(f"space-to-go-{next(_number)}")
    shelf = Shelf(pool, space)
    shelf.add("a")
    (held,) = shelf.claim()
    with transaction(pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)
    with transaction(pool) as c:
        assert spaces.lock_shared(c, space) is None
        assert tasks.fence(c, space, [held], documents=True).claims == []
    task = shelf.task(held.doc_id)
    assert (task.status, task.attempt) == ("CANCELED", held.attempt + 1)
    with pytest.raises(AssertionError):
        shelf.chunk(held, [])


def test_a_late_second_deletion_does_not_empty_the_next_owner_s_shard(app: FakedApp, pool: Pool) -> None:
    """Trace 55: both found shard n as the space's own; the first returned it, and another space took it."""
    space = loaded(app)
    shard = own_shard(app, space)
    with transaction(pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)
    with transaction(pool) as c:
        assert removal.shards(c, space.id) and removal.truncate_own_shard(c, space.id, shard)
    heir = loaded(app)
    with transaction(pool) as c:  # whatever lies ready before it is somebody else's
        c.execute("UPDATE kb_shard SET state = 'SHARED' WHERE state = 'SPARE' AND shard < %s", [shard])
    assert own_shard(app, heir) == shard
    before = left(pool, heir)
    with transaction(pool) as c:
        assert removal.truncate_own_shard(c, space.id, shard) is False
    assert set(delete_space(app.engine, space).values()) == {0}
    assert left(pool, heir) == before
    with transaction(pool) as c:
        row = c.execute("SELECT state, space_id FROM kb_shard WHERE shard = %s", [shard]).fetchone()
        assert tuple(row) == ("OWNED", heir.id)  # type: ignore[arg-type]
        c.execute("UPDATE kb_shard SET state = 'SPARE' WHERE state = 'SHARED' AND shard >= 32")
    with transaction(pool) as c:  # not even when the heir is being deleted as well
        spaces.lock_exclusive(c, heir.id)
        removal.begin(c, heir.id)
    with transaction(pool) as c:
        assert removal.truncate_own_shard(c, space.id, shard) is False


def test_the_shard_of_a_living_space_is_never_truncated(app: FakedApp, pool: Pool) -> None:
    space = loaded(app)
    shard = own_shard(app, space)
    before = left(pool, space)
    with transaction(pool) as c:
        assert removal.truncate_own_shard(c, space.id, shard) is False
    assert left(pool, space) == before


def test_a_truncation_waits_for_a_reader_without_holding_up_neighbours(app: FakedApp, pool: Pool) -> None:
    space, neighbour = loaded(app), loaded(app)
    shard = own_shard(app, space)
    with transaction(pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)
    with transaction(pool) as reader:
        reader.execute("SELECT count(*) FROM kb_chunk WHERE shard = %s", [shard])
        with pytest.raises(DatabaseBusy):
            with transaction(pool) as c:
                removal.truncate_own_shard(c, space.id, shard)
        assert left(pool, neighbour)
    with transaction(pool) as c:
        assert removal.shards(c, space.id)  # still the space's: nothing was returned without being emptied
        assert removal.truncate_own_shard(c, space.id, shard) is True


def test_a_truncation_leaves_the_parents_unlocked(app: FakedApp, pool: Pool) -> None:
    space = loaded(app)
    shard = own_shard(app, space)
    query = """SELECT DISTINCT c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
               WHERE l.pid = pg_backend_pid() AND l.mode = 'AccessExclusiveLock' AND c.relkind = 'p'"""
    with transaction(pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)
        assert removal.truncate_own_shard(c, space.id, shard)
        assert c.execute(query).fetchall() == []
