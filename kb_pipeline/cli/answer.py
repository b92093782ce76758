"""``kb answer``: what an answer was based on, and whether an exact ranking of what was current then gives it again."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import Output, when
from kb_pipeline.cli.search import answer_document, tell_hit, tell_withheld
from kb_pipeline.cli.session import session_of
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.as_of import Replay

NAME = "answer"


def command(
    ctx: typer.Context,
    answer_id: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1)],
    replay: Annotated[bool, typer.Option("--replay", help="Rank everything of then again, exactly, and compare.")] = False,
) -> None:
    """The chunks that an answer consisted of, without what may not be shown any more."""
    from kb_pipeline.as_of import read_answer
    from kb_pipeline.as_of import replay as rank_again

    session = session_of(ctx)
    with session.app() as opened:
        space, logged, answer = read_answer(opened.engine, answer_id)
        found = answer_document(answer) | {"space": space.key, "principals": logged.principals, "k": logged.k}
        again = rank_again(opened.engine, space, logged, answer, session.progress) if replay else None
    if again is not None:
        found["replay"] = replay_document(again)
    if not session.out.document(found):
        _tell(session.out, found)


def replay_document(replay: "Replay") -> Json:
    return {
        "equal": not replay.differences,
        "hits": [asdict(h) for h in replay.hits],
        "differences": [asdict(d) for d in replay.differences],
    }


def _tell(out: Output, found: Json) -> None:
    asker = f", asked as {', '.join(found['principals'])}" if found["principals"] else ""
    out.line(f"? {found['question']}")
    out.line(f"{when(found['at'])}, space {found['space']}{asker}")
    for hit in found["hits"]:
        tell_hit(out, hit)
    tell_withheld(out, found)
    if "replay" in found:
        out.line()
        _tell_replay(out, found["replay"])


def _tell_replay(out: Output, again: Json) -> None:
    if again["equal"]:
        return out.line("Replayed: an exact ranking of what was current then gives the same hits")
    columns = ("place", "logged chunk", "score", "replayed chunk", "score")
    keys = ("position", "logged_chunk", "logged_score", "replayed_chunk", "replayed_score")
    out.line("Replayed: an exact ranking of what was current then differs from the answer")
    out.table(columns, [[d[k] for k in keys] for d in again["differences"]], "")
