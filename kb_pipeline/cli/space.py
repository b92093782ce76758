"""``kb space``: knowledge bases."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.options import adapter_options, masked, pairs, truth, whole_number
from kb_pipeline.cli.session import COULD_NOT, session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.spaces import Space

NAME = "space"
app = typer.Typer(help="Knowledge bases: the unit of isolation and deletion.", no_args_is_help=True)
Key = Annotated[str, typer.Argument(metavar="KEY", help="Its short name: a-z, 0-9, '-' and '_'.")]


def space_document(space: "Space") -> Json:
    return {
        "key": space.key,
        "name": space.name,
        "status": space.status,
        "index": space.index_kind,
        "embedder": space.embedder,
        "embedder_options": masked(space.embedder_options),
        "model": space.fingerprint,
        "dimension": space.dimension,
        "chunking": space.chunking,
        "retained_versions": space.retained_versions,
        "schedule": space.schedule,
        "time_zone": space.time_zone,
        "audience": space.audience,
    }


@app.command("add")
def add(
    ctx: typer.Context,
    key: Key,
    name: Annotated[str | None, typer.Option(help="Its name for people.")] = None,
    index: Annotated[str | None, typer.Option(help="Vector index; KB_INDEX when left out.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Embedding model; KB_EMBEDDER when left out. Cannot be changed later.")
    ] = None,
    embedder_option: Annotated[
        list[str], typer.Option(metavar="K=V", help="Option of the embedder; secrets as env:NAME or file:PATH.")
    ] = [],  # noqa: B006
    retain: Annotated[int, typer.Option(min=1, help="Versions of a document that are kept.")] = 5,
    schedule: Annotated[
        str,
        typer.Option(metavar="CRON", help="When it is synced, as in '*/15 * * * *'; `kb status` shows when it is due next."),
    ] = "",
    time_zone: Annotated[str, typer.Option(metavar="ZONE", help="Of its schedule, as in Europe/Berlin.")] = "UTC",
    audience: Annotated[
        list[str], typer.Option(metavar="PRINCIPAL", help="Who may read it; several: any of them. Left out: everybody.")
    ] = [],  # noqa: B006
    chunk: Annotated[
        list[str], typer.Option(metavar="K=V", help="max_tokens, min_tokens, sections, context (none, title, path).")
    ] = [],  # noqa: B006
) -> None:
    """Make an empty space."""
    from kb_pipeline.registry import EMBEDDERS

    session = session_of(ctx)
    checked_schedule(schedule, time_zone)
    chunking, options = _chunking(pairs(chunk, "--chunk")), pairs(embedder_option, "--embedder-option")
    with session.app() as opened:
        typed = adapter_options(EMBEDDERS, embedder or opened.settings.embedder, options)
        space = opened.add_space(
            key, name=name, embedder=embedder, embedder_options=typed, index=index, retained_versions=retain, schedule=schedule,
            time_zone=time_zone, chunking=chunking, audience=_audience(",".join(audience)),
        )  # fmt: skip
    if not session.out.document(space_document(space)):
        session.out.line(
            f"Space {space.key} is ready: {space.index_kind} index, embedder {space.embedder} ({space.dimension} dimensions)"
        )
        session.out.line(f"Next: kb source add {space.key} docs local_dir path=FOLDER")


@app.command("list")
def list_(ctx: typer.Context) -> None:
    """All spaces."""
    session = session_of(ctx)
    with session.app() as opened:
        found = [space_document(s) for s in opened.spaces()]
    if not session.out.document({"spaces": found}):
        columns = ("key", "name", "status", "index", "embedder", "schedule")
        session.out.table(columns, [[s[c] for c in columns] for s in found], "No space yet: kb demo, or kb space add KEY")


@app.command("show")
def show(ctx: typer.Context, key: Key) -> None:
    """Its settings, and what it holds."""
    from kb_pipeline.cli.status import contents

    session = session_of(ctx)
    with session.app() as opened:
        space = opened.space(key)
        found = space_document(space) | contents(opened, space)
    if not session.out.document(found):
        session.out.pairs(
            {k: v for k, v in found.items() if k != "sources"} | {"sources": [s["name"] for s in found["sources"]]}
        )


@app.command("set")
def set_(
    ctx: typer.Context,
    key: Key,
    values: Annotated[
        list[str],
        typer.Argument(metavar="K=V ...", help="name, schedule, time_zone, retain, audience=A,B (audience= for everybody)."),
    ],
) -> None:
    """Change settings of a space."""
    from kb_pipeline.store import spaces
    from kb_pipeline.store.database import transaction

    session = session_of(ctx)
    changes = _changes(pairs(values, "setting"))
    with session.app() as opened:
        with transaction(opened.pool) as c:
            spaces.update_space(c, spaces.get_space(c, key).id, changes)
        space = opened.space(key)
    if not session.out.document(space_document(space)):
        session.out.pairs(space_document(space))


@app.command("remove")
def remove(
    ctx: typer.Context, key: Key, yes: Annotated[bool, typer.Option("--yes", help="Really remove everything of it.")] = False
) -> None:
    """Delete a space: documents, versions, vectors, objects. It cannot be undone."""
    session = session_of(ctx)
    if not yes:
        raise Misconfigured(
            f"removing space {key!r} deletes its documents, versions and vectors for good: kb space remove {key} --yes",
            code="not_confirmed",
        )
    from kb_pipeline.maintenance.delete_space import delete_space

    with session.app() as opened:
        residue = delete_space(opened.engine, opened.space(key))
    left = sum(residue.values())
    if not session.out.document({"key": key, "status": "DELETING" if left else "DELETED", "residue": residue}):
        session.out.line(f"Space {key} is deleted; nothing is left of it" if not left else f"Left of space {key}: {residue}")
    if left:
        session.out.hint(f"Something of space {key} is still there: run the same command again")
        raise typer.Exit(COULD_NOT)


def checked_schedule(cron: str, zone: str = "UTC") -> str:
    """Raises Misconfigured for what is no cron line, or no time zone."""
    from datetime import UTC, datetime

    from kb_pipeline.cron import next_time, time_zone

    time_zone(zone)
    if cron:
        next_time(cron, datetime.now(UTC), zone)
    return cron


def _changes(given: dict[str, str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key, value in given.items():
        match key:
            case "name":
                changes["name"] = value
            case "schedule":
                changes["schedule"] = checked_schedule(value)
            case "time_zone":
                checked_schedule("", value)
                changes["time_zone"] = value
            case "retain" | "retained_versions":
                changes["retained_versions"] = whole_number(key, value, 1)
            case "audience":
                changes |= {"audience": _audience(value), "set_audience": True}
            case _:
                raise Misconfigured(
                    f"a space's {key!r} cannot be set: choose name, schedule, time_zone, retain or audience; "
                    "embedder, index and chunking need a new space",
                    code="bad_option",
                )
    return changes


def _audience(principals: str) -> list[list[str]] | None:
    """One clause: whoever is any of these. None: everybody."""
    names = [p.strip() for p in principals.split(",") if p.strip()]
    return [names] if names else None


def _chunking(given: dict[str, str]) -> Json:
    typed: Json = dict(given)
    for key, value in given.items():
        if key in ("max_tokens", "min_tokens"):
            typed[key] = whole_number(key, value, 1)
        elif key == "sections":
            typed[key] = truth(key, value)
    return typed
