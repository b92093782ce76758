"""The jobs. Runs of a space have the tag ``dagster/partition``; those that sensors start have tags for the queue as well."""

from datetime import UTC, datetime, timedelta
from typing import Any

from dagster import (
    AssetSelection,
    DagsterInstance,
    DagsterRunStatus,
    Failure,
    HookContext,
    OpExecutionContext,
    RunsFilter,
    define_asset_job,
    job,
    op,
    success_hook,
)

from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.sweep import compact_index, sweep_removed
from kb_pipeline.maintenance.vector_gc import collect_vectors as erase_vectors
from kb_pipeline.orchestration.assets import FLOW_ASSETS
from kb_pipeline.orchestration.config import RebuildConfig
from kb_pipeline.orchestration.partitions import PARTITION_TAG, SCHEDULE_TAG, SPACES, WORKER_JOBS
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.signals import orderly_stop
from kb_pipeline.store import schedules
from kb_pipeline.store.database import transaction
from kb_pipeline.store.schedules import Kind

LAST_STEPS = {
    "sync_space": "vector_index",
    "ingest_batch": "vector_index",
    "index_batch": "vector_index",
    "reconcile_space": "index_reconciliation",
    "check_quality": "data_quality",
}
RUN_BATCH = 100


@success_hook(required_resource_keys={"kb"}, name="tell_schedule")
def tell_schedule(context: HookContext) -> None:
    """The last step of a run that a schedule has asked for has succeeded."""
    run = context.instance.get_run_by_id(context.run_id)
    if run is None or context.op.name != LAST_STEPS.get(context.job_name):
        return
    kind = Kind.INGEST.value if context.job_name in WORKER_JOBS else run.tags.get(SCHEDULE_TAG)
    if kind in list(Kind) and PARTITION_TAG in run.tags:
        _succeeded(context.resources.kb, run.tags[PARTITION_TAG], Kind(kind))


def _succeeded(kb: KbResource, key: str, kind: Kind) -> None:
    engine, space = kb.space(key)
    with transaction(engine.pool) as c:
        schedules.succeeded(c, space.id, kind)


def _flow_job(name: str, selection: AssetSelection, description: str) -> Any:
    """Of assets of one space. Its last step tells the schedule that asked for it."""
    return define_asset_job(name, selection, description=description, tags={"kb/job": name}, hooks={tell_schedule})


sync_space = _flow_job(
    "sync_space",
    AssetSelection.assets(*FLOW_ASSETS),
    "Brings one space up to date: walks its sources, then takes every new and changed document to the vector "
    "index. The same as `kb sync`. Nothing is done twice: an unchanged space costs one listing.",
)

ingest_batch = _flow_job(
    "ingest_batch",
    AssetSelection.assets(*FLOW_ASSETS[1:]),
    "Takes what already waits in one space's queue to the vector index, without asking its sources. For tasks "
    "that were due again, retried by hand, or left by a run that died. Several of them work on one space side by side. With "
    "KB_SPLIT_NODES, what sensors ask for ends with the chunks.",
)

embed_batch = _flow_job(
    "embed_batch",
    AssetSelection.assets("embeddings"),
    "Embeds what waits for it in one space. Sensors ask for it with KB_SPLIT_NODES only, so that machines with a "
    "model do nothing else.",
)

index_batch = _flow_job(
    "index_batch",
    AssetSelection.assets("vector_index"),
    "Indexes and publishes what is embedded in one space. Sensors ask for it with KB_SPLIT_NODES only.",
)

reconcile_space = _flow_job(
    "reconcile_space",
    AssetSelection.assets("index_reconciliation"),
    "Compares the vector index of one space with the database, id by id, and repairs the index. The same as `kb reconcile`.",
)

check_quality = _flow_job(
    "check_quality",
    AssetSelection.assets("data_quality"),
    "Great Expectations over what a space has stored. It reads only. Too slow to stand in the way of a sync.",
)


@op(
    name="remove_old_versions",
    description="Archives versions beyond those that the space retains and that were replaced over 30 days ago, and removes "
    "chunks, vectors, objects, cached embeddings and answers that nothing needs, and logs after 90 days. As `kb purge`.",
)
def remove_old_versions(context: OpExecutionContext, kb: KbResource) -> None:
    engine, space = kb.space(context.partition_key)
    report = purge(engine, space)
    counts = ("versions", "chunks", "vectors", "objects", "embeddings", "answers", "logs")
    context.add_output_metadata({name: getattr(report, name) for name in counts})
    _succeeded(kb, space.key, Kind.PURGE)


@op(
    name="erase_vectors",
    description="Erases vectors of chunks that are no longer current from the index, asks the index whether they are gone, and "
    "rebuilds an index of which too much is dead. The same as `kb gc`.",
)
def erase_vectors_of_space(context: OpExecutionContext, kb: KbResource) -> None:
    engine, space = kb.space(context.partition_key)
    context.add_output_metadata({"vectors": erase_vectors(engine, space), "rebuilt": compact_index(engine, space)})
    _succeeded(kb, space.key, Kind.GC)


@job(partitions_def=SPACES, tags={"kb/job": "purge_space"}, description="Removes what one space no longer needs.")
def purge_space() -> None:
    remove_old_versions()


@job(partitions_def=SPACES, tags={"kb/job": "collect_vectors"}, description="Erases the dead vectors of one space.")
def collect_vectors() -> None:
    erase_vectors_of_space()


@op(
    name="build_next_index",
    description="Builds the index that is to serve a space next, beside the one that serves: fills it from the cached vectors, "
    "or by the next model, keeps it up to date, compares it with the database id by id, and switches in one step. No search "
    "fails or mixes models meanwhile. The next run goes on where one ended. The same as `kb space set SPACE index=...`.",
)
def build_next_index(context: OpExecutionContext, config: RebuildConfig, kb: KbResource) -> None:
    app = kb.app()
    space = app.space(context.partition_key)
    if config.back:
        rebuild.back(app.engine, space)
    elif config.index or config.embedder or config.index_options or config.embedder_options:
        wanted = app.change_index(
            space,
            index=config.index or None,
            index_options=config.index_options or None,
            embedder=config.embedder or None,
            embedder_options=config.embedder_options or None,
        )
        if not wanted:
            context.log.info("space %s is served like this already", space.key)
            return
    with orderly_stop(app.engine.stop):
        report = app.build_index(space)
    context.add_output_metadata(
        {
            "backend": report.kind, "index": report.index, "model": report.model, "chunks_given": report.chunks,
            "embedded": report.embedded, "agreement_of_the_ten_best": report.agreement or 0.0,
        }
    )  # fmt: skip


@job(partitions_def=SPACES, tags={"kb/job": "rebuild_index"}, description="Another index or another model for one space.")
def rebuild_index() -> None:
    build_next_index()


@op(
    name="finish_deletions",
    description="Deletes the rest of every space whose deletion has begun and did not end. The same as `kb space remove`.",
)
def finish_deletions(context: OpExecutionContext, kb: KbResource) -> None:
    app = kb.app()
    for space in app.spaces():
        if space.status == "DELETING":
            residue = delete_space(app.engine, space)
            context.log.info("space %s: left %s", space.key, {k: n for k, n in residue.items() if n} or "nothing")
            if any(residue.values()):
                raise Failure(f"something of space {space.key} is still there: run this job again", metadata=dict(residue))


@op(
    name="remove_leftovers",
    description="Removes again what arrived for a space after its deletion: an upload or an index call that landed late.",
)
def remove_leftovers(context: OpExecutionContext, kb: KbResource) -> None:
    removed = sweep_removed(kb.app().engine)
    context.add_output_metadata(
        {"objects": removed.objects, "indexes": removed.indexes, "of_another_database": removed.foreign}
    )


@job(tags={"kb/job": "delete_spaces"}, description="Finishes the deletion of spaces that was begun and interrupted.")
def delete_spaces() -> None:
    finish_deletions()


@job(tags={"kb/job": "sweep_leftovers"}, description="Looks through the object store and the indexes for deleted spaces.")
def sweep_leftovers() -> None:
    remove_leftovers()


@op(
    name="delete_old_runs",
    description="Deletes finished runs that have not changed for KB_RUN_RETENTION_DAYS with their event logs, and older ticks "
    "of sensors and schedules. What is true about a space is kept elsewhere and stays.",
)
def delete_old_runs(context: OpExecutionContext, kb: KbResource) -> None:
    before = datetime.now(UTC) - timedelta(days=kb.settings().run_retention_days)
    context.add_output_metadata({"runs": delete_runs(context.instance, before), "older_than": before.isoformat()})
    for state in context.instance.all_instigator_state() if context.instance.schedule_storage else ():
        context.instance.purge_ticks(state.instigator_origin_id, state.selector_id, before.timestamp())


def delete_runs(instance: DagsterInstance, before: datetime) -> int:
    """In batches, the oldest first. A run that is at work is none of them, however old it is."""
    ended = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
    filters, deleted = RunsFilter(statuses=ended, updated_before=before), 0
    while runs := instance.get_runs(filters, limit=RUN_BATCH, ascending=True):
        for run in runs:
            instance.delete_run(run.run_id)
        deleted += len(runs)
    return deleted


@job(tags={"kb/job": "log_retention"}, description="Keeps Dagster's own storage from growing for ever.")
def log_retention() -> None:
    delete_old_runs()


SCHEDULED_JOBS: list[Any] = [sync_space, reconcile_space, purge_space, collect_vectors, check_quality]
WORKERS: list[Any] = [ingest_batch, embed_batch, index_batch]
JOBS: list[Any] = [*SCHEDULED_JOBS, *WORKERS, rebuild_index, delete_spaces, sweep_leftovers, log_retention]
