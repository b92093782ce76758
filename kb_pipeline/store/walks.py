"""sync_lease, sync_job, sync_seen: who walks a source, what the walk has seen, and what it hides in the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from kb_pipeline.model import Json, Verdict
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, is_dead, one, worker_id

SQL = load_statements(__package__, "walks.sql")


@dataclass(slots=True)
class Walk:
    """One pass over a source. It outlives its process: ``token`` is new for each, ``walk_id`` and the window stay."""

    job_id: int
    walk_id: int
    source_id: int
    token: int
    resumed: bool
    started_at: datetime
    checkpoint: Json | None
    verdict: Verdict = Verdict.COMPLETE
    reasons: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def take_lease(c: Connection, source_id: int, ttl_seconds: int) -> int | str:
    """The new token, or the owner's name when another living process walks this source."""
    row = one(c.execute(SQL.lease, {"source": source_id}))
    dead = row.owner if row.held and is_dead(row.owner) else ""
    taken = c.execute(SQL.take, {"source": source_id, "me": worker_id(), "dead": dead, "ttl": ttl_seconds}).fetchone()
    return int(taken.token) if taken else str(row.owner)


def renew_lease(c: Connection, walk: Walk, ttl_seconds: int) -> bool:
    """The fence of every transaction of a walk: False, and the transaction must be given up, when the token is not ours."""
    return c.execute(SQL.renew, {"source": walk.source_id, "token": walk.token, "ttl": ttl_seconds}).rowcount == 1


def release_lease(c: Connection, source_id: int, token: int) -> None:
    c.execute(SQL.release, {"source": source_id, "token": token})


def begin_walk(c: Connection, space_id: int, source_id: int, token: int, source_clock: float, *, order_stable: bool) -> Walk:
    """Resume the open walk of a source, or open one. Whoever resumes an unstable order is marked ``resumed``."""
    row = c.execute(SQL.open_job, {"source": source_id}).fetchone()
    if row is None:
        row = one(c.execute(SQL.begin, {"space": space_id, "source": source_id, "clock": source_clock}))
        return Walk(row.id, row.walk_id, source_id, token, False, row.started_at, None)
    resumed = row.resumed or (row.checkpoint is not None and not order_stable)
    if resumed and not row.resumed:
        c.execute(SQL.mark_resumed, {"job": row.id})
    return Walk(
        row.id,
        row.walk_id,
        source_id,
        token,
        resumed,
        row.started_at,
        row.checkpoint,
        Verdict(row.verdict),
        row.reasons,
        row.counts,
    )


def save_progress(c: Connection, walk: Walk) -> None:
    """Checkpoint, verdict and counts, in the transaction that creates the page's tasks."""
    c.execute(
        SQL.checkpoint, {"source": walk.source_id, "checkpoint": None if walk.checkpoint is None else Jsonb(walk.checkpoint)}
    )
    c.execute(SQL.progress, _job(walk))


def end_walk(c: Connection, walk: Walk, status: str, *, error: str | None = None) -> None:
    """Close the job and forget what it saw. The watermark is the caller's affair."""
    c.execute(SQL.end, {**_job(walk), "status": status, "error": error})
    c.execute(SQL.checkpoint, {"source": walk.source_id, "checkpoint": None})
    c.execute(SQL.forget_seen, {"walk": walk.walk_id})


def unchanged_pass(c: Connection, space_id: int, source_id: int, source_clock: float, counts: dict[str, int]) -> None:
    """A pass whose listing digest equals the last one: one row, no walk."""
    c.execute(SQL.unchanged, {"space": space_id, "source": source_id, "clock": source_clock, "counts": Jsonb(counts)})


def complete_listing(c: Connection, source_id: int, count: int, digest: str | None, watermark: Json) -> None:
    c.execute(SQL.complete_listing, {"source": source_id, "count": count, "digest": digest, "watermark": Jsonb(watermark)})


def set_waiting(c: Connection, source_id: int, waiting: int) -> None:
    c.execute(SQL.waiting, {"source": source_id, "waiting": waiting})


def mark_seen(c: Connection, walk_id: int, doc_ids: Sequence[int]) -> None:
    c.execute(SQL.mark_seen, {"walk": walk_id, "docs": list(doc_ids)})


def seen_watermark(c: Connection) -> int:
    """The sequence's value now: what is written later has a higher seen_seq."""
    return int(one(c.execute(SQL.seen_watermark)).value)


def count_unseen(c: Connection, walk: Walk, lag_seconds: float) -> int:
    return int(one(c.execute(SQL.count_unseen, _unseen(walk, lag_seconds))).n)


def seen_count(c: Connection, walk_id: int) -> int:
    return int(one(c.execute(SQL.seen_count, {"walk": walk_id})).n)


def unseen_docs(c: Connection, walk: Walk, lag_seconds: float, after: int, limit: int) -> list[Any]:
    """Candidates for hiding by ascending id. Rows: id, external_id."""
    return c.execute(SQL.unseen, {**_unseen(walk, lag_seconds), "after": after, "limit": limit}).fetchall()


def hide_unseen(c: Connection, walk: Walk, lag_seconds: float, doc_ids: Sequence[int]) -> int:
    """Lock these candidates, then decide in the next statement whether they are still unseen. How many were hidden."""
    if not doc_ids:
        return 0
    c.execute(SQL.lock_unseen, {"ids": list(doc_ids)})
    return c.execute(SQL.hide, {**_unseen(walk, lag_seconds), "ids": list(doc_ids)}).rowcount


def hidden_docs(c: Connection, source_id: int, after: int, limit: int) -> list[Any]:
    """Hidden, not yet deleted. Rows: id, external_id, hidden_sync; by id."""
    return c.execute(SQL.hidden, {"source": source_id, "after": after, "limit": limit}).fetchall()


def recent_jobs(c: Connection, source_id: int, limit: int) -> list[Any]:
    return c.execute(SQL.recent, {"source": source_id, "limit": limit}).fetchall()


def _job(walk: Walk) -> dict[str, Any]:
    return {"job": walk.job_id, "verdict": walk.verdict.value, "reasons": Jsonb(walk.reasons), "counts": Jsonb(walk.counts)}


def _unseen(walk: Walk, lag_seconds: float) -> dict[str, Any]:
    return {"walk": walk.walk_id, "source": walk.source_id, "started": walk.started_at, "lag": lag_seconds}
