"""Traces of what may happen at any time: workers that live on after they lost their work, and what erasing meets."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import IndexRef
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import erasure, spaces, tasks
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline_tests.fakes import CountingEmbedder, Gate, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article

OLD = article("maple")
NEW = OLD.replace("mapleword1x7", "novelty")


@pytest.fixture
def published(lying: Flow) -> Flow:
    """One document is published; an edit of it waits."""
    lying.memory.put("a.md", OLD)
    lying.sync()
    lying.memory.put("a.md", NEW)
    lying.walk()
    return lying


def _caches(flow: Flow) -> list[Any]:
    return flow.execute("SELECT xmin::text, content_hash FROM kb_embedding ORDER BY content_hash")


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_zombie_that_comes_back_from_the_embedder_writes_nothing(published: Flow) -> None:
    zombie = published.embedder
    zombie.gate.close()
    with published.beside(published.ingest) as ended:
        zombie.gate.await_caller()
        published.expire_leases()
        published.app.embedder = CountingEmbedder()  # another process's
        assert published.ingest().published == 1
        before, cache = published.untouched(), _caches(published)
        zombie.gate.open()
    assert (ended[0].published, ended[0].failed) == (0, 0)
    assert published.untouched() == before
    assert _caches(published) == cache
    assert published.showing("novelty") == {"a.md"}
    assert published.task("a.md").attempt == 2


def test_a_zombie_that_comes_back_from_the_index_publishes_nothing(published: Flow) -> None:
    published.index.gate.close()
    with published.beside(lambda: published.ingest(limit=1)) as ended:
        published.index.gate.await_caller()
        published.expire_leases()
        published.sweep()
        before = published.untouched()
        published.index.gate.open()
    assert ended[0].published == 0
    assert published.untouched() == before
    assert published.document("a.md").current_ver == 1
    assert published.ingest().published == 1
    published.sync(full=True)
    published.assert_whole()


def test_the_attempt_of_a_retried_task_goes_on_so_that_an_old_worker_stays_fenced_off(published: Flow) -> None:
    published.index.gate.close()
    with published.beside(published.ingest) as ended:
        published.index.gate.await_caller()  # attempt 1
        published.expire_leases()
        published.sweep()
        with transaction(published.app.pool) as c:
            (second,) = tasks.claim(c, published.space, 1, 120, list(Node))  # attempt 2 fails for good
            held = tasks.fence(c, published.space, [second], documents=True)
            failure = tasks.Failure("refused", "a.md: refused", None)
            tasks.fail(c, published.space.id, held.shard, [(second, failure)], datetime.now(UTC))
        dead = published.task("a.md")
        assert (dead.status, dead.attempt) == ("DEAD", 2)
        assert published.retry(dead.id)
        assert published.task("a.md").attempt == 2
        with transaction(published.app.pool) as c:
            (third,) = tasks.claim(c, published.space, 1, 120, list(Node))
        assert third.attempt == 3
        before = published.untouched()
        published.index.gate.open()
    assert ended[0].published == 0
    assert published.untouched() == before
    assert published.document("a.md").current_ver == 1


def test_a_cancelled_task_is_not_published_and_leaves_nothing(published: Flow) -> None:
    published.index.gate.close()
    with published.beside(published.ingest) as ended:
        published.index.gate.await_caller()
        assert published.cancel(published.task("a.md").id)
        published.index.gate.open()
    assert ended[0].published == 0
    assert published.document("a.md").current_ver == 1
    published.sync()
    assert published.task("a.md").status == "CANCELED"
    assert (published.version("a.md", 2).status, published.version("a.md", 2).chunk_ids) == ("CANCELED", None)
    assert published.showing("mapleword1x7") == {"a.md"}
    assert published.showing("novelty") == set()
    assert published.rows()["kb_chunk"] == len(published.current_ids())
    published.assert_whole()


def test_a_task_that_was_published_cannot_be_cancelled(published: Flow) -> None:
    published.ingest()
    assert not published.cancel(published.task("a.md").id)
    assert published.task("a.md").status == "SUCCESS"


def test_an_older_version_is_never_published_over_a_newer_one(published: Flow) -> None:
    published.index.gate.close()
    with published.beside(published.ingest) as ended:
        published.index.gate.await_caller()
        published.execute("UPDATE kb_doc SET current_ver = 7 WHERE space_id = %(space)s")  # somebody was faster
        published.index.gate.open()
    assert ended[0].published == 0
    assert published.document("a.md").current_ver == 7
    published.sweep()
    assert (published.task("a.md").status, published.version("a.md", 2).status) == ("CANCELED", "CANCELED")


def test_a_dead_version_cannot_be_retried_over_newer_content(published: Flow) -> None:
    published.embedder.refused = {"novelty": Rejected("refused", code="refused")}
    published.ingest()
    dead = published.task("a.md")
    assert dead.status == "DEAD"
    published.memory.put("a.md", OLD.replace("mapleword1x7", "later"))
    published.sync()
    assert not published.retry(dead.id)
    assert published.document("a.md").current_ver == 3
    assert published.showing("later") == {"a.md"}


def test_content_that_changes_while_it_is_ingested_waits_for_its_turn(published: Flow) -> None:
    published.index.gate.close()
    with published.beside(published.ingest):
        published.index.gate.await_caller()
        published.memory.put("a.md", OLD.replace("mapleword1x7", "later"))
        published.walk()
        assert (published.task("a.md").version, published.task("a.md").status) == (3, "INIT")
        published.sweep()
        assert published.task("a.md").status == "INIT"
        published.index.gate.open()
    published.sync()
    assert published.document("a.md").current_ver == 3
    assert published.showing("later") == {"a.md"}
    assert published.showing("novelty") == set()
    published.assert_whole()


def test_two_workers_side_by_side_ingest_each_document_once(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n:02}.md": article(f"w{n}", 1) for n in range(20)}, index=MemoryIndex(), batch_size=3)
    flow.walk()
    with flow.beside(flow.ingest) as ended:
        mine = flow.ingest()
    assert mine.published + ended[0].published == 20
    assert sorted(flow.memory.fetched) == sorted(flow.memory.items)
    assert len(flow.embedder.texts) == len(set(flow.embedder.texts))
    flow.assert_whole()


def test_a_worker_that_is_killed_anywhere_repeats_no_finished_node(make_flow: Callable[..., Flow]) -> None:
    class Killed(BaseException):
        pass

    class Mortal(CountingEmbedder):
        left = 0

        def embed_documents(self, texts: Sequence[str]) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return super().embed_documents(texts)

    flow = make_flow({f"{n:02}.md": article(f"w{n}", 2) for n in range(12)}, index=MemoryIndex(), batch_size=4)
    flow.app.embedder = mortal = Mortal()
    flow.walk()
    for left in (0, 1, 1, 99):
        mortal.left = left
        try:
            flow.ingest()
        except Killed:
            flow.expire_leases()
    flow.sync()
    assert len(flow.memory.fetched) == 12
    assert len(mortal.texts) == len(set(mortal.texts))
    assert {t.status for t in flow.execute("SELECT status FROM ingestion_task WHERE space_id = %(space)s")} == {"SUCCESS"}
    flow.assert_whole()


# --- vector GC and ERASE ----------------------------------------------------------------------------------------------


def _vec_id(flow: Flow, word: str) -> UUID:
    (row,) = flow.execute(
        "SELECT t.vec_id FROM kb_chunk c JOIN kb_chunk_state t ON t.shard = c.shard AND t.id = c.id "
        "WHERE c.space_id = %(space)s AND c.content LIKE '%%' || %(word)s || '%%'",
        word=word + " ",
    )
    found: UUID = row.vec_id
    return found


def _put(flow: Flow, text: str) -> None:
    flow.memory.put("a.md", text)
    flow.walk()
    flow.ingest()


def test_a_chunk_that_comes_back_before_gc_keeps_its_vector(lying: Flow) -> None:
    _put(lying, OLD)
    old = _vec_id(lying, "mapleword1x7")
    _put(lying, NEW)
    _put(lying, OLD)
    assert _vec_id(lying, "mapleword1x7") == old
    assert collect_vectors(lying.engine, lying.space) == 1  # the novelty
    assert lying.rows()["vector_tombstone"] == 0
    lying.assert_whole()


def test_a_chunk_that_comes_back_while_its_vector_is_erased_gets_a_new_name(lying: Flow) -> None:
    _put(lying, OLD)
    old, calls = _vec_id(lying, "mapleword1x7"), len(lying.embedder.calls)
    _put(lying, NEW)
    lying.index.down = True
    assert collect_vectors(lying.engine, lying.space) == 0  # decided, and not carried out
    lying.index.down = False
    _put(lying, OLD)
    assert _vec_id(lying, "mapleword1x7") != old
    assert {old, _vec_id(lying, "mapleword1x7")} <= lying.indexed_ids()
    collect_vectors(lying.engine, lying.space)
    assert lying.showing("mapleword1x7") == {"a.md"}
    assert len(lying.embedder.calls) == calls + 1  # the novelty
    lying.assert_whole()


def test_a_chunk_that_comes_back_after_gc_gets_a_new_name(lying: Flow) -> None:
    _put(lying, OLD)
    old = _vec_id(lying, "mapleword1x7")
    _put(lying, NEW)
    collect_vectors(lying.engine, lying.space)
    _put(lying, OLD)
    assert _vec_id(lying, "mapleword1x7") != old
    collect_vectors(lying.engine, lying.space)
    lying.assert_whole()


def test_gc_between_verification_and_publish_does_not_take_a_vector(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(lying, OLD)
    _put(lying, NEW)
    lying.memory.put("a.md", OLD.replace("mapleword2x7", "another"))
    lying.walk()
    lying.ingest(nodes=FLOW[:-1])
    lying.index.gate.close()
    with lying.beside(lying.ingest) as ended:
        lying.index.gate.await_caller()  # the old chunk was found in the index; the new one is about to be written
        decide_only = MemoryIndex()
        decide_only.down = True
        real, lying.app.index = lying.index, decide_only
        collect_vectors(lying.engine, lying.space)
        lying.app.index = real
        real.gate.open()
    assert ended[0].published == 1
    collect_vectors(lying.engine, lying.space)
    assert lying.showing("mapleword1x7") == {"a.md"}
    lying.assert_whole()


class SlowDelete(MemoryIndex):
    """The first deletion is held back; later ones pass it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Gate()
        self.first.close()
        self.deletions = 0

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        self.deletions += 1
        if self.deletions == 1:
            self.first.pass_through()
        super().delete(ref, vec_ids)


def test_a_late_gc_cannot_hit_what_came_back_under_a_new_name(make_flow: Callable[..., Flow]) -> None:
    index = SlowDelete()
    flow = make_flow(index=index)
    _put(flow, OLD)
    _put(flow, NEW)
    with flow.beside(lambda: collect_vectors(flow.engine, flow.space)):
        index.first.await_caller()
        collect_vectors(flow.engine, flow.space)
        _put(flow, OLD)
        index.first.open()
    collect_vectors(flow.engine, flow.space)
    assert flow.showing("mapleword1x7") == {"a.md"}
    flow.assert_whole()


def _until_blocked(flow: Flow) -> None:
    """Somebody waits for a row lock in this database."""
    for _ in range(20_000):
        rows = flow.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        if rows:
            return
    raise AssertionError("nobody waits for the document's lock")


def test_erase_waits_for_the_document_and_then_sees_who_refers_to_its_chunks(published: Flow) -> None:
    published.index.down = True
    published.ingest()
    published.index.down = False
    v2 = published.version("a.md", 2)
    assert published.cancel(published.task("a.md").id)
    (kept,) = set(v2.chunk_ids) - set(published.version("a.md", 1).chunk_ids)
    with published.app.pool.connection() as c:
        lock_documents(c, [v2.doc_id])
        with published.beside(published.sweep) as ended:
            _until_blocked(published)
            version = (v2.doc_id, published.space.id, v2.chunk_ids)
            c.execute("INSERT INTO kb_doc_version (doc_id, version, space_id, chunk_ids) VALUES (%s, 3, %s, %s)", version)
            c.commit()
    assert ended == [None]
    assert published.version("a.md", 2).status == "CANCELED"
    assert published.execute("SELECT 1 FROM kb_chunk WHERE space_id = %(space)s AND id = %(kept)s", kept=kept)


def test_a_dead_version_whose_chunks_were_erased_is_cut_again_when_it_is_retried(published: Flow) -> None:
    published.execute("UPDATE ingestion_task SET max_retry_count = 0 WHERE space_id = %(space)s")
    published.index.down = True
    published.ingest()
    published.index.down = False
    dead = published.task("a.md")
    assert (dead.status, dead.current_node) == ("DEAD", Node.INDEXER)
    with transaction(published.app.pool) as c:
        shard = spaces.lock_shared(c, published.space)
        assert shard is not None
        lock_documents(c, [dead.doc_id])
        assert erasure.erase(c, published.space.id, shard, [dead.doc_id]) == 1
    collect_vectors(published.engine, published.space)
    calls = len(published.embedder.calls)
    assert published.retry(dead.id)
    assert published.task("a.md").current_node == Node.CHUNKER
    published.sync()
    assert published.showing("novelty") == {"a.md"}
    assert (len(published.embedder.calls), len(published.memory.fetched)) == (calls, 2)
    published.assert_whole()
