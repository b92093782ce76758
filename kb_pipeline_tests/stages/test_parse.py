import dataclasses
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.stages import parse
from kb_pipeline.stages.parse import ParsedFile, decode_blocks, detect_format, encode_blocks, parse_document, recipe

ZH = "数据库集群部署完成后，您可以使用以下命令检查服务状态。\n" * 3
PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n"
NOISE = random.Random(7).randbytes(4000)


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("a.md", b"# Title\n\ntext\n", "markdown"),
        ("a.MARKDOWN", ZH.encode(), "markdown"),
        ("a.md", ZH.encode()[:100], "markdown"),  # cut inside a character
        ("a.md", ZH.encode("gb18030"), "markdown"),
        ("a.md", ZH.encode("utf-16-le"), "markdown"),
        ("a.txt", "plain".encode("utf-16"), "text"),
        ("a.csv", b"a,b\n1,2\n", "csv"),
        ("a.tsv", b"a\tb\n1\t2\n", "csv"),
        ("a.html", b"<p>x</p>", "html"),
        ("a.html", b"no tag in here", "text"),
        ("a.md", b"\n<!-- x --> <!DOCTYPE html><html><body>x</body></html>", "html"),
        ("a.txt", b"<html><body>x</body></html>", "html"),
        ("a.csv", b"\xef\xbb\xbf<!doctype html><html>x", "html"),
        ("a.py", b"HTML = 1\n", "text"),
        ("a.json", b'{"a": 1}', "text"),
        ("a.log", b"12:00 \x1b[31mred\x1b[0m\n", "text"),
        ("about-pdf.md", b"A file that begins with `%PDF-` is a PDF.\n", "markdown"),
        ("a.md", b"GIF89a was a format. MZ begins programs.\n", "markdown"),
        ("a.md", b"damaged \xff text with a NUL \0 in it\n", "markdown"),
    ],
)
def test_format_is_found_from_bytes_before_the_name(name: str, head: bytes, expected: str) -> None:
    assert detect_format(head, name) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (
            b"# Title\n\nSome *text* with a [link](https://example.org).\n\n- one\n- two\n\n## More\n\n```sh\nls\n```\n" * 3,
            "markdown",
        ),
        (b"<div><p>one</p><p>two</p><a href='/x'>three</a></div>\n" * 10, "html"),
        (b"def main(argv):\n    import sys\n    return sys.exit(0)\n" * 10, "text"),
    ],
)
def test_a_name_that_says_nothing_is_decided_from_the_bytes(head: bytes, expected: str) -> None:
    assert detect_format(head, "README") == expected


@pytest.mark.parametrize(
    ("name", "head", "code", "said"),
    [
        ("a.md", b"", "empty", "a.md"),
        ("a.md", b"\xef\xbb\xbf \r\n\t", "empty", "a.md"),
        ("a.md", "\ufeff \n".encode("utf-16-le"), "empty", "a.md"),
        ("a.md", NOISE, "binary", "a.md"),
        ("noise", NOISE, "binary", "noise"),
        ("report.md", PDF, "unsupported_format", "PDF"),
        ("a.md", b"{\\rtf1 text}", "unsupported_format", "RTF"),
        ("a.docx", b"PK\x03\x04\x14\0\x06\0word/document.xml", "unsupported_format", "Word"),
        ("a.txt", b"PK\x03\x04\x14\0\x06\0data", "unsupported_format", "ZIP"),
        ("a.md", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "unsupported_format", "PNG"),
        ("setup", b"MZ\x01\x02\x03 This program", "unsupported_format", "Windows"),
        ("a", b"\x1f\x8b\x08\0\0\0\0\0", "unsupported_format", "gzip"),
    ],
)
def test_what_no_parser_reads_is_refused_by_name(name: str, head: bytes, code: str, said: str) -> None:
    with pytest.raises(Rejected) as caught:
        detect_format(head, name)
    assert caught.value.code == code
    assert said in caught.value.message


def test_many_comments_before_the_markup_are_decided_at_once() -> None:
    assert detect_format(b"<!---->" * 9000 + b"x", "a.md") == "markdown"


class FakeParser:
    version = "3"

    def __init__(self, error: Exception | None = None, *, late: bool = False) -> None:
        self.error, self.late = error, late

    def parse(self, raw: BinaryIO, name: str) -> Parsed:
        if self.error and not self.late:
            raise self.error
        return Parsed(self._blocks(raw), "T", {"encoding": "utf-8"})

    def _blocks(self, raw: BinaryIO) -> Iterator[Block]:
        yield Block(BlockKind.TEXT, raw.read().decode())
        if self.error:
            raise self.error


def test_the_result_names_format_and_recipe() -> None:
    asked: list[str] = []

    def parser_for(name: str) -> FakeParser:
        asked.append(name)
        return FakeParser()

    raw = io.BytesIO(b"# all of it")
    raw.seek(4)
    parsed = parse_document(raw, "a.md", parser_for)
    assert asked == ["markdown"]
    assert [b.text for b in parsed.blocks] == ["# all of it"]
    assert parsed.meta == {"encoding": "utf-8", "format": "markdown", "recipe": recipe("markdown", FakeParser())}
    assert parsed.meta["recipe"] == "markdown/3"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("x"), RecursionError(), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), KeyError("x")]
)
def test_a_parser_that_fails_costs_the_document_only(error: Exception, late: bool) -> None:
    with pytest.raises(Rejected) as caught:
        list(parse_document(io.BytesIO(b"x"), "dir/a.md", lambda _: FakeParser(error, late=late)).blocks)
    assert caught.value.code == "corrupt"
    assert "dir/a.md" in caught.value.message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [Rejected("no", code="binary"), MemoryError(), OSError("disk")])
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        parse_document(io.BytesIO(b"x"), "a.md", lambda _: FakeParser(error))
    assert caught.value is error


def encoded(blocks: list[Block], title: str | None = None, meta: dict[str, object] | None = None) -> ParsedFile:
    return encode_blocks(Parsed(iter(blocks), title, meta or {}))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
BLOCK = st.builds(Block, st.sampled_from(BlockKind), TEXT, st.integers(0, 6), st.integers(0, 2**31 - 1))


@given(
    st.lists(BLOCK, max_size=20),
    st.none() | TEXT.filter(bool),
    st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT), max_size=4),
)
def test_everything_stored_is_read_back(blocks: list[Block], title: str | None, meta: dict[str, object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parse, "BATCH_CHARS", 30)
        file = encoded(blocks, title, meta)
    back = decode_blocks(file.data)
    assert (back.title, back.meta, list(back.blocks)) == (title, meta, blocks)
    assert (file.title, file.meta, file.blocks, file.characters) == (title, meta, len(blocks), sum(len(b.text) for b in blocks))


def test_result_is_at_its_start_and_its_size_is_right() -> None:
    file = encoded([Block(BlockKind.TEXT, "x" * 100)] * 3)
    assert file.data.tell() == 0
    assert len(file.data.read()) == file.size_bytes


def test_batches_do_not_change_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [Block(BlockKind.TEXT, f"text {i}") for i in range(50)]
    whole = encoded(blocks).text_sha256
    monkeypatch.setattr(parse, "BATCH_CHARS", 1)
    assert encoded(blocks).text_sha256 == whole
    assert len(whole) == hashlib.sha256().digest_size


def test_the_hash_covers_text_and_not_meta() -> None:
    block = Block(BlockKind.HEADING, "# a", 1, 2)
    base = encoded([block], "T", {"a": 1}).text_sha256
    assert encoded([block], "T", {"a": 2}).text_sha256 == base
    others = [encoded([block], "U"), encoded([block], None), encoded([block, block], "T"), encoded([], "T")]
    changes: list[dict[str, object]] = [{"text": "# b"}, {"level": 2}, {"page": 3}, {"kind": BlockKind.TEXT}]
    others += [encoded([dataclasses.replace(block, **change)], "T") for change in changes]
    assert len({base, *(o.text_sha256 for o in others)}) == len(others) + 1


@pytest.mark.parametrize("header", ["text 0 0", "text 0 0 1", "text 0 0 11", "text 0 0 12"])
def test_block_borders_are_part_of_the_hash(header: str) -> None:
    one = encoded([Block(BlockKind.TEXT, f"a\n{header}\nb")])
    two = encoded([Block(BlockKind.TEXT, "a"), Block(BlockKind.TEXT, "b")])
    assert one.text_sha256 != two.text_sha256


def test_what_postgresql_refuses_is_not_stored() -> None:
    file = encoded([Block(BlockKind.TEXT, "a\0b\ud800")], "t\0\udfff", {"k\0": ["\ud800", {"x": "\0y"}]})
    back = decode_blocks(file.data)
    stored = json.dumps([back.title, back.meta, [b.text for b in back.blocks]], ensure_ascii=False)
    stored.encode("utf-8")
    assert "\\u0000" not in stored


def test_a_large_result_is_read_batch_by_batch() -> None:
    made = 0

    def blocks() -> Iterator[Block]:
        nonlocal made
        for i in range(400):
            made += 1
            yield Block(BlockKind.TEXT, random.Random(i).randbytes(20_000).hex())

    file = encode_blocks(Parsed(blocks()))
    assert file.size_bytes > parse.MEMORY_BYTES / 2
    reader = decode_blocks(file.data).blocks
    next(reader)
    assert file.data.tell() < file.size_bytes / 4
    assert 1 + sum(1 for _ in reader) == made == 400


def test_a_cut_result_is_an_error_and_not_a_short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "BATCH_CHARS", 10)
    data = encoded([Block(BlockKind.TEXT, f"text number {i}") for i in range(6)], "T").data.read()
    for end in range(len(data) - 8):  # the last 8 bytes only repeat that it ends
        with pytest.raises(Rejected) as caught:
            list(decode_blocks(io.BytesIO(data[:end])).blocks)
        assert caught.value.code == "parse_result_damaged"


def test_a_failing_parser_leaves_no_open_file() -> None:
    def blocks() -> Iterator[Block]:
        yield Block(BlockKind.TEXT, "a")
        raise Rejected("bad page", code="corrupt")

    with pytest.raises(Rejected):
        encode_blocks(Parsed(blocks()))


def test_heavy_packages_stay_unloaded() -> None:
    program = """
import io, sys
from kb_pipeline.registry import open_adapter
from kb_pipeline.stages.parse import decode_blocks, encode_blocks, parse_document
parsed = parse_document(io.BytesIO(b"---\\na: b\\n---\\n# x"), "a.md", lambda name: open_adapter("parser", name))
assert [b.text for b in decode_blocks(encode_blocks(parsed).data).blocks] == ["# x"]
print(*sorted({"pandas", "trafilatura", "lxml", "magika", "charset_normalizer", "dagster"} & set(sys.modules)))
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.stdout.split() == []
