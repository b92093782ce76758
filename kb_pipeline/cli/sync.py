"""``kb sync``: one pass over a space, here and now."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.output import Output, counted
from kb_pipeline.cli.session import COULD_NOT, DELETIONS_WAIT, DONE, SOME_FAILED, session_of
from kb_pipeline.model import Json, Verdict
from kb_pipeline.signals import orderly_stop
from kb_pipeline.states import WalkKind

if TYPE_CHECKING:
    from kb_pipeline.engine import Engine, Progress
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.sync import SyncReport
    from kb_pipeline.walk import PassReport

NAME = "sync"
WALKED = ("seen", "new", "changed", "unchanged", "moved", "metadata_only", "hidden", "deleted", "failed")
INGESTED = ("chunks_written", "chunks_reused", "embedded", "vectors_upserted")
_WORSE = (Verdict.COMPLETE, Verdict.PARTIAL, Verdict.UNTRUSTED)
_FAILURES = 1000  # task rows looked through for the ids of failed documents


def command(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    source: Annotated[str | None, typer.Option(metavar="NAME", help="This source only.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Walk even where the listing's digest says that nothing changed.")
    ] = False,
    reparse: Annotated[
        bool, typer.Option("--reparse", help="Parse every stored original again, for a parser that has learned something.")
    ] = False,
    reembed: Annotated[
        bool, typer.Option("--reembed", help="Ask the embedder again for every text, and replace the vectors that differ.")
    ] = False,
    reembed_after: Annotated[
        int, typer.Option(min=0, metavar="CHUNK", help="Where an interrupted --reembed goes on: it names the number.")
    ] = 0,
) -> None:
    """Find what changed in the sources of a space, and bring its index up to date."""
    from kb_pipeline.sync import sync_space

    session = session_of(ctx)
    again: Json = {}
    with session.app() as opened:
        owner = opened.space(space)
        with orderly_stop(opened.engine.stop):
            if reparse:
                again["reparse"] = _reparse(opened.engine, owner, session.progress)
            report = sync_space(opened.engine, owner, source=source, full=full, progress=session.progress)
            if reembed or reembed_after:
                again["reembed"] = _reembed(opened.engine, owner, reembed_after, session.progress)
            if opened.engine.stop.is_set():
                session.out.hint("stopped before all was done, and nothing is lost: the same command goes on from here")
        found = sync_document(opened.engine, owner, report) | again
    if not session.out.document(found):
        tell_sync(session.out, found)
        _tell_again(session.out, again)
    tell_trouble(session.out, found)
    raise typer.Exit(_with_reembed(exit_code(report), session.out, again.get("reembed", {})))


def exit_code(report: "SyncReport") -> int:
    """What could not be done outweighs what must be approved, that outweighs single documents."""
    if report.errors or (report.ingest.stopped is not None and not report.ingest.published):
        return COULD_NOT
    if report.waiting_deletions or report.incomplete:
        return DELETIONS_WAIT
    return SOME_FAILED if report.failed else DONE


def _reparse(engine: "Engine", space: "Space", progress: "Callable[[Progress], None]") -> Json:
    from kb_pipeline.maintenance.reparse import reparse_space

    report = reparse_space(engine, space, progress=progress)
    return {k: getattr(report, k) for k in ("queued", "skipped", "fresh", "without_original")}


def _reembed(engine: "Engine", space: "Space", after: int, progress: "Callable[[Progress], None]") -> Json:
    from kb_pipeline.maintenance.reembed import reembed_space

    report = reembed_space(engine, space, after=after, progress=progress)
    counts = {k: getattr(report, k) for k in ("asked", "changed", "failed", "upserted", "last_chunk")}
    return {**counts, "stopped": report.stopped.message if report.stopped else None}


def _tell_again(out: Output, again: Json) -> None:
    if found := again.get("reparse"):
        out.line(f"parsed again: {found['queued']} documents; left out, as they are being worked on: {found['skipped']}")
    if found := again.get("reembed"):
        out.line(f"embedded again: {found['asked']} texts; another vector than before: {found['changed']}")


def _with_reembed(code: int, out: Output, reembed: Json) -> int:
    """What the rest of the command ended with, unless the embedder gave up or refused a text."""
    if reembed.get("stopped"):
        out.hint(f"asking again stopped: {reembed['stopped']}. To go on: --reembed-after {reembed['last_chunk']}")
        return COULD_NOT
    return code or (SOME_FAILED if reembed.get("failed") else DONE)


def sync_document(engine: "Engine", space: "Space", report: "SyncReport") -> Json:
    """The report under the names that scripts rely on. Ingest numbers are the space's: an only pass repeats them."""
    ingested = {k: report.ingest.counts.get(k, 0) for k in INGESTED} | {"vectors_deleted": report.vectors_deleted}
    passes = [_pass_document(p) for p in report.passes]
    totals = {k: sum(p[k] for p in passes) for k in (*WALKED, "waiting_deletions")}
    totals["failed"] = report.failed
    verdicts = [p.verdict for p in report.passes] + ([Verdict.PARTIAL] if report.errors else [])
    seconds = round(report.seconds, 3)
    if len(passes) == 1 and not report.errors:
        passes[0] |= ingested | {"failed": report.failed, "seconds": seconds}
    stopped = report.ingest.stopped
    return {
        "space": space.key,
        "verdict": max(verdicts, key=_WORSE.index, default=Verdict.COMPLETE),
        **totals,
        **ingested,
        "published": report.ingest.published,
        "seconds": seconds,
        "passes": passes,
        "failures": _failures(engine, space, report),
        "errors": {name: e.message for name, e in report.errors.items()},
        "stopped": stopped.message if stopped else None,
        "unfinished": _unfinished(engine, space),
    }


def _pass_document(found: "PassReport") -> Json:
    return {
        "source": found.source,
        "kind": found.kind,
        "verdict": found.verdict,
        "reasons": found.reasons,
        **{k: found.counts.get(k, 0) for k in WALKED},
        "waiting_deletions": found.waiting_deletions,
        "resumed": found.resumed,
    }


def tell_sync(out: Output, found: Json) -> None:
    for each in found["passes"]:
        changes = [f"{each[k]} {k.replace('_', ' ')}" for k in WALKED[1:] if each[k] and k not in ("unchanged", "failed")]
        marks = [
            m for m, holds in (("changes only", each["kind"] == WalkKind.INCREMENTAL), ("resumed", each["resumed"])) if holds
        ]
        words = f"{each['seen']} seen, {', '.join(changes) or 'nothing changed'}"
        out.line(f"{each['source']}: {words}{' (' + ', '.join(marks) + ')' if marks else ''}")
    done = [
        counted(found["published"], "document", "published"),
        counted(found["embedded"], "chunk", "embedded"),
        counted(found["chunks_reused"], "chunk", "kept"),
        counted(found["moved"], "document", "moved without embedding"),
        counted(found["vectors_deleted"], "vector", "deleted"),
    ]
    done = [words for words in done if words]
    if done:
        out.line(f"{'; '.join(done)} ({found['seconds']:.1f} s)")


def tell_trouble(out: Output, found: Json) -> None:
    """On stderr, with the way out of each."""
    for name, message in found["errors"].items():
        out.hint(f"source {name} could not be read: {message}")
    if found["stopped"]:
        out.hint(f"work stopped: {found['stopped']}")
    for each in found["passes"]:
        for reason in each["reasons"]:
            out.hint(f"{each['source']} ({each['verdict']}): {reason}")
    for failure in found["failures"]:
        way_out = f"kb task show {failure['task_id']}" if failure["task_id"] else f"kb task list {found['space']}"
        message = failure["message"].removeprefix(f"{failure['document']}: ")
        out.hint(f"failed: {failure['document']}: {message} [{failure['code']}] ({way_out})")
    if more := found["failed"] - len(found["failures"]):
        out.hint(f"and {more} more: kb task list {found['space']} --status DEAD")
    waiting = found["unfinished"]
    if again := waiting.get("FAILED", 0):
        out.hint(f"{counted(again, 'failed document', 'waiting')}: a later sync tries again, once the waiting time is over")
    if (dead := waiting.get("DEAD", 0)) and not found["failed"]:
        out.hint(f"{counted(dead, 'document', 'failed in earlier passes')}: kb task list {found['space']} --status DEAD")


def _failures(engine: "Engine", space: "Space", report: "SyncReport") -> list[Json]:
    failures: list[Json] = [
        {"document": c.external_id, "code": f.code, "message": f.message, "task_id": c.task_id}
        for c, f in report.ingest.failures
    ]
    bad = [b for p in report.passes for b in p.bad]
    tasks = _ledger(engine, space) if bad else {}
    return failures + [
        {"document": b.external_id, "code": b.code, "message": b.message, "task_id": tasks.get((b.external_id, b.code))}
        for b in bad
    ]


def _ledger(engine: "Engine", space: "Space") -> dict[tuple[str, str], int]:
    """Tasks of failed documents, the newest of each."""
    from kb_pipeline.store import tasks
    from kb_pipeline.store.database import connection

    with connection(engine.pool) as c:
        rows: Sequence[Any] = tasks.failed_documents(c, space.id, _FAILURES)
    return {(r.external_id, r.error_code): r.task_id for r in reversed(rows)}


def _unfinished(engine: "Engine", space: "Space") -> dict[str, int]:
    from kb_pipeline.store import status
    from kb_pipeline.store.database import connection

    with connection(engine.pool) as c:
        by_status = status.counts(c, space.id)["tasks"]
    return {k: n for k, n in by_status.items() if k not in ("SUCCESS", "CANCELED")}
