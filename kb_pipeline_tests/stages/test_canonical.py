import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb_pipeline.canonical import canonical, estimate_tokens, milli_tokens, source_offsets
from kb_pipeline.model import BlockKind

KINDS = st.sampled_from(BlockKind)
WORDS = (
    "[ ] ( ) [a](b) ![a](b) [![a](b)](c) [`a`](b) `a[i](x)` <!-- --> <!--x--> `<!--·x·-->` <a·id='x'></a> <span·x>new</span> "
    "</span> {#id} ---- ------ # e\u0301 \u0301 ü u\u0308 \u1112\u1161\u11ab \u0958 字 。 · ·· \t \n \n\n \n\n\n ·\n "
    "\r\n \r \ufeff - | ` `` <! -- > x \ud800 \0"
)
PIECES = st.sampled_from([w.replace("·", " ") for w in WORDS.split(" ")])
TEXT = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=60)


@settings(max_examples=600, deadline=None)
@given(TEXT, KINDS)
def test_the_form_is_a_fixed_point(text: str, kind: BlockKind) -> None:
    once = canonical(text, kind)
    assert canonical(once, kind) == once
    once.encode()


@settings(max_examples=300, deadline=None)
@given(TEXT.filter(lambda t: "\r" not in t and "\ud800" not in t), KINDS)
def test_encodings_of_the_same_text_have_one_form(text: str, kind: BlockKind) -> None:
    form = canonical(unicodedata.normalize("NFC", text), kind)
    assert canonical(unicodedata.normalize("NFD", text), kind) == form
    assert canonical(text.replace("\n", "\r\n"), kind) == form
    assert canonical("\ufeff" + text, kind) == form
    assert canonical("\n\n" + text + " \n\n", kind) == form


@settings(max_examples=600, deadline=None)
@given(TEXT, KINDS)
def test_every_point_of_the_form_has_a_place_in_the_source(text: str, kind: BlockKind) -> None:
    form, offsets, last = canonical(text, kind), source_offsets(text, kind), 0
    for offset in range(1, len(form)):
        place = offsets.at(offset, last)
        assert last <= place <= len(text)
        last = place


@settings(max_examples=300, deadline=None)
@given(TEXT.filter(lambda t: unicodedata.is_normalized("NFC", t)), KINDS)
def test_a_place_in_the_source_has_the_same_character(text: str, kind: BlockKind) -> None:
    form, offsets = canonical(text, kind), source_offsets(text, kind)
    for offset in range(1, len(form)):
        if form[offset] in "aix字" and form[offset - 1].isalnum():
            place = offsets.at(offset, len(text))  # not moved out of links; at their start all the same
            assert text[place:].lstrip("![")[:1] == form[offset]


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("See [the guide](/a/b.md 'Guide') now", "See the guide now"),
        ("[wiki](https://x.org/a_(b))", "wiki"),
        ("![alt](a.png)", "alt"),
        ("[![logo](a.png)](https://x.org)", "logo"),
        ("![](a.png)", ""),
        ("call `a[i](x)` and [`b`](c)", "call `a[i](x)` and `b`"),
        ("vec![1, 2]", "vec![1, 2]"),
        ("a <!-- todo\nmore --> b", "a b"),
        ("`<!-- shown -->`", "`<!-- shown -->`"),
        ('x <a id="y"></a>', "x"),
        ('do <span style="color:red">not</span> run', "do not run"),
        ("| a     |   b |\n| ------ | :------ |", "| a | b |\n| --- | :--- |"),
        ("a  \n\n\n\nb\t\n", "a\n\nb"),
        ("  - kept indentation", "  - kept indentation"),
        ("{#each items}", "{#each items}"),
    ],
)
def test_what_no_reader_sees_is_not_hashed(source: str, form: str) -> None:
    assert canonical(source, BlockKind.TEXT) == form


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("## Set up {#set-up}", "## Set up"),
        ("## `x` <span class='badge'>New in v5.0</span>", "## `x`"),
        ("# <span>Title</span>", "# Title"),
        ("# <span class='big'>Title</span>", "# Title"),
    ],
)
def test_a_heading_loses_its_anchor_and_keeps_its_words(source: str, form: str) -> None:
    assert canonical(source, BlockKind.HEADING) == form


def test_code_keeps_everything() -> None:
    source = "```md\n[a](b)   <!-- c -->  \n\n\n------\n```"
    assert canonical(source, BlockKind.CODE) == source
    assert canonical("\ufeff```\r\ne\u0301\r\n```\r\n", BlockKind.CODE) == "```\n\u00e9\n```"


def test_text_that_is_nested_without_end_is_left_alone() -> None:
    source = "[" * 50 + "x" + "](y)" * 50
    assert canonical(source, BlockKind.TEXT) == source
    assert source_offsets(source, BlockKind.TEXT).at(60) == 60


def test_a_point_inside_a_link_moves_before_the_link() -> None:
    source = "Go. [One. Two.](http://a/b) End."
    form = canonical(source, BlockKind.TEXT)
    assert form == "Go. One. Two. End."
    offsets = source_offsets(source, BlockKind.TEXT)
    assert source[offsets.at(form.index(" Two")) :] == "[One. Two.](http://a/b) End."
    assert source[offsets.at(form.index("One")) :] == "[One. Two.](http://a/b) End."
    assert source[offsets.at(form.index(" End")) :] == " End."


def test_tokens_are_additive_and_never_zero() -> None:
    assert milli_tokens("abc字") == milli_tokens("abc") + milli_tokens("字") == 3 * 275 + 955
    assert (estimate_tokens(""), estimate_tokens("a"), estimate_tokens("a" * 40)) == (0, 1, 11)
    assert milli_tokens("\ud800") > 0


def test_a_large_block_has_the_same_form() -> None:
    part = "See [the guide](http://x.org/a?b=1),  `a[i](x)`  \n"
    assert canonical(part * 30_000, BlockKind.TEXT) == "\n".join([canonical(part, BlockKind.TEXT)] * 30_000)
