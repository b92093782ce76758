"""The newest rows of each step of a space, one statement a step, for whoever looks at their quality."""

from dataclasses import dataclass
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "frames.sql")


@dataclass(frozen=True, slots=True)
class Columns:
    names: list[str]
    rows: list[Any]


def documents(c: Connection, space_id: int, limit: int) -> Columns:
    return _read(c, SQL.documents, {"space": space_id, "limit": limit})


def versions(c: Connection, space_id: int, shard: int, limit: int) -> Columns:
    return _read(c, SQL.versions, {"space": space_id, "shard": shard, "limit": limit})


def chunks(c: Connection, space_id: int, shard: int, limit: int) -> Columns:
    return _read(c, SQL.chunks, {"space": space_id, "shard": shard, "limit": limit})


def embeddings(c: Connection, space_id: int, shard: int, model_id: int, limit: int) -> Columns:
    """One row a text."""
    return _read(c, SQL.embeddings, {"space": space_id, "shard": shard, "model": model_id, "limit": limit})


def entries(c: Connection, space_id: int, shard: int, index_id: int, limit: int) -> Columns:
    """What the index must hold."""
    return _read(c, SQL.entries, {"space": space_id, "shard": shard, "index": index_id, "limit": limit})


def _read(c: Connection, statement: Any, values: dict[str, Any]) -> Columns:
    cursor = c.execute(statement, values)
    return Columns([column.name for column in cursor.description or ()], cursor.fetchall())
