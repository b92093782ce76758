"""Runs that ended before their time: what they held goes back to the queue, and their schedules learn of it."""

from datetime import UTC, datetime

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunsFilter,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from kb_pipeline.orchestration.partitions import PARTITION_TAG, SCHEDULE_TAG, WORKER_JOBS
from kb_pipeline.orchestration.requests import told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import schedules, tasks, waiting, walks
from kb_pipeline.store.database import connection, transaction
from kb_pipeline.store.schedules import Kind
from kb_pipeline.wiring import App

ENDED = {DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED}
FAILED = [DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
IN_ORDER = {"STEP_FAILURE", "RUN_EXCEPTION", "JOB_INITIALIZATION_FAILURE"}  # the process could still say why it failed
MOST_RUNS = 100


@sensor(
    minimum_interval_seconds=15,
    default_status=DefaultSensorStatus.RUNNING,
    description="Gives the tasks and sources that a failed or cancelled run still holds back at once, instead of when their "
    "leases end, and counts it for the schedule that had asked for it. Only where the process of the run died is that counted "
    "against the documents it was working on. If it is off, everything is given back when its lease ends.",
)
def run_ended(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    held, sources, dead = _release(app, context.instance)
    since = datetime.fromisoformat(context.cursor) if context.cursor else datetime.now(UTC)
    filters = RunsFilter(statuses=FAILED, updated_after=since)
    records = context.instance.get_run_records(filters, limit=MOST_RUNS, order_by="update_timestamp", ascending=True)
    for record in records:
        # What a dead worker held is done by another one at once: that each death counts against a document is bound enough.
        if not (record.dagster_run.run_id in dead and record.dagster_run.job_name in WORKER_JOBS):
            _tell_schedule(app, record.dagster_run)
    cursor = records[-1].update_timestamp.replace(tzinfo=UTC) if records else since
    message = told(
        (held, "tasks given back to the queue"),
        (sources, "sources free again"),
        (len(records), "runs failed or were cancelled"),
        nothing="no run ended before its time",
    )
    return SensorResult(skip_reason=SkipReason(message), cursor=cursor.isoformat())


def _release(app: App, instance: DagsterInstance) -> tuple[int, int, set[str]]:
    """By what is held and not by what has ended, so that a run that ended while nobody looked is found as well.

    Tasks and sources that were held, and the runs whose processes died with something in their hands.
    """
    with connection(app.pool) as c:
        run_ids = waiting.working_runs(c, MOST_RUNS)
    held = sources = 0
    dead = set()
    for run in instance.get_runs(RunsFilter(run_ids=run_ids)) if run_ids else ():
        if run.status in ENDED:
            died = run.status is DagsterRunStatus.FAILURE and _failure(instance, run.run_id) not in IN_ORDER
            with transaction(app.pool) as c:
                held += tasks.release_run(c, run.run_id, died=died)
                sources += walks.release_run(c, run.run_id)
            if died:
                dead.add(run.run_id)
    return held, sources, dead


def _failure(instance: DagsterInstance, run_id: str) -> str:
    """Why a run failed, in Dagster's words; "" where nobody was left to say so."""
    for record in instance.get_records_for_run(run_id, of_type=DagsterEventType.RUN_FAILURE, limit=1).records:
        event = record.event_log_entry.dagster_event
        reason = event.job_failure_data.failure_reason if event and event.event_specific_data else None
        return reason.value if reason else ""
    return ""


def _tell_schedule(app: App, run: DagsterRun) -> None:
    kind = Kind.INGEST.value if run.job_name in WORKER_JOBS else run.tags.get(SCHEDULE_TAG)
    if kind in list(Kind) and PARTITION_TAG in run.tags:
        with transaction(app.pool) as c:
            schedules.failed(c, run.tags[PARTITION_TAG], Kind(kind))
