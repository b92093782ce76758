import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.parsers import encoding
from kb_pipeline.parsers.markdown import COMMENT_CHARS, Config, MarkdownParser, split_blocks

H, T, C, TABLE, TAG = BlockKind.HEADING, BlockKind.TEXT, BlockKind.CODE, BlockKind.TABLE, BlockKind.TAG


def parse(text: str | bytes) -> Parsed:
    data = text if isinstance(text, bytes) else text.encode()
    return MarkdownParser(Config()).parse(io.BytesIO(data), "a.md")


def blocks(text: str | bytes) -> list[tuple[BlockKind, str]]:
    return [(b.kind, b.text) for b in parse(text).blocks]


def test_blocks_stand_between_blank_lines() -> None:
    text = "# One\npara\ngoes on\n\n- a\n- b\n\n  indented\n## Two\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert blocks(text) == [
        (H, "# One"),
        (T, "para\ngoes on"),
        (T, "- a\n- b"),
        (T, "  indented"),
        (H, "## Two"),
        (TABLE, "| a | b |\n|---|---|\n| 1 | 2 |"),
    ]
    assert [b.level for b in parse(text).blocks] == [1, 0, 0, 0, 2, 0]


def test_code_keeps_its_blank_lines_and_headings() -> None:
    assert blocks("a\n```sh\n# not a heading\n\n````\nb") == [(T, "a"), (C, "```sh\n# not a heading\n\n````"), (T, "b")]
    assert blocks("- x\n   ~~~\n   ```\n   ~~~\n") == [(T, "- x"), (C, "   ~~~\n   ```\n   ~~~")]


def test_unclosed_fence_runs_to_the_end() -> None:
    assert blocks("```\na\n\n# b\n") == [(C, "```\na\n\n# b")]


def test_setext_headings_become_atx() -> None:
    assert blocks("One\n===\ntext\n\nTwo\n---\n") == [(H, "# One"), (T, "text"), (H, "## Two")]


@pytest.mark.parametrize("text", ["- a\n---", "| a |\n---", "two\nlines\n---", "> q\n---", "---", "x\n\n---"])
def test_a_rule_is_no_heading(text: str) -> None:
    assert all(kind is not H for kind, _ in blocks(text))


def test_tag_lines_are_tags() -> None:
    assert blocks('<Tabs>\n\n<Tab title="x">\n\ntext <b>\n\n</Tab>\n</Tabs>\n') == [
        (TAG, "<Tabs>"),
        (TAG, '<Tab title="x">'),
        (T, "text <b>"),
        (TAG, "</Tab>\n</Tabs>"),
    ]


def test_simple_html_tables_become_pipe_rows() -> None:
    html = "<table>\n<tr><th>Name</th><th>A|B</th></tr>\n<tr><td rowspan=2>x</td><td>`1`</td></tr><tr><td>2</td></tr>\n</table>"
    assert blocks(html) == [(TABLE, "| Name | A\\|B |\n| --- | --- |\n| x | `1` |\n| x | 2 |")]
    nested = "<table><tr><td><ul><li>a</li></ul></td><td>b</td></tr></table>"
    assert blocks(nested) == [(T, nested)]


def test_front_matter_is_meta_and_never_text() -> None:
    parsed = parse("---\ntitle: ' The title '\ndate: 2024-05-01\ntags: [a, b]\n---\n# Heading\n")
    assert parsed.title == "The title"
    assert parsed.meta["front_matter"] == {"title": " The title ", "date": "2024-05-01", "tags": ["a", "b"]}
    assert [b.text for b in parsed.blocks] == ["# Heading"]


@pytest.mark.parametrize("title", ["[a]", "42", "''", "null"])
def test_only_text_is_a_title(title: str) -> None:
    assert parse(f"---\ntitle: {title}\n---\nx\n").title is None


@pytest.mark.parametrize(
    "yaml",
    [
        "a: [1, 2",
        "a: b: c",
        "a: !!python/object/apply:os.system [x]",
        "a: 2020-13-45",
        "a: &x [*x]",
        "a: " + "[" * 5000,
        "a: " + "[" * 500 + "]" * 500,
        "a: &a [x,x]\n"
        + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "a: &a {x: 1}\n"
        + "".join(f"{c}: &{c} {{<<: [{','.join(['*' + p] * 9)}]}}\n" for p, c in zip("abcde", "bcdef", strict=True)),
        "a: " + "9" * 5000,
    ],
)
def test_bad_front_matter_costs_only_its_meta(yaml: str) -> None:
    parsed = parse(f"---\n{yaml}\n---\ntext\n")
    assert parsed.meta["front_matter"] is None
    assert [b.text for b in parsed.blocks] == ["text"]


def test_front_matter_escapes_give_storable_text() -> None:
    parsed = parse('---\ntitle: "a\\0b\\uD800c"\n---\nx\n')
    (parsed.title or "").encode("utf-8")
    assert "\0" not in (parsed.title or "")


@pytest.mark.parametrize(
    "text", ["---\n\nprose\n\n---\nmore\n", "---\nprose, no key\n---\nmore\n", "---\ntitle: x\n\nnever closed\n"]
)
def test_text_behind_a_rule_is_not_front_matter(text: str) -> None:
    parsed = parse(text)
    assert "front_matter" not in parsed.meta
    assert "".join(b.text for b in parsed.blocks).replace("\n", "") == text.replace("\n", "").strip()


def test_comments_over_blank_lines_are_left_out() -> None:
    assert blocks("a\n\n<!-- hidden\n\n# hidden\n-->\n\nb\n") == [(T, "a"), (T, "b")]
    assert blocks("a <!-- x\n\ny --> b\n") == [(T, "a  b")]
    assert blocks("one `<!--` two\n\nb -->\n") == [(T, "one `<!--` two"), (T, "b -->")]


@pytest.mark.parametrize("filler", ["b\n", "b\n" * (COMMENT_CHARS // 2 + 10)])
def test_an_unclosed_comment_loses_nothing(filler: str) -> None:
    text = "a\n\n<!-- open\n\n" + filler + "\n<!-- again\n\nend\n"
    assert "".join(t for _, t in blocks(text)).replace("\n", "") == text.replace("\n", "")


def test_bad_input_is_read() -> None:
    assert blocks("") == blocks("\n \n\t\n") == blocks("---\na: b\n---\n") == []
    assert blocks(b"# a\0b\n\n\xff \xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9")[0] == (H, "# ab")
    assert len(blocks("x" * 10_000_000)[0][1]) == 10_000_000
    assert blocks("#\n####### seven\n#no\n") == [(H, "#"), (T, "####### seven\n#no")]


LINES = ["# h", "text", "", " ", "```", "~~~~", "> ```", "===", "---", "| a |", "<div>", "</div>", "<!-- x", "y -->", "- item"]


@given(
    st.lists(st.sampled_from([*LINES, "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td></tr></table>", "　"]), max_size=30)
)
def test_streamed_and_whole_text_give_the_same_blocks(lines: list[str]) -> None:
    data = "\n".join(lines).encode()
    whole = parse(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "SMALL", 1)
        patch.setattr(encoding, "PIECE", 3)
        streamed = parse(data)
        assert (list(streamed.blocks), streamed.title, streamed.meta) == (list(whole.blocks), whole.title, whole.meta)


@given(st.lists(st.sampled_from([x for x in LINES if x not in ("===", "---", "<!-- x")]), max_size=30))
def test_no_text_is_lost_and_order_is_kept(lines: list[str]) -> None:
    out = list(split_blocks(lines))
    assert [x.strip() for b in out for x in b.text.split("\n") if x.strip()] == [x.strip() for x in lines if x.strip()]
    assert all(isinstance(b, Block) and b.text.strip() and b.text == b.text.rstrip() for b in out)
