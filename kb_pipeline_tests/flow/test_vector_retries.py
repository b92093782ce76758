"""Vectors that an index does not take: counted, tried again after a back-off, five times in all, and then somebody is told."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.maintenance.reconcile import ReconcileReport, reconcile
from kb_pipeline.model import AlertKind, IndexRef, VectorEntry
from kb_pipeline.store import alerts, status
from kb_pipeline.store.database import transaction
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article


class Picky(MemoryIndex):
    """Forgets, or refuses with the whole batch, the entries that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets: Callable[[VectorEntry], bool] = lambda _: False
        self.refuses: Callable[[VectorEntry], bool] = lambda _: False

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        if any(self.refuses(e) for e in entries):
            raise Rejected("an entry is not accepted", code="mapping")
        super().upsert(ref, [e for e in entries if not self.forgets(e)])


@pytest.fixture
def make(make_flow: Callable[..., Flow]) -> Callable[..., Flow]:
    """Two published documents of three chunks."""

    def made(**changes: Any) -> Flow:
        flow = make_flow({f"{n}.md": article(n) for n in ("ash", "birch")}, index=Picky(), **changes)
        flow.sync()
        return flow

    return made


def _picky(flow: Flow) -> Picky:
    assert isinstance(flow.app.index, Picky)
    return flow.app.index


def _retries(flow: Flow) -> list[Any]:
    return flow.execute(
        "SELECT r.*, d.external_id FROM vector_retry r JOIN kb_doc d ON d.id = r.doc_id WHERE r.space_id = %(space)s ORDER BY r.chunk_id"
    )


def _attempts(flow: Flow) -> list[int]:
    return [r.attempts for r in _retries(flow)]


def _vectors(flow: Flow) -> dict[str, int]:
    with transaction(flow.app.pool) as c:
        return status.counts(c, flow.space.id)["vectors"]


def _alerts(flow: Flow) -> list[alerts.Alert]:
    with transaction(flow.app.pool) as c:
        alerts.observe(c)
        return [a for a in alerts.open_alerts(c, flow.space.id) if a.kind is AlertKind.VECTOR_FAILED]


def _lose(flow: Flow, n: int = 1) -> set[UUID]:
    lost = set(sorted(flow.current_ids())[:n])
    for rows in flow.index.indexes.values():
        for vec_id in lost & rows.keys():
            del rows[vec_id]
    _picky(flow).forgets = lambda e: e.vec_id in lost
    return lost


def _due(flow: Flow) -> None:
    flow.execute("UPDATE vector_retry SET next_at = clock_timestamp() - interval '1 second' WHERE space_id = %(space)s")


def _reconcile(flow: Flow, **options: Any) -> ReconcileReport:
    return reconcile(flow.engine, flow.space, **options)


# --- while a document is indexed ----------------------------------------------------------------------------------------


def test_what_the_index_forgets_is_failed_until_its_document_is_published(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=3600.0)
    doc = flow.document("ash.md").id
    held = flow.indexed_ids()
    _picky(flow).forgets = lambda e: e.doc_id == doc and e.vec_id not in held
    flow.memory.put("ash.md", article("ash").replace("ashword1x7", "novelty"))
    flow.sync()
    (row,) = _retries(flow)
    assert (row.external_id, row.attempts) == ("ash.md", 1)
    assert "although it accepted it" in row.error
    (task,) = flow.execute("SELECT status, error_code FROM ingestion_task WHERE doc_id = %(doc)s AND version = 2", doc=doc)
    assert (task.status, task.error_code) == ("FAILED", "index_incomplete")
    assert _vectors(flow)["failed"] == 1
    flow.due()
    flow.sync()
    assert _attempts(flow) == [2]
    waits = flow.execute("SELECT extract(epoch FROM next_at - seen_at) AS s FROM vector_retry WHERE space_id = %(space)s")
    assert round(waits[0].s) == 3600  # twice the base, and the longest back-off
    _picky(flow).forgets = lambda _: False
    flow.due()
    assert flow.sync().ingest.published == 1
    assert _retries(flow) == []
    assert "failed" not in _vectors(flow)


def test_a_refused_entry_costs_its_document_and_no_other_of_the_batch(make: Callable[..., Flow]) -> None:
    flow = make()
    doc = flow.document("ash.md").id
    _picky(flow).refuses = lambda e: e.doc_id == doc
    for name in ("ash", "birch"):
        flow.memory.put(f"{name}.md", article(name).replace(f"{name}word1x7", "novelty"))
    report = flow.sync()
    assert (report.ingest.published, report.failed) == (1, 1)
    assert flow.showing("novelty") == {"birch.md"}
    task = flow.task("ash.md")
    assert (task.status, task.error_code) == ("DEAD", "mapping")  # the same entry would be refused again
    assert [(r.external_id, r.attempts, r.error) for r in _retries(flow)] == [
        ("ash.md", 1, "mapping: an entry is not accepted")
    ]


def test_an_index_that_is_down_fails_no_vector(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=3600.0)
    flow.index.down = True
    flow.memory.put("ash.md", article("ash").replace("ashword1x7", "novelty"))
    flow.sync()
    assert flow.task("ash.md").status == "FAILED"
    assert _retries(flow) == []


def test_a_worker_that_lost_its_task_counts_nothing(make: Callable[..., Flow]) -> None:
    flow = make()
    _picky(flow).forgets = lambda _: True
    for name in ("ash", "birch"):
        flow.memory.put(f"{name}.md", article(name).replace(f"{name}word1x7", "novelty"))
    flow.walk()
    flow.index.gate.close()
    with flow.beside(lambda: flow.ingest(limit=2)):
        flow.index.gate.await_caller()
        flow.execute("UPDATE ingestion_task SET attempt = attempt + 1 WHERE id = %(task)s", task=flow.task("ash.md").id)
        flow.index.gate.open()
    assert {r.external_id for r in _retries(flow)} == {"birch.md"}


def test_a_manual_retry_of_the_task_ends_the_count(make: Callable[..., Flow]) -> None:
    flow = make()
    doc = flow.document("ash.md").id
    _picky(flow).refuses = lambda e: e.doc_id == doc
    flow.memory.put("ash.md", article("ash").replace("ashword1x7", "novelty"))
    flow.sync()
    assert _attempts(flow) == [1]
    flow.execute("UPDATE vector_retry SET attempts = 5 WHERE space_id = %(space)s")
    assert len(_alerts(flow)) == 1
    assert flow.retry(flow.task("ash.md").id)
    assert _retries(flow) == [] and _alerts(flow) == []
    assert _vectors(flow)["waiting"] == 1


# --- reconciliation -----------------------------------------------------------------------------------------------------


def test_reconciliation_tries_five_times_and_then_tells_instead(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=60.0)
    lost = _lose(flow)
    for n in range(1, 6):
        report = _reconcile(flow)
        assert (report.remaining, report.postponed) == (1, 0)
        assert _attempts(flow) == [n]
        assert len(_alerts(flow)) == (n == 5)
        _due(flow)
    _picky(flow).forgets = lambda _: False  # the index would take it now: nobody asks it any more
    report = _reconcile(flow)
    assert (report.missing, report.repaired, report.remaining, report.postponed) == (1, 0, 1, 1)
    assert not lost & flow.indexed_ids()
    assert _attempts(flow) == [5]
    (alert,) = _alerts(flow)
    assert "1 vector of 1 document" in alert.message and f"kb reconcile {flow.space.key} --retry-failed" in alert.message
    assert flow.execute("SELECT 1 FROM kb_doc WHERE space_id = %(space)s AND strpos(%(m)s, external_id) > 0", m=alert.message)
    report = _reconcile(flow, retry_failed=True)
    assert (report.repaired, report.remaining, report.postponed) == (1, 0, 0)
    assert _retries(flow) == [] and _alerts(flow) == []
    flow.assert_whole()


def test_what_is_not_due_is_not_tried(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=3600.0)
    _lose(flow)
    _reconcile(flow)
    _picky(flow).forgets = lambda _: False
    report = _reconcile(flow)
    assert (report.remaining, report.postponed) == (1, 1)
    _due(flow)
    assert _reconcile(flow).repaired == 1
    assert _retries(flow) == []


def test_after_retry_failed_there_are_five_tries_again(make: Callable[..., Flow]) -> None:
    flow = make()
    _lose(flow)
    _reconcile(flow)
    flow.execute("UPDATE vector_retry SET attempts = 5 WHERE space_id = %(space)s")
    _reconcile(flow, retry_failed=True)
    assert _attempts(flow) == [1]


def test_report_only_counts_no_try_and_ends_no_count(make: Callable[..., Flow]) -> None:
    flow = make()
    _lose(flow)
    _reconcile(flow)
    before = _retries(flow)
    _reconcile(flow, repair=False, retry_failed=True)
    assert _retries(flow) == before


def test_a_vector_that_came_back_by_itself_is_failed_no_more(make: Callable[..., Flow]) -> None:
    flow = make()
    rows = {vec_id: e for held in flow.index.indexes.values() for vec_id, e in held.items()}
    lost = _lose(flow, 2)
    _reconcile(flow)
    assert _attempts(flow) == [1, 1]
    back = min(lost)
    for name, held in flow.index.indexes.items():
        if name.startswith(f"kb_{flow.space.id}_"):
            held[back] = rows[back]
    _reconcile(flow)
    assert _attempts(flow) == [2]
    assert _vectors(flow)["failed"] == 1


def test_a_refused_entry_is_counted_and_its_neighbours_are_repaired(make: Callable[..., Flow]) -> None:
    flow = make()
    lost = _lose(flow, 3)
    _picky(flow).forgets = lambda _: False
    bad = max(lost)
    _picky(flow).refuses = lambda e: e.vec_id == bad
    report = _reconcile(flow)
    assert (report.missing, report.repaired) == (3, 2)
    (row,) = _retries(flow)
    assert row.error == "mapping: an entry is not accepted"


def test_a_text_that_the_model_refuses_is_counted_and_one_that_is_only_late_is_not(make: Callable[..., Flow]) -> None:
    flow = make()
    (vec_id,) = _lose(flow)
    _picky(flow).forgets = lambda _: False
    flow.execute(
        "DELETE FROM kb_embedding e USING kb_chunk c, kb_chunk_state s WHERE e.content_hash = c.content_hash AND c.id = s.id AND s.vec_id = %(id)s",
        id=vec_id,
    )
    flow.embedder.refused["word"] = Rejected("not permitted", code="policy")
    _reconcile(flow)
    (row,) = _retries(flow)
    assert (row.attempts, row.error) == (1, "policy: not permitted")
    flow.embedder.refused.clear()
    flow.execute(
        "INSERT INTO kb_embedding (model_id, content_hash, token, lease_until) SELECT %(model)s, c.content_hash, 0, 'infinity' "
        "FROM kb_chunk c JOIN kb_chunk_state s ON s.id = c.id WHERE s.vec_id = %(id)s",
        model=flow.space.model_id,
        id=vec_id,
    )
    assert _reconcile(flow).remaining == 1  # another process embeds it
    assert _attempts(flow) == [1]


def test_a_chunk_that_leaves_takes_its_count_with_it(make: Callable[..., Flow]) -> None:
    flow = make()
    _lose(flow, 6)
    _reconcile(flow)
    assert len(_retries(flow)) == 6
    flow.memory.remove("ash.md")
    flow.approve(9)
    flow.sync()
    assert {r.external_id for r in _retries(flow)} == {"birch.md"}


# --- where else the table goes ------------------------------------------------------------------------------------------


def test_counts_move_with_a_space_and_go_with_it(make: Callable[..., Flow]) -> None:
    flow = make(own_shard_chunks=1_000_000)
    _lose(flow)
    _reconcile(flow)
    (before,) = _retries(flow)
    small = replace(flow.engine, limits=replace(flow.engine.limits, own_shard_chunks=1))
    shard = promote_if_large(small, flow.space)
    assert shard is not None
    (after,) = [r for r in _retries(flow) if r.shard == shard]
    assert (after.chunk_id, after.doc_id, after.attempts) == (before.chunk_id, before.doc_id, 1)
    assert _vectors(flow)["failed"] == 1
    _reconcile(flow)
    assert [r.attempts for r in _retries(flow) if r.shard == shard] == [2]
    residue = delete_space(flow.engine, flow.space)
    assert residue["vector_retries"] == residue["reconciliations"] == residue["alerts"] == 0
    assert _retries(flow) == []
