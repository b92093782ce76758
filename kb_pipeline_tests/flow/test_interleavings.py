"""What happens at one chosen moment of a pass: a cancellation, a purge, a deletion, a death, another walk."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any, BinaryIO

import psycopg
import pytest

from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Presence
from kb_pipeline.nodes import chunk
from kb_pipeline.nodes.outcome import object_key
from kb_pipeline.ports import Capabilities
from kb_pipeline.states import FLOW
from kb_pipeline.store import answers, documents, publications, spaces, tasks, walks
from kb_pipeline.store.database import transaction, worker_id
from kb_pipeline_tests.fakes import LONGEST_WAIT, MemoryBlobs, MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.interleaving import Begun

OLD = article("maple")
NEW = OLD.replace("mapleword1x7", "novelty")


class Killed(BaseException):
    """The process dies."""


@pytest.fixture
def published(lying: Flow) -> Flow:
    """One document is published; an edit of it waits."""
    lying.memory.put("a.md", OLD)
    lying.sync()
    lying.memory.put("a.md", NEW)
    lying.walk()
    return lying


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_task_is_published_or_cancelled_and_never_both(published: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancellation comes when everything has been asked and nothing is written yet."""
    real, begun = publications.publish, []
    task = published.task("a.md").id

    def publish(*args: Any) -> Any:
        begun.append(Begun(published.app.pool, lambda: published.cancel(task)))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(publications, "publish", publish)
        published.ingest()
    (cancellation,) = begun
    assert (published.document("a.md").current_ver == 2) is not cancellation.result()


def test_a_worker_renews_its_leases_while_it_works(make_flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch) -> None:
    flow = make_flow({"a.md": OLD}, index=MemoryIndex(), lease_seconds=1)
    renewed, real = Event(), tasks.renew

    def renew(*args: Any) -> None:
        real(*args)
        renewed.set()

    monkeypatch.setattr(tasks, "renew", renew)
    flow.walk()
    flow.embedder.gate.close()
    with flow.beside(flow.ingest) as ended:
        flow.embedder.gate.await_caller()
        found = renewed.wait(LONGEST_WAIT / 4)
        flow.embedder.gate.open()
    assert found
    assert ended[0].published == 1


def test_a_failed_update_does_not_hide_the_version_before_it(published: Flow) -> None:
    published.execute("UPDATE ingestion_task SET max_retry_count = 0 WHERE space_id = %(space)s")
    published.index.down = True
    published.ingest()
    published.index.down = False
    assert published.task("a.md").status == "DEAD"
    assert published.document("a.md").status == "AVAILABLE"
    assert published.showing("mapleword1x7") == {"a.md"}


def test_the_third_death_at_one_node_is_the_last(published: Flow) -> None:
    statuses = []
    for _ in range(3):
        with transaction(published.app.pool) as c:
            tasks.claim(c, published.space, 10, -1, FLOW)
        published.sweep()
        statuses.append(published.task("a.md").status)
    assert statuses == ["PENDING", "PENDING", "DEAD"]


def test_an_index_that_forgot_a_vector_is_given_it_again(lying: Flow) -> None:
    """It was seen there once. Only the index itself knows whether it still is."""
    for text in (OLD, NEW):
        lying.memory.put("a.md", text)
        lying.walk()
        lying.ingest()
    for held in lying.index.indexes.values():
        for vec_id in held.keys() - lying.current_ids():
            del held[vec_id]
    lying.memory.put("a.md", OLD)
    lying.walk()
    assert lying.ingest().published == 1
    assert lying.showing("mapleword1x7") == {"a.md"}


def test_an_acl_that_changes_while_a_version_is_verified_makes_it_look_again(published: Flow) -> None:
    attempt = published.task("a.md").attempt
    published.index.gate.close()
    with published.beside(published.ingest) as ended:
        published.index.gate.await_caller()
        with transaction(published.app.pool) as c:
            answers.set_acl(c, [published.document("a.md").id], [["staff"]])
        published.index.gate.open()
    assert ended[0].published == 1
    assert published.task("a.md").attempt == attempt + 2  # claimed, given back, claimed again


def test_a_vector_that_nobody_waits_for_any_more_is_not_stored(published: Flow) -> None:
    before = published.rows()["kb_embedding"]
    published.embedder.gate.close()
    with published.beside(published.ingest):
        published.embedder.gate.await_caller()
        assert published.cancel(published.task("a.md").id)
        published.embedder.gate.open()
    after = published.rows()
    assert (after["kb_embedding"], after["embedding_claims"]) == (before, 0)


# --- objects ----------------------------------------------------------------------------------------------------------


class WatchedBlobs(MemoryBlobs):
    """``after_put`` runs once, when a batch has been taken."""

    after_put: Callable[[], Any] | None = None

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        super().put_many(objects)
        after, self.after_put = self.after_put, None
        if after is not None:
            after()


def test_an_attempt_that_lost_its_task_does_not_name_its_object(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({"a.md": OLD, "b.md": article("oak")}, index=MemoryIndex())
    watched = WatchedBlobs()
    flow.engine = replace(flow.engine, blobs=watched)
    flow.walk()

    def another_takes_b() -> None:
        flow.execute("UPDATE ingestion_task SET attempt = attempt + 1 WHERE id = %(task)s", task=flow.task("b.md").id)
        flow.execute("UPDATE kb_doc_version SET raw_path = 'theirs' WHERE doc_id = %(doc)s", doc=flow.document("b.md").id)

    watched.after_put = another_takes_b
    assert flow.ingest().published == 1
    assert flow.version("b.md", 1).raw_path == "theirs"


def test_two_attempts_at_one_version_put_two_objects(published: Flow) -> None:
    with transaction(published.app.pool) as c:
        (claim,) = tasks.claim(c, published.space, 1, 120, FLOW)
    later = replace(claim, attempt=claim.attempt + 1)
    assert object_key(published.space, claim) != object_key(published.space, later)


# --- GC and purge -----------------------------------------------------------------------------------------------------


def test_the_gc_waits_for_the_document_and_then_sees_who_takes_the_chunk_up(lying: Flow) -> None:
    for text in (OLD, NEW):
        lying.memory.put("a.md", text)
        lying.walk()
        lying.ingest()
    v1 = lying.version("a.md", 1)
    with lying.app.pool.connection() as c:
        documents.lock_documents(c, [v1.doc_id])
        gc = Begun(lying.app.pool, lambda: collect_vectors(lying.engine, lying.space))
        version = (v1.doc_id, lying.space.id, v1.chunk_ids)
        c.execute("INSERT INTO kb_doc_version (doc_id, version, space_id, chunk_ids) VALUES (%s, 3, %s, %s)", version)
        c.commit()
    assert gc.result() == 0
    (left,) = lying.execute("SELECT state FROM vector_tombstone WHERE space_id = %(space)s")
    assert left.state == "W"
    assert lying.execute("SELECT 1 FROM kb_chunk_state WHERE space_id = %(space)s AND vec_status = 3") == []


def test_purge_waits_for_a_rollback_that_shares_the_objects_of_an_old_version(lying: Flow) -> None:
    for text in (OLD, NEW, article("maple", 2)):
        lying.memory.put("a.md", text)
        lying.sync()
    lying.execute("UPDATE kb_publication SET to_at = to_at - interval '1 day' WHERE space_id = %(space)s")
    lying.space = replace(lying.space, retained_versions=1)
    v1 = lying.version("a.md", 1)
    with lying.app.pool.connection() as c:
        documents.lock_documents(c, [v1.doc_id])
        purging = Begun(lying.app.pool, lambda: purge(lying.engine, lying.space, keep=timedelta(0)))
        assert documents.copy_version(c, v1.doc_id, 1, chunk.recipe(lying.space)) == 4
        c.commit()
    purging.result()
    assert {v1.raw_path, v1.parsed_path} <= lying.blobs.objects.keys()


# --- walks ------------------------------------------------------------------------------------------------------------

DOCUMENTS = {f"{n}{n}.md": article(f"{n}{n}", 1) for n in "abcdef"}


def _killed_in(flow: Flow, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """A full walk dies in the first call of this function."""

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, dies)
        with pytest.raises(Killed):
            flow.walk(full=True)
    flow.expire_leases()


def test_a_page_whose_documents_were_not_stored_is_listed_again(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in DOCUMENTS.items():
        lying.memory.put(name, text)
    lying.sync()
    lying.memory.put("bb.md", article("bb", 1, tag="edited"))
    _killed_in(lying, monkeypatch, documents, "new_versions")
    report = lying.sync()
    assert (report.passes[0].counts["hidden"], report.ingest.published) == (0, 1)
    assert lying.showing("bbeditedword0x5") == {"bb.md"}


def test_a_page_that_nobody_noted_as_seen_is_listed_again(
    make_flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow({f"{n:02}.md": article(f"w{n}", 1) for n in range(12)}, index=MemoryIndex(), page_size=2)
    flow.sync()
    _killed_in(flow, monkeypatch, walks, "mark_seen")
    report = flow.sync(full=True)
    assert (report.passes[0].counts["seen"], report.passes[0].counts["hidden"]) == (12, 0)


def test_an_acl_that_changed_at_the_source_is_another_one_for_every_worker(lying: Flow) -> None:
    lying.memory.put("a.md", OLD, acl=(("ann",),))
    lying.sync()
    before = lying.document("a.md").acl_seq
    item, raw = lying.memory.items["a.md"]
    lying.memory.items["a.md"] = (replace(item, acl=(("bob",),)), raw)
    lying.sync(full=True)
    assert lying.document("a.md").acl_seq == before + 1


def test_nobody_waits_for_the_lease_of_a_walk_whose_process_is_dead(lying: Flow) -> None:
    lying.memory.put("a.md", OLD)
    dead = worker_id().rpartition("/")[0] + "/0"
    lying.execute("UPDATE sync_lease SET owner = %(dead)s, until = 'infinity' WHERE source_id = %(source)s", dead=dead)
    assert lying.sync().errors == {}
    assert lying.document("a.md").current_ver == 1


class AskedSource(MemorySource):
    """``when_asked`` runs once, while it is asked what is still there; then it says that nothing is."""

    when_asked: Callable[[], Any] | None = None

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        when, self.when_asked = self.when_asked, None
        if when is None:
            return super().presence(external_ids)
        when()
        return [Presence.GONE] * len(external_ids)


def test_what_was_hidden_anew_after_the_probe_began_waits_for_a_probe_of_its_own(make_flow: Callable[..., Flow]) -> None:
    source = AskedSource(DOCUMENTS)
    flow = make_flow(memory=source, index=MemoryIndex())
    flow.sync()
    source.remove("aa.md")
    doc = flow.document("aa.md").id
    query = "UPDATE kb_doc SET hidden_sync = nextval('kb_walk_id') WHERE id = %(doc)s AND hidden_sync IS NOT NULL"
    source.when_asked = lambda: flow.execute(query, doc=doc)
    flow.sync()
    assert flow.document("aa.md").id == doc
    flow.sync(full=True)
    assert flow.document("aa.md") is None


def test_what_is_written_after_it_was_found_missing_is_not_hidden(make_flow: Callable[..., Flow]) -> None:
    source = AskedSource(DOCUMENTS, Capabilities(order_stable=False, digest=True, probe=True))
    flow = make_flow(memory=source, index=MemoryIndex())
    flow.sync()
    doc = flow.document("aa.md").id
    kept = source.items.pop("aa.md")

    def comes_back() -> None:
        source.items["aa.md"] = kept
        with transaction(flow.app.pool) as c:
            documents.lock_documents(c, [doc])
            documents.new_versions(c, flow.space.id, [(doc, "by another", 1)], max_retries=3)

    source.when_asked = comes_back
    report = flow.sync(full=True)
    assert report.passes[0].counts["hidden"] == 0
    assert flow.document("aa.md").hidden_at is None


def test_a_moved_document_without_a_digest_is_known_by_its_identity(make_flow: Callable[..., Flow]) -> None:
    source = MemorySource(capabilities=Capabilities(order_stable=True, digest=False))
    source.put("old.md", OLD, identity="inode 7")
    flow = make_flow(memory=source, index=MemoryIndex())
    flow.sync()
    doc = flow.document("old.md").id
    source.rename("old.md", "new.md")
    report = flow.sync(full=True)
    assert (report.passes[0].counts["moved"], flow.document("new.md").id) == (1, doc)
    assert len(source.fetched) == 1


def test_what_changes_after_the_walk_began_lies_behind_its_watermark(lying: Flow) -> None:
    began = 1_000.0
    lying.memory.clock = lambda: began  # type: ignore[method-assign]
    lying.memory.put("a.md", OLD)
    lying.memory.gate.close()
    with lying.beside(lying.sync):
        lying.memory.gate.await_caller()
        lying.memory.clock = lambda: began + 500  # type: ignore[method-assign]
        lying.memory.gate.open()
    assert lying.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark == {"*": began}


def test_a_document_has_one_task_at_a_time_whatever_is_written(published: Flow) -> None:
    second = "UPDATE ingestion_task SET status = 'PENDING' WHERE doc_id = %(doc)s AND version = 1"
    with pytest.raises(psycopg.errors.UniqueViolation):
        published.execute(second, doc=published.document("a.md").id)


def test_a_space_s_shard_is_read_again_by_every_transaction(published: Flow) -> None:
    """It moves between two nodes of one task."""
    published.ingest(nodes=FLOW[:-1])
    with transaction(published.app.pool) as c:
        assert spaces.promote(c, published.space) is not None
    assert published.ingest().published == 1
    assert published.showing("novelty") == {"a.md"}


def test_a_copy_on_another_page_leaves_the_original_alone(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({"a.md": OLD}, index=MemoryIndex(), page_size=1)
    flow.sync()
    doc = flow.document("a.md").id
    flow.memory.put("z.md", OLD)
    report = flow.sync()
    assert (report.passes[0].counts["moved"], report.passes[0].counts["new"]) == (0, 1)
    assert flow.document("a.md").id == doc


def test_of_a_moved_document_and_its_copy_one_is_the_moved_one(lying: Flow) -> None:
    lying.memory.put("old.md", OLD, identity="inode 7")
    lying.sync()
    doc = lying.document("old.md").id
    lying.memory.rename("old.md", "moved.md")
    lying.memory.put("copy.md", OLD)
    report = lying.sync()
    assert (report.passes[0].counts["moved"], report.passes[0].counts["new"]) == (1, 1)
    assert lying.document("moved.md").id == doc
    assert lying.document("copy.md").id != doc


def test_a_listing_that_left_something_to_others_has_no_digest(lying: Flow) -> None:
    lying.memory.put("a.md", OLD)
    lying.sync()
    lying.memory.put("a.md", NEW)
    lying.memory.gate.close()
    with lying.beside(lying.walk):
        lying.memory.gate.await_caller()
        doc = lying.document("a.md").id
        with transaction(lying.app.pool) as c:
            documents.lock_documents(c, [doc])
            documents.new_versions(c, lying.space.id, [(doc, "by another", 1)], max_retries=3)
        lying.memory.gate.open()
    assert lying.execute("SELECT listing_digest FROM kb_source WHERE id = %(source)s")[0].listing_digest is None


def test_a_source_has_one_open_walk_whatever_is_written(lying: Flow) -> None:
    one = "INSERT INTO sync_job (space_id, source_id, walk_id, status) VALUES (%(space)s, %(source)s, 1, %(status)s)"
    lying.execute(one, status="PENDING")
    with pytest.raises(psycopg.errors.UniqueViolation):
        lying.execute(one, status="RUNNING")
