"""Alerts open when their cause is there, stay one record while it is, and resolve by themselves."""

import json
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from psycopg import sql

from kb_pipeline.model import AlertKind
from kb_pipeline.states import WalkKind
from kb_pipeline.store import alerts, removal, sources, walks
from kb_pipeline.store.alerts import Alert, Finding
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.spaces import Space, lock_exclusive
from kb_pipeline_tests.store.shelf import Shelf


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Iterator[Shelf]:
    """Alone: what other tests of the file have left is resolved."""
    with transaction(pool) as c:
        c.execute("UPDATE kb_alert SET resolved_at = clock_timestamp() WHERE resolved_at IS NULL")
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE id <> %s", [space.id])
    yield Shelf(pool, space)


def observe(shelf: Shelf, *extra: Finding, known: bool = False) -> list[Alert]:
    with transaction(shelf.pool) as c:
        return alerts.observe(c, extra if extra or known else None)


def opened(shelf: Shelf) -> list[tuple[AlertKind, str]]:
    with transaction(shelf.pool) as c:
        return [(a.kind, a.subject) for a in alerts.open_alerts(c)]


def run(shelf: Shelf, statement: str, **values: Any) -> None:
    with transaction(shelf.pool) as c:
        c.execute(statement, {"space": shelf.space.id, "source": shelf.source.id, **values})


def walk(shelf: Shelf, error: str | None = None) -> None:
    """A pass that ends: well, or with an error."""
    with transaction(shelf.pool) as c:
        token = walks.take_lease(c, shelf.source.id, 60)
        assert isinstance(token, int)
        opened = walks.begin_walk(c, shelf.space.id, shelf.source.id, token, WalkKind.FULL, {"*": None}, 0.0)
        walks.save_progress(c, opened)
        if error is None:
            walks.complete_walk(c, opened)
        else:
            walks.fail_walk(c, opened, error)
        walks.release_lease(c, shelf.source.id, token)


def dead(shelf: Shelf, *names: str) -> list[int]:
    ids = shelf.add(*names)
    for claim in shelf.claim():
        shelf.fail(claim, None)
    return ids


# --- what is found ------------------------------------------------------------------------------------------------------


def test_a_failed_pass_is_told_until_one_succeeds(shelf: Shelf) -> None:
    assert observe(shelf) == []
    walk(shelf, "unauthorized: the key is refused")
    (alert,) = observe(shelf)
    assert (alert.kind, alert.subject, alert.space) == (AlertKind.SYNC_FAILED, "docs", shelf.space.key)
    assert "the key is refused" in alert.message and f"kb sync {shelf.space.key} --source docs" in alert.message
    walk(shelf, "unauthorized: the key is refused")
    assert observe(shelf) == [] and len(opened(shelf)) == 1
    walk(shelf)
    assert observe(shelf) == [] and opened(shelf) == []


def test_while_a_pass_runs_its_alert_neither_opens_nor_resolves(shelf: Shelf) -> None:
    walk(shelf, "timeout: no answer")
    with transaction(shelf.pool) as c:
        token = walks.take_lease(c, shelf.source.id, 60)
        assert isinstance(token, int)
        walks.begin_walk(c, shelf.space.id, shelf.source.id, token, WalkKind.FULL, {"*": None}, 0.0)
    assert observe(shelf) == []
    run(shelf, "UPDATE sync_lease SET until = '-infinity' WHERE source_id = %(source)s")  # its process is gone
    assert len(observe(shelf)) == 1
    run(shelf, "UPDATE sync_lease SET until = 'infinity' WHERE source_id = %(source)s")
    assert observe(shelf) == [] and len(opened(shelf)) == 1


def test_a_source_that_could_not_even_be_asked_has_failed(shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        walks.could_not_begin(c, shelf.space.id, shelf.source.id, "root_missing: mount it")
    (alert,) = observe(shelf)
    assert alert.kind is AlertKind.SYNC_FAILED and "mount it" in alert.message


def test_a_walk_that_began_earlier_and_ended_well_later_is_a_success(shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        token = walks.take_lease(c, shelf.source.id, 60)
        assert isinstance(token, int)
        resumed = walks.begin_walk(c, shelf.space.id, shelf.source.id, token, WalkKind.FULL, {"*": None}, 0.0)
        walks.could_not_begin(c, shelf.space.id, shelf.source.id, "root_missing: mount it")
        walks.release_lease(c, shelf.source.id, token)
    assert len(observe(shelf)) == 1
    with transaction(shelf.pool) as c:
        walks.save_progress(c, resumed)
        walks.complete_walk(c, resumed)
    assert observe(shelf) == [] and opened(shelf) == []


def test_a_paused_source_fails_nobody(shelf: Shelf) -> None:
    walk(shelf, "timeout: no answer")
    run(shelf, "UPDATE kb_source SET status = 'PAUSED' WHERE id = %(source)s")
    assert observe(shelf) == []


def test_dead_documents_are_counted_by_code_and_three_are_named(shelf: Shelf) -> None:
    dead(shelf, "a.md", "b.md", "c.md", "d.md")
    (alert,) = observe(shelf)
    assert (alert.kind, alert.subject) == (AlertKind.TASK_DEAD, "broken")
    assert alert.message == (
        f"4 documents (a.md, b.md, c.md, ...) failed for good with broken: kb task list {shelf.space.key} --status DEAD"
    )
    (left, *others) = [r.id for r in shelf.rows("SELECT id FROM kb_doc WHERE space_id = %(space)s ORDER BY id DESC")]
    for doc_id in others:
        shelf.delete(doc_id)
    assert observe(shelf) == []
    with transaction(shelf.pool) as c:
        (alert,) = alerts.open_alerts(c, shelf.space.id)
    assert alert.message.startswith("1 document (d.md) failed")  # the same record says how it is now
    shelf.edit(left)  # newer content: the dead task is superseded
    assert observe(shelf) == [] and opened(shelf) == []


def test_deletions_that_wait_are_told_with_the_command_until_they_are_approved(shelf: Shelf) -> None:
    walk(shelf)
    with transaction(shelf.pool) as c:
        walks.set_waiting(c, shelf.source.id, 7)
    (alert,) = observe(shelf)
    assert (alert.kind, alert.subject) == (AlertKind.APPROVAL_WAITING, "docs")
    assert "7 deletions" in alert.message and f"kb source approve {shelf.space.key} docs --up-to 7" in alert.message
    with transaction(shelf.pool) as c:
        sources.approve(c, shelf.source.id, 6)
    assert observe(shelf) == [] and len(opened(shelf)) == 1
    with transaction(shelf.pool) as c:
        sources.approve(c, shelf.source.id, 7)
    assert observe(shelf) == [] and opened(shelf) == []


def test_a_listing_that_waits_for_an_approval_is_told_once(shelf: Shelf) -> None:
    walk(shelf, "7 of 8 documents were not listed")
    run(shelf, "UPDATE sync_job SET verdict = 'UNTRUSTED' WHERE source_id = %(source)s")
    with transaction(shelf.pool) as c:
        walks.set_waiting(c, shelf.source.id, 7)
    assert [a.kind for a in observe(shelf)] == [AlertKind.APPROVAL_WAITING]


def reconciled(shelf: Shelf, remaining: int) -> None:
    with transaction(shelf.pool) as c:
        counts = dict.fromkeys(("chunks", "vectors", "missing", "orphaned", "wrong", "repaired"), 0)
        alerts.store_reconciliation(c, shelf.space.id, remaining=remaining, **counts)


def test_the_newest_reconciliation_counts(shelf: Shelf) -> None:
    reconciled(shelf, 0)
    assert observe(shelf) == []
    reconciled(shelf, 3)
    (alert,) = observe(shelf)
    assert alert.kind is AlertKind.RECONCILIATION_FAILED and f"kb reconcile {shelf.space.key}" in alert.message
    reconciled(shelf, 0)
    assert observe(shelf) == [] and opened(shelf) == []


# --- records ------------------------------------------------------------------------------------------------------------


def record(shelf: Shelf) -> Any:
    return shelf.rows("SELECT * FROM kb_alert WHERE space_id = %(space)s ORDER BY id DESC LIMIT 1")[0]


def test_a_cause_that_persists_is_one_record_whose_last_time_moves(shelf: Shelf) -> None:
    reconciled(shelf, 3)
    observe(shelf)
    first = record(shelf)
    observe(shelf)
    second = record(shelf)
    assert (second.id, second.first_at) == (first.id, first.first_at)
    assert second.last_at > first.last_at


def test_two_observers_at_once_open_one_record(shelf: Shelf) -> None:
    reconciled(shelf, 3)
    found: list[list[Alert]] = []
    with transaction(shelf.pool) as c:
        found.append(alerts.observe(c))
        second = Thread(target=lambda: found.append(observe(shelf)))
        second.start()
        _await_lock(shelf, second)
    second.join()
    assert [len(f) for f in found] == [1, 0]
    assert len(opened(shelf)) == 1


def _await_lock(shelf: Shelf, thread: Thread) -> None:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 3 AND NOT granted"
    while thread.is_alive() and not shelf.value(query):
        thread.join(0.02)


def test_findings_of_others_stay_until_others_are_asked_again(shelf: Shelf) -> None:
    late = Finding(AlertKind.SCHEDULE_MISSED, "sync", "it did not run", shelf.space.id)
    whole = Finding(AlertKind.SCHEDULE_MISSED, "purge", "it did not run")
    assert {a.space for a in observe(shelf, late, whole)} == {shelf.space.key, None}
    observe(shelf)
    assert len(opened(shelf)) == 2
    observe(shelf, whole)
    assert opened(shelf) == [(AlertKind.SCHEDULE_MISSED, "purge")]
    observe(shelf, known=True)
    assert opened(shelf) == []


def test_alerts_of_a_space_that_is_being_removed_resolve_and_no_new_one_comes(shelf: Shelf) -> None:
    reconciled(shelf, 3)
    observe(shelf)
    with transaction(shelf.pool) as c:
        lock_exclusive(c, shelf.space.id)
        removal.begin(c, shelf.space.id)
    late = Finding(AlertKind.SCHEDULE_MISSED, "sync", "it did not run", shelf.space.id)
    assert observe(shelf, late) == []
    assert opened(shelf) == []
    with transaction(shelf.pool) as c:
        assert removal.count_left(c, shelf.space.id)["alerts"] == removal.count_left(c, shelf.space.id)["reconciliations"] == 1
        removal.delete_rest(c, shelf.space.id)
        assert removal.count_left(c, shelf.space.id)["alerts"] == removal.count_left(c, shelf.space.id)["reconciliations"] == 0


def test_old_reconciliations_and_resolved_alerts_go_but_the_newest_outcome_stays(shelf: Shelf) -> None:
    for remaining in (3, 0, 2):
        reconciled(shelf, remaining)
        observe(shelf)
    run(shelf, "UPDATE kb_reconciliation SET at = at - interval '91 days' WHERE space_id = %(space)s")
    run(shelf, "UPDATE kb_alert SET resolved_at = resolved_at - interval '91 days' WHERE space_id = %(space)s")
    with transaction(shelf.pool) as c:
        (row,) = c.execute("SELECT clock_timestamp() - interval '90 days' AS before").fetchall()
        assert alerts.forget_old(c, shelf.space.id, row.before) == 3
    assert shelf.value("SELECT remaining FROM kb_reconciliation WHERE space_id = %(space)s") == 2
    assert len(opened(shelf)) == 1


# --- costs --------------------------------------------------------------------------------------------------------------

FILL = """
INSERT INTO kb_doc (space_id, source_id, external_id, title, uri) SELECT %(space)s, %(source)s, 'm' || n, 't', 'u' FROM generate_series(1, 20000) n;
INSERT INTO ingestion_task (space_id, doc_id, version, status, error_code)
SELECT space_id, id, 1, CASE WHEN id %% 1000 = 0 THEN 'DEAD' ELSE 'SUCCESS' END, CASE WHEN id %% 1000 = 0 THEN 'broken' END FROM kb_doc WHERE space_id = %(space)s;
INSERT INTO sync_job (space_id, source_id, walk_id, status, finished_at) SELECT %(space)s, %(source)s, n, 'SUCCESS', clock_timestamp() FROM generate_series(1, 20000) n;
INSERT INTO kb_reconciliation (space_id, chunks, vectors, missing, orphaned, wrong, repaired, remaining) SELECT %(space)s, 0, 0, 0, 0, 0, 0, 0 FROM generate_series(1, 20000);
INSERT INTO vector_retry (shard, chunk_id, space_id, doc_id, attempts, error) SELECT 0, n, %(space)s, n, CASE WHEN n %% 1000 = 0 THEN 5 ELSE 1 END, 'x' FROM generate_series(1, 20000) n;
"""
LARGE = {"ingestion_task", "sync_job", "kb_reconciliation", "vector_retry", "kb_doc"}


def test_no_finding_reads_what_is_done(shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        for statement in FILL.strip().split(";\n"):
            c.execute(statement.rstrip(";"), {"space": shelf.space.id, "source": shelf.source.id})
        c.execute("ANALYZE")
    with transaction(shelf.pool) as c:
        for name in ("failed_syncs", "dead_tasks", "waiting_approvals", "differences", "failed_vectors"):
            plan = c.execute(sql.SQL("EXPLAIN (FORMAT JSON) ") + sql.SQL(getattr(alerts.SQL, name))).fetchone()[0]  # type: ignore[index]
            read = list(_nodes((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]))
            scanned = {n["Relation Name"] for n in read if n["Node Type"] == "Seq Scan"}
            assert not scanned & LARGE, (name, scanned)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for inner in node.get("Plans", []):
        yield from _nodes(inner)
