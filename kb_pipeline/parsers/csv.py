"""CSV and TSV to tables of pipe rows. Every table repeats the header row, so that a piece of it can name its columns."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import BinaryIO
from zlib import crc32

from pydantic import BaseModel, ConfigDict

from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.parsers.encoding import Text, open_text

DELIMITERS = ",\t;|"
SNIFF_LINES = 50
SNIFF_CHARS = 64 << 10
MIN_ROWS, MAX_ROWS, ONE_IN = 8, 64, 16  # a table ends behind a row whose hash says so: about every 24 rows
MAX_CHARS = 64 << 10
FOLD = str.maketrans({"|": "\\|", "\n": " ", "\r": " "})


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CsvParser:
    """The first row is the header. ``meta`` names the delimiter, and ``quoting`` false where quotes did not pair."""

    version = "1"

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, raw: BinaryIO, name: str) -> Parsed:
        text = open_text(raw, name)
        delimiter = _sniff(text, name)
        quoting = _quotes_pair(text, delimiter)
        rows = _rows(text.lines(), delimiter, quoting)
        return Parsed(_tables(rows), None, text.meta() | {"delimiter": delimiter, "quoting": quoting})


def _sniff(text: Text, name: str) -> str:
    """The delimiter under which most of the first rows have the same number of columns, and more than one."""
    head: list[str] = []
    for line in islice(text.lines(), SNIFF_LINES):
        head.append(line[:SNIFF_CHARS])
        if sum(map(len, head)) > SNIFF_CHARS:
            break
    best, best_score = "\t" if name.lower().endswith(".tsv") else ",", 0.0
    for delimiter in DELIMITERS:
        widths = Counter(len(row) for row in _rows(head, delimiter, quoting=_readable(head, delimiter)))
        width, count = max(widths.items(), key=lambda x: (x[1], x[0]), default=(0, 0))
        score = count / sum(widths.values()) if width > 1 else 0.0
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _quotes_pair(text: Text, delimiter: str) -> bool:
    """An opening quote that nobody closes would swallow the rest of the file into one cell: the reader's limit finds it."""
    return _readable(text.lines(), delimiter)


def _readable(lines: Iterable[str], delimiter: str) -> bool:
    try:
        for _ in _rows(lines, delimiter, quoting=True):
            pass
    except csv.Error:
        return False
    return True


def _rows(lines: Iterable[str], delimiter: str, quoting: bool) -> Iterator[list[str]]:
    """Rows that hold anything. Without quoting lines are rows, of any length."""
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter) if quoting else (x.split(delimiter) for x in lines)
    return (row for row in rows if any(cell and not cell.isspace() for cell in row))


def _tables(rows: Iterator[list[str]]) -> Iterator[Block]:
    first = next(rows, None)
    if first is None:
        return
    header = f"{_pipe_row(first)}\n|{' --- |' * len(first)}"
    table, size, cut = [header], 0, False
    for row in rows:
        line = _pipe_row(row)
        table.append(line)
        size += len(line)
        count = len(table) - 1
        # where a table ends depends on its rows only: a row put in above does not move what follows
        if cut := count >= MAX_ROWS or size > MAX_CHARS or (count >= MIN_ROWS and crc32(line.encode()) % ONE_IN == 0):
            yield Block(BlockKind.TABLE, "\n".join(table))
            table, size = [header], 0
    if not cut:
        yield Block(BlockKind.TABLE, "\n".join(table))


def _pipe_row(cells: list[str]) -> str:
    return f"| {' | '.join([cell.translate(FOLD).strip() for cell in cells])} |"
