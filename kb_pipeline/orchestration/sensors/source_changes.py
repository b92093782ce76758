"""Sources that can say cheaply whether anything may have changed are asked every few seconds, and synced when it may have."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

from dagster import DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.errors import KbError
from kb_pipeline.orchestration.jobs import sync_space
from kb_pipeline.orchestration.partitions import syncs_at_work
from kb_pipeline.orchestration.requests import request_sync, told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import events
from kb_pipeline.store.database import connection, transaction
from kb_pipeline.store.events import Hint
from kb_pipeline.walk import change_token
from kb_pipeline.wiring import App

TICK_SECONDS = 2.0  # of probing
PROBE_SECONDS = 0.25
MOST_SOURCES = 2000
MOST_RUNS = 20


@dataclass
class _Found:
    changed: dict[str, list[tuple[Hint, str]]] = field(default_factory=lambda: defaultdict(list))  # by space, with the token
    probed: int = 0
    mute: int = 0  # cannot tell
    waiting: int = 0  # changed, and tried in vain not long ago
    errors: list[str] = field(default_factory=list)
    last: int = 0  # behind which source the next tick begins


@sensor(
    job=sync_space,
    minimum_interval_seconds=3,  # the daemon looks every 5 s: with 5 it would miss every other time by a hair
    default_status=DefaultSensorStatus.RUNNING,
    description="Starts `sync_space` for a space one of whose sources has changed since its last completed pass. It compares "
    "a change token, which costs no listing, with the one that pass has stored; it probes for two seconds a tick, and the next "
    "tick goes on with the next source. A source that was synced in vain is tried again after 30 seconds, then after twice "
    "as long, up to an hour. Sources that have no such token, or are too large for one, are left to schedules and events. "
    "If it is off, changes are found by `kb sync`, schedules and events only.",
)
def source_changes(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    found = _probe(app, int(context.cursor or 0))
    busy = syncs_at_work(context.instance, found.changed)
    requests = []
    for space, changes in found.changed.items():
        if space in busy:
            continue
        with transaction(app.pool) as c:
            numbers = [events.request_walk(c, hint, "change", token) for hint, token in changes]
        hint, token = changes[0]
        only = hint.name if len(changes) == 1 else ""
        requests.append(request_sync(space, f"{space}:{hint.name}:{token[:12]}:{numbers[0]}", reason="change", source=only))
    message = told(
        (len(requests), "changed"),
        (len(busy), "changed, and a sync is queued or running"),
        (found.waiting, "changed, and a sync was asked for not long ago"),
        (found.mute, "cannot tell: left to schedules and events"),
        *((1, f"could not be asked: {error}") for error in found.errors[:3]),
        nothing=f"nothing changed in {found.probed} sources",
    )
    return SensorResult(requests, skip_reason=None if requests else SkipReason(message), cursor=str(found.last))


def _probe(app: App, after: int) -> _Found:
    found, end = _Found(last=after), time.monotonic() + TICK_SECONDS
    with connection(app.pool) as c:
        known = events.probed_sources(c, after, MOST_SOURCES)
    for source, hint in known:
        if end - time.monotonic() < PROBE_SECONDS or len(found.changed) >= MOST_RUNS:
            break
        found.last = source.id
        try:
            token = change_token(app.engine.connector(source), PROBE_SECONDS)
        except KbError as e:
            found.errors.append(f"{hint.space}/{hint.name}: {e.message}")
            continue
        found.probed += 1
        if token is None:
            found.mute += 1
        elif token != hint.mark and hint.may_ask(token):
            found.changed[hint.space].append((hint, token))
        elif token != hint.mark:
            found.waiting += 1
    return found
