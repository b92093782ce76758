"""LEAVE, ERASE and the tombstones: the only place that deletes chunk rows and decides that a vector is dead.

Every function here wants the document locked in an earlier statement of the same transaction (PostgreSQL re-reads only the
locked row after a wait, not the rows that decide).
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "erasure.sql")


def give_up(c: Connection, space_id: int, shard: int, versions: Sequence[tuple[int, int]], *, status: str = "FAILED") -> None:
    """LEAVE: versions that end unpublished. Their vectors that nothing current uses are asked about again by the vector GC."""
    if not versions:
        return
    values = {
        "space": space_id,
        "shard": shard,
        "docs": [d for d, _ in versions],
        "versions": [v for _, v in versions],
        "status": status,
    }
    c.execute(SQL.leave, values)
    c.execute(SQL.give_up, values)


def erase(c: Connection, space_id: int, shard: int, doc_ids: Sequence[int], limit: int | None = None) -> int:
    """ERASE: rows that no PROCESSING or READY version refers to, with a tombstone for each in every living index."""
    if not doc_ids:
        return 0
    values = {"space": space_id, "shard": shard, "docs": sorted(set(doc_ids)), "limit": limit}
    c.execute(SQL.forget_references, values)
    return int(one(c.execute(SQL.erase, values)).n)


def due_documents(c: Connection, space_id: int, limit: int) -> list[int]:
    """Documents with tombstones that may be decided now."""
    return [r.doc_id for r in c.execute(SQL.due_documents, {"space": space_id, "limit": limit})]


def decide(c: Connection, space_id: int, shard: int, doc_ids: Sequence[int]) -> None:
    """G1: each waiting tombstone is dropped, left waiting, or its id declared dead for good."""
    values = {"space": space_id, "shard": shard, "docs": list(doc_ids)}
    for statement in (SQL.drop_living, SQL.mark_erasing, SQL.mark_dead):
        c.execute(statement, values)


def dead_vectors(c: Connection, index_id: int, after: UUID | None, limit: int) -> list[UUID]:
    rows = c.execute(SQL.dead_vectors, {"index": index_id, "after": after, "limit": limit})
    return [r.vec_id for r in rows]


def confirm_dead(c: Connection, space_id: int, shard: int, index_id: int, gone: Sequence[UUID], still: Sequence[UUID]) -> None:
    """G3 and G4: forget what the index no longer holds, and give a row that came back a new name; count a try for the rest."""
    values = {"space": space_id, "shard": shard, "index": index_id, "gone": list(gone), "still": list(still)}
    c.execute(SQL.confirm_dead, values)
    if still:
        c.execute(SQL.count_tries, values)


def waiting_tombstones(c: Connection, space_id: int) -> dict[str, Any]:
    return {r.state: r.n for r in c.execute(SQL.waiting, {"space": space_id})}
