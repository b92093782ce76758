"""``kb reconcile``, ``kb purge``, ``kb gc``: what keeps a space true and small over the years."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import Output, counted
from kb_pipeline.cli.session import SOME_FAILED, session_of
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.maintenance.reconcile import ReconcileReport

SpaceKey = Annotated[str, typer.Argument(metavar="SPACE")]
KINDS = ("missing", "orphaned", "wrong")


def reconcile(
    ctx: typer.Context,
    space: SpaceKey,
    report_only: Annotated[bool, typer.Option("--report-only", help="Compare only; nothing is changed.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try vectors now that failed before, five times again.")
    ] = False,
) -> None:
    """Compare the vector index with the database, id by id, and repair it. Exit code 3: differences remain."""
    from kb_pipeline.maintenance.reconcile import reconcile as compare

    session = session_of(ctx)
    with session.app() as opened:
        report = compare(
            opened.engine, opened.space(space), repair=not report_only, retry_failed=retry_failed, progress=session.progress
        )
    found = reconcile_document(report)
    if not session.out.document(found):
        _tell_differences(session.out, found)
    _tell_what_remains(session.out, report, report_only=report_only)
    if report.remaining:
        raise typer.Exit(SOME_FAILED)


def purge(
    ctx: typer.Context,
    space: SpaceKey,
    keep_days: Annotated[int, typer.Option(min=0, metavar="N", help="How long answers, and what they rest on, are kept.")] = 30,
) -> None:
    """Archive versions beyond those the space retains, and remove what nothing refers to any more."""
    from datetime import timedelta

    from kb_pipeline.maintenance.purge import purge as forget

    session = session_of(ctx)
    with session.app() as opened:
        report = forget(opened.engine, opened.space(space), keep=timedelta(days=keep_days), progress=session.progress)
    if not session.out.document(asdict(report)):
        done = [
            counted(report.versions, "version", "archived"),
            *(counted(getattr(report, f"{thing}s"), thing, "removed") for thing in ("chunk", "vector", "object")),
            *(counted(getattr(report, f"{thing}s"), thing, "forgotten") for thing in ("embedding", "answer", "log")),
        ]
        session.out.line("; ".join(x for x in done if x) or "Nothing to purge")


def gc(ctx: typer.Context, space: SpaceKey) -> None:
    """Erase vectors of chunks that are no longer current, and rebuild an index that is full of dead ones."""
    from kb_pipeline.maintenance.sweep import compact_index
    from kb_pipeline.maintenance.vector_gc import collect_vectors
    from kb_pipeline.store.database import connection
    from kb_pipeline.store.erasure import waiting_tombstones

    session = session_of(ctx)
    with session.app() as opened:
        owner = opened.space(space)
        vectors = collect_vectors(opened.engine, owner)
        with connection(opened.pool) as c:
            waiting = sum(waiting_tombstones(c, owner.id).values())
        compacted = compact_index(opened.engine, owner)
    if not session.out.document({"space": space, "vectors": vectors, "waiting": waiting, "compacted": compacted}):
        done = [counted(vectors, "vector", "erased"), "index rebuilt" if compacted else ""]
        session.out.line("; ".join(x for x in done if x) or "Nothing to erase")
    if waiting:
        session.out.hint(
            f"{counted(waiting, 'vector', 'waiting')}: their document is being worked on, or the index could not delete them; "
            f"later: kb gc {space}"
        )


COMMANDS: dict[str, Callable[..., None]] = {"reconcile": reconcile, "purge": purge, "gc": gc}


def reconcile_document(report: "ReconcileReport") -> Json:
    """The report under the names that scripts rely on."""
    counts = {
        k: getattr(report, k)
        for k in ("chunks", "vectors", *KINDS, "repaired", "remaining", "postponed", "waiting", "embedded")
    }
    error = report.error and {"code": report.error.code, "message": report.error.message}
    return {"space": report.space, **counts, "samples": report.samples, "error": error}


def _tell_differences(out: Output, found: Json) -> None:
    out.line(f"{found['chunks']} current chunks, {found['vectors']} vectors in the index")
    if not any(found[kind] for kind in KINDS):
        return out.line("They are equal")
    out.line(", ".join(f"{found[kind]} {kind}" for kind in KINDS) + f"; {found['repaired']} repaired")
    rows = [
        (kind, s.get("external_id"), s["document_id"], s["chunk_id"], s["vec_id"])
        for kind in KINDS
        for s in found["samples"][kind]
    ]
    out.table(("difference", "document", "id", "chunk", "vector"), rows, "")


def _tell_what_remains(out: Output, report: "ReconcileReport", *, report_only: bool) -> None:
    if report.error is not None:
        out.hint(f"a text could not be embedded: {report.error.message} [{report.error.code}]")
    if report.remaining:
        when = "to repair" if report_only else "later"
        out.hint(f"{counted(report.remaining, 'difference', 'left')}: {when}, kb reconcile {report.space}")
    if report.postponed:
        out.hint(
            f"{counted(report.postponed, 'vector', 'not tried')}: failed before, and not due yet or five times: "
            f"to try now, kb reconcile {report.space} --retry-failed"
        )
    if report.waiting:
        out.hint(f"{counted(report.waiting, 'vector', 'waiting')} to be erased: kb gc {report.space}")
