"""``kb search``: a question, and the chunks that answer it, now or as of an earlier time."""

import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import Output, excerpt
from kb_pipeline.cli.session import session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json, Mode

if TYPE_CHECKING:
    from kb_pipeline.model import Answer

NAME = "search"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def command(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    question: Annotated[list[str], typer.Argument(metavar="QUESTION")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many chunks at most.")] = 5,
    principals: Annotated[
        list[str], typer.Option("--as", metavar="PRINCIPAL", help="Search as this user or group; several: as all of them.")
    ] = [],  # noqa: B006
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="vector, keyword or hybrid; by words where the index does (pgvector with index.keyword=true, elasticsearch).",
        ),
    ] = "vector",
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="What was found then: 2h or 3d ago, or 2026-05-01T10:00+08:00; no zone: this one's."),
    ] = None,
) -> None:
    """The best chunks for a question. Without --as only what everybody may read."""
    from kb_pipeline.as_of import as_of
    from kb_pipeline.search import search

    session = session_of(ctx)
    how = mode_of(mode, at)
    then, note = (None, "") if at is None else time_of(at, datetime.now(UTC))
    with session.app() as opened:
        owner, asked = opened.space(space), " ".join(question)
        if then is None:
            answer = search(opened.engine, owner, asked, k=k, principals=principals, mode=how)
        else:
            answer = as_of(opened.engine, owner, asked, then, k=k, principals=principals)
    if note:
        session.out.hint(note)
    found = answer_document(answer)
    if not session.out.document(found):
        for hit in found["hits"]:
            tell_hit(session.out, hit, lines=4)
        if not found["hits"]:
            found_in = f"space {space} at that time" if then else f"space {space}"
            session.out.line(
                f"Nothing found in {found_in}. kb status {space} shows what it holds; --as PRINCIPAL what is not public"
            )
        tell_withheld(session.out, found)


def answer_document(answer: "Answer") -> Json:
    return {
        "answer_id": answer.answer_id,
        "question": answer.question,
        "at": answer.at,
        "mode": answer.mode,
        "hits": [asdict(h) for h in answer.hits],
        "withheld": answer.withheld,
    }


def tell_hit(out: Output, hit: Json, *, lines: int = 2) -> None:
    out.line(f"{hit['score']:.3f}  {hit['external_id']}{''.join(f' > {t}' for t in hit['title_path'])}", style="bold")
    out.line(f"       {excerpt(hit['text'], 100 * lines)}")


def tell_withheld(out: Output, found: Json) -> None:
    if found["withheld"]:
        out.line(f"{found['withheld']} withheld: deleted, hidden or not permitted since")


def mode_of(text: str, at: str | None) -> Mode:
    """Raises Misconfigured."""
    try:
        mode = Mode(text)
    except ValueError:
        raise Misconfigured(f"--mode {text}: choose vector, keyword or hybrid", code="bad_mode") from None
    if at is not None and mode is not Mode.VECTOR:
        raise Misconfigured(f"--at {at} searches by vectors only: leave --mode out", code="bad_mode")
    return mode


def time_of(text: str, now: datetime) -> tuple[datetime, str]:
    """A time with its zone, and what to tell about how ``text`` was read. Raises Misconfigured."""
    try:
        if re.fullmatch(r"(\d+[smhdw])+", text):
            return now - sum((timedelta(**{_UNITS[u]: int(n)}) for n, u in re.findall(r"(\d+)(.)", text)), timedelta()), ""
        given = datetime.fromisoformat(text)
        local = given.astimezone()
    except (ValueError, OverflowError) as e:
        raise Misconfigured(
            f"--at {text}: write a time as 2026-05-01T10:00+08:00 or 2026-05-01T02:00Z, or how long ago: 90s, 15m, 2h, 3d, 1w",
            code="bad_time",
        ) from e
    return local, f"--at {text} has no zone: read as {local.isoformat()}" if given.tzinfo is None else ""
