import io

from kb_pipeline.model import BlockKind
from kb_pipeline.parsers import encoding
from kb_pipeline.parsers.text import Config, TextParser


def texts(data: bytes) -> list[str]:
    blocks = list(TextParser(Config()).parse(io.BytesIO(data), "a.txt").blocks)
    assert all(b.kind is BlockKind.TEXT for b in blocks)
    return [b.text for b in blocks]


def test_paragraphs_stand_between_blank_lines_and_keep_their_indentation() -> None:
    assert texts(b"\n  one\n\ttwo  \n \t\n\n# three\n```\n") == ["  one\n\ttwo", "# three\n```"]


def test_a_line_of_ten_megabytes_is_one_block() -> None:
    data = "字".encode() * 3_400_000
    assert len(data) > encoding.SMALL
    assert [len(t) for t in texts(data)] == [3_400_000]


def test_nothing_gives_no_blocks() -> None:
    assert texts(b"") == texts(b" \n\n\t") == []


def test_meta_names_the_encoding() -> None:
    parsed = TextParser(Config()).parse(io.BytesIO("数据库集群部署完成后\n".encode("gb18030")), "a.txt")
    assert (parsed.title, parsed.meta) == (None, {"encoding": "gb18030"})
