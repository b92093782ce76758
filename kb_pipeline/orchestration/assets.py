"""The five assets, in the order of the flow. Each one hands its space to the core and shows the core's report.

A materialisation says: everything of this space that waited at this step is done. Nothing passes from asset to asset but
the queue in PostgreSQL, so that any of them can be run alone, again, or beside a ``kb`` command. Each ends with a gate, which
stops the run where the next step would make nonsense visible.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetRecordsFilter,
    DataVersion,
    Failure,
    MaterializeResult,
    asset,
)

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError
from kb_pipeline.maintenance.reembed import reembed_space
from kb_pipeline.maintenance.reparse import reparse_space
from kb_pipeline.model import Verdict
from kb_pipeline.orchestration import metadata
from kb_pipeline.orchestration.checks import gates
from kb_pipeline.orchestration.config import ReembedConfig, ReparseConfig, SyncConfig
from kb_pipeline.orchestration.lineage import GROUP, OWNERS, SOURCES
from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.pipeline import IngestReport, ingest
from kb_pipeline.signals import orderly_stop
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import gates as looks
from kb_pipeline.store import indexes, spaces, status, tasks
from kb_pipeline.store.database import connection, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import SyncReport, pending, settle, take_snapshot

EMBEDDING_POOL, INDEX_POOL = "kb_embedding", "kb_index"  # limits of the instance: one endpoint, one index for all spaces
PATIENCE_SECONDS = 60.0  # for somebody else's walk of the same source to end
_COMMON: dict[str, Any] = {"partitions_def": SPACES, "group_name": GROUP, "owners": OWNERS}

_FAILED_DOCUMENTS = """
**Documents that fail do not fail the run.** They are listed under `failed_documents` with a code and a sentence. Temporary
failures are tried again by themselves; for the others repair the document, or use `kb task retry ID`.
"""


@asset(
    **_COMMON,
    deps=list(SOURCES),
    check_specs=[gates.SPECS["source_snapshot"]],
    kinds={"python", "postgres"},
    tags={"kb/step": "fetch"},
    description=f"""
What the sources of the space hold now, compared with what we know, and the originals of everything new or changed.

**A materialisation means:** every active source was listed; new and changed documents have a version whose original lies in
the object store; documents that a complete listing no longer shows are hidden at once, and deleted once the source confirms it.

**When it fails:** a source could not be read (see `source`, `code`, `message`). The other sources were walked all the same,
and their documents were taken through every step before this asset failed. Repair the source (`kb source test`), then
materialise again: an interrupted walk goes on where it stopped.

**When its gate is red:** a listing lost more documents than the guard allows. Nothing was removed, and nothing of this run is
published: a wrong folder looks like this. If it is right, `kb source approve` lets it happen.

In the launchpad `source` and `full` narrow a run to one source, or make it list everything.
{_FAILED_DOCUMENTS}""",
)
def source_snapshot(context: AssetExecutionContext, config: SyncConfig, kb: KbResource) -> MaterializeResult:
    since = datetime.now(UTC)
    with _core(kb, context.partition_key) as (engine, space):
        source = config.source.strip() or None
        found = take_snapshot(engine, space, source=source, full=config.full, patience_seconds=PATIENCE_SECONDS)
        _log_verdicts(context, found)
        fetched = _work(context, engine, space, Node.FETCHER)
        logged = _logged(engine, space, Node.FETCHER, since)
        values = {**metadata.of_snapshot(found), **metadata.of_node(fetched, found=found), "bytes": logged.bytes}
        values |= metadata.of_log(logged)
        if found.errors:
            _finish_the_rest(engine, space, Node.FETCHER)
            raise Failure(_source_errors(space, found), metadata={**values, **metadata.of_errors(found.errors)})
        values |= _history(context, values, "new", "changed", "deleted", "bytes")
        return _result(engine, space, Node.FETCHER, values, gates.listed(space, found))


@asset(
    **_COMMON,
    deps=[source_snapshot],
    check_specs=[gates.SPECS["parsed_documents"]],
    kinds={"python", "markdown"},
    tags={"kb/step": "parse"},
    description=f"""
Originals turned into blocks of Markdown: headings, paragraphs, tables, code.

**A materialisation means:** every original that waited has been read by the parser of its format, and its blocks are stored.

**When it fails:** the object store could not be used. Nothing is lost: materialise again when it is back.

With `reparse` in the launchpad, every document's stored original is parsed again: for a parser that has learned something.
{_FAILED_DOCUMENTS}""",
)
def parsed_documents(context: AssetExecutionContext, config: ReparseConfig, kb: KbResource) -> MaterializeResult:
    since = datetime.now(UTC)
    with _core(kb, context.partition_key) as (engine, space):
        again = metadata.of_reparse(reparse_space(engine, space)) if config.reparse else {}
        report = _work(context, engine, space, Node.PARSER)
        values = {**metadata.of_node(report), **again, **metadata.of_log(_logged(engine, space, Node.PARSER, since))}
        values |= _history(context, values)
        return _result(engine, space, Node.PARSER, values, gates.parsed(engine, space))


@asset(
    **_COMMON,
    deps=[parsed_documents],
    check_specs=[gates.SPECS["chunks"]],
    kinds={"python", "postgres"},
    tags={"kb/step": "chunk"},
    description=f"""
Pieces of text as they will be found, cut so that an edit changes only the chunks around it.

**A materialisation means:** every parsed document that waited is cut, and its version lists its chunks in reading order.
`reuse_rate` is the share of chunks that an earlier version had already: only the others are embedded and indexed.

**When it fails:** the object store or the database could not be used. Materialise again when it is back.
{_FAILED_DOCUMENTS}""",
)
def chunks(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult:
    since = datetime.now(UTC)
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.CHUNKER)
        values = {**metadata.of_node(report, "chunks_written", "chunks_reused"), **metadata.reuse_rate(report.counts)}
        values |= metadata.of_log(_logged(engine, space, Node.CHUNKER, since))
        values["tokens"] = _texts(engine, space, Node.CHUNKER, since, report)[1]
        values |= _history(context, values, "chunks_written", "chunks_reused", "reuse_rate", "tokens")
        return _result(engine, space, Node.CHUNKER, values, gates.chunked(engine, space))


@asset(
    **_COMMON,
    deps=[chunks],
    check_specs=[gates.SPECS["embeddings"]],
    pool=EMBEDDING_POOL,
    kinds={"python", "postgres"},
    tags={"kb/step": "embed"},
    description=f"""
Vectors of chunk texts, kept for good: a text is embedded once per model, in whatever document, version or space it stands.

**A materialisation means:** every chunk that waited has a vector. `embedded` counts the texts the model was asked for; 0 is
what an unchanged space must show. `embeddings_saved` counts the chunks of changed documents whose vector was known.

**When it fails:** the embedding endpoint refused its key, was down, or answers with another model. What it answered so far is
stored and is not asked for again. Repair the endpoint and materialise again.

With `reembed` in the launchpad the endpoint is asked again for every current text, and what differs is replaced: for a model
that changed behind its name. A run that was interrupted says in `reembed_last_chunk` where to go on (`reembed_after`).
{_FAILED_DOCUMENTS}""",
)
def embeddings(context: AssetExecutionContext, config: ReembedConfig, kb: KbResource) -> MaterializeResult:
    since = datetime.now(UTC)
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.EMBEDDING)
        values = {**metadata.of_node(report, "embedded"), **metadata.of_log(_logged(engine, space, Node.EMBEDDING, since))}
        of_versions, values["tokens"] = _texts(engine, space, Node.EMBEDDING, since, report)
        values["embeddings_saved"] = max(0, of_versions - values["embedded"])
        if config.reembed:
            values |= _reembed(context, engine, space, config.reembed_after)
        values |= _history(context, values, "embedded", "embeddings_saved", "tokens")
        return _result(engine, space, Node.EMBEDDING, values, gates.embedded(engine, space))


@asset(
    **_COMMON,
    deps=[embeddings],
    check_specs=[gates.SPECS["vector_index"]],
    pool=INDEX_POOL,
    kinds={"pgvector", "postgres"},
    tags={"kb/step": "index"},
    description=f"""
What search finds. A document's new version replaces the old one as a whole, in one transaction: never a mixture, never a gap.

**A materialisation means:** every embedded document that waited is in the vector index, verified there, and published;
vectors of what is gone are erased. The data version is a digest over the published versions: it changes exactly when the
answers may change. `failing_documents_now` shows every document of the space that is in trouble, whichever run met it.

**When it fails:** the vector index could not be used or lost what it had accepted. The old versions are still being served.
Materialise again when it is back.
{_FAILED_DOCUMENTS}""",
)
def vector_index(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult:
    since = datetime.now(UTC)
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.INDEXER)
        erased = settle(engine, space, loaded=report.published)
        with connection(engine.pool) as c:
            serving = metadata.of_index(indexes.serving(c, space.id), space.generation)
            held = metadata.of_state(status.counts(c, space.id), tasks.failed_documents(c, space.id, metadata.MAX_ROWS))
        values = {**metadata.of_node(report, "vectors_upserted", "published"), "vectors_erased": erased, **held, **serving}
        values |= metadata.of_log(_logged(engine, space, Node.INDEXER, since))
        values |= _history(context, values, "published", "vectors_upserted", "vectors_erased")
        return _result(engine, space, Node.INDEXER, values, gates.indexed(engine, space, since))


FLOW_ASSETS = (source_snapshot, parsed_documents, chunks, embeddings, vector_index)


@contextmanager
def _core(kb: KbResource, key: str) -> Iterator[tuple[Engine, Space]]:
    """The space of a partition. An error of the core becomes a Failure that says in the UI what to do.

    A run that is asked to end does so between two units of work, and gives its tasks back.
    """
    try:
        engine, space = kb.space(key)
        with orderly_stop(engine.stop):
            yield engine, space
    except KbError as e:
        raise Failure(f"space {key}: {e.message}", metadata={"space": key, "code": e.code, "message": e.message}) from e


def _work(context: AssetExecutionContext, engine: Engine, space: Space, node: Node) -> IngestReport:
    """Everything that waits at ``node``. Raises Failure for what stops the node as a whole, never for a document."""
    # What a run that died had not fetched yet is fetched here: no worker's run begins further up.
    nodes = (Node.FETCHER, node) if node is Node.PARSER else (node,)
    report = ingest(engine, space, nodes=nodes) if pending(engine, space) else IngestReport()
    if report.failed:
        context.log.warning("%d of %d documents failed: see failed_documents", report.failed, report.tasks)
    stopped = report.stopped
    if stopped is None:
        return report
    _finish_the_rest(engine, space, node)
    values = {**metadata.of_node(report), "space": space.key, "code": stopped.code, "message": stopped.message}
    raise Failure(f"space {space.key}: {node} cannot go on: {stopped.message}", metadata=values) from stopped


def _finish_the_rest(engine: Engine, space: Space, node: Node) -> None:
    """The run ends at a failed asset, but nobody's document has to wait for another's source or step."""
    behind = _behind(node)
    rest = ingest(engine, space, nodes=behind) if behind else IngestReport()
    settle(engine, space, loaded=rest.published)


def _behind(node: Node) -> Sequence[Node]:
    return FLOW[FLOW.index(node) + 1 :]


def _log_verdicts(context: AssetExecutionContext, found: SyncReport) -> None:
    for p in found.passes:
        if p.verdict is not Verdict.COMPLETE:
            reasons = "; ".join(p.reasons[:5])
            context.log.warning("source %s: the listing is %s, nothing is removed: %s", p.source, p.verdict, reasons)
    for name, error in found.errors.items():
        context.log.error("source %s: %s: %s", name, error.code, error.message)


def _source_errors(space: Space, found: SyncReport) -> str:
    each = [f"source {name} failed ({e.code}): {e.message}" for name, e in found.errors.items()]
    return f"space {space.key}: {'; '.join(each)}"


def _reembed(context: AssetExecutionContext, engine: Engine, space: Space, after: int) -> dict[str, Any]:
    """Raises Failure where the endpoint stopped it, with the place to go on from."""
    report = reembed_space(engine, space, after=after)
    values = metadata.of_reembed(report)
    if report.stopped is not None:
        told = {**values, "space": space.key, "code": report.stopped.code, "message": report.stopped.message}
        go_on = f"go on with reembed_after: {report.last_chunk}"
        raise Failure(f"space {space.key}: {report.stopped.message}; {go_on}", metadata=told) from report.stopped
    context.log.info("asked again for %d texts: %d differ", report.asked, report.changed)
    return values


def _logged(engine: Engine, space: Space, node: Node, since: datetime) -> looks.Worked:
    with connection(engine.pool) as c:
        return looks.worked(c, space.id, node, since)


def _texts(engine: Engine, space: Space, node: Node, since: datetime, report: IngestReport) -> tuple[int, int]:
    """Chunks and tokens of the versions that this run took through ``node``."""
    if not report.tasks:
        return 0, 0
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        return (0, 0) if shard is None else looks.texts(c, space.id, shard, node, since)


def _history(context: AssetExecutionContext, values: dict[str, Any], *names: str) -> dict[str, Any]:
    wanted = AssetRecordsFilter(asset_key=context.asset_key, asset_partitions=[context.partition_key])
    earlier = context.instance.fetch_materializations(wanted, limit=metadata.MAX_RUNS - 1).records
    return metadata.of_history(earlier, values, names)


def _result(engine: Engine, space: Space, node: Node, values: dict[str, Any], gate: AssetCheckResult) -> MaterializeResult:
    """With a data version that depends on documents only, so that an unchanged space shows as unchanged."""
    behind = _behind(node)
    with connection(engine.pool) as c:
        state = status.reached_state(c, space.id, behind) if behind else status.published_state(c, space.id)
    return MaterializeResult(metadata=metadata.in_order(values), data_version=DataVersion(state), check_results=[gate])
