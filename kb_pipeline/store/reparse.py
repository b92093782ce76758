"""Tasks that begin at PARSER, with the original that is stored already. Documents are locked by the caller."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "reparse.sql")


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Documents of a batch: with a new version now, with a live task, and those whose newest version is young enough."""

    queued: int
    busy: int
    fresh: int


def some_living(c: Connection, space_id: int, after: int, limit: int) -> list[int]:
    return [r.id for r in c.execute(SQL.some_living, {"space": space_id, "after": after, "limit": limit})]


def enqueue(c: Connection, space_id: int, doc_ids: Sequence[int], before: datetime, *, max_retries: int) -> Enqueued:
    """A version and its task for each document that nobody works on and whose newest version was made before ``before``."""
    values = {"space": space_id, "docs": list(doc_ids), "before": before, "max_retries": max_retries}
    busy, fresh = one(c.execute(SQL.busy, values)).n, one(c.execute(SQL.newer, values)).n
    return Enqueued(c.execute(SQL.enqueue, values).rowcount, busy, fresh)
