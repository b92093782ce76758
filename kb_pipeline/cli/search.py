"""``kb search``: a question, and the chunks that answer it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import Output, excerpt
from kb_pipeline.cli.session import session_of
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.model import Answer

NAME = "search"


def command(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    question: Annotated[list[str], typer.Argument(metavar="QUESTION")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many chunks at most.")] = 5,
    principals: Annotated[
        list[str], typer.Option("--as", metavar="PRINCIPAL", help="Search as this user or group; several: as all of them.")
    ] = [],  # noqa: B006
) -> None:
    """The best chunks for a question. Without --as only what everybody may read."""
    from kb_pipeline.search import search

    session = session_of(ctx)
    with session.app() as opened:
        answer = search(opened.engine, opened.space(space), " ".join(question), k=k, principals=principals)
    found = answer_document(answer)
    if not session.out.document(found):
        for hit in found["hits"]:
            tell_hit(session.out, hit, lines=4)
        if not found["hits"]:
            session.out.line(
                f"Nothing found in space {space}. kb status {space} shows what it holds; --as PRINCIPAL what is not public"
            )


def answer_document(answer: "Answer") -> Json:
    return {
        "answer_id": answer.answer_id,
        "question": answer.question,
        "at": answer.at,
        "hits": [asdict(h) for h in answer.hits],
    }


def tell_hit(out: Output, hit: Json, *, lines: int = 2) -> None:
    out.line(f"{hit['score']:.3f}  {hit['external_id']}{''.join(f' > {t}' for t in hit['title_path'])}", style="bold")
    out.line(f"       {excerpt(hit['text'], 100 * lines)}")
