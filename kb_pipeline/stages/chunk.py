"""Blocks to chunks, so that an edit changes few of them. Stateless, streaming, the same for every format.

The document is a row of units with a boundary before each: blocks, and inside blocks of twice the minimum or more also
items, rows, lines, sentences. A boundary has a strength (the constants below) and a key, the crc32 of the 24 characters
behind it: what stands further on does not move a cut. ``boundaries.cut`` decides; a unit's size is ``milli_tokens``.

The title that is prefixed is the content's own (front matter) where the caller has one, else the topmost heading above the
chunk: in a document with one title that is the title, and in one with several no chunk gets another section's.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from zlib import crc32

from kb_pipeline.boundaries import Limits, cut
from kb_pipeline.canonical import SourceOffsets, canonical, is_inside_character, milli_tokens, source_offsets
from kb_pipeline.model import Block, BlockKind, Chunk, ChunkParams

CHUNKER_VERSION = "1"  # of the canonical form, the units and the cuts: a change re-embeds everything

# Strength of the boundary before a unit, lower is stronger; 1 to 6 are heading levels.
BLOCK, ITEM, GLUED, NESTED, ROW, LINE, CLAUSE, CHARACTER, NEVER = range(8, 17)
HEADINGS = 7 << 32  # ranks of headings are below
KEY_CHARS = 24
GAP = "\n\n"  # between two blocks
GAP_SIZE = milli_tokens(GAP)
NAME_CHARS = 200  # of a heading or title in a path or prefix
WINDOW_TOKENS = 50_000  # units held at a time, besides context and look-ahead

_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]")
_ITEM_STARTS = frozenset("-*+0123456789")
_TAG = re.compile(r"[ \t]*<(/?)[A-Za-z][^>\n]*(?<!/)>[ \t]*\Z")
_DELIMITER = re.compile(r"[ \t|:-]+\Z")
_LINE_END = re.compile(r"\n")
_CODE_LINE = re.compile(r"((?:\n[ \t]*+(?=\n))*+)\n(?=[ \t]*+[^ \t\n])")
_SENTENCE = re.compile(r"[。！？；…]+[”’」』）)\]\"]*|(?<![.!?])[.!?]+[\"')\]]*(?=\s)|\n")
_CLAUSE = re.compile(r"[，、：,;:]|\s+")


def chunk_blocks(
    blocks: Iterable[Block], title: str | None, params: ChunkParams, *, window_tokens: int = WINDOW_TOKENS
) -> Iterator[Chunk]:
    """The chunks in reading order. ``title`` only where the content itself names one. Memory: a window of units, the largest
    block a few times, and a digest a chunk; the size of the window never changes the result."""
    limits = Limits(params.max_tokens * 1000, params.min_tokens * 1000, HEADINGS if params.sections else 0)
    large = min(2 * limits.minimum, limits.maximum)
    context = _Context(title, params)
    window = _Window(limits, window_tokens * 1000)
    for part in _keyed(_parts(blocks)):
        for offset, strength, size in _units(part, large):
            window.add(part, offset, strength, size)
            if window.full:
                yield from context.chunks(window.closed(more=True))
    yield from context.chunks(window.closed(more=False))


@dataclass(slots=True)
class _Part:
    """One block with its canonical text."""

    text: str
    block: Block
    strength: int
    behind: str = ""  # the first characters of what follows it in the canonical text
    before: list[str] = field(default_factory=list)  # sources of blocks without any canonical text around it
    after: list[str] = field(default_factory=list)
    offsets: SourceOffsets | None = None
    parted: tuple[int, int] = (0, 0)  # the last cut inside it: canonical and source offset

    @property
    def name(self) -> str:
        """Of a heading: its first line without the marks."""
        return self.text.partition("\n")[0].strip().strip("#").strip()[:NAME_CHARS]

    @property
    def header(self) -> str:
        """Of a table: its header and delimiter row."""
        rows = self.text[:4000].split("\n", 2)
        return "\n".join(rows[:2] if len(rows) > 1 and _DELIMITER.match(rows[1]) else rows[:1])

    def source_at(self, offset: int) -> int:
        """Where a cut before the canonical ``offset`` falls in the source. Asked for in order, each cut twice."""
        if self.block.text is self.text:
            return offset
        if offset != self.parted[0]:
            if self.offsets is None:
                self.offsets = source_offsets(self.block.text, self.block.kind)
            self.parted = offset, self.offsets.at(offset, self.parted[1])
        return self.parted[1]


# --- units ----------------------------------------------------------------------------------------------------------


def _parts(blocks: Iterable[Block]) -> Iterator[_Part]:
    part: _Part | None = None
    silent: list[str] = []
    for block in blocks:
        text = canonical(block.text, block.kind)
        if not text or text.isspace():
            silent.append(block.text)
            continue
        if part is not None:
            part.after, silent = silent, []
            yield part
        part = _Part(text, block, _strength(text, block, part), before=silent)
        silent = []
    if part is not None:
        part.after = silent
        yield part


def _keyed(parts: Iterable[_Part]) -> Iterator[_Part]:
    waiting: list[_Part] = []
    for part in parts:
        start = GAP + part.text[:KEY_CHARS]
        for earlier in waiting:
            earlier.behind += start
        while waiting and len(waiting[0].behind) >= KEY_CHARS:
            yield waiting.pop(0)
        waiting.append(part)
    yield from waiting


def _strength(text: str, block: Block, previous: _Part | None) -> int:
    if block.kind is BlockKind.HEADING:
        return min(max(block.level, 1), 6)
    if previous is None:
        return BLOCK
    bare = text.lstrip(" \t")
    if _opens(previous) or (bare[0] == "<" and _tag(text.partition("\n")[0]) == "/"):
        return NEVER
    if _announces(previous):
        return GLUED
    indent = len(text) - len(bare)
    if bare[0] in _ITEM_STARTS and _ITEM.match(text):
        return ITEM if indent < 2 else NESTED
    return GLUED if indent >= 2 else BLOCK


def _tag(line: str) -> str | None:
    """A slash for a line that is only a closing tag, nothing for an opening one, None for any other."""
    return m[1] if (m := _TAG.match(line)) else None


def _opens(part: _Part) -> bool:
    """Is it a heading, or its last line an opening tag?"""
    tagged = part.text[-1] == ">" and part.block.kind in (BlockKind.TEXT, BlockKind.TAG)
    return part.block.kind is BlockKind.HEADING or (tagged and _tag(part.text.rpartition("\n")[2]) == "")


def _announces(part: _Part) -> bool:
    ends = part.text[-1] in ":：*" and part.block.kind is not BlockKind.CODE
    return ends and part.text[-8:].rstrip(" \t\n*")[-1:] in (":", "：")


def _units(part: _Part, large: int) -> Iterator[tuple[int, int, int]]:
    """Offset, strength and size of each unit. Lazy, so that a huge block is never held as units."""
    text, start, strength = part.text, 0, part.strength
    size = milli_tokens(text) + GAP_SIZE
    if size < large:
        yield 0, strength, size
        return
    for end, following in chain(_points(part), ((len(text), 0),)):
        last = GAP_SIZE if end == len(text) else 0
        piece = text[start:end]
        size = milli_tokens(piece)
        if size <= large:
            yield start, strength, size + last
        else:
            at = 0
            for i, inner in chain(_finer(piece, large), ((len(piece), 0),)):
                yield start + at, strength, milli_tokens(piece[at:i]) + (last if i == len(piece) else 0)
                at, strength = i, inner
        start, strength = end, following


def _points(part: _Part) -> Iterator[tuple[int, int]]:
    if part.block.kind is BlockKind.CODE:
        return _code_lines(part.text)
    if part.block.kind is BlockKind.TABLE:
        return _rows(part.text)
    return _sentences(part.text)


def _rows(text: str) -> Iterator[tuple[int, int]]:
    """Rows from the second data row on: header, delimiter and first row stay together."""
    return ((m.end(), ROW) for m in islice(_LINE_END.finditer(text), 2, None))


def _code_lines(text: str) -> Iterator[tuple[int, int]]:
    """Lines, those behind a blank line stronger, but not the first and the last: they stay with their fence."""
    lines = ((m.end(), ROW if m[1] else LINE) for m in _CODE_LINE.finditer(text))
    return (line for line, _ in pairwise(islice(lines, 1, None)))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    for m in _SENTENCE.finditer(text):
        end = m.end()
        if end >= len(text) or is_inside_character(text, end):
            continue
        strength = LINE
        if m[0] == "\n":
            line = text[end : end + 40]
            bare = line.lstrip(" \t")
            if bare[:1] == "|":
                strength = ROW
            elif bare[:1] in _ITEM_STARTS and _ITEM.match(line):
                strength = ITEM if len(line) - len(bare) < 2 else NESTED
        yield end, strength


def _finer(s: str, large: int) -> Iterator[tuple[int, int]]:
    """Points inside one sentence, line or row that is large: clause ends, and in a large clause characters."""
    start = 0
    for end in chain((m.end() for m in _CLAUSE.finditer(s)), (len(s),)):
        if end < len(s) and is_inside_character(s, end):
            continue
        if milli_tokens(s[start:end]) > large:
            yield from ((start + i, CHARACTER) for i in _characters(s[start:end], large))
        if end < len(s):
            yield end, CLAUSE
        start = end


def _characters(s: str, large: int) -> Iterator[int]:
    """Characters that the content chooses; where a long run has none (a repetition), one every so often."""
    step, last = max(1, large // 1300), 0  # no code point is over 1,295 thousandths
    for i in chain(_chosen(s), (len(s),)):
        if i - last > step and milli_tokens(s[last:i]) > large:
            while i - last > step:
                last = _character_start(s, last + step, last)
                yield last
        if i < len(s):
            yield i
        last = i


def _chosen(s: str) -> Iterator[int]:
    """One in sixteen, by the eight characters that begin there."""
    length = 16384
    for base in range(0, len(s), length):
        wide = s[base : base + length + 7].encode("utf-32-le", "surrogatepass")
        for i in range(min(length, len(s) - base)):
            if not crc32(wide[4 * i : 4 * i + 32]) & 15 and base + i and not is_inside_character(s, base + i):
                yield base + i


def _character_start(s: str, at: int, floor: int) -> int:
    """The start of the character that the code point at ``at`` belongs to, or ``at`` if that is not behind ``floor``."""
    for i in range(at, floor, -1):
        if not is_inside_character(s, i):
            return i
    return at


# --- windows of units, slices of them -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slice:
    """The parts of one chunk, where it begins in the first and, if that is not its end, where it ends in the last."""

    parts: list[_Part]
    start: int
    stop: int | None

    def text(self) -> str:
        pieces = [p.text for p in self.parts]
        if self.stop is not None:
            pieces[-1] = pieces[-1][: self.stop]
        pieces[0] = pieces[0][self.start :]
        return GAP.join(pieces).strip()

    def display(self, text: str) -> str:
        """The same slice of the sources: what one chunk does not show of a parted block, its neighbour does."""
        if all(p.block.text is p.text and not p.before and not p.after for p in self.parts):
            return text
        pieces = [source for p in self.parts for source in (*p.before, p.block.text, *p.after)]
        first, last = self.parts[0], self.parts[-1]
        begin = first.source_at(self.start)
        if self.stop is not None:
            del pieces[len(pieces) - len(last.after) :]
            pieces[-1] = last.block.text[: last.source_at(self.stop)]
        if self.start:
            del pieces[: len(first.before)]
            pieces[0] = pieces[0][begin:]
        return GAP.join(pieces).strip()


class _Window:
    """Units of which the cuts are not certain yet, with the context that decides them."""

    def __init__(self, limits: Limits, size: int) -> None:
        self._limits, self._size = limits, size
        self._parts: list[_Part] = []
        self._offsets: list[int] = []
        self._rank: list[int] = []
        self._pos = [0]
        self._first = 0  # the unit that starts the open chunk

    def add(self, part: _Part, offset: int, strength: int, size: int) -> None:
        key = part.text[offset : offset + KEY_CHARS]
        if len(key) < KEY_CHARS:
            key = (key + part.behind)[:KEY_CHARS]
        self._parts.append(part)
        self._offsets.append(offset)
        self._rank.append(strength << 32 | crc32(key.encode()))
        self._pos.append(self._pos[-1] + size)

    @property
    def full(self) -> bool:
        return self._pos[-1] - self._pos[self._first] >= self._size + self._limits.look_ahead

    def closed(self, more: bool) -> Iterator[_Slice]:
        """The chunks whose ends are certain; forgets what nothing depends on any more."""
        if not self._parts:
            return
        bounds = cut(self._rank, self._pos, self._limits, self._first, more)
        if not more:
            bounds.append(len(self._parts))
        for i, j in pairwise(bounds):
            parts = self._parts[i:j]
            members = [p for k, p in enumerate(parts) if not k or p is not parts[k - 1]]
            inside = j < len(self._parts) and self._parts[j] is parts[-1]
            yield _Slice(members, self._offsets[i], self._offsets[j] if inside else None)
        self._forget(bounds[-1])

    def _forget(self, first: int) -> None:
        keep, oldest = first, self._pos[first] - self._limits.reach
        while keep and self._pos[keep] > oldest:
            keep -= 1
        self._first = first - keep
        for column in (self._parts, self._offsets, self._rank, self._pos):
            del column[:keep]


# --- chunks ---------------------------------------------------------------------------------------------------------


class _Context:
    """What a chunk needs to know of the document before it: headings, title, hashes seen."""

    def __init__(self, title: str | None, params: ChunkParams) -> None:
        self._title = " ".join(canonical(title or "", BlockKind.TEXT).split())[:NAME_CHARS]
        self._params = params
        self._headings: list[tuple[int, str]] = []
        self._seen: dict[bytes, int] = {}

    def chunks(self, slices: Iterable[_Slice]) -> Iterator[Chunk]:
        for one in slices:
            path = self._path(one)
            if text := one.text():  # white space alone can be a unit
                yield self._numbered(self._chunk(one, text, path))

    def _chunk(self, one: _Slice, text: str, path: tuple[str, ...]) -> Chunk:
        prefix = self._prefix(one, path)
        pages = [p.block.page for p in one.parts if p.block.page]
        size = milli_tokens(text) + (milli_tokens(prefix) + GAP_SIZE if prefix else 0)
        return Chunk(
            text=text,
            display=one.display(text),
            prefix=prefix,
            title_path=path,
            tokens=(size + 999) // 1000,
            page_from=pages[0] if pages else 0,
            page_to=pages[-1] if pages else 0,
        )

    def _path(self, one: _Slice) -> tuple[str, ...]:
        """The headings above its first line. Moves on to its last."""
        own = one.parts[0].strength if not one.start else BLOCK
        path = tuple(name for level, name in self._headings if level < own and name)
        for p in one.parts[1:] if one.start else one.parts:
            if p.strength < BLOCK:
                self._headings = [h for h in self._headings if h[0] < p.strength]
                self._headings.append((p.strength, p.name))
        return path

    def _prefix(self, one: _Slice, path: tuple[str, ...]) -> str:
        first = one.parts[0]
        names: list[str] = []
        if self._params.context != "none":
            names = [self._title, *path] if self._title and path[:1] != (self._title,) else list(path)
        if self._params.context == "title":
            names = names[:1]
        if names and not one.start and first.strength < BLOCK and first.name == names[-1]:
            names.pop()  # it begins with that very heading
        lines = [" > ".join(names)] if names else []
        if one.start and first.block.kind is BlockKind.TABLE and milli_tokens(first.header) <= self._params.max_tokens * 500:
            lines.append(first.header)  # a header wider than half a chunk would say more than the rows
        return GAP.join(lines)

    def _numbered(self, chunk: Chunk) -> Chunk:
        digest = chunk.content_hash
        copies = self._seen[digest] = self._seen.get(digest, -1) + 1
        return replace(chunk, occurrence=copies) if copies else chunk
