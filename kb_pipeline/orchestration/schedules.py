"""When spaces are due. A schedule only marks rows, at any number of spaces; the sensor `due_runs` starts their runs."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    schedule,
)

from kb_pipeline.orchestration.jobs import (
    check_quality,
    collect_vectors,
    log_retention,
    purge_space,
    reconcile_space,
    sweep_leftovers,
    sync_space,
)
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import schedules
from kb_pipeline.store.database import transaction
from kb_pipeline.store.schedules import Kind

_DUE = "The sensor `due_runs` starts 50 runs a minute. If it is off, this work is left to the `kb` commands."


@schedule(
    job=sync_space,
    cron_schedule="* * * * *",
    default_status=DefaultScheduleStatus.RUNNING,
    description="Gives every space that has a cron line of its own (`kb space set KEY schedule=...`) its next time, in its "
    "time zone, and notices when one is changed or removed. If it is off, changed lines are not noticed.",
)
def space_syncs(context: ScheduleEvaluationContext, kb: KbResource) -> SkipReason:
    with transaction(kb.app().pool) as c:
        changed = schedules.follow_crons(c, datetime.now(UTC))
    return SkipReason(f"{changed} spaces have a new time" if changed else "no space's schedule has changed")


def build_schedules(time_zone: str) -> Sequence[ScheduleDefinition]:
    """All of them, the nightly ones in ``time_zone``."""
    nightly = (
        ("nightly_sweep", "0 2 * * *", sync_space, Kind.SWEEP, "A full listing of every source of every space"),
        (
            "nightly_reconciliation",
            "30 2 * * *",
            reconcile_space,
            Kind.RECONCILIATION,
            "Every index is compared with the database",
        ),
        ("nightly_purge", "0 3 * * *", purge_space, Kind.PURGE, "Old versions and what nothing refers to are removed"),
        (
            "nightly_quality",
            "30 3 * * *",
            check_quality,
            Kind.QUALITY,
            "What is stored is held against expectations",
        ),
        ("off_peak_vector_gc", "0 4 * * *", collect_vectors, Kind.GC, "Vectors of chunks that are gone are erased"),
    )
    marking = [_nightly(name, cron, time_zone, job, kind, what) for name, cron, job, kind, what in nightly]
    return [
        space_syncs,
        *marking,
        _of_the_installation(
            "nightly_leftovers",
            "45 3 * * *",
            time_zone,
            sweep_leftovers,
            "What arrived for a deleted space after its deletion is removed. If it is off, late uploads stay.",
        ),
        _of_the_installation(
            "log_retention",
            "30 4 * * *",
            time_zone,
            log_retention,
            "Finished Dagster runs, their event logs and the history of ticks are deleted after KB_RUN_RETENTION_DAYS. "
            "If it is off, Dagster's storage grows for ever.",
        ),
    ]


def _nightly(name: str, cron: str, time_zone: str, job: Any, kind: Kind, what: str) -> ScheduleDefinition:
    @schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=time_zone,
        default_status=DefaultScheduleStatus.RUNNING,
        description=f"{what}. {_DUE}",
    )
    def mark(context: ScheduleEvaluationContext, kb: KbResource) -> SkipReason:
        with transaction(kb.app().pool) as c:
            due = schedules.mark_due(c, kind)
        return SkipReason(f"{due} spaces are due: due_runs starts 50 a minute")

    return mark


def _of_the_installation(name: str, cron: str, time_zone: str, job: Any, what: str) -> ScheduleDefinition:
    @schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=time_zone,
        default_status=DefaultScheduleStatus.RUNNING,
        description=what,
    )
    def start(context: ScheduleEvaluationContext) -> RunRequest:
        return RunRequest(run_key=f"{name}:{context.scheduled_execution_time.date().isoformat()}")

    return start
