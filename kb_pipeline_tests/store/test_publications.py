"""Publishing: the old version or the new one, never neither, never both, and no row is touched that stays as it is."""

from datetime import UTC, datetime

import psycopg
import pytest

from kb_pipeline.states import Node
from kb_pipeline.store import documents, publications, spaces, tasks
from kb_pipeline.store.database import Pool, retried, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.store.shelf import Shelf, cut


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def ready(shelf: Shelf, doc: int, *texts: str) -> tasks.Claim:
    """The document's next version, chunked, at the INDEXER."""
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    shelf.chunk(held, cut(*texts))
    (held,) = shelf.at(Node.INDEXER, [held])
    return held


def current(shelf: Shelf, doc: int) -> set[str]:
    return {r.content for r in shelf.states(doc) if r.in_current}


def test_the_first_publication_makes_its_chunks_current(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    published = shelf.bring(doc, cut("one", "two"))
    assert (published.documents, published.appeared, published.left) == (1, 2, 0)
    assert current(shelf, doc) == {"one", "two"}
    assert shelf.tombstones() == {}
    found = shelf.rows("SELECT status, current_ver, published_at IS NOT NULL AS at FROM kb_doc WHERE id = %(doc)s", doc=doc)[0]
    assert tuple(found) == ("AVAILABLE", 1, True)
    assert [r.vec_status for r in shelf.states(doc)] == [1, 1]
    assert shelf.task(doc).status == "SUCCESS"


def test_publishing_touches_only_the_chunks_that_come_and_go(shelf: Shelf) -> None:
    doc = shelf.published("a", "stays", "goes")
    query = "SELECT s.xmin::text AS written FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.id = %(id)s"
    stays, goes = sorted(shelf.states(doc), key=lambda r: r.content, reverse=True)
    before = shelf.value(query, shard=shelf.shard, id=stays.id)
    published = shelf.edited(doc, "comes", "stays")
    assert (published.appeared, published.left) == (1, 1)
    assert shelf.value(query, shard=shelf.shard, id=stays.id) == before
    assert current(shelf, doc) == {"comes", "stays"}
    assert shelf.tombstones() == {goes.vec_id: "W"}


def test_until_it_is_published_the_old_version_is_served(shelf: Shelf) -> None:
    doc = shelf.published("a", "old")
    held = ready(shelf, doc, "new")
    assert current(shelf, doc) == {"old"}
    found = shelf.rows("SELECT status, current_ver FROM kb_doc WHERE id = %(doc)s", doc=doc)[0]
    assert tuple(found) == ("AVAILABLE", 1)
    shelf.publish(held)
    assert current(shelf, doc) == {"new"}


def test_a_publication_that_does_not_commit_leaves_everything_as_it_was(shelf: Shelf) -> None:
    doc = shelf.published("a", "old")
    held = ready(shelf, doc, "new")
    with pytest.raises(psycopg.errors.DivisionByZero):
        with transaction(shelf.pool) as c:
            fence = tasks.fence(c, shelf.space, [held], documents=True)
            publications.publish(c, shelf.space.id, fence.shard, {doc: 2})
            tasks.advance(c, [held], datetime.now(UTC), {})
            c.execute("SELECT 1 / 0")
    assert current(shelf, doc) == {"old"}
    assert shelf.task(doc, 2).status == "PROCESSING"
    assert shelf.tombstones() == {}
    assert shelf.publish(held).documents == 1


def test_a_version_below_the_current_one_is_never_published_over_it(shelf: Shelf) -> None:
    """Trace 15: version 1 dies, version 2 is published, an operator tries version 1 again."""
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    shelf.chunk(first, cut("one"))
    shelf.fail(shelf.at(Node.INDEXER, [first])[0], None)
    shelf.edit(doc)  # marks the dead one CANCELED; an old client may still hold its id
    shelf.bring(doc, cut("two"))
    with transaction(shelf.pool) as c:
        documents.lock_documents(c, [doc])
        published = publications.publish(c, shelf.space.id, shelf.shard, {doc: 1})
    assert published.documents == 0 and published.appeared == 0
    assert current(shelf, doc) == {"two"}
    assert shelf.value("SELECT current_ver FROM kb_doc WHERE id = %(doc)s", doc=doc) == 2


def test_what_is_no_longer_publishable_is_told_apart(shelf: Shelf) -> None:
    here, gone = shelf.published("a", "one"), shelf.published("b", "one")
    shelf.delete(gone)
    with transaction(shelf.pool) as c:
        assert publications.publishable(c, {here: 2, gone: 2}) == {here: (1, 0)}


def test_a_document_has_one_open_publication_and_a_closed_one_per_time_it_was_current(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.edited(doc, "two")
    shelf.edited(doc, "one")
    rows = shelf.rows(
        """SELECT version, to_at IS NULL AS open, from_at <= coalesce(to_at, 'infinity') AS forward, from_xid IS NOT NULL AS snap,
                  (to_at IS NULL) = (to_xid IS NULL) AS both FROM kb_publication WHERE doc_id = %(doc)s ORDER BY from_at""",
        doc=doc,
    )
    assert [tuple(r) for r in rows] == [(1, False, True, True, True), (2, False, True, True, True), (3, True, True, True, True)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        with transaction(shelf.pool) as c:
            c.execute(
                "INSERT INTO kb_publication (space_id, doc_id, version, from_at, from_xid) VALUES (%s, %s, 9, now(), pg_current_xact_id())",
                [shelf.space.id, doc],
            )


def test_publications_of_one_document_do_not_leave_a_gap(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.edited(doc, "two")
    first, second = shelf.rows(
        "SELECT from_at, to_at, from_xid::text, to_xid::text FROM kb_publication WHERE doc_id = %(doc)s ORDER BY 1", doc=doc
    )
    assert first.to_at <= second.from_at
    assert first.to_xid == second.from_xid  # one transaction closed the one and opened the other


def test_deleting_a_document_closes_its_publication_and_hides_its_chunks(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.delete(doc)
    assert current(shelf, doc) == set()
    assert shelf.value("SELECT count(*) FROM kb_publication WHERE doc_id = %(doc)s AND to_at IS NULL", doc=doc) == 0
    assert shelf.value("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc) == "ARCHIVED"


def test_an_older_version_comes_back_as_a_new_one_with_the_same_rows(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.edited(doc, "two")
    with transaction(shelf.pool) as c:
        spaces.lock_shared(c, shelf.space)
        documents.lock_documents(c, [doc])
        assert documents.copy_version(c, doc, 1, "another recipe") == 3
    (held,) = shelf.claim()
    assert held.node is Node.INDEXER
    before = shelf.rows("SELECT id FROM kb_chunk WHERE doc_id = %(doc)s", doc=doc)
    assert shelf.publish(held).appeared == 1
    assert current(shelf, doc) == {"one"}
    assert shelf.rows("SELECT id FROM kb_chunk WHERE doc_id = %(doc)s", doc=doc) == before
    revision = "SELECT revision FROM kb_doc_version WHERE doc_id = %(doc)s AND version = 3"
    assert shelf.value(revision, doc=doc) == "r2"  # the next walk finds nothing new


def test_a_publication_waits_for_nobody_who_publishes_another_document(shelf: Shelf) -> None:
    one, two = shelf.published("a", "one"), shelf.published("b", "one")
    first = ready(shelf, one, "first")
    second = ready(shelf, two, "second")
    with transaction(shelf.pool) as c:
        fence = tasks.fence(c, shelf.space, [first], documents=True)
        spaces.lock_serving_index(c, shelf.space.id)
        publications.publish(c, shelf.space.id, fence.shard, {one: 2})
        retried(lambda: shelf.publish(second))  # would run into its lock timeout otherwise
        tasks.advance(c, [first], datetime.now(UTC), {})
    assert current(shelf, one) == {"first"} and current(shelf, two) == {"second"}


def test_what_a_following_index_has_to_learn_is_noted_with_the_publication(shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        query = "INSERT INTO kb_index (space_id, model_id, name, status) VALUES (%s, %s, 'next', 'FOLLOWING') RETURNING id"
        following = c.execute(query, [shelf.space.id, shelf.space.model_id]).fetchone().id  # type: ignore[union-attr]
    doc = shelf.published("a", "one", "two")
    one = next(r.id for r in shelf.states(doc) if r.content == "one")
    todo = "SELECT chunk_id, seq FROM kb_index_todo WHERE index_id = %(index)s ORDER BY chunk_id"
    first = shelf.rows(todo, index=following)
    assert [r.chunk_id for r in first] == [r.id for r in shelf.states(doc)]
    shelf.edited(doc, "two")
    dead = shelf.rows("SELECT index_id, state FROM vector_tombstone WHERE space_id = %(space)s ORDER BY 1")
    assert [tuple(r) for r in dead] == [(shelf.index().index_id, "W"), (following, "W")]
    shelf.edited(doc, "one", "two")
    again = {r.chunk_id: r.seq for r in shelf.rows(todo, index=following)}
    assert again[one] > max(r.seq for r in first)  # trace 27: removed by its seq, never by its id
