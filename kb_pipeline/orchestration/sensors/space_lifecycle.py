"""Partitions equal the spaces in the database."""

from datetime import UTC, datetime

from dagster import (
    AddDynamicPartitionsRequest,
    DefaultSensorStatus,
    DeleteDynamicPartitionsRequest,
    RunRequest,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from kb_pipeline.orchestration.jobs import delete_spaces, rebuild_index
from kb_pipeline.orchestration.partitions import SPACE, SPACES
from kb_pipeline.orchestration.resources import KbResource

MOST_BUILDS = 10


@sensor(
    name="space_lifecycle",
    jobs=[delete_spaces, rebuild_index],
    minimum_interval_seconds=15,
    default_status=DefaultSensorStatus.RUNNING,
    description="Keeps the partitions equal to the spaces in the database: a space made with `kb space add` appears here "
    "within one tick, a deleted one leaves. A deletion that was interrupted is finished, and so is the building of an index "
    "that `kb space set` has begun: once an hour until it is. It reads two tables. If it is off, new spaces are missing in the "
    "web UI, and what was interrupted waits for `kb space remove` or `kb space build`.",
)
def space_lifecycle(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    wanted = kb.active_spaces()
    have = context.instance.get_dynamic_partitions(SPACE)
    added, removed = sorted(set(wanted) - set(have)), sorted(set(have) - set(wanted))
    requests: list[AddDynamicPartitionsRequest | DeleteDynamicPartitionsRequest] = []
    if added:
        requests.append(SPACES.build_add_request(added))
    if removed:
        requests.append(SPACES.build_delete_request(removed))
    changes = [f"{verb} {', '.join(keys)}" for verb, keys in (("added", added), ("removed", removed)) if keys]
    message = "; ".join(changes) if changes else f"nothing to do: {len(wanted)} spaces, {len(have)} partitions"
    runs, hour = [], f"{datetime.now(UTC):%Y-%m-%dT%H}"
    if begun := kb.deleting_spaces():
        message += f"; being deleted: {', '.join(begun)}"
        runs.append(RunRequest(f"delete:{','.join(begun)}:{hour}", job_name="delete_spaces"))
    if building := [key for key in kb.spaces_building() if key in have]:
        message += f"; building an index: {', '.join(building)}"
        first = building[:MOST_BUILDS]
        runs += [RunRequest(f"build:{key}:{hour}", partition_key=key, job_name="rebuild_index") for key in first]
    return SensorResult(runs, skip_reason=None if runs else message, dynamic_partitions_requests=requests)
