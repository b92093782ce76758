"""Hints that sources sent: each asks for one sync of its source, however many of them come."""

from collections import defaultdict

from dagster import DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.orchestration.jobs import sync_space
from kb_pipeline.orchestration.partitions import syncs_at_work
from kb_pipeline.orchestration.requests import request_sync, told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import events
from kb_pipeline.store.database import connection, transaction
from kb_pipeline.store.events import Hint

MOST_RUNS = 20


@sensor(
    job=sync_space,
    minimum_interval_seconds=10,
    default_status=DefaultSensorStatus.RUNNING,
    description="Starts `sync_space` for sources that sent a webhook or an upload. An event stays in the inbox until a pass "
    "that began after it has completed, so that none is lost with a run or a daemon; a pass in vain is repeated after 30 "
    "seconds, then after twice as long, up to an hour. If it is off, events wait for the next pass by other means.",
)
def event_inbox(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    with connection(app.pool) as c:
        waiting = events.waiting_events(c)
    ready: dict[str, list[Hint]] = defaultdict(list)
    for hint in waiting:
        if hint.may_ask(str(hint.mark)) and (hint.space in ready or len(ready) < MOST_RUNS):
            ready[hint.space].append(hint)
    busy = syncs_at_work(context.instance, ready)
    requests = []
    for space, hints in ready.items():
        if space in busy:
            continue
        with transaction(app.pool) as c:
            numbers = [events.request_walk(c, hint, "event", str(hint.mark)) for hint in hints]
        only = hints[0].name if len(hints) == 1 else ""
        run_key = f"{space}:{hints[0].name}:event-{hints[0].mark}:{numbers[0]}"
        requests.append(request_sync(space, run_key, reason="event", source=only))
    later = len(waiting) - sum(len(hints) for hints in ready.values())
    message = told(
        (len(busy), "with events, and a sync is queued or running"),
        (later, "with events, and a sync was asked for not long ago, or is in the next tick"),
        nothing="no event waits",
    )
    return SensorResult(requests, skip_reason=None if requests else SkipReason(message))
