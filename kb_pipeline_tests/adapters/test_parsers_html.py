import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.model import BlockKind, Parsed
from kb_pipeline.parsers import encoding, html
from kb_pipeline.parsers.html import Config, HtmlParser
from kb_pipeline.parsers.html_writer import simple_table

H, T, C, TABLE = BlockKind.HEADING, BlockKind.TEXT, BlockKind.CODE, BlockKind.TABLE
PAGE = """<!doctype html><html><head><title>Guide &amp; more - Site</title><style>p {}</style></head><body>
<nav><a href="/">Home of navigation</a></nav><main><h1>Install <b>guide</b></h1>
<p>The first paragraph has a <a href="https://example.org/a b">link</a>, and is long enough to be content.</p>
<h2>Steps</h2><ul><li>one<ul><li>nested</li></ul></li><li>two</li></ul><ol><li>first</li><li>second</li></ol>
<pre><code class="language-sh">kb sync
  --all

done</code></pre>
<table><tr><th>Name</th><th>A|B</th></tr><tr><td>x</td><td><code>1</code></td></tr><tr><td>y</td><td>2</td></tr></table>
<p>Use <code>kb</code> for this; another paragraph of the main content, with some more words.</p></main>
<footer>Imprint in the footer</footer><script>var hidden = 1</script></body></html>"""
EXPECTED = [
    (H, "# Install guide"),
    (T, "The first paragraph has a [link](https://example.org/a%20b), and is long enough to be content."),
    (H, "## Steps"),
    (T, "- one\n  - nested\n- two"),
    (T, "1. first\n2. second"),
    (C, "```\nkb sync\n  --all\n\ndone\n```"),
    (TABLE, "| Name | A\\|B |\n| --- | --- |\n| x | `1` |\n| y | 2 |"),
    (T, "Use `kb` for this; another paragraph of the main content, with some more words."),
]


def parse(page: str | bytes) -> Parsed:
    data = page if isinstance(page, bytes) else page.encode()
    return HtmlParser(Config()).parse(io.BytesIO(data), "a.html")


def blocks(page: str | bytes) -> list[tuple[BlockKind, str]]:
    return [(b.kind, b.text) for b in parse(page).blocks]


def test_main_content_comes_without_navigation() -> None:
    parsed = parse(PAGE)
    assert (parsed.title, parsed.meta["content"]) == ("Install guide", "main")
    assert [(b.kind, b.text) for b in parsed.blocks] == EXPECTED
    assert [b.level for b in parse(PAGE).blocks][:3] == [1, 0, 2]


@pytest.mark.parametrize("code", ["a\n  b", "<span>a</span>\n  <span>b</span>", "a<br>  b", "<b></b><span>a</span><br>  b"])
def test_preformatted_text_of_the_main_content_is_code(code: str) -> None:
    parsed = parse(PAGE.replace("<h2>", f"<pre>{code}</pre><h2>"))
    assert parsed.meta["content"] == "main"
    assert (C, "```\na\n  b\n```") in [(b.kind, b.text) for b in parsed.blocks]


def test_visible_text_has_the_same_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAIN_CHARS", 10)
    parsed = parse(PAGE)
    assert (parsed.title, parsed.meta["content"]) == ("Guide & more - Site", "visible")
    assert [(b.kind, b.text) for b in parsed.blocks] == EXPECTED


def test_streamed_pages_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SMALL", 10)
    monkeypatch.setattr(encoding, "PIECE", 7)
    assert blocks(PAGE) == EXPECTED


@pytest.mark.parametrize("wrong", [[], "fails"])
def test_visible_text_stands_in_for_missing_main_content(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import trafilatura

    def extract(*_: object, **__: object) -> None:
        if wrong == "fails":
            raise TypeError("a node without a parent")

    monkeypatch.setattr(trafilatura, "bare_extraction", extract)
    parsed = parse(PAGE)
    assert parsed.meta["content"] == "visible"
    assert [(b.kind, b.text) for b in parsed.blocks] == EXPECTED


def test_a_page_of_navigation_only_still_has_its_text() -> None:
    assert blocks("<html><body><nav><a href='/x'>only a menu</a></nav></body></html>")[0][1].find("only a menu") >= 0


def test_title_element_names_a_page_without_a_first_heading() -> None:
    assert parse("<title> A &lt;b&gt;\n page </title><p>Some text that stands here.</p>").title == "A <b> page"
    assert parse("<p>Some text that stands here.</p>").title is None
    assert parse("<title>never closed <p>text").title is None


@pytest.mark.parametrize("codec", ["gb2312", "utf-8", "utf-16", "big5", "shift_jis"])
def test_the_declared_charset_is_used(codec: str) -> None:
    text = "日本文" if codec == "shift_jis" else "中文文件"
    page = f'<html><head><meta charset="{codec}"><title>{text}</title></head><body><p>{text}</p></body></html>'
    parsed = parse(page.encode(codec))
    assert (parsed.title, [b.text for b in parsed.blocks]) == (text, [text])


def test_truncated_pages_keep_what_is_there() -> None:
    for end in range(len(PAGE) // 2, len(PAGE), 37):
        assert (H, "# Install guide") in blocks(PAGE[:end])
    assert blocks("<p>one<p>two <b>bold <a href=") == [(T, "one"), (T, "two bold")]


def test_deeply_nested_pages_keep_their_text() -> None:
    for depth in (300, 3000, 50_000):
        page = "<html><body><p>before</p>" + "<div>" * depth + "inner" + "</div>" * depth + "<p>after</p></body></html>"
        assert [t for _, t in blocks(page)] == ["before", "inner", "after"]
    assert [t for _, t in blocks("<ul><li>x" * 2000)][0].startswith("- x\n  - x")
    assert blocks("<table><tr><td>" * 2000 + "deep")[0][1] == "deep"


def test_tables_with_spans_stay_rectangular() -> None:
    page = "<table><tr><th>a</th><th>b</th><th>c</th></tr>"
    page += "<tr><td rowspan=2>x</td><td colspan=2>y</td></tr><tr><td>1</td><td>2</td></tr></table>"
    assert simple_table(page) == "| a | b | c |\n| --- | --- | --- |\n| x | y |  |\n| x | 1 | 2 |"
    hostile = (
        "<table>" + "<tr>" + "<td rowspan=99999999 colspan=99999999>x</td>" * 50 + "</tr>" * 2 + "<tr><td>y</td></tr></table>"
    )
    assert len(simple_table(hostile) or "") < 10_000


def test_layout_tables_are_text() -> None:
    assert blocks("<table><tr><td>left column</td><td>right column</td></tr></table>") == [
        (T, "left column"),
        (T, "right column"),
    ]


def test_bad_input_is_read() -> None:
    assert blocks("") == blocks(" \n") == blocks("<!-- only a comment -->") == blocks("<html><script>x</script></html>") == []
    assert blocks("no tags at all") == [(T, "no tags at all")]
    text = blocks("<p>a&#0;b&#xD800;c\0d</p>")[0][1]
    text.encode("utf-8")
    assert "\0" not in text
    assert blocks("<pre>a\n```\nb</pre>") == [(C, "````\na\n```\nb\n````")]
    assert blocks("<p>x</p><p hidden>secret</p>") == [(T, "x")]


def test_a_line_of_ten_megabytes_is_one_block() -> None:
    assert [len(t) for _, t in blocks("<p>" + "x" * 10_000_000)] == [10_000_000]


TAGS = ["p", "div", "ul", "li", "table", "tr", "td", "pre", "code", "a", "h2", "blockquote", "br", "script", "b", "nav"]


@given(
    st.lists(
        st.one_of(
            st.sampled_from([f"<{t}>" for t in TAGS] + [f"</{t}>" for t in TAGS]), st.sampled_from(["x", " ", "\n", "&lt;"])
        ),
        max_size=40,
    )
)
def test_any_tags_give_blocks_that_hold_the_rules(parts: list[str]) -> None:
    for b in parse("".join(parts)).blocks:
        assert b.text.strip()
        assert (b.kind is H) == (b.level > 0)
        assert b.kind in (C, TABLE) or "\n\n" not in b.text
