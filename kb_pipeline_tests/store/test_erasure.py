"""LEAVE, ERASE and the vector GC's decisions, held against the traces that break them when a rule is missing."""

from uuid import UUID

import pytest

from kb_pipeline.states import Node
from kb_pipeline.store import documents, erasure, publications, spaces, tasks
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim
from kb_pipeline_tests.store.shelf import Shelf, cut


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def working(shelf: Shelf, doc: int, *texts: str) -> Claim:
    """The document's next version, PROCESSING with these chunks, at the INDEXER."""
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    shelf.chunk(held, cut(*texts))
    return shelf.at(Node.INDEXER, [held])[0]


def decide(shelf: Shelf) -> None:
    """G1 for everything that is due."""
    with transaction(shelf.pool) as c:
        shard = spaces.lock_shared(c, shelf.space)
        assert shard is not None
        due = erasure.due_documents(c, shelf.space.id, 100)
        documents.lock_deleted(c, due)
        erasure.decide(c, shelf.space.id, shard, due)


def confirm(shelf: Shelf, gone: list[UUID], still: tuple[UUID, ...] = ()) -> None:
    with transaction(shelf.pool) as c:
        shard = spaces.lock_shared(c, shelf.space)
        assert shard is not None
        erasure.confirm_dead(c, shelf.space.id, shard, shelf.index().index_id, gone, still)


def dead(shelf: Shelf) -> list[UUID]:
    with transaction(shelf.pool) as c:
        return erasure.dead_vectors(c, shelf.index().index_id, None, 100)


def erase(shelf: Shelf, *docs: int) -> int:
    with transaction(shelf.pool) as c:
        shard = spaces.lock_shared(c, shelf.space)
        assert shard is not None
        documents.lock_deleted(c, docs)
        return erasure.erase(c, shelf.space.id, shard, docs)


def state(shelf: Shelf, doc: int, text: str) -> object:
    (found,) = [r for r in shelf.states(doc) if r.content == text]
    return found


def revive(shelf: Shelf, held: Claim) -> dict[int, UUID]:
    with transaction(shelf.pool) as c:
        fence = tasks.fence(c, shelf.space, [held], documents=True)
        wanted = publications.revive(c, shelf.space.id, fence.shard, [held.doc_id], [held.version])
    return {w.chunk_id: w.vec_id for w in wanted}


# --- G1 -----------------------------------------------------------------------------------------------------------------


def test_a_chunk_that_left_is_declared_dead_and_gets_a_new_name_when_it_is_gone(shelf: Shelf) -> None:
    doc = shelf.published("a", "A", "B")
    shelf.edited(doc, "B")
    old = state(shelf, doc, "A").vec_id
    assert dead(shelf) == []
    decide(shelf)
    assert dead(shelf) == [old]
    assert state(shelf, doc, "A").vec_status == 3
    confirm(shelf, [old])
    after = state(shelf, doc, "A")
    assert (after.vec_status, after.incarnation) == (0, 1)
    assert after.vec_id != old
    assert shelf.tombstones() == {}


def test_a_chunk_that_is_current_again_loses_its_tombstone(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    shelf.edited(doc, "A")
    decide(shelf)
    assert shelf.tombstones() == {state(shelf, doc, "B").vec_id: "E"}
    assert state(shelf, doc, "A").vec_status == 1


def test_a_chunk_of_a_version_in_flight_is_left_alone(shelf: Shelf) -> None:
    """Trace 3: version 3 has looked, A is there; a GC that only looks at in_current would erase it under its hands."""
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    held = working(shelf, doc, "A", "C")
    vectors = revive(shelf, held)
    decide(shelf)
    a = state(shelf, doc, "A")
    assert shelf.tombstones() == {a.vec_id: "W"}
    assert a.vec_status != 3
    shelf.publish(held)
    assert state(shelf, doc, "A").vec_id == vectors[a.id]


def test_a_name_that_is_being_erased_is_never_waited_for_again(shelf: Shelf) -> None:
    """Trace 2: the GC marked A and failed; the next version gives the row a new name before it looks."""
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    old = state(shelf, doc, "A").vec_id
    decide(shelf)
    held = working(shelf, doc, "A")
    vectors = revive(shelf, held)
    a = state(shelf, doc, "A")
    assert vectors == {a.id: a.vec_id} and a.vec_id != old
    assert (a.vec_status, a.incarnation) == (0, 1)
    assert dead(shelf) == [old]


def test_a_late_gc_does_not_rename_a_row_that_was_revived(shelf: Shelf) -> None:
    """Trace 5: only the row that still carries the dead name is reset."""
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    old = state(shelf, doc, "A").vec_id
    decide(shelf)
    held = working(shelf, doc, "A")
    new = revive(shelf, held)
    confirm(shelf, [old])
    assert {state(shelf, doc, "A").id: state(shelf, doc, "A").vec_id} == new
    shelf.publish(held)
    assert state(shelf, doc, "A").vec_status == 1


def test_an_id_that_is_still_in_the_index_keeps_its_tombstone_and_waits_longer_each_time(shelf: Shelf) -> None:
    """Trace 6: a delete that was answered ok and did nothing."""
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    decide(shelf)
    (old,) = dead(shelf)
    confirm(shelf, [], (old,))
    confirm(shelf, [], (old,))
    row = shelf.rows(
        "SELECT state, tries, not_before > clock_timestamp() AS later FROM vector_tombstone WHERE vec_id = %(id)s", id=old
    )[0]
    assert tuple(row) == ("E", 2, True)
    assert dead(shelf) == [old]
    assert state(shelf, doc, "A").vec_status == 3


def test_a_tombstone_without_a_row_is_dead(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    with transaction(shelf.pool) as c:
        c.execute("DELETE FROM kb_chunk_state WHERE shard = %s AND doc_id = %s AND NOT in_current", [shelf.shard, doc])
    decide(shelf)
    assert list(shelf.tombstones().values()) == ["E"]


def test_a_dead_vector_s_name_is_another_one_for_every_incarnation_and_chunk(pool: Pool) -> None:
    query = "SELECT kb_vec_id(i, md5('x')::uuid, n) AS id FROM generate_series(1, 100) i, generate_series(0, 9) n"
    with transaction(pool) as c:
        found = [r.id for r in c.execute(query)]
        buckets = c.execute("SELECT kb_bucket(id) AS b FROM unnest(%s::uuid[]) id", [found]).fetchall()
        same = c.execute("SELECT kb_checksum(%(v)s, '{}') = kb_checksum(%(v)s, '{1}') AS same", {"v": found[0]}).fetchone()
    assert len(set(found)) == 1000
    assert [r.b for r in buckets] == [int(v.hex[:3], 16) for v in found]
    assert same is not None and not same.same


# --- LEAVE ----------------------------------------------------------------------------------------------------------------


def test_a_version_that_fails_leaves_a_tombstone_for_each_of_its_vectors_that_nothing_current_uses(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    held = working(shelf, doc, "A", "B")
    shelf.fail(held, None)
    assert shelf.tombstones() == {state(shelf, doc, "B").vec_id: "W"}
    decide(shelf)
    assert shelf.tombstones() == {state(shelf, doc, "B").vec_id: "E"}
    assert state(shelf, doc, "A").vec_status == 1


def test_a_failed_version_that_is_tried_again_over_erased_rows_is_chunked_again(shelf: Shelf) -> None:
    """Trace 13: its chunk_ids must not point to nothing."""
    doc = shelf.published("a", "A")
    held = working(shelf, doc, "A", "B")
    shelf.fail(held, None)
    assert erase(shelf, doc) == 1
    assert shelf.value("SELECT chunk_ids FROM kb_doc_version WHERE doc_id = %(doc)s AND version = 2", doc=doc) is None
    with transaction(shelf.pool) as c:
        documents.lock_documents(c, [doc])
        assert tasks.retry(c, held.task_id)
    assert shelf.task(doc, 2).current_node == "FETCHER"


# --- ERASE ----------------------------------------------------------------------------------------------------------------


def test_erasing_keeps_what_a_ready_or_processing_version_refers_to(shelf: Shelf) -> None:
    """Traces 10 to 12."""
    doc = shelf.published("a", "A", "X")
    shelf.edited(doc, "B")
    working(shelf, doc, "C", "X")
    with transaction(shelf.pool) as c:
        c.execute("UPDATE kb_doc_version SET status = 'ARCHIVED' WHERE doc_id = %s AND version = 1", [doc])
    assert erase(shelf, doc) == 1
    assert {r.content for r in shelf.states(doc)} == {"B", "C", "X"}
    lost = shelf.rows(
        """SELECT v.version FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id) WHERE v.doc_id = %(doc)s
           AND NOT EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.id = u.id)""",
        doc=doc,
        shard=shelf.shard,
    )
    assert lost == []


def test_erased_rows_leave_dead_ids_in_every_living_index(shelf: Shelf) -> None:
    doc = shelf.published("a", "A", "B")
    vectors = {r.vec_id for r in shelf.states(doc)}
    with transaction(shelf.pool) as c:
        query = "INSERT INTO kb_index (space_id, model_id, name, status) VALUES (%s, %s, 'f', 'FOLLOWING'), (%s, %s, 'd', 'DROPPED')"
        c.execute(query, [shelf.space.id, shelf.space.model_id] * 2)
    shelf.delete(doc)
    assert erase(shelf, doc) == 2
    assert shelf.states(doc) == []
    assert shelf.value("SELECT count(*) FROM kb_chunk WHERE doc_id = %(doc)s", doc=doc) == 0
    rows = shelf.rows("SELECT vec_id, state, count(*) AS n FROM vector_tombstone WHERE space_id = %(space)s GROUP BY 1, 2")
    assert {r.vec_id for r in rows} == vectors
    assert {(r.state, r.n) for r in rows} == {("E", 2)}


def test_erasing_one_document_leaves_its_neighbours(shelf: Shelf) -> None:
    one, two = shelf.published("a", "A"), shelf.published("b", "A")
    shelf.delete(one)
    assert erase(shelf, one) == 1
    assert erase(shelf, one, two) == 0
    assert len(shelf.states(two)) == 1


def test_a_waiting_tombstone_of_an_erased_row_is_dead_at_once(shelf: Shelf) -> None:
    doc = shelf.published("a", "A")
    shelf.edited(doc, "B")
    assert list(shelf.tombstones().values()) == ["W"]
    shelf.delete(doc)
    erase(shelf, doc)
    assert set(shelf.tombstones().values()) == {"E"} and len(shelf.tombstones()) == 2


def test_the_vectors_of_a_deleted_document_are_collected_even_if_nobody_erases_its_rows(shelf: Shelf) -> None:
    """The process dies between the deletion and ERASE; a version in flight has vectors there, too."""
    doc = shelf.published("a", "A")
    working(shelf, doc, "A", "B")
    vectors = {r.vec_id for r in shelf.states(doc)}
    shelf.delete(doc)
    decide(shelf)
    assert set(dead(shelf)) == vectors
    assert shelf.tombstones() == dict.fromkeys(vectors, "E")
