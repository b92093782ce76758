"""Markdown to blocks: headings, fenced code, tables, tag lines, and whatever stands between two blank lines.

Works on lines, so that a large document costs no more memory than its largest block.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from kb_pipeline.model import Block, BlockKind, Json, Parsed
from kb_pipeline.parsers.encoding import open_text, storable

FRONT_CHARS = 64 << 10
FRONT_NODES = 2000
FRONT_DEPTH = 16
COMMENT_CHARS = 256 << 10

# an ATX heading; a fence, also one inside a list or a quote
MARK = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)|[ \t>]*(`{3,}|~{3,})")
SETEXT = re.compile(r" {0,3}(={2,}|-{3,})[ \t]*$")
NOT_SETEXT = re.compile(r"[ \t]*(?:[-*+>|<#]|\d{1,9}[.)][ \t]|$)| {4}|\t")  # lines that no underline makes a heading
TAG = re.compile(r"[ \t]*</?[A-Za-z][^<>]*>[ \t]*$")
FRONT_END = re.compile(r"(?:---|\.\.\.)[ \t]*$")
KEY = re.compile(r"""["']?[\w][^:#]*:(?:\s|$)""")
ANCHOR = re.compile(r"(?:^|[\s,\[{:-])&\w", re.MULTILINE)


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MarkdownParser:
    """Front matter becomes ``meta["front_matter"]``, never text. The title is the front matter's, if it has one."""

    version = "1"

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, raw: BinaryIO, name: str) -> Parsed:
        text = open_text(raw, name)
        front, lines = split_front_matter(text.lines())
        meta = text.meta()
        if front is None:
            return Parsed(split_blocks(lines), None, meta)
        values = load_front_matter(front)
        title = values.get("title") if values else None
        meta["front_matter"] = values  # None: there was one, and it could not be read
        return Parsed(split_blocks(lines), title.strip() or None if isinstance(title, str) else None, meta)


# --- front matter ---------------------------------------------------------------------------------------------------


def split_front_matter(lines: Iterable[str]) -> tuple[str | None, Iterable[str]]:
    """(YAML, the lines behind it). What does not look like keys is text behind a thematic break, and stays."""
    rest = iter(lines)
    held = [next(rest, "")]
    if held[0].rstrip(" \t") != "---":
        return None, chain(held, rest)
    size, key_seen = 0, False
    for line in rest:
        held.append(line)
        size += len(line) + 1
        if FRONT_END.match(line):
            return "\n".join(held[1:-1]), rest
        if not key_seen and line.strip() and not line.startswith("#"):
            if not KEY.match(line):
                break
            key_seen = True
        if size > FRONT_CHARS or (not key_seen and not line.strip()):
            break
    return None, chain(held, rest)


def load_front_matter(text: str) -> Json | None:
    """The mapping as JSON values, or None when it is invalid, not a mapping, or larger than any honest one."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    if ANCHOR.search(text) and text.count("*") > 16:  # aliases of aliases: a few bytes that unfold to gigabytes
        return None
    try:
        loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return _json_mapping(loaded, [FRONT_NODES]) if isinstance(loaded, dict) else {} if loaded is None else None
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError, TypeError, RecursionError):
        return None  # dates such as 2020-13-45 raise ValueError, keys such as [a] TypeError


def _json_mapping(value: dict[Any, Any], budget: list[int], depth: int = 0) -> Json:
    return {storable(str(k)): _json(v, budget, depth + 1) for k, v in value.items()}


def _json(value: Any, budget: list[int], depth: int) -> Any:
    budget[0] -= 1
    if budget[0] < 0 or depth > FRONT_DEPTH:
        raise ValueError("front matter is too large or nested too deeply")
    if isinstance(value, dict):
        return _json_mapping(value, budget, depth)
    if isinstance(value, list | tuple | set):
        return [_json(v, budget, depth + 1) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    return storable(value.isoformat() if isinstance(value, date) else str(value))


# --- blocks ---------------------------------------------------------------------------------------------------------


def split_blocks(lines: Iterable[str]) -> Iterator[Block]:
    """Blocks in reading order. HTML comments over several lines are left out: their blank lines are not boundaries."""
    pend: list[str] = []
    rest = iter(lines)
    match, kind = MARK.match, BlockKind
    comments = True
    while (line := next(rest, None)) is not None:  # not a for loop: rest may be replaced
        if comments and "<!--" in line and (start := _open_comment(line)) >= 0:
            held, behind = _to_comment_end(rest)
            if behind is None:  # never closed: text, as is all that looks like a comment from here on
                comments, rest = False, chain(held, rest)
            else:
                line = line[:start] + behind
                if not line.strip():
                    continue
        if not line or not line.strip(" \t"):
            if pend:
                yield from _plain(pend)
                pend = []
        elif m := match(line):
            if pend:
                yield from _plain(pend)
                pend = []
            if m[1]:
                yield Block(kind.HEADING, line.strip(), len(m[1]))
            else:
                yield Block(kind.CODE, _fenced(line, m[2], rest))
        elif len(pend) == 1 and line[-1] in "=- \t" and (m := SETEXT.match(line)) and not NOT_SETEXT.match(pend[0]):
            level = 1 if m[1][0] == "=" else 2
            yield Block(kind.HEADING, f"{'#' * level} {pend.pop().strip()}", level)
        else:
            pend.append(line)
    if pend:
        yield from _plain(pend)


def _fenced(first: str, fence: str, rest: Iterator[str]) -> str:
    """Up to the closing fence, or to the end of the document (CommonMark 0.31, 4.5)."""
    out = [first]
    for line in rest:
        out.append(line)
        if fence in line:
            bare = line.lstrip(" \t>")
            if bare.startswith(fence) and not bare[len(fence) :].rstrip(" \t").strip("`~"):
                break
    return "\n".join(out).rstrip()


def _plain(lines: list[str]) -> Iterator[Block]:
    text = "\n".join(lines).rstrip()
    bare = text.lstrip()
    if not bare:
        return
    kind = BlockKind.TEXT
    if bare[0] == "|":
        kind = BlockKind.TABLE
    elif bare[0] == "<":
        if bare[:6].lower() == "<table" and (table := _pipe_table(bare)):
            kind, text = BlockKind.TABLE, table
        elif all(map(TAG.match, lines)):
            kind = BlockKind.TAG
    yield Block(kind, text)


def _pipe_table(text: str) -> str | None:
    from kb_pipeline.parsers.html_writer import simple_table

    return simple_table(text)


def _open_comment(line: str) -> int:
    """Where a comment begins that goes on in the next line, or -1."""
    start = line.rfind("<!--")
    return -1 if "-->" in line[start:] or line.count("`", 0, start) % 2 else start


def _to_comment_end(rest: Iterator[str]) -> tuple[list[str], str | None]:
    """The lines read, and what stands behind the end of the comment; None where it does not end in COMMENT_CHARS."""
    held: list[str] = []
    size = 0
    for line in rest:
        if (end := line.find("-->")) >= 0:
            return [], line[end + 3 :]
        held.append(line)
        size += len(line) + 1
        if size > COMMENT_CHARS:
            break
    return held, None
