"""kb_doc_version as the nodes of a task fill it: fetched, parsed, chunked. Called behind ``tasks.fence`` only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from kb_pipeline.model import Json
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "versions.sql")


@dataclass(frozen=True, slots=True)
class VersionRow:
    """What a node needs of a version: the stored output of the nodes before it."""

    doc_id: int
    version: int
    revision: str
    raw_path: str | None
    raw_sha256: bytes | None
    parsed_path: str | None
    text_sha256: bytes | None
    title: str | None
    chunk_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class Fetched:
    doc_id: int
    version: int
    revision: str
    raw_path: str
    raw_sha256: bytes
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class ParsedVersion:
    doc_id: int
    version: int
    parsed_path: str
    text_sha256: bytes
    title: str | None
    parse_result: Json


def read_versions(c: Connection, keys: Sequence[tuple[int, int]]) -> dict[int, VersionRow]:
    """By document id."""
    rows = c.execute(SQL.read, {"docs": [d for d, _ in keys], "versions": [v for _, v in keys]})
    return {row.doc_id: VersionRow(*row) for row in rows}


def save_fetched(c: Connection, rows: Sequence[Fetched]) -> None:
    c.execute(SQL.fetched, _columns(rows, "doc_id", "version", "revision", "raw_path", "raw_sha256", "raw_bytes"))


def save_parsed(c: Connection, rows: Sequence[ParsedVersion]) -> None:
    columns = _columns(rows, "doc_id", "version", "parsed_path", "text_sha256", "title", "parse_result")
    c.execute(SQL.parsed, {**columns, "parse_result": [Jsonb(r.parse_result) for r in rows]})


def object_paths(c: Connection, doc_ids: Sequence[int]) -> list[str]:
    """Every object that a version of these documents refers to."""
    return [r.path for r in c.execute(SQL.object_paths, {"docs": list(doc_ids)})]


def _columns(rows: Sequence[Any], *names: str) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in names}
