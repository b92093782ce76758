"""What every parser of the registry keeps."""

import io
import random
from collections.abc import Callable
from typing import cast

import pytest

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.ports import Parser
from kb_pipeline.registry import PARSERS, open_adapter
from kb_pipeline.stages.parse import decode_blocks, encode_blocks

ZH = "数据库集群部署完成后，您可以使用以下命令检查服务状态"
SAMPLES: dict[str, Callable[[str], str]] = {
    "markdown": lambda text: f"---\ntitle: {text}\n---\n# {text}\n\n{text}\n\n```\n{text}\n```\n",
    "html": lambda text: f"<html><head><title>{text}</title></head><body><h1>{text}</h1><p>{text}</p></body></html>",
    "text": lambda text: f"{text}\n\n{text}\n",
    "csv": lambda text: f"id,{text}\n1,{text}\n2,{text}\n",
}


@pytest.fixture(params=sorted(PARSERS))
def name(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture
def parser(name: str) -> Parser:
    return cast(Parser, open_adapter("parser", name))


def read(parser: Parser, data: bytes) -> tuple[Parsed, list[Block]]:
    parsed = parser.parse(io.BytesIO(data), "the name")
    return parsed, list(parsed.blocks)


def test_version_is_a_part_of_a_recipe(parser: Parser) -> None:
    assert parser.version and "/" not in parser.version


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030"])
def test_every_encoding_gives_the_same_blocks(name: str, parser: Parser, codec: str) -> None:
    sample = SAMPLES[name](ZH)
    parsed, blocks = read(parser, sample.encode(codec))
    expected, expected_blocks = read(parser, sample.encode())
    assert (parsed.title, blocks) == (expected.title, expected_blocks)
    assert ZH in blocks[0].text
    assert expected.meta["encoding"] == "utf-8"


def test_line_ends_do_not_matter(name: str, parser: Parser) -> None:
    sample = SAMPLES[name](ZH)
    assert read(parser, sample.replace("\n", "\r\n").encode())[1] == read(parser, sample.encode())[1]


def test_a_second_reading_gives_the_same(name: str, parser: Parser) -> None:
    data = SAMPLES[name](ZH).encode()
    assert read(parser, data)[1] == read(parser, data)[1]


def test_binary_content_is_rejected(parser: Parser) -> None:
    with pytest.raises(Rejected) as caught:
        read(parser, random.Random(3).randbytes(3000))
    assert caught.value.code == "binary"
    assert "the name" in caught.value.message


@pytest.mark.parametrize("data", [b"", b" \r\n\t\n", b"\xef\xbb\xbf"])
def test_nothing_gives_no_blocks(parser: Parser, data: bytes) -> None:
    assert read(parser, data)[1] == []


@pytest.mark.parametrize("seed", range(8))
def test_mutilated_content_is_read_or_rejected(name: str, parser: Parser, seed: int) -> None:
    pick = random.Random(seed)
    data = bytearray(SAMPLES[name](ZH).encode() * 3)
    for _ in range(6):
        at = pick.randrange(len(data))
        data[at : at + pick.randrange(4)] = pick.choice(
            [b"", b"\0", b"\xff", b"<", b'"', b"---\n", b"```\n", b"\xed\xa0\x80", b"|"]
        )
    try:
        parsed, blocks = read(parser, bytes(data))
    except Rejected:
        return
    for block in blocks:
        assert block.text.strip() and "\0" not in block.text
        block.text.encode("utf-8")
        assert (block.kind is BlockKind.HEADING) == (1 <= block.level <= 6)
    with encode_blocks(Parsed(iter(blocks), parsed.title, parsed.meta)).data as stored:
        back = decode_blocks(stored)
        assert (back.title, back.meta, list(back.blocks)) == (parsed.title, parsed.meta, blocks)
