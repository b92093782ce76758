"""The ``kb`` command: global options, the list of commands, and what becomes of errors.

Exit codes: 0 done; 1 could not; 2 wrong usage; 3 done, but some documents failed, or differences remain; 4 done, but deletions
wait for approval.
"""

import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from kb_pipeline import __version__
from kb_pipeline.cli import alerts, answer, demo, doc, init, search, source, space, status, sync, task, up, upkeep
from kb_pipeline.cli.output import Output, forgive_encodings, printable
from kb_pipeline.cli.session import COULD_NOT, USAGE, Session
from kb_pipeline.errors import KbError, Misconfigured, MissingExtra

app = typer.Typer(
    name="kb", help="Keeps retrieval knowledge bases true.", add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for module in (init, demo, up, sync, search, answer, status):
    app.command(module.NAME)(module.command)
for name, command in upkeep.COMMANDS.items():
    app.command(name)(command)
for noun in (space, source, task, doc, alerts):
    app.add_typer(noun.app, name=noun.NAME)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kb {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    ctx: typer.Context,
    home: Annotated[
        Path | None, typer.Option(help="Data folder; KB_HOME, or .kb in the working directory, when left out.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout; also accepted behind the command.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and show where an error came from.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    ctx.obj = Session(home, debug, Output(as_json=as_json))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The exit code; an error that is not a KbError comes through, for the excepthook to tell."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = (option in _before_dashes(arguments) for option in ("--json", "--debug"))
    if argv is None:
        _own_process(debug)
    try:
        _require_text(arguments)
        typer.main.get_command(app)(args=_json_first(arguments), prog_name="kb")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else COULD_NOT if e.code else 0
    except KbError as e:
        if debug or _debugs():
            traceback.print_exception(e)
        return _refuse(e, as_json=as_json)
    return 0


def _own_process(debug: bool) -> None:
    """What holds for the whole process. SIGTERM ends a command as Ctrl-C does: what is open is closed."""
    forgive_encodings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not debug:
        sys.excepthook = _tell_bug


def _refuse(error: KbError, *, as_json: bool) -> int:
    Output(as_json=as_json).document({"error": {"code": error.code, "message": error.message}})
    print(f"kb: {printable(error.message)}", file=sys.stderr)
    return USAGE if isinstance(error, Misconfigured | MissingExtra) else COULD_NOT


def _tell_bug(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if _debugs():
        return sys.__excepthook__(kind, error, where)
    first = (str(error).strip().splitlines() or [""])[0][:300]
    print(f"kb: unexpected {kind.__name__}: {printable(first)}. kb --debug ... shows where it came from", file=sys.stderr)


def _require_text(arguments: Sequence[str]) -> None:
    """Bytes that are no UTF-8 arrive as surrogates, which nothing can store or print."""
    for argument in arguments:
        if any("\ud800" <= c <= "\udfff" for c in argument):
            shown = argument.encode("ascii", "backslashreplace").decode("ascii")
            raise Misconfigured(
                f"argument {shown!r} is not UTF-8: type it in a UTF-8 terminal, or rename the file", code="not_utf8"
            )


def _debugs() -> bool:
    """KB_LOG_LEVEL=DEBUG, once the settings have been read."""
    return logging.getLogger("kb_pipeline").isEnabledFor(logging.DEBUG)


def _json_first(arguments: Sequence[str]) -> list[str]:
    """Scripts write ``--json`` at either end."""
    before = _before_dashes(arguments)
    rest = [a for a in before if a != "--json"] + list(arguments[len(before) :])
    return ["--json", *rest] if len(rest) < len(arguments) else rest


def _before_dashes(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments
