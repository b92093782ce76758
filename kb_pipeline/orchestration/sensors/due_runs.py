"""What the schedules have marked as due is started here, a bounded number a tick: 2,000 spaces are due at the same minute."""

from dagster import DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.orchestration.jobs import SCHEDULED_JOBS
from kb_pipeline.orchestration.partitions import syncs_at_work
from kb_pipeline.orchestration.requests import JOBS, request_scheduled, told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import schedules
from kb_pipeline.store.database import connection, transaction
from kb_pipeline.store.schedules import Kind

MOST_RUNS = 25


@sensor(
    jobs=SCHEDULED_JOBS,
    minimum_interval_seconds=30,
    default_status=DefaultSensorStatus.RUNNING,
    description="Starts the runs that schedules have marked as due, 50 a minute, the longest due first. The next time of a "
    "space is set before its run is asked for, so that no lost or failed run ends a schedule; a request that no success "
    "follows counts as a miss. A space that is still being synced is passed over. If it is off, nothing scheduled runs.",
)
def due_runs(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    with connection(app.pool) as c:
        due = schedules.due_spaces(c, MOST_RUNS)
    busy = syncs_at_work(context.instance, {d.space for d in due if JOBS[d.kind] == "sync_space"})
    requests, passed = [], 0
    for each in due:
        with transaction(app.pool) as c:
            if each.kind is Kind.SYNC and each.space in busy:
                schedules.pass_over(c, each)
                passed += 1
            elif schedules.request(c, each):
                requests.append(request_scheduled(each.space, f"{each.space}:{each.kind}:{each.due_at.isoformat()}", each.kind))
    message = told((passed, "due, and still being synced: passed over"), nothing="nothing is due")
    return SensorResult(requests, skip_reason=None if requests else SkipReason(message))
