"""Partitions equal the spaces in the database."""

from dagster import (
    AddDynamicPartitionsRequest,
    DefaultSensorStatus,
    DeleteDynamicPartitionsRequest,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from kb_pipeline.orchestration.partitions import SPACE, SPACES
from kb_pipeline.orchestration.resources import KbResource


@sensor(
    name="space_lifecycle",
    minimum_interval_seconds=10,
    default_status=DefaultSensorStatus.RUNNING,
    description="Keeps the partitions equal to the spaces in the database: a space made with `kb space add` appears here "
    "within one tick, a deleted one leaves. It reads one table and starts no run. If it is off, new spaces are missing in "
    "the web UI, and nothing else is affected.",
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
    return SensorResult(skip_reason=message, dynamic_partitions_requests=requests)
