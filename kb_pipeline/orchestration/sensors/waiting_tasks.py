"""Work that waits and that nobody does: tasks due again, left by a dead worker, put back by hand, or simply many."""

import json
import time
from collections.abc import Sequence

from dagster import DagsterRun, DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.model import Json
from kb_pipeline.orchestration.jobs import ingest_batch
from kb_pipeline.orchestration.partitions import SLOT_TAG, runs_at_work
from kb_pipeline.orchestration.requests import request_worker, told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.settings import Settings
from kb_pipeline.store import waiting
from kb_pipeline.store.database import connection, is_dead, run_of
from kb_pipeline.store.waiting import Waiting

MOST_RUNS = 20
MOST_SPACES = 60


@sensor(
    job=ingest_batch,
    minimum_interval_seconds=5,
    default_status=DefaultSensorStatus.RUNNING,
    description="Starts `ingest_batch` for spaces where documents wait and nobody works on them: failures that are due again, "
    "what a dead worker left, retries by hand. A space with more than KB_FANOUT_TASKS waiting tasks gets several runs side by "
    "side, up to KB_FANOUT_RUNS; spaces take turns. After a failed run the space is tried again after 30 seconds, then "
    "after twice as long, up to an hour. If it is off, what waits is done by the next sync of its space.",
)
def waiting_tasks(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    place: Json = json.loads(context.cursor) if context.cursor else {"after": "", "tick": int(time.time())}
    limit = app.settings.fanout_tasks * app.settings.fanout_runs
    with connection(app.pool) as c:
        spaces = waiting.waiting_spaces(c, place["after"], MOST_SPACES, limit)
    at_work = runs_at_work(context.instance, [w.space for w in spaces])
    free = {w.space: _free_slots(app.settings, w, at_work[w.space]) for w in spaces}
    # One for each space before a second one for any.
    turns = [(turn, space) for space, slots in free.items() for turn in range(len(slots))]
    chosen = sorted(turns, key=lambda x: x[0])[:MOST_RUNS]
    slots = [(space, free[space][turn]) for turn, space in chosen]
    requests = [request_worker(space, f"{space}:ingest:{place['tick']}:{slot}", slot) for space, slot in slots]
    served = {space for space, _ in slots}
    keys = [w.space for w in spaces]
    after = next((key for key in reversed(keys) if not served or key in served), "")
    message = told((len(spaces), "spaces with waiting tasks, and workers for all of them"), nothing="nothing waits")
    cursor = json.dumps({"after": after, "tick": place["tick"] + 1})
    return SensorResult(requests, skip_reason=None if requests else SkipReason(message), cursor=cursor)


def _free_slots(settings: Settings, w: Waiting, runs: Sequence[DagsterRun]) -> list[int]:
    """Numbers of the workers that the space should have beside the ones that it has: its runs, and processes of ours."""
    wanted = min(settings.fanout_runs, max(1, -(-w.tasks // settings.fanout_tasks)))
    others = sum(1 for owner in w.owners if not run_of(owner) and not is_dead(owner))
    taken = {run.tags.get(SLOT_TAG, "").rpartition("/")[2] for run in runs}
    free = [slot for slot in range(settings.fanout_runs) if str(slot) not in taken]
    return free[: max(0, wanted - len(runs) - others)]
