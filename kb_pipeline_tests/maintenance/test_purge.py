"""What may be purged goes, with all that belongs to it; what a version, an answer or a neighbour needs stays."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kb_pipeline.errors import Misconfigured
from kb_pipeline.maintenance import purge as purging
from kb_pipeline.maintenance.purge import PurgeReport, forget_embeddings, purge
from kb_pipeline.states import Node
from kb_pipeline.store import documents, embeddings, retention, spaces, tasks
from kb_pipeline.store.chunks import VersionChunks, store_chunks
from kb_pipeline.store.database import transaction
from kb_pipeline.versions import rollback, version_text
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.maintenance.watched import await_blocked
from kb_pipeline_tests.store.shelf import Shelf, cut

NOW = timedelta(0)


def _retaining(flow: Flow, retained: int) -> Flow:
    flow.space = replace(flow.space, retained_versions=retained)
    return flow


def _age(flow: Flow, days: float) -> None:
    """What was superseded was superseded this long ago."""
    flow.execute(
        "UPDATE kb_publication SET from_at = from_at - %(ago)s, to_at = to_at - %(ago)s WHERE space_id = %(space)s AND to_at IS NOT NULL",
        ago=timedelta(days=days),
    )


def _edited(flow: Flow, times: int) -> Flow:
    """``a.md`` in as many versions, each with a section of its own beside those that stay."""
    for n in range(1, times + 1):
        flow.memory.put("a.md", article("aa", 2) + article(f"only{n}", 1))
        flow.sync()
    return flow


def _purge(flow: Flow, keep: timedelta = NOW) -> PurgeReport:
    return purge(flow.engine, flow.space, keep=keep)


def _statuses(flow: Flow, doc: str = "a.md") -> list[str]:
    rows = flow.execute("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s ORDER BY version", doc=flow.document(doc).id)
    return [r.status for r in rows]


def _assert_complete(flow: Flow) -> None:
    """I5: every chunk of a READY or PROCESSING version is there, text and state; and nothing that no such version has."""
    torn = flow.execute(
        "SELECT v.doc_id, v.version, u.id FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id) "
        "WHERE v.space_id = %(space)s AND v.status IN ('PROCESSING', 'READY') AND NOT EXISTS ("
        "  SELECT FROM kb_space p JOIN kb_chunk_state s ON s.shard = p.shard JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id "
        "  WHERE p.id = %(space)s AND s.id = u.id)"
    )
    assert torn == []


def _unreferenced(flow: Flow) -> int:
    return int(
        flow.execute(
            "SELECT count(*) AS n FROM kb_chunk_state s WHERE s.space_id = %(space)s AND NOT EXISTS ("
            "  SELECT FROM kb_doc_version v WHERE v.doc_id = s.doc_id AND v.status IN ('PROCESSING', 'READY') AND s.id = ANY(v.chunk_ids))"
        )[0].n
    )


# --- versions ---------------------------------------------------------------------------------------------------------


def test_versions_beyond_the_retained_ones_are_archived_with_chunks_and_objects(lying: Flow) -> None:
    flow = _retaining(_edited(lying, 4), 2)
    before = flow.rows()
    report = _purge(flow)
    assert _statuses(flow) == ["ARCHIVED", "ARCHIVED", "READY", "READY"]
    assert (report.versions, report.objects) == (2, 4)  # two versions, an original and a parse result each
    assert report.chunks == before["kb_chunk"] - flow.rows()["kb_chunk"] == 2
    assert flow.rows()["vector_tombstone"] == 0
    _assert_complete(flow)
    assert _unreferenced(flow) == 0
    doc = flow.document("a.md").id
    assert "only3word0x5" in version_text(flow.engine, doc, 3)
    with pytest.raises(Misconfigured, match="archived"):
        rollback(flow.engine, flow.space, doc, 1)
    rollback(flow.engine, flow.space, doc, 3)
    flow.ingest()
    assert flow.showing("only3word0x5") == {"a.md"}
    again = _purge(_retaining(flow, 5))
    assert (again.versions, again.chunks, again.objects) == (0, 0, 0)


def test_what_was_superseded_within_the_answer_retention_stays(lying: Flow) -> None:
    flow = _retaining(_edited(lying, 3), 1)
    flow.hits("only1word0x5")
    _age(flow, 29)
    assert _purge(flow, timedelta(days=30)).versions == 0
    assert _statuses(flow) == ["READY", "READY", "READY"]
    _age(flow, 2)
    assert _purge(flow, timedelta(days=30)).versions == 2


def test_every_kept_answer_can_still_be_read(lying: Flow) -> None:
    flow = _retaining(lying, 1)
    for n in range(1, 5):
        flow.memory.put("a.md", article(f"only{n}", 1))
        flow.sync()
        flow.hits(f"only{n}word0x5")
        _age(flow, 10)  # answers are 40, 30 ... days old, their versions were replaced 30, 20 ... days ago
        flow.execute("UPDATE kb_answer SET at = at - interval '10 days' WHERE space_id = %(space)s")
    report = _purge(flow, timedelta(days=25))
    assert (report.answers, report.versions) == (2, 1)
    lost = flow.execute(
        "SELECT a.id FROM kb_answer a CROSS JOIN LATERAL unnest(a.chunk_ids) u (id) "
        "WHERE a.space_id = %(space)s AND NOT EXISTS (SELECT FROM kb_chunk c WHERE c.space_id = %(space)s AND c.id = u.id)"
    )
    assert lost == []
    assert flow.execute("SELECT count(*) AS n FROM kb_answer WHERE space_id = %(space)s")[0].n == 2


def test_a_search_under_way_when_its_version_was_superseded_keeps_it(lying: Flow) -> None:
    """Its answer is stored a little later, and kept as long."""
    flow = _retaining(_edited(lying, 2), 1)
    keep = timedelta(days=30)
    _age(flow, 30 + 5 / 1440)
    assert _purge(flow, keep).versions == 0
    _age(flow, 6 / 1440)
    assert _purge(flow, keep).versions == 1


def test_as_of_is_refused_for_the_time_of_what_was_archived(lying: Flow) -> None:
    """The horizon moves with what is archived."""
    flow = _retaining(_edited(lying, 4), 2)
    (ended,) = flow.execute("SELECT max(to_at) AS at FROM kb_publication WHERE space_id = %(space)s AND version = 2")
    _purge(flow)
    (space,) = flow.execute("SELECT as_of_horizon FROM kb_space WHERE id = %(space)s")
    assert space.as_of_horizon == ended.at
    _purge(flow)
    assert flow.execute("SELECT as_of_horizon FROM kb_space WHERE id = %(space)s")[0].as_of_horizon == ended.at


def test_the_current_version_stays_however_old_its_number_is(lying: Flow) -> None:
    flow = _edited(lying, 2)
    flow.execute("UPDATE kb_doc_version SET status = 'READY', version = version + 10 WHERE doc_id = %(doc)s AND version = 1", doc=flow.document("a.md").id)  # fmt: skip
    _purge(_retaining(flow, 1))
    assert flow.version("a.md", 2).status == "READY"
    flow.assert_whole()


def test_a_rolled_back_version_keeps_the_objects_it_shares(lying: Flow) -> None:
    flow = _edited(lying, 3)
    doc = flow.document("a.md").id
    rollback(flow.engine, flow.space, doc, 1)
    flow.ingest()
    report = _purge(_retaining(flow, 1))
    assert report.versions == 3
    assert report.objects == 4  # of versions 2 and 3
    assert "only1word0x5" in version_text(flow.engine, doc, 4)
    _assert_complete(flow)


# --- beside workers ------------------------------------------------------------------------------


@pytest.fixture
def shelf(lying: Flow) -> Shelf:
    return Shelf(lying.app.pool, lying.space)


def _two_versions(shelf: Shelf) -> tuple[int, int]:
    """Version 1 had A, version 2 has B: (document, the row of A)."""
    doc_id = shelf.published("a.md", "A")
    (row,) = shelf.states(doc_id)
    shelf.edited(doc_id, "B")
    return doc_id, row.id


def test_a_chunk_that_a_new_version_takes_up_while_purge_waits_for_the_document_stays(lying: Flow, shelf: Shelf) -> None:
    """selected as unreferenced, referenced by the time the document's lock is ours."""
    flow = _retaining(lying, 1)
    (doc_id,) = shelf.add("a.md")
    (claim,) = shelf.claim()
    shelf.chunk(claim, cut("A"))
    shelf.fail(claim, None)  # version 1 died with A, which nothing refers to from now on
    (row_of_a,) = shelf.states(doc_id)
    shelf.edited(doc_id, "B")
    shelf.edit(doc_id)
    (claim,) = _claimed(shelf)
    ended: list[Any] = []
    thread = Thread(target=lambda: ended.append(_purge(flow)))
    with transaction(flow.app.pool) as c:
        held = tasks.fence(c, flow.space, [claim], documents=True)
        stored = store_chunks(c, flow.space.id, held.shard, [VersionChunks(doc_id, claim.version, "recipe", cut("A", "C"))])
        assert stored[doc_id] == (1, 1)
        thread.start()
        await_blocked(flow.app.pool, thread)
    thread.join()
    assert isinstance(ended[0], PurgeReport)
    _assert_complete(flow)
    assert row_of_a.id in {r.id for r in shelf.states(doc_id)}
    shelf.publish(shelf.at(Node.INDEXER, [claim])[0])
    _assert_complete(flow)


def test_erase_decides_again_behind_the_lock(lying: Flow, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """between the look without a lock and the erasing transaction."""
    flow = _retaining(lying, 1)
    doc_id, row_of_a = _two_versions(shelf)
    shelf.edit(doc_id)
    look = retention.with_unreferenced

    def then_reuse(*args: Any) -> list[int]:
        found = look(*args)
        if found and (claims := _claimed(shelf)):
            shelf.chunk(claims[0], cut("A"))
        return found

    monkeypatch.setattr(retention, "with_unreferenced", then_reuse)
    _purge(flow)
    assert [r.id for r in shelf.states(doc_id) if r.content == "A"] == [row_of_a]
    _assert_complete(flow)


def _claimed(shelf: Shelf) -> Sequence[tasks.Claim]:
    shelf.sweep()
    return shelf.claim()


def test_a_version_that_is_being_worked_on_protects_its_chunks(lying: Flow, shelf: Shelf) -> None:
    flow = _retaining(lying, 1)
    doc_id, row_of_a = _two_versions(shelf)
    shelf.edit(doc_id)
    (claim,) = _claimed(shelf)
    shelf.chunk(claim, cut("A"))
    report = _purge(flow)
    assert (report.versions, report.chunks) == (1, 0)
    assert row_of_a in {r.id for r in shelf.states(doc_id)}
    shelf.publish(shelf.at(Node.INDEXER, [claim])[0])
    _assert_complete(flow)
    assert _purge(flow).chunks == 1  # B, once its version is beyond the retained one


def test_a_failed_version_that_lost_its_chunks_begins_again_at_the_chunker(lying: Flow) -> None:
    flow = _retaining(lying, 1)
    flow.memory.put("a.md", article("aa", 2))
    flow.sync()
    flow.memory.put("a.md", article("bb", 2))
    flow.index.drops_upserts = True
    flow.walk()
    flow.ingest(limit=1)
    flow.execute("UPDATE ingestion_task SET retry_count = max_retry_count WHERE space_id = %(space)s")
    flow.due()
    flow.ingest(limit=1)
    (task,) = flow.execute("SELECT id, current_node FROM ingestion_task WHERE space_id = %(space)s AND status = 'DEAD'")
    assert task.current_node == "INDEXER"
    assert flow.version("a.md", 2).chunk_ids
    report = _purge(flow)
    assert report.chunks > 0
    assert flow.version("a.md", 2).chunk_ids is None
    flow.index.drops_upserts = False
    assert flow.retry(task.id)
    flow.ingest()
    assert flow.showing("bbword0x5") == {"a.md"}
    _assert_complete(flow)
    flow.sync()
    flow.assert_whole()


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_what_an_interrupted_purge_left_is_erased_by_the_next_one(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _retaining(_edited(lying, 4), 1)
    flow.memory.put("a.md", article("last", 2))
    flow.sync()
    monkeypatch.setattr(purging, "CHUNKS", 2)

    def stop(engine: Any, work: Callable[..., int], full: int) -> int:
        purging._run(engine, work)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        answers = purging._all
        m.setattr(purging, "_all", lambda engine, work, full: (stop if full == 2 else answers)(engine, work, full))
        with pytest.raises(KeyboardInterrupt):
            _purge(flow)
    assert _unreferenced(flow) > 0
    assert all(r.chunk_ids is None for r in flow.execute("SELECT chunk_ids FROM kb_doc_version WHERE space_id = %(space)s AND status = 'ARCHIVED'"))  # fmt: skip
    left = _unreferenced(flow)
    assert _purge(flow).chunks == left > 2  # in batches
    assert _unreferenced(flow) == 0
    _assert_complete(flow)


def test_a_deletion_that_was_interrupted_before_its_erasing_is_finished(lying: Flow) -> None:
    flow = _edited(lying, 2)
    doc = flow.document("a.md").id
    with transaction(flow.app.pool) as c:
        shard = spaces.lock_shared(c, flow.space)
        assert shard is not None and documents.lock_documents(c, [doc])
        documents.delete_documents(c, flow.space.id, shard, [doc])
    report = _purge(flow, timedelta(days=30))
    assert report.chunks > 0
    assert report.vectors == 3
    assert flow.rows()["kb_chunk"] == flow.rows()["kb_chunk_state"] == 0
    assert not flow.blobs.objects
    assert flow.indexed_ids() == set()


# --- embeddings -------------------------------------------------------------------------------------------------------


def _cached(flow: Flow) -> set[bytes]:
    return {bytes(r.content_hash) for r in flow.execute("SELECT content_hash FROM kb_embedding")}


def _put_unused(flow: Flow, content_hash: bytes, days: float = 40) -> None:
    flow.execute(
        "INSERT INTO kb_embedding (model_id, content_hash, vector, last_used) VALUES (%(model)s, %(hash)s, 'x', clock_timestamp() - %(ago)s)",
        model=flow.space.model_id,
        hash=content_hash,
        ago=timedelta(days=days),
    )


def test_an_embedding_goes_once_nothing_uses_it_for_long(lying: Flow) -> None:
    flow = _edited(lying, 1)
    living = _cached(flow)
    flow.execute("UPDATE kb_embedding SET last_used = last_used - interval '1 year'")
    _put_unused(flow, b"old")
    _put_unused(flow, b"young", days=20)
    assert _purge(flow, timedelta(days=30)).embeddings == 1
    assert _cached(flow) == living | {b"young"}


def test_an_embedding_that_another_space_uses_stays(make_flow: Callable[..., Flow]) -> None:
    first = _edited(make_flow(index=MemoryIndex()), 1)
    other = _edited(make_flow(index=MemoryIndex(), own_shard_chunks=2), 1)  # empties the cache: it embeds anew
    shards = first.execute("SELECT DISTINCT shard FROM kb_space WHERE id IN (%(space)s, %(other)s)", other=other.space.id)
    assert len(shards) == 2
    first.memory.items.clear()
    first.execute("DELETE FROM kb_chunk WHERE space_id = %(space)s")
    first.execute("DELETE FROM kb_chunk_state WHERE space_id = %(space)s")
    cached = _cached(other)
    assert forget_embeddings(first.engine, first.space, _tomorrow(first)) == 0
    assert _cached(other) == cached


def _tomorrow(flow: Flow) -> Any:
    return flow.execute("SELECT clock_timestamp() + interval '1 day' AS at")[0].at


def test_a_space_that_moves_to_its_own_shard_during_the_look_is_looked_at_again(lying: Flow) -> None:
    """It goes where the look has been already, and its old rows may go before the look gets to them."""
    flow = _edited(lying, 1)
    with transaction(flow.app.pool) as c:
        every = retention.every_shard(c)
        seen = [next(every)]
        with transaction(flow.app.pool) as other:
            new = spaces.promote(other, flow.space)
        seen += every
    assert new in seen and seen.count(seen[0]) == 2


def test_a_pin_wins_against_a_purge_that_saw_no_chunk(lying: Flow) -> None:
    """the chunk row and the pin come between the purge's look and its deletion."""
    flow = _edited(lying, 1)
    _put_unused(flow, b"pinned")
    _put_unused(flow, b"not")
    model = flow.space.model_id
    with transaction(flow.app.pool) as purge_c:
        before = retention.clock(purge_c) - timedelta(days=30)
        assert retention.stage_unused(purge_c, model, before, b"", 100)[0] == 2
        retention.spare_living(purge_c)
        with transaction(flow.app.pool) as worker_c:
            assert embeddings.pin(worker_c, model, [b"pinned"]) == {b"pinned"}
        assert retention.forget_staged(purge_c, model, before) == 1
    assert b"pinned" in _cached(flow) and b"not" not in _cached(flow)


def test_a_claim_in_work_is_not_taken_away(lying: Flow) -> None:
    with transaction(lying.app.pool) as c:
        embeddings.claim(c, lying.space.model_id, [b"mine"], 60)
        lying_claim, _ = embeddings.claim(c, lying.space.model_id, [b"abandoned"], -1)
    assert lying_claim
    assert forget_embeddings(lying.engine, lying.space, _tomorrow(lying)) == 1
    assert _cached(lying) == {b"mine"}


def test_candidates_are_gone_through_batch_by_batch(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _edited(lying, 1)
    living = _cached(flow)
    for n in range(7):
        _put_unused(flow, bytes([n, 1]))
    flow.execute("UPDATE kb_embedding SET last_used = last_used - interval '1 year'")
    monkeypatch.setattr(purging, "EMBEDDINGS", 2)
    assert _purge(flow, timedelta(days=30)).embeddings == 7
    assert _cached(flow) == living


# --- answers, logs, walks ---------------------------------------------------------------------------------------------


def test_old_answers_logs_and_passes_go_and_younger_ones_stay(lying: Flow) -> None:
    flow = _edited(lying, 3)
    for word in ("one", "two", "three"):
        flow.hits(word)
    flow.execute("UPDATE kb_answer SET at = at - interval '31 days' WHERE space_id = %(space)s AND question = 'one'")
    flow.execute(
        "CREATE TABLE IF NOT EXISTS old_log PARTITION OF ingestion_node_log FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')"
    )
    logs = flow.rows()["ingestion_node_log"]
    for day in ("2020-01-01", "2020-05-01", "2020-12-31"):
        flow.execute(
            "INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, trace_id, started_at) "
            "VALUES (1, %(space)s, 'PARSER', 'SUCCESS', 1, gen_random_uuid(), %(day)s::timestamptz + interval '12 hours')",
            day=day,
        )
    flow.execute("UPDATE sync_job SET finished_at = finished_at - interval '91 days' WHERE source_id = %(source)s")
    (last,) = flow.execute("SELECT max(id) AS id FROM sync_job WHERE source_id = %(source)s")
    report = _purge(flow, timedelta(days=30))
    assert (report.answers, report.logs) == (1, 3 + 2)
    assert flow.rows()["ingestion_node_log"] == logs
    assert [r.id for r in flow.execute("SELECT id FROM sync_job WHERE source_id = %(source)s")] == [last.id]
    questions = flow.execute("SELECT question FROM kb_answer WHERE space_id = %(space)s")
    assert {r.question for r in questions} == {"two", "three"}


def test_what_an_open_walk_has_seen_stays(lying: Flow) -> None:
    flow = _edited(lying, 1)
    (job,) = flow.execute("SELECT walk_id FROM sync_job WHERE source_id = %(source)s")
    walks = {"closed": job.walk_id, "open": 10**9 + flow.space.id}
    flow.execute(
        "INSERT INTO sync_job (space_id, source_id, walk_id, status, started_at) VALUES (%(space)s, %(source)s, %(walk)s, 'RUNNING', '2020-01-01')",
        walk=walks["open"],
    )
    for walk in walks.values():
        flow.execute("INSERT INTO sync_seen VALUES (%(walk)s, '{1}')", walk=walk)
    _purge(flow)
    seen = flow.execute("SELECT walk_id FROM sync_seen WHERE walk_id = ANY(%(walks)s)", walks=list(walks.values()))
    assert [r.walk_id for r in seen] == [walks["open"]]


def test_a_neighbour_is_not_touched(make_flow: Callable[..., Flow]) -> None:
    neighbour, flow = (_edited(make_flow(index=MemoryIndex()), 3) for _ in range(2))
    neighbour.hits("only1word0x5")
    before = neighbour.untouched()
    assert _purge(_retaining(flow, 1)).versions == 2
    assert neighbour.untouched() == before
    assert neighbour.execute("SELECT count(*) AS n FROM kb_answer WHERE space_id = %(space)s")[0].n == 1


# --- any history ------------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=4)
STEP = st.one_of(
    st.tuples(st.just("publish"), TEXTS),
    st.tuples(st.just("begin"), TEXTS),
    st.tuples(st.just("die"), TEXTS),
    st.tuples(st.just("rollback"), st.integers(1, 8)),
    st.tuples(st.just("purge"), st.integers(1, 3)),
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=3, max_size=10))
def test_any_history_leaves_every_living_version_complete(steps: list[tuple[str, Any]], lying: Flow, shelf: Shelf) -> None:
    """Versions come, fail, are given up and rolled back to, and purges run at any point of it."""
    (doc_id,) = shelf.add(f"doc{shelf.value('SELECT count(*) FROM kb_doc')}")
    shelf.bring(doc_id, cut("A"))
    for what, value in steps:
        if what == "purge":
            _purge(_retaining(lying, value))
            assert _unreferenced(lying) == 0
            statuses = [r.status for r in lying.execute("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc_id)]
            assert 1 <= statuses.count("READY") <= value
        elif what == "rollback":
            _roll_back(lying, shelf, doc_id, value)
        else:
            _work(shelf, doc_id, what, value)
        _assert_complete(lying)


def _roll_back(flow: Flow, shelf: Shelf, doc_id: int, version: int) -> None:
    try:
        rollback(flow.engine, flow.space, doc_id, version)
    except Misconfigured:
        return
    for claim in _of(doc_id, _claimed(shelf)):
        shelf.publish(claim)


def _work(shelf: Shelf, doc_id: int, what: str, texts: list[str]) -> None:
    """``begin`` leaves its version behind, chunked; the next step that works takes it over, and the newer one waits."""
    shelf.edit(doc_id)
    (claim,) = _of(doc_id, _claimed(shelf)) or _of(doc_id, _taken_over(shelf, doc_id))
    shelf.chunk(claim, cut(*texts))
    if what == "publish":
        shelf.publish(shelf.at(Node.INDEXER, [claim])[0])
    elif what == "die":
        shelf.fail(claim, None)


def _taken_over(shelf: Shelf, doc_id: int) -> Sequence[tasks.Claim]:
    shelf.rows(
        "UPDATE ingestion_task SET lease_until = '-infinity', deaths = 0 WHERE doc_id = %(doc)s AND status = 'PROCESSING' RETURNING id",
        doc=doc_id,
    )
    return _claimed(shelf)


def _of(doc_id: int, claims: Sequence[tasks.Claim]) -> list[tasks.Claim]:
    return [claim for claim in claims if claim.doc_id == doc_id]
