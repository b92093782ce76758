"""What serves a space, changed without a gap: index, model and chunking in ``kb space set``, and what follows it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.options import adapter_options, masked
from kb_pipeline.cli.session import Session, session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.maintenance.rebuild import BuildReport
    from kb_pipeline.store.indexes import Index
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

Key = Annotated[str, typer.Argument(metavar="KEY", help="Its short name.")]
PARTS = ("index", "embedder")


def index_changes(given: Mapping[str, str]) -> dict[str, Any]:
    """``index``, ``index.OPTION``, ``embedder``, ``embedder.OPTION`` as App.change_index takes them."""
    from kb_pipeline.registry import EMBEDDERS, INDEXES

    adapters = {"index": INDEXES, "embedder": EMBEDDERS}
    changes: dict[str, Any] = {p: given[p] for p in PARTS if p in given}
    for part in PARTS:
        options = {k.partition(".")[2]: v for k, v in given.items() if k.startswith(f"{part}.")}
        if options:
            changes[f"{part}_options"] = (options, adapters[part])
    return changes


def change(opened: "App", space: "Space", changes: dict[str, Any]) -> bool:
    """Begin. True: something is to be built."""
    kinds = {"index": changes.get("index", space.index_kind), "embedder": changes.get("embedder", space.embedder)}
    for part in PARTS:
        if f"{part}_options" in changes:
            options, adapters = changes[f"{part}_options"]
            kept = {"index": space.index_options, "embedder": space.embedder_options}[part] if part not in changes else {}
            changes[f"{part}_options"] = {**kept, **adapter_options(adapters, kinds[part], options)}
    return opened.change_index(space, **changes)


def rechunk(session: Session, opened: "App", space: "Space") -> Json:
    """Every document is cut anew from what is stored, as ordinary tasks: each is seen as it was, or as it will be."""
    from kb_pipeline.maintenance.reparse import reparse_space
    from kb_pipeline.pipeline import ingest
    from kb_pipeline.sync import settle

    queued = reparse_space(opened.engine, space, progress=session.progress)
    report = ingest(opened.engine, space, progress=session.progress)
    settle(opened.engine, space, loaded=report.published)
    if report.stopped is not None:
        raise report.stopped
    return {"queued": queued.queued, "published": report.published, "failed": report.failed, **report.counts}


def built(session: Session, opened: "App", space: "Space") -> "BuildReport":
    """Tells the ways on where it fails."""
    from kb_pipeline.errors import KbError

    try:
        return opened.build_index(space, session.progress)
    except KbError as e:
        if not isinstance(e, Misconfigured):
            ways = f"kb space build {space.key} goes on, kb space cancel {space.key} gives it up"
            session.out.hint(f"Space {space.key} is served as before: {ways}")
        raise


def index_document(index: "Index", left: int) -> Json:
    return {
        "name": index.ref.name, "kind": index.ref.kind, "options": masked(index.ref.options), "model": index.fingerprint,
        "state": "serving" if index.status == "SERVING" else "building" if index.building else "kept",
        "chunks": index.wanted, "left": left, "served_at": index.served_at, "keep_until": index.keep_until,
        "agreement": index.agreement, "error": index.error,
    }  # fmt: skip


def indexes_of(opened: "App", space: "Space") -> list[Json]:
    from kb_pipeline.store import indexes
    from kb_pipeline.store.database import connection

    with connection(opened.pool) as c:
        return [index_document(i, indexes.todo_left(c, i.ref.index_id)) for i in indexes.living(c, space.id)]


def build_document(report: "BuildReport") -> Json:
    return {
        "space": report.space, "index": report.index, "kind": report.kind, "model": report.model, "chunks": report.chunks,
        "embedded": report.embedded, "agreement": report.agreement,
    }  # fmt: skip


def tell_built(session: Session, report: "BuildReport") -> None:
    if session.out.document(build_document(report)):
        return
    session.out.line(
        f"Space {report.space} is served by {report.kind} index {report.index}, model {report.model}: "
        f"{report.chunks} chunks given, {report.embedded} embedded"
    )
    if report.agreement is not None:
        session.out.line(
            f"Of the ten best chunks both indexes had {report.agreement:.0%} in common. Back: kb space back {report.space}"
        )


def build(ctx: typer.Context, key: Key) -> None:
    """Go on building the index that was asked for, until it serves."""
    session = session_of(ctx)
    with session.app() as opened:
        report = built(session, opened, opened.space(key))
    tell_built(session, report)


def cancel(ctx: typer.Context, key: Key) -> None:
    """Give up the index that is being built; the serving one is not touched."""
    from kb_pipeline.maintenance import rebuild
    from kb_pipeline.store import indexes
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened:
        index = rebuild.cancel(opened.engine, opened.space(key), keep_seconds=opened.keep_index_seconds)
        with connection(opened.pool) as c:
            left = [i.ref.name for i in indexes.dropping(c, opened.space(key).id)]
    if not session.out.document({"space": key, "index": index.ref.name, "status": "CANCELED", "not_dropped": left}):
        session.out.line(f"{index.ref.kind} index {index.ref.name} is given up; space {key} is served as before")
    if left:
        session.out.hint(f"Could not be dropped: {', '.join(left)}. The next purge tries again: kb purge {key}")


def back(ctx: typer.Context, key: Key) -> None:
    """Serve by the former index again, which was kept up to date: nothing is embedded."""
    from kb_pipeline.maintenance import rebuild

    session = session_of(ctx)
    with session.app() as opened:
        rebuild.back(opened.engine, opened.space(key))
        report = built(session, opened, opened.space(key))
    tell_built(session, report)


def list_indexes(ctx: typer.Context, key: Key) -> None:
    """What serves the space, what is being built, and what is kept to go back to."""
    session = session_of(ctx)
    with session.app() as opened:
        found = indexes_of(opened, opened.space(key))
    if not session.out.document({"space": key, "indexes": found}):
        columns = ("name", "kind", "model", "state", "chunks", "left", "keep_until", "error")
        session.out.table(columns, [[i[c] for c in columns] for i in found], "None: the space is being made or removed")


def chunking_of(text: str) -> dict[str, str]:
    """``max_tokens:300,context:path``. Raises Misconfigured."""
    found: dict[str, str] = {}
    for part in (p for p in text.split(",") if p.strip()):
        name, colon, value = part.partition(":")
        if not colon:
            raise Misconfigured(f"chunking={text}: write it as max_tokens:300,context:path", code="bad_option")
        found[name.strip()] = value.strip()
    return found


COMMANDS = {"build": build, "cancel": cancel, "back": back, "indexes": list_indexes}
