"""Work that waits and that nobody does: tasks due again, left by a dead worker, put back by hand, or simply many."""

import json
import time
from collections.abc import Sequence

from dagster import DagsterRun, DefaultSensorStatus, RunRequest, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.model import Json
from kb_pipeline.orchestration.jobs import embed_batch, index_batch, ingest_batch
from kb_pipeline.orchestration.partitions import NODE_TAG, SLOT_TAG, runs_at_work
from kb_pipeline.orchestration.requests import SPLIT, WHOLE, Part, request_worker, slot_of, told
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.settings import Settings
from kb_pipeline.store import waiting
from kb_pipeline.store.database import Connection, connection, is_dead, run_of
from kb_pipeline.store.waiting import Waiting

MOST_RUNS = 20
MOST_SPACES = 60


@sensor(
    jobs=[ingest_batch, embed_batch, index_batch],
    minimum_interval_seconds=10,
    default_status=DefaultSensorStatus.RUNNING,
    description="Starts `ingest_batch` for spaces where documents wait and nobody works on them: failures that are due again, "
    "what a dead worker left, retries by hand. A space with more than KB_FANOUT_TASKS waiting tasks gets several runs side by "
    "side, up to KB_FANOUT_RUNS; spaces take turns. With KB_SPLIT_NODES this holds for parsing, embedding and indexing each. "
    "After a failed run the space is tried again after 30 seconds, then after twice as long, up to an hour. If it is off, what "
    "waits is done by the next sync of its space.",
)
def waiting_tasks(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    place: Json = json.loads(context.cursor) if context.cursor else {"after": "", "tick": int(time.time())}
    limit = app.settings.fanout_tasks * app.settings.fanout_runs
    with connection(app.pool) as c:
        spaces = waiting.waiting_spaces(c, place["after"], MOST_SPACES, limit)
        parts = _parts(c, app.settings, spaces, limit)
    at_work = runs_at_work(context.instance, [w.space for w in spaces])
    free = {w.space: _free_slots(app.settings, w, parts[w.space_id], at_work[w.space]) for w in spaces}
    # One for each space before a second one for any.
    turns = [(turn, space) for space, slots in free.items() for turn in range(len(slots))]
    chosen = sorted(turns, key=lambda x: x[0])[:MOST_RUNS]
    slots = [(space, free[space][turn]) for turn, space in chosen]
    requests = [_request(space, place["tick"], part, slot) for space, (part, slot) in slots]
    served = {space for space, _ in slots}
    keys = [w.space for w in spaces]
    after = next((key for key in reversed(keys) if not served or key in served), "")
    message = told((len(spaces), "spaces with waiting tasks, and workers for all of them"), nothing="nothing waits")
    cursor = json.dumps({"after": after, "tick": place["tick"] + 1})
    return SensorResult(requests, skip_reason=None if requests else SkipReason(message), cursor=cursor)


def _request(space: str, tick: int, part: Part, slot: int) -> RunRequest:
    return request_worker(space, f"{space}:{part.name or 'ingest'}:{tick}:{slot}", slot, part)


def _parts(c: Connection, settings: Settings, spaces: Sequence[Waiting], limit: int) -> dict[int, list[tuple[Part, int]]]:
    """Which runs each space needs, by the id of the space, and for how many tasks."""
    if not settings.split_nodes:
        return {w.space_id: [(WHOLE, w.tasks)] for w in spaces}
    nodes = waiting.waiting_nodes(c, [w.space_id for w in spaces], limit)
    found = {i: [(part, n) for part in SPLIT if (n := sum(at[node] for node in part.nodes))] for i, at in nodes.items()}
    return {i: parts or [(SPLIT[0], 0)] for i, parts in found.items()}  # only to be admitted or cleaned up: any run does that


def _free_slots(
    settings: Settings, w: Waiting, parts: Sequence[tuple[Part, int]], runs: Sequence[DagsterRun]
) -> list[tuple[Part, int]]:
    """Numbers of the workers that the space should have beside the ones that it has: its runs, and processes of ours.

    A run whose claims have run out works no more, whatever Dagster still says of it: nobody waits until it is known as dead.
    """
    others = sum(1 for owner in w.owners if not run_of(owner) and not is_dead(owner))
    silent = {run_of(owner) for owner in w.silent} - {run_of(owner) for owner in w.owners}
    taken = {run.tags.get(SLOT_TAG) for run in runs}
    numbers = range(settings.fanout_runs + len(silent))  # the slot of a dead run is taken until Dagster knows
    found: list[tuple[Part, int]] = []
    for part, tasks in parts:
        wanted = min(settings.fanout_runs, max(1, -(-tasks // settings.fanout_tasks)))
        working = sum(1 for run in runs if run.run_id not in silent and _takes(run, part))
        free = [(part, slot) for slot in numbers if slot_of(w.space, part, slot) not in taken]
        found += free[: max(0, wanted - working - others)]
    return found


def _takes(run: DagsterRun, part: Part) -> bool:
    """Whether the run was asked for this part of the flow. One that takes all of it begins with the first."""
    return not part.name or run.tags.get(NODE_TAG, SPLIT[0].name) == part.name
