"""The five assets, in the order of the flow. Each one hands its space to the core and shows the core's report.

A materialisation says: everything of this space that waited at this step is done. Nothing passes from asset to asset but
the queue in PostgreSQL, so that any of them can be run alone, again, or beside a ``kb`` command.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dagster import AssetExecutionContext, DataVersion, Failure, MaterializeResult, asset

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError
from kb_pipeline.model import Verdict
from kb_pipeline.orchestration import metadata
from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.pipeline import IngestReport, ingest
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import status, tasks
from kb_pipeline.store.database import connection
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import SyncReport, pending, settle, take_snapshot

GROUP = "knowledge_base"
OWNERS = ["team:knowledge-base"]
_COMMON: dict[str, Any] = {"partitions_def": SPACES, "group_name": GROUP, "owners": OWNERS}

_FAILED_DOCUMENTS = """
**Documents that fail do not fail the run.** They are listed under `failed_documents` with a code and a sentence. Temporary
failures are tried again by themselves; for the others repair the document, or use `kb task retry ID`.
"""


@asset(
    **_COMMON,
    kinds={"python", "postgres"},
    tags={"kb/step": "fetch"},
    description=f"""
What the sources of the space hold now, compared with what we know, and the originals of everything new or changed.

**A materialisation means:** every active source was listed; new and changed documents have a version whose original lies in
the object store; documents that a complete listing no longer shows are hidden at once, and deleted once the source confirms it.

**When it fails:** a source could not be read (see `source`, `code`, `message`). The other sources were walked all the same,
and their documents were taken through every step before this asset failed. Repair the source (`kb source test`), then
materialise again: an interrupted walk goes on where it stopped.

**When it warns about waiting deletions:** the listing lost more documents than the guard allows, so nothing was removed. If
that is right, `kb source approve` lets it happen.
{_FAILED_DOCUMENTS}""",
)
def source_snapshot(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult[None]:
    with _core(kb, context.partition_key) as (engine, space):
        found = take_snapshot(engine, space)
        _log_verdicts(context, found)
        fetched = _work(context, engine, space, Node.FETCHER)
        values = {**metadata.of_snapshot(found), **metadata.of_node(fetched, found=found)}
        if found.errors:
            _finish_the_rest(engine, space, Node.FETCHER)
            raise Failure(_source_errors(space, found), metadata={**values, **metadata.of_errors(found.errors)})
        return _result(engine, space, Node.FETCHER, values)


@asset(
    **_COMMON,
    deps=[source_snapshot],
    kinds={"python", "markdown"},
    tags={"kb/step": "parse"},
    description=f"""
Originals turned into blocks of Markdown: headings, paragraphs, tables, code.

**A materialisation means:** every original that waited has been read by the parser of its format, and its blocks are stored.

**When it fails:** the object store could not be used. Nothing is lost: materialise again when it is back.
{_FAILED_DOCUMENTS}""",
)
def parsed_documents(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult[None]:
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.PARSER)
        return _result(engine, space, Node.PARSER, metadata.of_node(report))


@asset(
    **_COMMON,
    deps=[parsed_documents],
    kinds={"python", "postgres"},
    tags={"kb/step": "chunk"},
    description=f"""
Pieces of text as they will be found, cut so that an edit changes only the chunks around it.

**A materialisation means:** every parsed document that waited is cut, and its version lists its chunks in reading order.
`reuse_rate` is the share of chunks that an earlier version had already: only the others are embedded and indexed.

**When it fails:** the object store or the database could not be used. Materialise again when it is back.
{_FAILED_DOCUMENTS}""",
)
def chunks(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult[None]:
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.CHUNKER)
        values = metadata.of_node(report, "chunks_written", "chunks_reused")
        return _result(engine, space, Node.CHUNKER, {**values, **metadata.reuse_rate(report.counts)})


@asset(
    **_COMMON,
    deps=[chunks],
    kinds={"python", "postgres"},
    tags={"kb/step": "embed"},
    description=f"""
Vectors of chunk texts, kept for good: a text is embedded once per model, in whatever document, version or space it stands.

**A materialisation means:** every chunk that waited has a vector. `embedded` counts the texts the model was asked for; 0 is
what an unchanged space must show.

**When it fails:** the embedding endpoint refused its key, was down, or answers with another model. What it answered so far is
stored and is not asked for again. Repair the endpoint and materialise again.
{_FAILED_DOCUMENTS}""",
)
def embeddings(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult[None]:
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.EMBEDDING)
        return _result(engine, space, Node.EMBEDDING, metadata.of_node(report, "embedded"))


@asset(
    **_COMMON,
    deps=[embeddings],
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
def vector_index(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult[None]:
    with _core(kb, context.partition_key) as (engine, space):
        report = _work(context, engine, space, Node.INDEXER)
        erased = settle(engine, space, loaded=report.published)
        with connection(engine.pool) as c:
            held = metadata.of_state(status.counts(c, space.id), tasks.failed_documents(c, space.id, metadata.MAX_ROWS))
        values = metadata.of_node(report, "vectors_upserted", "published")
        return _result(engine, space, Node.INDEXER, {**values, "vectors_erased": erased, **held})


FLOW_ASSETS = (source_snapshot, parsed_documents, chunks, embeddings, vector_index)


@contextmanager
def _core(kb: KbResource, key: str) -> Iterator[tuple[Engine, Space]]:
    """The space of a partition. An error of the core becomes a Failure that says in the UI what to do."""
    try:
        yield kb.space(key)
    except KbError as e:
        raise Failure(f"space {key}: {e.message}", metadata={"space": key, "code": e.code, "message": e.message}) from e


def _work(context: AssetExecutionContext, engine: Engine, space: Space, node: Node) -> IngestReport:
    """Everything that waits at ``node``. Raises Failure for what stops the node as a whole, never for a document."""
    report = ingest(engine, space, nodes=(node,)) if pending(engine, space) else IngestReport()
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


def _result(engine: Engine, space: Space, node: Node, values: dict[str, Any]) -> MaterializeResult[None]:
    """With a data version that depends on documents only, so that an unchanged space shows as unchanged."""
    behind = _behind(node)
    with connection(engine.pool) as c:
        state = status.reached_state(c, space.id, behind) if behind else status.published_state(c, space.id)
    return MaterializeResult(metadata=values, data_version=DataVersion(state))
