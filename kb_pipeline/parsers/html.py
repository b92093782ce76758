"""HTML to blocks: the main content without navigation; all visible text where no main content stands out.

One writer (html_writer.py) turns tags into blocks. It is fed by lxml's push parser (visible text; any size, any depth) or
from the tree that trafilatura makes (main content; small pages only, it costs many times the page in memory).
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.parsers.encoding import Text, open_text, storable
from kb_pipeline.parsers.html_writer import SPACE, BlockWriter

MAIN_CHARS = 512 << 10  # 1.5 s and 145 MB at this size; larger pages are data rather than articles
MAIN_DEPTH = 250  # libxml2's trees end at 256 levels, silently
MAIN_SHARE = 0.25  # main content that is less than this part of the visible text has missed something
PIECE_CHARS = 64 << 10

CHARSET = re.compile(rb"""<(?:meta\s[^>]{0,200}?charset|\?xml\s[^>]{0,100}?encoding)\s*=\s*["']?\s*([\w.:-]{2,40})""", re.I)
TITLE = re.compile(r"<title[\s>]", re.I)
TITLE_END = re.compile(r"</title", re.I)

AROUND = frozenset({"nav", "footer", "aside"})  # what stands beside the content
# trafilatura's names (TEI) for HTML's
TEI = {"list": "ul", "item": "li", "row": "tr", "cell": "td", "ref": "a", "lb": "br", "quote": "blockquote"}


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HtmlParser:
    """The title is the first heading of level 1 in the content, else ``<title>``, which often names the site as well."""

    version = "1"

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, raw: BinaryIO, name: str) -> Parsed:
        raw.seek(0)
        declared = CHARSET.search(raw.read(4096))
        text = open_text(raw, name, declared[1].decode("ascii") if declared else None)
        if text.whole is None or len(text.whole) > MAIN_CHARS:
            title = _named_title(next(text.pieces(), "")[:PIECE_CHARS])
            return Parsed(_visible(text, BlockWriter(AROUND), name), title, text.meta() | {"content": "visible"})
        blocks, content = _best(text, name)
        heading = next((b.text[2:] for b in blocks if b.kind is BlockKind.HEADING and b.level == 1), None)
        return Parsed(iter(blocks), heading or _named_title(text.whole), text.meta() | {"content": content})


def _best(text: Text, name: str) -> tuple[list[Block], str]:
    writer = BlockWriter(AROUND)
    visible = list(_visible(text, writer, name))
    if writer.max_depth <= MAIN_DEPTH and text.whole is not None:
        main = _main(text.whole)
        # its last resort is one paragraph without structure, navigation included
        if main and _size(main) >= MAIN_SHARE * _size(visible) and 2 * _structured(main) >= _structured(visible):
            return main, "main"
    return visible or list(_visible(text, BlockWriter(frozenset()), name)), "visible"


def _size(blocks: list[Block]) -> int:
    return sum(len(b.text) for b in blocks)


def _structured(blocks: list[Block]) -> int:
    return sum(b.kind is not BlockKind.TEXT for b in blocks)


def _named_title(page: str) -> str | None:
    from html import unescape

    begin = TITLE.search(page)
    end = TITLE_END.search(page, begin.end()) if begin else None
    if begin is None or end is None:
        return None
    title = page[page.find(">", begin.end() - 1) + 1 : end.start()]
    return SPACE.sub(" ", storable(unescape(title))).strip() or None


def _visible(text: Text, writer: BlockWriter, name: str) -> Iterator[Block]:
    from lxml import etree

    parser = etree.HTMLParser(target=writer, encoding="utf-8", huge_tree=True)
    try:
        for piece in text.pieces():
            for at in range(0, len(piece), PIECE_CHARS):
                parser.feed(piece[at : at + PIECE_CHARS].encode())
                yield from writer.take()
        parser.close()
    except etree.LxmlError as e:
        if not writer.max_depth:
            return  # not one element: white space, or comments only
        raise Rejected(f"{name} cannot be read as HTML: {e}; save it again as HTML or as text", code="corrupt") from e
    yield from writer.finish()


def _main(page: str) -> list[Block]:
    """The main content as trafilatura sees it; empty where it finds none, or fails on what the page holds."""
    import lxml.html
    from lxml import etree
    from trafilatura import bare_extraction

    parser = lxml.html.HTMLParser(encoding="utf-8")
    try:
        tree = lxml.html.document_fromstring(page.encode(), parser=parser)
        _mark_code(tree)
        found = bare_extraction(
            tree, favor_recall=True, include_comments=False, include_tables=True, include_links=True, include_formatting=True
        )
    except (etree.LxmlError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    body = getattr(found, "body", None)
    if body is None:
        return []
    writer = BlockWriter(frozenset())
    _feed(body, writer)
    return list(writer.finish())


def _mark_code(tree: Any) -> None:
    """Every <pre> around one <span>: trafilatura takes other ones for quotes, and folds their lines."""
    from lxml import etree

    for pre in list(tree.iter("pre")):
        for line_break in list(pre.iter("br")):
            line_break.tail = "\n" + (line_break.tail or "")
        text = "".join(pre.itertext())
        for child in list(pre):
            pre.remove(child)
        pre.text = None
        etree.SubElement(pre, "span").text = text


def _feed(root: Any, writer: BlockWriter) -> None:
    """Walks without recursion, however deep the tree is."""
    from lxml import etree

    for event, node in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        if event == "start":
            writer.start(_html_name(node), {"href": node.get("target", ""), **node.attrib})
            writer.data(node.text or "")
        else:
            if event == "end":
                writer.end(_html_name(node))
            if node is not root:
                writer.data(node.tail or "")


def _html_name(node: Any) -> str:
    tag, rend = str(node.tag), node.get("rend", "")
    if tag == "head":
        return rend if re.fullmatch("h[1-6]", rend) else "h2"
    if tag == "list" and rend == "ol":
        return "ol"
    parent = node.getparent()
    if tag == "code" and ("\n" in "".join(node.itertext()) or (parent is not None and parent.tag in ("body", "main"))):
        return "pre"
    return TEI.get(tag, tag)
