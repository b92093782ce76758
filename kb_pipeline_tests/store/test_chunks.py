"""Chunk rows: one per text and occurrence of a document, used again by every version that has the text."""

from dataclasses import replace

import pytest

from kb_pipeline.errors import Rejected
from kb_pipeline.states import Node
from kb_pipeline.store import chunks, documents, erasure, spaces, tasks
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import FakedApp, MemorySource
from kb_pipeline_tests.store.shelf import Shelf, cut


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def chunk_ids(shelf: Shelf, doc: int, version: int) -> list[int]:
    query = "SELECT chunk_ids FROM kb_doc_version WHERE doc_id = %(doc)s AND version = %(version)s"
    return list(shelf.value(query, doc=doc, version=version))


def test_chunks_are_stored_in_reading_order_with_exactly_what_is_embedded(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    pieces = [replace(x, prefix="Title", display=f"[{x.text}](link)", page_from=1, page_to=2) for x in cut("b", "a", "c")]
    assert shelf.chunk(held, pieces) == (3, 0)
    with transaction(shelf.pool) as c:
        rows = chunks.texts_of(c, shelf.space.id, shelf.shard, chunk_ids(shelf, doc, 1))
    assert [(r.content, r.display, r.prefix, r.page_from, r.page_to) for r in rows] == [
        (x.text, x.display, "Title", 1, 2) for x in pieces
    ]
    hashes = shelf.rows(
        "SELECT content_hash FROM kb_chunk WHERE doc_id = %(doc)s AND shard = %(shard)s", doc=doc, shard=shelf.shard
    )
    assert {bytes(r.content_hash) for r in hashes} == {x.content_hash for x in pieces}


def test_a_text_that_stands_twice_has_two_rows_and_keeps_them(shelf: Shelf) -> None:
    doc = shelf.published("a", "same", "other", "same")
    first = chunk_ids(shelf, doc, 1)
    assert len(set(first)) == 3
    assert {(r.content, r.occurrence) for r in shelf.states(doc)} == {("other", 0), ("same", 0), ("same", 1)}
    published = shelf.edited(doc, "same", "same")
    assert (published.appeared, published.left) == (0, 1)
    assert chunk_ids(shelf, doc, 2) == [first[0], first[2]]
    assert shelf.edited(doc, "same").left == 1
    assert chunk_ids(shelf, doc, 3) == [first[0]]


def test_a_text_of_another_document_has_a_row_of_its_own(shelf: Shelf) -> None:
    a, b = shelf.published("a", "same"), shelf.published("b", "same")
    assert chunk_ids(shelf, a, 1) != chunk_ids(shelf, b, 1)


def test_only_new_texts_are_written_and_an_old_one_comes_back_as_the_same_row(shelf: Shelf) -> None:
    doc = shelf.published("a", "one", "two")
    one, two = chunk_ids(shelf, doc, 1)
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    assert shelf.chunk(held, cut("three", "two")) == (1, 1)
    shelf.publish(shelf.at(Node.INDEXER, [held])[0])
    assert chunk_ids(shelf, doc, 2)[1] == two
    shelf.edited(doc, "one")
    assert chunk_ids(shelf, doc, 3) == [one]


def test_storing_chunks_again_after_a_crash_gives_the_same_rows(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    assert shelf.chunk(held, cut("one", "two")) == (2, 0)
    before = chunk_ids(shelf, doc, 1)
    assert shelf.chunk(held, cut("one", "two")) == (0, 2)
    assert chunk_ids(shelf, doc, 1) == before


def test_a_new_path_of_an_unchanged_text_shows_when_its_version_is_published_and_not_before(shelf: Shelf) -> None:
    doc = shelf.published("a", "one", "two")
    before = chunk_ids(shelf, doc, 1)
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    pieces = [*cut("one", path="New heading"), *cut("two")]
    assert shelf.chunk(held, pieces) == (0, 2)
    assert [r.title_path for r in shelf.states(doc)] == [[], []]
    published = shelf.publish(shelf.at(Node.INDEXER, [held])[0])
    assert (published.appeared, published.left) == (0, 0)
    assert chunk_ids(shelf, doc, 2) == before
    assert {r.content: r.title_path for r in shelf.states(doc)} == {"one": ["New heading"], "two": []}
    assert shelf.value("SELECT count(*) FROM kb_chunk_restated WHERE doc_id = %(doc)s", doc=doc) == 0


def restated(shelf: Shelf, doc: int) -> Claim:
    """Version 2 of a document is at the INDEXER, with a new path for a text that stayed."""
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    shelf.chunk(held, cut("one", path="New heading"))
    return shelf.at(Node.INDEXER, [held])[0]


def waiting_paths(shelf: Shelf, doc: int) -> int:
    return int(shelf.value("SELECT count(*) FROM kb_chunk_restated WHERE doc_id = %(doc)s", doc=doc))


def test_the_new_path_of_a_dead_version_shows_when_it_is_tried_again(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    held = restated(shelf, doc)
    shelf.fail(held, None)
    assert [r.title_path for r in shelf.states(doc)] == [[]]
    with transaction(shelf.pool) as c:
        documents.lock_documents(c, [doc])
        assert tasks.retry(c, held.task_id)
    (again,) = shelf.claim()
    assert again.node is Node.INDEXER
    shelf.publish(again)
    assert [r.title_path for r in shelf.states(doc)] == [["New heading"]]
    assert waiting_paths(shelf, doc) == 0


def test_the_new_path_of_a_version_that_is_given_up_is_forgotten(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    held = restated(shelf, doc)
    with transaction(shelf.pool) as c:
        assert tasks.cancel(c, held.task_id, "a test's")
    shelf.sweep()
    assert [r.title_path for r in shelf.states(doc)] == [[]]
    assert waiting_paths(shelf, doc) == 0


def test_the_new_path_of_a_deleted_document_is_forgotten(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    restated(shelf, doc)
    shelf.delete(doc)
    with transaction(shelf.pool) as c:
        documents.lock_deleted(c, [doc])
        erasure.erase(c, shelf.space.id, shelf.shard, [doc])
    assert waiting_paths(shelf, doc) == 0


@pytest.mark.parametrize("field", ["text", "display", "prefix", "title_path"])
def test_a_text_with_nul_is_refused_before_it_reaches_the_database(shelf: Shelf, field: str) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    value = ("a\0b",) if field == "title_path" else "a\0b"
    with pytest.raises(Rejected, match="NUL") as e:
        shelf.chunk(held, [replace(cut("one")[0], **{field: value})])
    assert e.value.code == "nul_in_text"
    assert shelf.states(doc) == []
    assert shelf.value("SELECT chunk_ids FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc) is None


def test_a_document_with_nul_costs_no_other_document_anything(app: FakedApp, space: Space) -> None:
    source = MemorySource({"a.txt": "one word", "b.txt": b"two\0words", "c.md": "# T\0itle\n\nthree\0words"})
    app.add_fake_source(space, source)
    report = sync_space(app.engine, space)
    with transaction(app.pool) as c:
        texts = [r.content for r in c.execute("SELECT content FROM kb_chunk WHERE space_id = %s", [space.id])]
    assert report.ingest.published + report.failed == 3
    assert report.ingest.published >= 1 and "one word" in texts
    assert not any("\0" in t for t in texts)
    assert all(f.code != "internal" for _, f in report.ingest.failures)


def test_a_leaf_without_statistics_gets_them_once(shelf: Shelf) -> None:
    """The planner takes every shard condition of such a leaf for selective, and reads all of it for a handful of chunks."""
    shelf.published("learned", *(f"text {n}" for n in range(20)))
    with transaction(shelf.pool) as c:
        new = spaces.promote(c, shelf.space)
    assert new is not None
    with transaction(shelf.pool) as c:
        assert chunks.learn(c, new) is True
    with transaction(shelf.pool) as c:
        assert chunks.learn(c, new) is False
        known = "SELECT n_distinct FROM pg_stats WHERE tablename = 'kb_chunk_state_' || %s::text AND attname = 'shard'"
        assert c.execute(known, [new]).fetchone() == (1.0,)
