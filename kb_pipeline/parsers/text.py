"""Plain text, source code, logs: paragraphs between blank lines, in any encoding."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict

from kb_pipeline.model import Block, BlockKind, Parsed
from kb_pipeline.parsers.encoding import open_text


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextParser:
    version = "1"

    def __init__(self, config: Config) -> None:
        self.config = config

    def parse(self, raw: BinaryIO, name: str) -> Parsed:
        text = open_text(raw, name)
        return Parsed(_paragraphs(text.lines()), None, text.meta())


def _paragraphs(lines: Iterable[str]) -> Iterator[Block]:
    pend: list[str] = []
    for line in lines:
        if line and not line.isspace():
            pend.append(line)
        elif pend:
            yield Block(BlockKind.TEXT, "\n".join(pend).rstrip())
            pend = []
    if pend:
        yield Block(BlockKind.TEXT, "\n".join(pend).rstrip())
