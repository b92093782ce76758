"""One partition per space: never per document or bucket, which the web UI could not show. And the tags of a space's runs."""

from collections.abc import Collection

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, DynamicPartitionsDefinition, RunsFilter

SPACE = "space"  # the name under which Dagster stores the keys
SPACES = DynamicPartitionsDefinition(name=SPACE)

PARTITION_TAG = "dagster/partition"
PRIORITY_TAG = "dagster/priority"  # in the run queue: edits before what waits, that before the work of the night
SYNC_TAG = "kb/sync"  # the space: the queue runs one sync of it at a time
SLOT_TAG = "kb/slot"  # space and number: the queue runs as many workers of a space side by side as there are numbers
NODE_TAG = "kb/node"  # which part of the flow a worker's run takes, where KB_SPLIT_NODES has split it
SCHEDULE_TAG = "kb/schedule"  # the kind of a schedule's request

_AT_WORK = [DagsterRunStatus.QUEUED, DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
_MOST_RUNS = 2000
WORKER_JOBS = frozenset({"ingest_batch", "embed_batch", "index_batch"})  # they ask no source
_FLOW_JOBS = WORKER_JOBS | {"sync_space", "__ASSET_JOB"}  # the last: "Materialize" in the web UI


def runs_at_work(instance: DagsterInstance, spaces: Collection[str]) -> dict[str, list[DagsterRun]]:
    """Queued and running runs of these spaces that take documents through the flow, by space. One query."""
    found: dict[str, list[DagsterRun]] = {space: [] for space in spaces}
    if found:
        filters = RunsFilter(statuses=_AT_WORK, tags={PARTITION_TAG: sorted(found)})
        for run in instance.get_runs(filters=filters, limit=_MOST_RUNS):
            if run.job_name in _FLOW_JOBS:
                found[run.tags[PARTITION_TAG]].append(run)
    return found


def syncs_at_work(instance: DagsterInstance, spaces: Collection[str]) -> set[str]:
    """Of these, the spaces whose sources a queued or running run asks, or may ask."""
    found = runs_at_work(instance, spaces)
    return {space for space, runs in found.items() if any(run.job_name not in WORKER_JOBS for run in runs)}
