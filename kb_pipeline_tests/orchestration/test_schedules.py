"""Schedules mark what is due, jobs do it and say so, and Dagster's own storage does not grow for ever."""

import threading
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRunStatus, RunRequest, SkipReason, build_schedule_context

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.orchestration.definitions import build_defs
from kb_pipeline.orchestration.jobs import delete_runs
from kb_pipeline.orchestration.partitions import SPACE
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.schedules import build_schedules
from kb_pipeline.store import schedules
from kb_pipeline.store.database import transaction
from kb_pipeline.store.schedules import Kind
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp

_number = count(1)
ALL = {s.name: s for s in build_schedules("Europe/Berlin")}
NIGHTLY = {
    "nightly_sweep": ("0 2 * * *", Kind.SWEEP),
    "nightly_reconciliation": ("30 2 * * *", Kind.RECONCILIATION),
    "nightly_purge": ("0 3 * * *", Kind.PURGE),
    "nightly_quality": ("30 3 * * *", Kind.QUALITY),
    "off_peak_vector_gc": ("0 4 * * *", Kind.GC),
}


def tick(name: str, instance: DagsterInstance, kb: KbResource) -> Any:
    at = datetime(2026, 3, 13, 2, 0, tzinfo=UTC)
    with build_schedule_context(instance=instance, scheduled_execution_time=at, resources={"kb": kb}) as context:
        return ALL[name](context)


def state(app: FakedApp, space: Space, kind: Kind) -> Any:
    with transaction(app.pool) as c:
        return c.execute("SELECT * FROM kb_schedule WHERE space_id = %s AND kind = %s", (space.id, kind.value)).fetchone()


def run(kb: KbResource, instance: DagsterInstance, job: str, key: str | None, **tags: str) -> Any:
    if key:
        instance.add_dynamic_partitions(SPACE, [key])
    chosen = build_defs({"kb": kb}).resolve_job_def(job)
    return chosen.execute_in_process(instance=instance, partition_key=key, tags=tags, raise_on_error=False)


@pytest.mark.parametrize("name", NIGHTLY)
def test_night_marks_every_space_and_starts_no_run_itself(
    app: FakedApp, filled: Space, instance: DagsterInstance, kb: KbResource, name: str
) -> None:
    cron, kind = NIGHTLY[name]
    assert (ALL[name].cron_schedule, ALL[name].execution_timezone) == (cron, "Europe/Berlin")
    if kind is Kind.GC:
        with transaction(app.pool) as c:
            c.execute(
                "INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state) "
                "SELECT id, gen_random_uuid(), space_id, 1, 1, 'E' FROM kb_index WHERE space_id = %s",
                (filled.id,),
            )
    result = tick(name, instance, kb)
    assert isinstance(result, SkipReason) and "spaces are due" in str(result.skip_message)
    assert state(app, filled, kind).due_at is not None


def test_cron_lines_of_spaces_are_followed(app: FakedApp, instance: DagsterInstance, kb: KbResource) -> None:
    space = app.add_space(f"cron-{next(_number)}", schedule="*/5 * * * *")
    assert isinstance(tick("space_syncs", instance, kb), SkipReason)
    assert state(app, space, Kind.SYNC).due_at > datetime.now(UTC)
    assert ALL["space_syncs"].cron_schedule == "* * * * *"


def test_log_retention_is_one_run_a_day(instance: DagsterInstance, kb: KbResource) -> None:
    result = tick("log_retention", instance, kb)
    assert isinstance(result, RunRequest) and result.run_key == "log_retention:2026-03-13"


@pytest.mark.parametrize("job, kind", [("sync_space", "sync"), ("sync_space", "sweep"), ("reconcile_space", "reconciliation"),
                                       ("purge_space", "purge"), ("collect_vectors", "gc"), ("check_quality", "quality")])  # fmt: skip
def test_job_that_a_schedule_asked_for_notes_its_success(
    app: FakedApp, filled: Space, instance: DagsterInstance, kb: KbResource, job: str, kind: str
) -> None:
    with transaction(app.pool) as c:
        schedules.failed(c, filled.key, Kind(kind))
    assert run(kb, instance, job, filled.key, **{"kb/schedule": kind}).success
    found = state(app, filled, Kind(kind))
    assert found.last_success_at > found.last_failure_at and found.misses == 0


def test_run_that_a_person_started_or_that_failed_notes_no_success(
    app: FakedApp, filled: Space, folder: Path, instance: DagsterInstance, kb: KbResource
) -> None:
    with transaction(app.pool) as c:
        schedules.failed(c, filled.key, Kind.SYNC)
    assert run(kb, instance, "sync_space", filled.key).success
    folder.rename(folder.with_name("elsewhere"))
    assert not run(kb, instance, "sync_space", filled.key, **{"kb/schedule": "sync"}).success
    assert state(app, filled, Kind.SYNC).last_success_at is None


def test_purge_and_gc_say_what_they_removed(app: FakedApp, filled: Space, instance: DagsterInstance, kb: KbResource) -> None:
    for job, step, counts in (
        ("purge_space", "remove_old_versions", {"versions", "chunks", "vectors", "objects", "embeddings", "answers", "logs"}),
        ("collect_vectors", "erase_vectors", {"vectors", "rebuilt"}),
    ):
        done = run(kb, instance, job, filled.key)
        (output,) = [e for e in done.all_events if e.event_type_value == "STEP_OUTPUT"]
        assert output.step_key == step
        assert set(output.step_output_data.metadata) == counts


def test_finished_runs_are_deleted_when_they_are_old_and_others_never(
    filled: Space, instance: DagsterInstance, kb: KbResource
) -> None:
    done = [run(kb, instance, "collect_vectors", filled.key).run_id for _ in range(3)]
    working = instance.create_run_for_job(
        build_defs({"kb": kb}).resolve_job_def("collect_vectors"), status=DagsterRunStatus.STARTED
    )
    assert delete_runs(instance, datetime.now(UTC) - timedelta(days=1)) == 0
    assert delete_runs(instance, datetime.now(UTC) + timedelta(days=1)) == 3
    assert [r.run_id for r in instance.get_runs()] == [working.run_id]
    assert all(not instance.all_logs(run_id) for run_id in done)


def test_log_retention_runs(instance: DagsterInstance, kb: KbResource, app: FakedApp) -> None:
    assert run(kb, instance, "log_retention", None).success


def test_what_arrives_after_the_deletion_of_its_space_is_removed_at_night(
    instance: DagsterInstance, kb: KbResource, app: FakedApp, filled: Space
) -> None:
    delete_space(app.engine, filled)
    late = f"spaces/{filled.id}/docs/1/v1/FETCHER-a1"
    app.engine.blobs.put_many([(late, b"late")])
    result = tick("nightly_leftovers", instance, kb)
    assert isinstance(result, RunRequest) and result.run_key == "nightly_leftovers:2026-03-13"
    assert run(kb, instance, "sweep_leftovers", None).success
    assert late not in set(app.engine.blobs.keys("spaces/"))


def test_two_syncs_of_one_space_at_once_both_succeed_and_nothing_is_done_twice(
    app: FakedApp, filled: Space, kb: KbResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the web UI starts them: without the tags by which the run queue keeps syncs of a space apart."""
    results: list[Any] = []

    def sync() -> None:
        own = KbResource(home=kb.home, database_url=kb.database_url)
        with DagsterInstance.ephemeral() as instance:
            results.append(run(own, instance, "sync_space", filled.key))

    threads = [threading.Thread(target=sync) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.success for r in results] == [True, True]
    sync()  # takes what waits behind a version that was being worked on when both had ended
    with transaction(app.pool) as c:
        rows = c.execute("SELECT current_ver, last_ver, status FROM kb_doc WHERE space_id = %s", (filled.id,)).fetchall()
        states = c.execute("SELECT DISTINCT status FROM ingestion_task WHERE space_id = %s", (filled.id,)).fetchall()
        texts = c.execute("SELECT count(DISTINCT content_hash) AS n FROM kb_chunk WHERE space_id = %s", (filled.id,)).fetchone()
        embedded = c.execute(
            "SELECT sum((output ->> 'embedded')::int) AS n FROM ingestion_node_log WHERE space_id = %s AND node = 'EMBEDDING'",
            (filled.id,),
        ).fetchone()
    # A file that was written in this very second is read again by the later pass: a version more, and nothing embedded.
    assert [(r.current_ver == r.last_ver, r.status) for r in rows] == [(True, "AVAILABLE")] * 10
    assert {r.status for r in states} <= {"SUCCESS", "CANCELED"}
    assert embedded.n == texts.n >= 10
