"""``kb demo``: a space that answers questions a minute after the installation."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.output import Output
from kb_pipeline.cli.session import COULD_NOT, session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

NAME = "demo"
SPACE, SOURCE = "demo", "docs"
QUESTIONS = (
    "用户申请删除个人信息后多少天内处理完？",
    "出差住宿每晚的标准是多少？",
    "How do I get one damaged table back from a backup?",
    "How quickly must I acknowledge a P1 page?",
)
_SAMPLES = Path(__file__).parents[1] / "samples"


def command(
    ctx: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A folder of yours; the bundled samples when left out.")
    ] = None,
) -> None:
    """Make space `demo` from a folder or the bundled samples, and ask it. Again: sync it again."""
    from kb_pipeline.cli.sync import exit_code, sync_document, tell_sync, tell_trouble
    from kb_pipeline.search import search
    from kb_pipeline.sync import sync_space

    session = session_of(ctx)
    folder = (path.expanduser().absolute() if path else session.settings().home / "samples").resolve()
    if path and not folder.is_dir():
        raise Misconfigured(f"{folder} is no folder: kb demo FOLDER, or kb demo for the bundled samples", code="no_folder")
    with session.app() as opened:
        space = _space(opened, folder, bundled=path is None)
        report = sync_space(opened.engine, space, progress=session.progress)
        found = sync_document(opened.engine, space, report)
        code = exit_code(report)
        asked = QUESTIONS if path is None and code != COULD_NOT else ()
        answers = [asdict(search(opened.engine, space, q, k=1)) for q in asked]
    if not session.out.document({"space": SPACE, "path": folder, "sync": found, "answers": answers}):
        tell_sync(session.out, found)
        _tell_answers(session.out, answers)
        if code != COULD_NOT:
            _tell_next(session.out, folder)
    tell_trouble(session.out, found)
    raise typer.Exit(code)


def _space(app: "App", folder: Path, *, bundled: bool) -> "Space":
    """Made, or finished, or found. Raises Misconfigured where it was made from another folder."""
    from kb_pipeline.store import sources
    from kb_pipeline.store.database import connection

    space = next((s for s in app.spaces() if s.key == SPACE), None)
    have: list[Any] = []
    if space is not None:
        with connection(app.pool) as c:
            have = sources.list_sources(c, space.id)
    source = next((s for s in have if s.name == SOURCE), None)
    if source is not None and source.config.get("path") != str(folder):
        raise Misconfigured(
            f"space {SPACE} was made from {source.config.get('path')}, not from {folder}: make a space of your own with "
            f"kb space add, or begin anew with kb space remove {SPACE} --yes",
            code="demo_exists",
        )
    if bundled:
        copy_samples(_SAMPLES, folder)
    space = space or app.add_space(SPACE, name="Demo")
    if source is None:
        app.add_source(space, SOURCE, "local_dir", {"path": str(folder)})
    return space


def copy_samples(bundled: Path, folder: Path) -> None:
    """Once: a later run must not bring back what the user has edited or deleted. A half-made copy is made anew."""
    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(bundled, partial, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    partial.rename(folder)


def _tell_answers(out: Output, answers: list[Json]) -> None:
    from kb_pipeline.cli.search import tell_hit

    for answer in answers:
        out.line()
        out.line(f"? {answer['question']}")
        for hit in answer["hits"]:
            tell_hit(out, hit)


def _tell_next(out: Output, folder: Path) -> None:
    out.line()
    out.line("Next:")
    for command_line, what in (
        (f'kb search {SPACE} "your question"', "ask it"),
        (f"kb sync {SPACE}", f"after you have edited a file in {folder}"),
        ("kb up", "the web UI"),
        ("kb space add mydocs", "a space of your own, then:"),
        ("kb source add mydocs docs local_dir path=FOLDER", ""),
        ("kb sync mydocs", ""),
        ('kb search mydocs "your question"', ""),
    ):
        out.line(f"  {command_line.ljust(48)} {what}".rstrip())
