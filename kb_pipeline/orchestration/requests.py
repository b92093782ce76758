"""Runs that sensors ask for, and the words of their ticks."""

from dataclasses import dataclass
from typing import Any

from dagster import AssetKey, RunRequest

from kb_pipeline.orchestration.assets import EMBEDDING_POOL, INDEX_POOL
from kb_pipeline.orchestration.partitions import NODE_TAG, PRIORITY_TAG, SCHEDULE_TAG, SLOT_TAG, SYNC_TAG
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store.schedules import Kind

QUEUE_TAG = "dagster-celery/queue"  # only the Celery launcher reads it
JOBS = {
    Kind.SYNC: "sync_space",
    Kind.SWEEP: "sync_space",
    Kind.RECONCILIATION: "reconcile_space",
    Kind.PURGE: "purge_space",
    Kind.GC: "collect_vectors",
    Kind.QUALITY: "check_quality",
}


def request_sync(space: str, run_key: str, *, reason: str, source: str = "") -> RunRequest:
    """For a change at a source: of that one only, where it is known. Goes before everything else in the queue."""
    tags = {SYNC_TAG: space, PRIORITY_TAG: "2", "kb/reason": reason}
    return RunRequest(run_key, partition_key=space, job_name="sync_space", tags=tags, run_config=sync_config(source=source))


@dataclass(frozen=True)
class Part:
    """What a worker's run takes of the flow. ``name`` is its tag, and empty for a run that takes all of it; ``nodes``: where
    the documents stand that it is for. A Celery queue of its own lets it run on machines of its own."""

    name: str
    job: str
    nodes: frozenset[Node]
    assets: tuple[str, ...] = ()  # of the job; empty: all
    queue: str = ""


WHOLE = Part("", "ingest_batch", frozenset(FLOW))
SPLIT = (
    Part("ingest", "ingest_batch", frozenset({Node.FETCHER, Node.PARSER, Node.CHUNKER}), ("parsed_documents", "chunks")),
    Part("embedding", "embed_batch", frozenset({Node.EMBEDDING}), queue=EMBEDDING_POOL),
    Part("index", "index_batch", frozenset({Node.INDEXER}), queue=INDEX_POOL),
)


def request_worker(space: str, run_key: str, slot: int, part: Part = WHOLE) -> RunRequest:
    """One more run on the queue of a space. No two runs of a slot work at a time."""
    tags = {SLOT_TAG: slot_of(space, part, slot), PRIORITY_TAG: "1", "kb/reason": "waiting"}
    if part.name:
        tags[NODE_TAG] = part.name
    if part.queue:
        tags[QUEUE_TAG] = part.queue
    chosen = [AssetKey(name) for name in part.assets] or None
    return RunRequest(run_key, partition_key=space, job_name=part.job, tags=tags, asset_selection=chosen)


def slot_of(space: str, part: Part, slot: int) -> str:
    return f"{space}/{part.name}/{slot}" if part.name else f"{space}/{slot}"


def request_scheduled(space: str, run_key: str, kind: Kind) -> RunRequest:
    tags = {SCHEDULE_TAG: kind.value, PRIORITY_TAG: "0" if kind is Kind.SYNC else "-1"}
    syncs = kind in (Kind.SYNC, Kind.SWEEP)
    return RunRequest(
        run_key,
        partition_key=space,
        job_name=JOBS[kind],
        tags={**tags, SYNC_TAG: space} if syncs else tags,
        run_config=sync_config(full=kind is Kind.SWEEP) if syncs else {},
    )


def sync_config(*, source: str = "", full: bool = False) -> dict[str, Any]:
    """Run config of ``source_snapshot``; nothing where its defaults will do."""
    given = {**({"source": source} if source else {}), **({"full": True} if full else {})}
    return {"ops": {"source_snapshot": {"config": given}}} if given else {}


def told(*parts: tuple[int, str], nothing: str) -> str:
    """The counts that are not 0, with their words, for a person who looks at a tick."""
    return "; ".join(f"{n} {words}" for n, words in parts if n) or nothing
