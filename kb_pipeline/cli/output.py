"""What a command says: one JSON document or text for people on stdout; progress, hints and errors on stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from uuid import UUID

from kb_pipeline.model import Json

if TYPE_CHECKING:
    from rich.console import Console

    from kb_pipeline.engine import Progress

PIPED_WIDTH = 200  # columns where the output is no terminal, so that tables are not folded for a reader that has no edge
LINE_SECONDS = 5.0  # between two lines of progress where stderr is no terminal


class Output:
    """One command's voice. Text of documents is shown as it is: no markup, no emoji codes, no control characters."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: Mapping[str, Any]) -> bool:
        """Print ``value`` if JSON is wanted; False: the caller tells it to a person."""
        if self.as_json:
            print(json.dumps(value, ensure_ascii=not _is_utf8(sys.stdout), indent=2, default=_plain))
        return self.as_json

    def line(self, text: str = "", style: str = "") -> None:
        from rich.text import Text

        self._console().print(Text(printable(text), style=style), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
        """``empty`` says what to do where there is no row."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        if not rows:
            return self.line(empty)
        table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*(printable(_cell(x)) for x in row))
        self._console().print(table)

    def pairs(self, values: Mapping[str, object]) -> None:
        """Name and value, one a line; empty ones are left out."""
        shown = {k: v for k, v in values.items() if v not in (None, "", [], {}, ())}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.line(f"{name.ljust(width)}  {_cell(value)}")

    def hint(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> "Iterator[Callable[[Progress], None]]":
        """Bars on a terminal, which vanish at the end; otherwise a line now and then, and none for quick work."""
        if not sys.stderr.isatty():
            yield _line_now_and_then()
            return
        from rich import progress as rich

        columns = (
            rich.SpinnerColumn(),
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[amount]}"),
        )
        with rich.Progress(*columns, console=_console(sys.stderr), transient=True) as bars:
            bar = bars.add_task("opening", total=None, amount="")

            def show(p: "Progress") -> None:
                amount = f"{p.done}/{p.total}" if p.total else str(p.done or "")
                total = max(p.total, p.done) or None
                bars.update(bar, description=printable(p.phase), total=total, completed=p.done, amount=amount)

            yield show

    def _console(self) -> "Console":
        return _console(sys.stdout)


def printable(text: str) -> str:
    """Without control characters: text of documents and names of files must not steer the terminal."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)


def when(at: datetime | None) -> str:
    """For a person: UTC to the second."""
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def excerpt(text: str, limit: int = 160) -> str:
    """The beginning of a chunk on one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def counted(n: int, thing: str, done: str) -> str:
    """``3 chunks embedded``; nothing for none."""
    return f"{n} {thing}{'' if n == 1 else 's'} {done}" if n else ""


def tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)


def forgive_encodings() -> None:
    """A terminal that cannot show Chinese gets question marks, never an exception."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")


def rows(found: Sequence[Any]) -> list[Json]:
    """Rows of the database as objects."""
    return [r._asdict() for r in found]


def _line_now_and_then() -> "Callable[[Progress], None]":
    last = time.monotonic()

    def show(p: "Progress") -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            amount = f" {p.done}/{p.total}" if p.total else f" {p.done}" if p.done else ""
            print(f"{printable(p.phase)}{amount}", file=sys.stderr, flush=True)

    return show


def _console(stream: TextIO) -> "Console":
    from rich.console import Console

    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return when(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_cell(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _is_utf8(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, UUID | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
