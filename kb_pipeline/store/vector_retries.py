"""vector_retry: vectors that an index did not take. A row is the vector's state "failed"; without one it waits, or is indexed.

Counted are tries of the index, by whoever made them. A published document, a reconciliation that finds the vector in its
place, and an operator's retry end the count.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "vector_retries.sql")
MAX_ATTEMPTS = 5  # the alert's partial index in sql/ has the same number
SLICE = 5000  # ids a statement


def record(
    c: Connection,
    space_id: int,
    shard: int,
    failures: Mapping[int, str],
    *,
    base_seconds: float,
    max_seconds: float,
    current_only: bool = False,
) -> None:
    """One more failed try for each chunk -> error, due again after a back-off. Their documents are locked by the caller."""
    ids = sorted(failures)
    for start in range(0, len(ids), SLICE):
        part = ids[start : start + SLICE]
        values = {"space": space_id, "shard": shard, "chunks": part, "errors": [failures[i][:1000] for i in part]}
        c.execute(SQL.record, {**values, "base": base_seconds, "longest": max_seconds, "current": current_only})


def forget(c: Connection, space_id: int, doc_ids: Sequence[int]) -> None:
    """These documents are in the index as they should be."""
    c.execute(SQL.forget, {"space": space_id, "docs": list(doc_ids)})


def reset(c: Connection, space_id: int) -> None:
    """Every failed vector of the space may be tried again, at once and five times."""
    c.execute(SQL.reset, {"space": space_id})


def postponed(c: Connection, space_id: int, shard: int, chunk_ids: Sequence[int]) -> set[int]:
    """Of these, the ones that nobody tries now: failed five times, or not due. They are noted as still failing."""
    values = {"space": space_id, "shard": shard, "chunks": list(chunk_ids), "most": MAX_ATTEMPTS}
    return {r.chunk_id for r in c.execute(SQL.postponed, values)}


def touch(c: Connection, space_id: int, shard: int, chunk_ids: Sequence[int]) -> None:
    """Still failing, without a try that would count."""
    c.execute(SQL.touch, {"space": space_id, "shard": shard, "chunks": list(chunk_ids)})


def settle(c: Connection, space_id: int, shard: int, since: datetime) -> None:
    """Forget current chunks that nobody has seen failing ``since`` then, and rows whose chunk is gone."""
    c.execute(SQL.settle, {"space": space_id, "shard": shard, "since": since})
