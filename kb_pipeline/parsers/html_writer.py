"""Tags to blocks: the writer behind the HTML parser, and behind HTML tables in Markdown. No recursion anywhere."""

import re
from collections.abc import Iterator, Mapping

from kb_pipeline.model import Block, BlockKind
from kb_pipeline.parsers.encoding import storable

MAX_COLUMNS = 500
MAX_SPAN = 1000
LAYOUT_CHARS = 2000  # nobody writes that much into a cell of a data table

SPACE = re.compile(r"[ \t\r\n\f\v\xa0]+")
RUN = re.compile(r" {2,}")
BREAK = re.compile(r" *\n[ \n]*")
FENCE = re.compile(r"^`{3,}", re.MULTILINE)
NOT_SIMPLE = re.compile(r"<(?:ul|ol|pre|h[1-6]|img|p|div|table|!--)\b", re.IGNORECASE)
FOLD = str.maketrans({"|": "\\|", "\n": " "})

HIDDEN = frozenset(
    ("script", "style", "noscript", "template", "head", "title", "svg", "math", "iframe", "object", "select", "button")
)
BLOCKS = frozenset(
    ("p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "figure", "figcaption", "blockquote", "hr")
) | frozenset(
    ("dl", "dt", "dd", "address", "fieldset", "form", "details", "summary", "body", "html", "center", "legend", "caption")
)


class BlockWriter:
    """A parser target. ``take`` gives what is finished so far; ``skip`` names more elements to leave out."""

    def __init__(self, skip: frozenset[str] = frozenset()) -> None:
        self._skip = HIDDEN | skip
        self._out: list[Block] = []
        self._inline: list[str] = []  # of the current paragraph, item, heading or cell
        self._links: list[tuple[int, str]] = []  # where in _inline a link began, and its target
        self._lists: list[int] = []  # open lists: the next number, 0 for bullets
        self._items: list[str] = []  # finished lines of the outermost open list
        self._prefix = ""  # of the item that began and has no text yet
        self._table: Table | None = None
        self._depth = self._skipped = self._pre = self._quotes = self._tables = 0
        self.max_depth = 0

    def take(self) -> list[Block]:
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Block]:
        self._flush()
        self._end_table()
        self._end_list()
        return self.take()

    def close(self) -> None:
        """Called by lxml at the end of the input; ``finish`` does the work."""

    def comment(self, text: str) -> None:
        """Comments are not content."""

    def pi(self, target: str, data: str | None = None) -> None:
        """Nor are processing instructions."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        self.max_depth = max(self.max_depth, self._depth)
        if self._skipped or tag in self._skip or "hidden" in attributes:
            self._skipped += 1
        elif self._pre:
            if tag == "br":
                self._inline.append("\n")
        elif self._table is not None:
            self._start_in_table(tag, attributes)
        elif tag == "table":
            self._flush()
            self._table, self._tables = Table(), 1
        elif tag in ("ul", "ol"):
            self._flush()
            if not self._lists:
                self._end_list()
            self._lists.append(1 if tag == "ol" else 0)
        elif tag == "li":
            self._flush()
            self._start_item()
        elif tag == "pre" or (len(tag) == 2 and tag[0] == "h" and tag[1] in "123456"):
            self._flush()
            self._pre = int(tag == "pre")
        elif tag in BLOCKS:
            self._flush()
            self._quotes += tag == "blockquote"
        else:
            self._start_inline(tag, attributes)

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._skipped:
            self._skipped -= 1
        elif self._pre:
            if tag == "pre":
                self._end_pre()
        elif self._table is not None:
            self._end_in_table(tag)
        elif tag in ("ul", "ol"):
            self._flush()
            if self._lists:
                self._lists.pop()
            if not self._lists:
                self._end_list()
        elif tag == "li":
            self._flush()
        elif len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
            self._end_heading(int(tag[1]))
        elif tag in BLOCKS:
            self._flush()
            self._quotes -= tag == "blockquote" and self._quotes > 0
        else:
            self._end_inline(tag)

    def data(self, text: str) -> None:
        if text and not self._skipped:
            self._inline.append(text if self._pre else SPACE.sub(" ", text))

    # inline

    def _start_inline(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "br":
            self._inline.append("\n")
        elif tag == "code":
            self._inline.append("`")
        elif tag == "a":
            self._links.append((len(self._inline), attributes.get("href", "").strip()))
        elif tag == "img" and attributes.get("alt", "").strip():
            alt, src = SPACE.sub(" ", attributes["alt"]).strip(), attributes.get("src", "")
            self._inline.append(f"![{alt}]({_target(src)})" if _target(src) else alt)

    def _end_inline(self, tag: str) -> None:
        if tag == "code":
            self._inline.append("`")
        elif tag == "a" and self._links:
            start, href = self._links.pop()
            label = "".join(self._inline[start:]).strip()
            if label and "\n" not in label and _target(href):  # a link around whole blocks was flushed with them
                self._inline[start:] = [f"[{label}]({_target(href)})"]

    def _text(self) -> str:
        text = BREAK.sub("\n", RUN.sub(" ", storable("".join(self._inline)))).strip()
        self._inline.clear()
        self._links.clear()
        return "" if text.strip("`") == "" else text

    # blocks

    def _emit(self, kind: BlockKind, text: str, level: int = 0) -> None:
        self._out.append(Block(kind, text, level))

    def _flush(self) -> None:
        if not self._inline:
            return
        text = self._text()
        if not text:
            return
        if self._lists:
            indent = "  " * (len(self._lists) - 1)
            first, *others = text.split("\n")
            self._items.append(f"{self._prefix or indent + '  '}{first}")
            self._items += [f"{indent}  {line}" for line in others]
            self._prefix = ""
            return
        quote = "> " if self._quotes else ""
        self._emit(BlockKind.TEXT, "\n".join(quote + line for line in text.split("\n")))

    def _start_item(self) -> None:
        if not self._lists:
            return  # an item outside of a list is a paragraph
        number = self._lists[-1]
        self._lists[-1] += number > 0
        self._prefix = f"{'  ' * (len(self._lists) - 1)}{f'{number}.' if number else '-'} "

    def _end_list(self) -> None:
        if self._items:
            self._emit(BlockKind.TEXT, "\n".join(self._items))
            self._items = []
        self._prefix = ""

    def _end_heading(self, level: int) -> None:
        self._end_list()
        if text := self._text().replace("\n", " "):
            self._emit(BlockKind.HEADING, f"{'#' * level} {text}", level)

    def _end_pre(self) -> None:
        self._pre = 0
        text = storable("".join(self._inline)).strip("\r\n").rstrip()
        self._inline.clear()
        if text:
            self._end_list()
            fence = "`" * max(3, 1 + max(map(len, FENCE.findall(text)), default=0))
            self._emit(BlockKind.CODE, f"{fence}\n{text}\n{fence}")

    # tables

    def _start_in_table(self, tag: str, attributes: Mapping[str, str]) -> None:
        assert self._table is not None
        if tag == "table":
            self._tables += 1
        elif self._tables == 1 and tag == "tr":
            self._table.row()
        elif self._tables == 1 and tag in ("td", "th"):
            self._table.loose(self._text())
            self._table.open_cell(_span(attributes, "colspan"), _span(attributes, "rowspan"))
        elif tag in BLOCKS or tag in ("li", "pre"):
            self._inline.append("\n")
        else:
            self._start_inline(tag, attributes)

    def _end_in_table(self, tag: str) -> None:
        assert self._table is not None
        if tag == "table":
            self._tables -= 1
            if not self._tables:
                self._end_table()
        elif self._tables == 1 and tag in ("td", "th"):
            self._table.close_cell(self._text())
        elif tag in BLOCKS or tag in ("li", "pre", "td", "th", "tr"):
            self._inline.append("\n")
        else:
            self._end_inline(tag)

    def _end_table(self) -> None:
        if self._table is None:
            return
        self._end_list()
        self._table.loose(self._text())
        self._out += self._table.blocks()
        self._table, self._tables = None, 0


class Table:
    """Rows of cells. A cell over several rows is repeated in each, so that every row can be read alone."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []
        self._loose: list[str] = []  # captions, and text between the cells
        self._spans: dict[int, tuple[int, str]] = {}  # column -> rows that it still reaches into, and its text
        self._span = (1, 1)

    def loose(self, text: str) -> None:
        if text:
            self._loose.append(text)

    def row(self) -> None:
        self._fill()
        self._rows.append([])

    def open_cell(self, columns: int, rows: int) -> None:
        if not self._rows:
            self._rows.append([])
        self._span = (columns, rows)

    def close_cell(self, text: str) -> None:
        self._fill()
        row, (columns, rows) = self._rows[-1], self._span
        for i in range(max(0, min(columns, MAX_COLUMNS - len(row)))):
            if rows > 1:
                self._spans[len(row)] = (rows - 1, text)
            row.append("" if i else text)

    def _fill(self) -> None:
        """What reaches in from the rows above, up to the next free column."""
        row = self._rows[-1] if self._rows else []
        while (span := self._spans.get(len(row))) is not None and self._rows:
            left, text = span
            if left > 1:
                self._spans[len(row)] = (left - 1, text)
            else:
                del self._spans[len(row)]
            row.append(text)

    def blocks(self) -> Iterator[Block]:
        self._fill()
        yield from (Block(BlockKind.TEXT, text) for text in self._loose)
        rows = [row for row in self._rows if any(row)]
        width = max(map(len, rows), default=0)
        # one row, one column or long texts: a table that only places things on the page
        if len(rows) < 2 or width < 2 or max(len(cell) for row in rows for cell in row) > LAYOUT_CHARS:
            yield from (Block(BlockKind.TEXT, cell) for row in rows for cell in row if cell)
            return
        lines = [f"| {' | '.join(cell.translate(FOLD) for cell in row)} |" for row in rows]
        lines.insert(1, f"|{' --- |' * len(rows[0])}")
        yield Block(BlockKind.TABLE, "\n".join(lines))


def _span(attributes: Mapping[str, str], name: str) -> int:
    value = attributes.get(name, "").strip()
    return min(max(int(value), 1), MAX_SPAN) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def _target(href: str) -> str:
    """A link target that Markdown can hold, or nothing for scripts, inline data and places on the page itself."""
    if href.startswith("#") or href[:11].lower() == "javascript:" or href[:5].lower() == "data:":
        return ""
    return SPACE.sub("%20", href.strip()).replace("\n", "").replace("(", "%28").replace(")", "%29")


def simple_table(text: str) -> str | None:
    """Pipe rows from one HTML table whose cells are plain text; None when it is anything more."""
    if not text.lower().endswith("</table>") or NOT_SIMPLE.search(text, 1):
        return None
    from lxml import etree

    writer = BlockWriter()
    parser = etree.HTMLParser(target=writer, encoding="utf-8")
    try:
        parser.feed(text.encode())
        parser.close()
    except etree.LxmlError:
        return None
    blocks = list(writer.finish())
    return blocks[0].text if len(blocks) == 1 and blocks[0].kind is BlockKind.TABLE else None
