"""Statements of two transactions in the one order that would break something if a lock or a guard were missing."""

from itertools import count
from typing import Any
from uuid import UUID

import pytest

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.model import Item
from kb_pipeline.store import documents, erasure, publications, removal, sources, spaces, tasks
from kb_pipeline.store.chunks import VersionChunks, store_chunks
from kb_pipeline.store.database import Connection, Pool, one, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp, MemoryBlobs, MemoryIndex
from kb_pipeline_tests.interleaving import Begun
from kb_pipeline_tests.store.shelf import Shelf, cut

_number = count(1)


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def contents_of(shelf: Shelf, doc: int, version: int) -> list[str]:
    """Of the rows that the version's list names, as far as they exist."""
    rows = shelf.rows(
        """SELECT c.content FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) WITH ORDINALITY u (id, seq)
           JOIN kb_space p ON p.id = v.space_id JOIN kb_chunk_state s ON s.shard = p.shard AND s.id = u.id
           JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id WHERE v.doc_id = %(doc)s AND v.version = %(version)s ORDER BY u.seq""",
        doc=doc,
        version=version,
    )
    return [r.content for r in rows]


def erase(shelf: Shelf, doc: int) -> int:
    with transaction(shelf.pool) as c:
        shard = spaces.lock_shared(c, shelf.space)
        assert shard is not None
        documents.lock_deleted(c, [doc])
        return erasure.erase(c, shelf.space.id, shard, [doc])


# --- tasks --------------------------------------------------------------------------------------------------------------


def test_a_worker_that_renews_its_lease_before_its_task_is_buried_keeps_it(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim(lease_seconds=-1)
    query = "UPDATE ingestion_task SET deaths = 2 WHERE id = %s"
    with transaction(shelf.pool) as c:
        c.execute(query, [held.task_id])
    with shelf.pool.connection() as c:
        documents.lock_documents(c, [doc])
        sweeper = Begun(shelf.pool, shelf.sweep)  # it has found the task, and waits for the document
        with transaction(shelf.pool) as beside:
            tasks.renew(beside, [(held.task_id, held.attempt)], 120)
        c.commit()
    sweeper.result()
    assert (shelf.task(doc).status, shelf.task(doc).attempt) == ("PROCESSING", held.attempt)


def test_a_queued_version_that_has_to_wait_keeps_no_other_document_waiting(shelf: Shelf) -> None:
    blocked, free = shelf.add("a", "b")
    first, second = sorted(shelf.claim(), key=lambda x: x.doc_id)
    shelf.edit(blocked)
    shelf.edit(free)
    shelf.fail(second, None)  # the way is free for b, and not for a
    shelf.sweep()
    assert (shelf.task(blocked, 2).status, shelf.task(free, 2).status) == ("INIT", "PENDING")
    assert shelf.task(blocked).attempt == first.attempt


# --- chunks and publications --------------------------------------------------------------------------------------------


def test_nobody_erases_a_chunk_before_its_version_names_it(shelf: Shelf) -> None:
    """Rows and list are one transaction under the document's lock."""
    doc = shelf.published("a", "A")
    shelf.edit(doc)
    (held,) = shelf.claim()
    with shelf.pool.connection() as c:
        c.execute("SELECT FROM kb_doc_version WHERE doc_id = %s AND version = 2 FOR UPDATE", [doc])
        chunker = Begun(shelf.pool, lambda: shelf.chunk(held, cut("A", "B")))  # its rows are there, its list is not
        eraser = Begun(shelf.pool, lambda: erase(shelf, doc), waiting=2)
        c.commit()
    chunker.result()
    eraser.result()
    assert contents_of(shelf, doc, 2) == ["A", "B"]


def test_a_deleted_document_is_not_published_whoever_asks(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    shelf.delete(doc)
    with transaction(shelf.pool) as c:
        documents.lock_deleted(c, [doc])
        published = publications.publish(c, shelf.space.id, shelf.shard, {doc: 1})
    assert published.documents == 0
    found = shelf.rows("SELECT status, current_ver FROM kb_doc WHERE id = %(doc)s", doc=doc)[0]
    assert tuple(found) == ("DELETED", 0)


def test_a_name_that_was_declared_dead_stays_so_when_its_document_is_deleted(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    old: UUID = shelf.states(doc)[0].vec_id
    shelf.edited(doc, "B")
    with transaction(shelf.pool) as c:
        documents.lock_deleted(c, [doc])
        erasure.decide(c, shelf.space.id, shelf.shard, [doc])
    assert shelf.tombstones() == {old: "E"}
    shelf.delete(doc)
    found = shelf.tombstones()
    assert (found.pop(old), list(found.values())) == ("E", ["W"])


def test_one_document_has_no_moment_without_a_version(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.edited(doc, "two")
    rows = shelf.rows("SELECT from_at, to_at, from_xid, to_xid FROM kb_publication WHERE doc_id = %(doc)s ORDER BY id", doc=doc)
    first, second = rows
    assert (first.to_at, first.to_xid) == (second.from_at, second.from_xid)
    assert first.from_xid != first.to_xid


# --- spaces -------------------------------------------------------------------------------------------------------------


def _store(c: Connection, shelf: Shelf, doc: int, shard: int, *texts: str) -> None:
    store_chunks(c, shelf.space.id, shard, [VersionChunks(doc, 1, "recipe", cut(*texts))])


def _promote(pool: Pool, space: Space) -> int | None:
    with transaction(pool) as c:
        return spaces.promote(c, space)


def test_a_promotion_waits_for_a_writer_that_has_read_the_shard(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    with shelf.pool.connection() as c:
        shard = spaces.lock_shared(c, shelf.space)
        assert shard is not None
        mover = Begun(shelf.pool, lambda: _promote(shelf.pool, shelf.space))
        _store(c, shelf, doc, shard, "late")
        c.commit()
    assert mover.result() == shelf.shard != shard
    assert contents_of(shelf, doc, 1) == ["late"]


def test_a_writer_waits_for_a_promotion_and_writes_to_the_new_shard(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")

    def write() -> int | None:
        with transaction(shelf.pool) as c:
            shard = spaces.lock_shared(c, shelf.space)
            assert shard is not None
            _store(c, shelf, doc, shard, "late")
            return shard

    with shelf.pool.connection() as c:
        new = spaces.promote(c, shelf.space)
        writer = Begun(shelf.pool, write)
        c.commit()
    assert writer.result() == new
    assert contents_of(shelf, doc, 1) == ["late"]


def test_what_failed_in_the_index_moves_with_its_space(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    values = [shelf.shard, shelf.states(doc)[0].id, shelf.space.id]
    with transaction(shelf.pool) as c:
        c.execute("INSERT INTO vector_retry (shard, chunk_id, space_id, error) VALUES (%s, %s, %s, 'refused')", values)
    new = _promote(shelf.pool, shelf.space)
    rows = shelf.rows("SELECT shard FROM vector_retry WHERE space_id = %(space)s AND error = 'refused' ORDER BY shard")
    assert new is not None
    assert {r.shard for r in rows} == {values[0], new}


def test_two_promotions_that_see_one_spare_do_not_share_it(app: FakedApp, pool: Pool) -> None:
    mine, theirs = (app.add_space(f"mover-{next(_number)}") for _ in range(2))
    with pool.connection() as c:
        first = spaces.promote(c, mine)
        second = Begun(pool, lambda: _promote(pool, theirs))
        c.commit()
    assert second.result() != first
    with transaction(pool) as c:
        owned = c.execute("SELECT shard, space_id FROM kb_shard WHERE space_id = ANY(%s)", [[mine.id, theirs.id]]).fetchall()
    assert {r.space_id for r in owned} == {mine.id, theirs.id}


def test_a_deletion_waits_for_a_page_that_is_being_written(app: FakedApp, pool: Pool) -> None:
    shelf = Shelf(pool, app.add_space(f"going-{next(_number)}"))
    with pool.connection() as c:
        assert spaces.lock_shared(c, shelf.space) is not None
        deleter = Begun(pool, lambda: delete_space(app.engine, shelf.space))
        documents.insert_documents(c, shelf.space.id, shelf.source.id, [Item("late", "r1", "late", "memory:late")])
        c.commit()
    assert set(deleter.result().values()) == {0}
    assert shelf.value("SELECT count(*) FROM kb_doc WHERE space_id = %(space)s") == 0


class KeptIndex(MemoryIndex):
    """It is asked to drop an index, and something of it is left."""

    def drop(self, ref: Any) -> int:
        return super().drop(ref) + 1


def _deleted(pool: Pool, space: Space) -> bool:
    with transaction(pool) as c:
        found = spaces.space_by_id(c, space.id)
        return found is not None and found.status == "DELETED"


def test_a_space_whose_index_keeps_something_is_not_deleted(make_app: Any, pool: Pool) -> None:
    app = make_app(index=KeptIndex())
    space = app.add_space(f"kept-{next(_number)}")
    assert delete_space(app.engine, space)["vectors"] == 1
    assert not _deleted(pool, space)
    app.index = MemoryIndex()
    assert set(delete_space(app.engine, space).values()) == {0}
    assert _deleted(pool, space)


def test_objects_that_no_row_names_go_with_their_space(make_app: Any) -> None:
    blobs = MemoryBlobs()
    app = make_app(index=MemoryIndex(), blobs=blobs)
    space = app.add_space(f"objects-{next(_number)}")
    blobs.objects[f"spaces/{space.id}/docs/1/v1/fetcher-a1"] = b"of an attempt that died before it was written down"
    assert set(delete_space(app.engine, space).values()) == {0}
    assert blobs.objects == {}


def test_a_space_that_is_being_deleted_is_taken_up_where_it_stands(app: FakedApp, pool: Pool) -> None:
    space = app.add_space(f"half-{next(_number)}")
    with transaction(pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)
        half = spaces.space_by_id(c, space.id)
    assert half is not None and half.status == "DELETING"
    assert set(delete_space(app.engine, half).values()) == {0}
    assert _deleted(pool, space)


def test_a_truncation_asks_for_its_locks_for_a_moment_only(shelf: Shelf) -> None:
    """Behind a truncation that waits, every reader of the shard would wait as well."""
    shard = _promote(shelf.pool, shelf.space)
    assert shard is not None
    with transaction(shelf.pool) as c:
        removal.begin(c, shelf.space.id)
        assert removal.truncate_own_shard(c, shelf.space.id, shard)
        assert one(c.execute("SELECT current_setting('lock_timeout') AS limit")).limit == "50ms"


def test_a_late_upsert_waits_for_a_promotion_and_goes_to_the_new_shard(app: FakedApp, pool: Pool) -> None:
    if app.index is not None:
        pytest.skip("without pgvector no vectors are in this database")
    shelf = Shelf(pool, app.add_space(f"late-{next(_number)}"))
    ref = shelf.index()
    index = app.engine.index(ref)
    entry = entry_of(ref.dimension)
    with pool.connection() as c:
        spaces.promote(c, shelf.space)
        writer = Begun(pool, lambda: index.upsert(ref, [entry]))
        c.commit()
    writer.result()
    assert index.present(ref, [entry.vec_id]) == {entry.vec_id: 0}


def entry_of(dimension: int) -> Any:
    import numpy as np

    from kb_pipeline.model import VectorEntry

    vector = np.zeros(dimension, "<f2")
    vector[0] = 1
    return VectorEntry(UUID(int=next(_number)), 1, 1, vector.tobytes(), (), 0, 0, 0)


# --- approvals ----------------------------------------------------------------------------------------------------------


def test_an_approval_is_taken_whole_or_not_at_all(shelf: Shelf) -> None:
    def spend(n: int) -> bool:
        with transaction(shelf.pool) as c:
            return sources.spend_approval(c, shelf.source.id, n)

    with transaction(shelf.pool) as c:
        sources.approve(c, shelf.source.id, 3)
    assert [spend(n) for n in (2, 2, 1, 1)] == [True, False, True, False]


def test_of_two_that_spend_one_approval_one_is_refused(shelf: Shelf) -> None:
    def spend() -> bool:
        with transaction(shelf.pool) as c:
            return sources.spend_approval(c, shelf.source.id, 2)

    with transaction(shelf.pool) as c:
        sources.approve(c, shelf.source.id, 3)
    with shelf.pool.connection() as c:
        assert sources.spend_approval(c, shelf.source.id, 2)
        second = Begun(shelf.pool, spend)
        c.commit()
    assert second.result() is False
