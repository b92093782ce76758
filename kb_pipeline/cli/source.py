"""``kb source``: what a space is made from."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.options import adapter_options, masked, pairs
from kb_pipeline.cli.output import when
from kb_pipeline.cli.session import session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.sources import Source
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

NAME = "source"
app = typer.Typer(help="Where the documents of a space come from.", no_args_is_help=True)
Where = Annotated[list[str], typer.Argument(metavar="[SPACE] NAME", help="SPACE may be left out where the name is unique.")]


def source_document(space: "Space", source: "Source", last: Any) -> Json:
    """``last``: the row of its last pass, or None."""
    return {
        "space": space.key,
        "name": source.name,
        "kind": source.kind,
        "status": source.status,
        "config": masked(source.config),
        "verdict": last.verdict if last else None,
        "last_pass": pass_document(last),
        "watermark": source.watermark,
        "waiting_deletions": source.waiting_deletions,
        "approved": source.approved,
        "listing_count": source.listing_count,
        "listing_at": source.listing_at,
    }


def pass_document(last: Any) -> Json | None:
    keys = ("status", "verdict", "reasons", "counts", "started_at", "finished_at", "error")
    return {k: getattr(last, k) for k in keys} if last else None


@app.command("add")
def add(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Your name for it.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Its connector, as local_dir.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="K=V ...", help="Options of the connector; secrets as env:NAME or file:PATH.")
    ] = None,
) -> None:
    """Add a source that answers. `kb sync SPACE` reads it."""
    from kb_pipeline.registry import CONNECTORS

    session = session_of(ctx)
    config = adapter_options(CONNECTORS, kind, pairs(options or [], "option"))
    with session.app() as opened:
        owner = opened.space(space)
        made = opened.add_source(owner, name, kind, config)
    if not session.out.document(source_document(owner, made, None)):
        session.out.line(f"Source {name} ({kind}) is added to space {space}. Next: kb sync {space}")


@app.command("list")
def list_(ctx: typer.Context, space: Annotated[str | None, typer.Argument(metavar="[SPACE]")] = None) -> None:
    """Sources of a space, or of all."""
    from kb_pipeline.store import sources, status
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    found = []
    with session.app() as opened:
        for owner in [opened.space(space)] if space else opened.spaces():
            with connection(opened.pool) as c:
                jobs = status.last_jobs(c, owner.id)
                found += [source_document(owner, s, jobs.get(s.id)) for s in sources.list_sources(c, owner.id)]
    if not session.out.document({"sources": found}):
        rows = [
            [
                s["space"],
                s["name"],
                s["kind"],
                s["status"],
                s["verdict"],
                s["listing_count"],
                s["waiting_deletions"],
                s["config"],
            ]
            for s in found
        ]
        columns = ("space", "name", "kind", "status", "verdict", "documents", "waiting deletions", "options")
        session.out.table(columns, rows, "No source yet: kb source add SPACE docs local_dir path=FOLDER")


@app.command("show")
def show(ctx: typer.Context, where: Where) -> None:
    """Its options, and how its last pass ended."""
    session = session_of(ctx)
    with session.app() as opened:
        space, source = _find(opened, where)
        found = _current(opened, space, source.name)
    if not session.out.document(found):
        last = found["last_pass"] or {}
        session.out.pairs(
            {k: v for k, v in found.items() if k != "last_pass"}
            | {"last pass": when(last.get("finished_at")), "error": last.get("error")}
        )
        for reason in last.get("reasons") or ():
            session.out.line(f"  {reason}")


@app.command("test")
def test(ctx: typer.Context, where: Where) -> None:
    """Can it be reached with these options?"""
    session = session_of(ctx)
    with session.app() as opened:
        space, source = _find(opened, where)
        told = opened.engine.connector(source).check()
    if not session.out.document(
        {"space": space.key, "name": source.name, "kind": source.kind, "reachable": True, "check": told}
    ):
        session.out.line(f"Source {source.name} answers")
        session.out.pairs(told)


@app.command("pause")
def pause(ctx: typer.Context, where: Where) -> None:
    """Do not read it until it is resumed; its documents stay."""
    _set_status(ctx, where, "PAUSED")


@app.command("resume")
def resume(ctx: typer.Context, where: Where) -> None:
    """Read it again."""
    _set_status(ctx, where, "ACTIVE")


@app.command("approve")
def approve(
    ctx: typer.Context,
    where: Where,
    up_to: Annotated[int, typer.Option("--up-to", min=0, help="How many documents may be deleted.")] = ...,  # type: ignore[assignment]
) -> None:
    """Allow deletions that a much shorter listing asks for; the next pass carries them out."""
    from kb_pipeline.store import sources
    from kb_pipeline.store.database import transaction

    session = session_of(ctx)
    with session.app() as opened:
        space, source = _find(opened, where)
        with transaction(opened.pool) as c:
            sources.approve(c, source.id, up_to)
        found = _current(opened, space, source.name)
    if not session.out.document(found):
        session.out.line(
            f"Up to {up_to} deletions in {source.name} are approved; {source.waiting_deletions} wait. Next: kb sync {space.key}"
        )


@app.command("remove")
def remove(
    ctx: typer.Context,
    where: Where,
    yes: Annotated[bool, typer.Option("--yes", help="Really delete its documents.")] = False,
) -> None:
    """Forget a source, and delete its documents from the space. The source itself is not touched."""
    from kb_pipeline.maintenance.deletion import remove_source
    from kb_pipeline.maintenance.vector_gc import collect_vectors

    session = session_of(ctx)
    with session.app() as opened:
        space, source = _find(opened, where)
        if not yes:
            raise Misconfigured(
                f"removing source {source.name!r} deletes its documents from space {space.key}: "
                f"kb source remove {space.key} {source.name} --yes",
                code="not_confirmed",
            )
        deleted = remove_source(opened.engine, space, source)
        vectors = collect_vectors(opened.engine, space)
    found = {"space": space.key, "name": source.name, "kind": source.kind, "status": "REMOVED"}
    if not session.out.document(found | {"deleted": deleted, "vectors_deleted": vectors}):
        session.out.line(f"Source {source.name} is removed; deleted: {deleted} documents, {vectors} vectors")


def _set_status(ctx: typer.Context, where: list[str], status: str) -> None:
    from kb_pipeline.store import sources
    from kb_pipeline.store.database import transaction

    session = session_of(ctx)
    with session.app() as opened:
        space, source = _find(opened, where)
        with transaction(opened.pool) as c:
            sources.set_status(c, source.id, status)
        found = _current(opened, space, source.name)
    if not session.out.document(found):
        session.out.line(f"Source {source.name} in space {space.key} is {status}")


def _current(app: "App", space: "Space", name: str) -> Json:
    from kb_pipeline.store import sources, status
    from kb_pipeline.store.database import connection

    with connection(app.pool) as c:
        source = sources.get_source(c, space.id, name)
        return source_document(space, source, status.last_jobs(c, space.id).get(source.id))


def _find(app: "App", where: list[str]) -> "tuple[Space, Source]":
    """SPACE NAME, or a NAME that only one space has. Raises Misconfigured."""
    from kb_pipeline.store import sources, spaces
    from kb_pipeline.store.database import connection

    *key, name = where
    if len(key) > 1:
        raise Misconfigured(f"{len(where)} names are given: write SPACE NAME, or NAME alone", code="bad_option")
    with connection(app.pool) as c:
        if key:
            space = spaces.get_space(c, key[0])
            return space, sources.get_source(c, space.id, name)
        found = sources.find_sources(c, name)
        owners = [s for s in spaces.list_spaces(c) if s.id in {f.space_id for f in found}]
    if not owners:
        raise Misconfigured(f"no source {name!r}: kb source list shows them", code="no_source")
    if len(owners) > 1:
        keys = ", ".join(s.key for s in owners)
        raise Misconfigured(f"source {name!r} exists in the spaces {keys}: name the space before it", code="ambiguous_source")
    return owners[0], found[0]
