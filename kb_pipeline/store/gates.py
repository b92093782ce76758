"""What a step has just left behind, looked at once more before the next one takes it: read-only, by keys, within bounds."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.states import Node
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "gates.sql")
DOCUMENTS = 2000  # looked at, the newest first
ROWS = 20_000  # chunks of them
SHOWN = 50


@dataclass(frozen=True, slots=True)
class Worked:
    """What a node's log says of a run. ``p95_seconds`` is None where nothing was logged."""

    entries: int
    p95_seconds: float | None
    bytes: int


def parsed(c: Connection, space_id: int) -> list[Any]:
    """Documents that wait for the chunker: doc_id, external_id, task_id, title, text_sha256, raw_bytes, total."""
    return c.execute(SQL.parsed, {"space": space_id, "documents": DOCUMENTS}).fetchall()


def unchunked(c: Connection, space_id: int, shard: int) -> list[Any]:
    """Documents that wait for embedding, and have no chunks or chunks without rows: doc_id, external_id, task_id, chunks,
    missing, total."""
    return c.execute(SQL.unchunked, _bounds(space_id, shard)).fetchall()


def unsound(c: Connection, space_id: int, shard: int, model_id: int, dimension: int) -> list[Any]:
    """Documents that wait for the index, with texts whose vector is missing, of another length, not of numbers, or zero:
    doc_id, external_id, task_id, missing, length, number, zero, total."""
    return c.execute(SQL.unsound, {**_bounds(space_id, shard), "model": model_id, "dimension": dimension}).fetchall()


def published(c: Connection, space_id: int, shard: int, since: datetime) -> list[Any]:
    """Current chunks of what was published ``since``: doc_id, external_id, chunk_id, vec_id."""
    return c.execute(SQL.published, {**_bounds(space_id, shard), "since": since}).fetchall()


def worked(c: Connection, space_id: int, node: Node, since: datetime) -> Worked:
    return Worked(*one(c.execute(SQL.worked, {"space": space_id, "node": node.value, "since": since})))


def texts(c: Connection, space_id: int, shard: int, node: Node, since: datetime) -> tuple[int, int]:
    """Chunks and tokens of the versions that passed ``node`` since then."""
    row = one(c.execute(SQL.texts, {"space": space_id, "shard": shard, "node": node.value, "since": since}))
    return int(row.chunks), int(row.tokens)


def _bounds(space_id: int, shard: int) -> dict[str, Any]:
    return {"space": space_id, "shard": shard, "documents": DOCUMENTS, "rows": ROWS, "shown": SHOWN}
