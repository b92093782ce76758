"""``kb space``: knowledge bases."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli import space_index
from kb_pipeline.cli.options import adapter_options, masked, pairs, truth, whole_number
from kb_pipeline.cli.session import COULD_NOT, session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.spaces import Space

NAME = "space"
app = typer.Typer(help="Knowledge bases: the unit of isolation and deletion.", no_args_is_help=True)
for name, command in space_index.COMMANDS.items():
    app.command(name)(command)
Key = Annotated[str, typer.Argument(metavar="KEY", help="Its short name: a-z, 0-9, '-' and '_'.")]


def space_document(space: "Space") -> Json:
    return {
        "key": space.key,
        "name": space.name,
        "status": space.status,
        "index": space.index_kind,
        "index_options": masked(space.index_options),
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
    index_option: Annotated[
        list[str], typer.Option(metavar="K=V", help="Option of the index; secrets as env:NAME or file:PATH.")
    ] = [],  # noqa: B006
    embedder: Annotated[str | None, typer.Option(help="Embedding model; KB_EMBEDDER when left out.")] = None,
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
    from kb_pipeline.registry import EMBEDDERS, INDEXES

    session = session_of(ctx)
    checked_schedule(schedule, time_zone)
    chunking, options = _chunking(pairs(chunk, "--chunk")), pairs(embedder_option, "--embedder-option")
    with session.app() as opened:
        of_index = adapter_options(INDEXES, index or opened.settings.index, pairs(index_option, "--index-option"))
        typed = adapter_options(EMBEDDERS, embedder or opened.settings.embedder, options)
        space = opened.add_space(
            key, name=name, embedder=embedder, embedder_options=typed, index=index, index_options=of_index,
            retained_versions=retain, schedule=schedule, time_zone=time_zone, chunking=chunking,
            audience=_audience(",".join(audience)),
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
        found = space_document(space) | contents(opened, space) | {"indexes": space_index.indexes_of(opened, space)}
    if not session.out.document(found):
        session.out.pairs(
            {k: v for k, v in found.items() if k not in ("sources", "indexes")}
            | {"sources": [s["name"] for s in found["sources"]]}
            | {"indexes": [f"{i['kind']} {i['name']} ({i['state']})" for i in found["indexes"]]}
        )


@app.command("set")
def set_(
    ctx: typer.Context,
    key: Key,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="K=V ...",
            help="name, schedule, time_zone, retain, audience=A,B (audience= for everybody), index=KIND, index.OPTION=V, "
            "embedder=KIND, embedder.OPTION=V, chunking=max_tokens:300,context:path.",
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Build another index here and now, or leave it to `kb up`.")
    ] = True,
) -> None:
    """Change settings of a space. Another index or model is built beside the one that serves: no search fails meanwhile."""
    from kb_pipeline.store import spaces
    from kb_pipeline.store.database import transaction

    session = session_of(ctx)
    given = pairs(values, "setting")
    of_index = {k: v for k, v in given.items() if k.partition(".")[0] in space_index.PARTS}
    to_build = space_index.index_changes(of_index)
    changes = _changes({k: v for k, v in given.items() if k not in of_index})
    built = cut = None
    with session.app() as opened:
        space = opened.space(key)
        if changes:
            with transaction(opened.pool) as c:
                spaces.update_space(c, space.id, changes)
            space = opened.space(key)
        if "chunking" in changes:
            cut = space_index.rechunk(session, opened, space)
        if to_build and space_index.change(opened, space, to_build) and wait:
            built = space_index.built(session, opened, space)
        space, indexes = opened.space(key), space_index.indexes_of(opened, space)
    found = space_document(space) | {"indexes": indexes} | ({"rechunked": cut} if cut else {})
    if not session.out.document(found | ({"built": space_index.build_document(built)} if built else {})):
        session.out.pairs(space_document(space))
        if built is not None:
            space_index.tell_built(session, built)


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
    from kb_pipeline.cli.partition import forget_partition
    from kb_pipeline.maintenance.delete_space import delete_space

    with session.app() as opened:
        residue = delete_space(opened.engine, opened.space(key))
        deleted = not any(residue.values())
        residue["partitions"] = forget_partition(opened.settings, key)
    left = sum(residue.values())
    if not session.out.document({"key": key, "status": "DELETED" if deleted else "DELETING", "residue": residue}):
        session.out.line(f"Space {key} is deleted; nothing is left of it" if not left else f"Left of space {key}: {residue}")
    if left:
        again = "`kb up` takes its partition away" if deleted else f"run the same command again: kb space remove {key} --yes"
        session.out.hint(f"Something of space {key} is still there: {again}")
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
            case "chunking":
                from kb_pipeline.wiring import checked_chunking

                changes["chunking"] = _chunking(space_index.chunking_of(value))
                checked_chunking(changes["chunking"])
            case _:
                raise Misconfigured(
                    f"a space's {key!r} cannot be set: choose name, schedule, time_zone, retain, audience, index, embedder or "
                    "chunking",
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
