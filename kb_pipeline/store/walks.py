"""sync_lease, sync_job, sync_seen: who walks a source, what the walk has seen, and what it hides in the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from kb_pipeline.model import Json, Verdict
from kb_pipeline.statements import load_statements
from kb_pipeline.states import SyncEvent, SyncStatus, WalkKind, sync_change
from kb_pipeline.store.database import Connection, is_dead, one, worker_id

SQL = load_statements(__package__, "walks.sql")


@dataclass(slots=True)
class Walk:
    """One pass over a source. It outlives its process: ``token`` is new for each, id, kind, window and clock stay.

    ``checkpoint`` per scope: {"at": behind which page to go on, "done": whether the scope is listed}; None before a page.
    """

    job_id: int
    walk_id: int
    source_id: int
    token: int
    kind: WalkKind
    window_from: dict[str, float | None]
    clock: float  # the source's when the walk began: the next watermark
    started_at: datetime
    resumed: bool = False  # somewhere in the middle of an unstable order: items may have moved behind the checkpoint
    checkpoint: Json | None = None
    verdict: Verdict = Verdict.COMPLETE
    reasons: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Scopes that are not listed to their end."""
        places = self.checkpoint or {}
        return [s for s in self.window_from if not places.get(s, {}).get("done")]

    def at(self, scope: str) -> Json | None:
        place: Json = (self.checkpoint or {}).get(scope, {})
        return place.get("at")

    def go_on(self, scope: str, at: Json | None, *, done: bool = False) -> None:
        self.checkpoint = {**(self.checkpoint or {}), scope: {"at": at, "done": done}}


def take_lease(c: Connection, source_id: int, ttl_seconds: int) -> int | str:
    """The new token, or the owner's name when another living process walks this source."""
    row = one(c.execute(SQL.lease, {"source": source_id}))
    dead = row.owner if row.held and is_dead(row.owner) else ""
    taken = c.execute(SQL.take, {"source": source_id, "me": worker_id(), "dead": dead, "ttl": ttl_seconds}).fetchone()
    return int(taken.token) if taken else str(row.owner)


def walked_by(c: Connection, source_id: int) -> str | None:
    """Who walks this source and lives, as far as is known."""
    row = one(c.execute(SQL.lease, {"source": source_id}))
    return str(row.owner) if row.held and not is_dead(row.owner) else None


def release_run(c: Connection, run_id: str) -> int:
    """Take the leases from a run that has ended. Its walks stay open for the next pass; the new token fences what is late."""
    return c.execute(SQL.release_run, {"run": run_id}).rowcount


def renew_lease(c: Connection, walk: Walk, ttl_seconds: int) -> bool:
    """The fence of every transaction of a walk: False, and the transaction must be given up, when the token is not ours."""
    return c.execute(SQL.renew, {"source": walk.source_id, "token": walk.token, "ttl": ttl_seconds}).rowcount == 1


def release_lease(c: Connection, source_id: int, token: int) -> None:
    c.execute(SQL.release, {"source": source_id, "token": token})


def open_walk(c: Connection, source_id: int, token: int, *, order_stable: bool) -> Walk | None:
    """The walk that a process left open, with everything as it was fixed at its beginning."""
    row = c.execute(SQL.open_job, {"source": source_id}).fetchone()
    if row is None:
        return None
    walk = Walk(
        row.id,
        row.walk_id,
        source_id,
        token,
        WalkKind(row.kind),
        row.window_from,
        row.source_started,
        row.started_at,
        row.resumed,
        row.checkpoint,
        Verdict(row.verdict),
        row.reasons,
        row.counts,
    )
    if not walk.resumed and not order_stable and any(walk.at(s) is not None for s in walk.left):
        c.execute(SQL.mark_resumed, {"job": walk.job_id})
        walk.resumed = True
    return walk


def begin_walk(
    c: Connection,
    space_id: int,
    source_id: int,
    token: int,
    kind: WalkKind,
    window_from: dict[str, float | None],
    source_clock: float,
) -> Walk:
    """A new walk. Until it has completed no digest of an earlier listing says that nothing changed."""
    values = {"space": space_id, "source": source_id, "kind": kind.value, "window": Jsonb(window_from), "clock": source_clock}
    row = one(c.execute(SQL.begin, values))
    return Walk(row.id, row.walk_id, source_id, token, kind, window_from, source_clock, row.started_at)


def past_of(c: Connection, source_id: int) -> Any:
    """watermark, listed_ago (seconds since the last complete listing; None: never), deletions_approved."""
    return one(c.execute(SQL.past, {"source": source_id}))


def save_progress(c: Connection, walk: Walk) -> None:
    """Checkpoint, verdict and counts, in the transaction that creates the page's tasks."""
    _set_checkpoint(c, walk.source_id, walk.checkpoint)
    c.execute(SQL.progress, {**_job(walk), **_change(SyncEvent.LIST)})


def complete_walk(c: Connection, walk: Walk) -> None:
    """Close the job and forget what it saw. Count, digest and watermark of the source are the caller's affair."""
    c.execute(SQL.end, {**_job(walk), **_change(SyncEvent.COMPLETE), "error": None})
    _forget(c, walk)


def fail_walk(c: Connection, walk: Walk, error: str) -> None:
    """FAILED and ROLLBACK in the caller's transaction: the watermark was not touched, the checkpoint goes."""
    c.execute(SQL.end, {**_job(walk), **_change(SyncEvent.FAIL), "error": error})
    _forget(c, walk)
    c.execute(SQL.roll_back, {"job": walk.job_id, **_change(SyncEvent.ROLL_BACK)})


def close_cleaned(c: Connection, space_id: int) -> None:
    """Completed walks whose hidden documents are all erased, vectors too, or shown again."""
    c.execute(SQL.clean, {"space": space_id, **_change(SyncEvent.CLEAN)})


def unchanged_pass(c: Connection, space_id: int, source_id: int, source_clock: float, counts: dict[str, int]) -> None:
    """A pass whose listing digest equals the last one: one row, no walk."""
    values = {"space": space_id, "source": source_id, "clock": source_clock, "counts": Jsonb(counts)}
    c.execute(SQL.unchanged, {**values, "after": SyncStatus.SUCCESS.value})


def could_not_begin(c: Connection, space_id: int, source_id: int, error: str) -> None:
    """A pass whose source could not even be asked: one row that is closed already."""
    values = {"space": space_id, "source": source_id, "error": error}
    c.execute(SQL.could_not_begin, {**values, "after": SyncStatus.ROLLBACK.value})


def complete_listing(c: Connection, source_id: int, count: int, digest: str | None) -> None:
    c.execute(SQL.complete_listing, {"source": source_id, "count": count, "digest": digest})


def store_watermark(c: Connection, source_id: int, watermark: dict[str, float]) -> None:
    """For all scopes of the source: one that is not in it has none any more."""
    c.execute(SQL.store_watermark, {"source": source_id, "watermark": Jsonb(watermark)})


def set_waiting(c: Connection, source_id: int, waiting: int) -> None:
    c.execute(SQL.waiting, {"source": source_id, "waiting": waiting})


def mark_seen(c: Connection, walk_id: int, doc_ids: Sequence[int]) -> None:
    if doc_ids:
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


def hide_unseen(c: Connection, walk: Walk, lag_seconds: float, doc_ids: Sequence[int], *, beyond_guard: bool = False) -> int:
    """Lock these candidates, then decide in the next statement whether they are still unseen. How many were hidden.

    ``beyond_guard``: deleting them will spend an approval, whenever that is.
    """
    if not doc_ids:
        return 0
    c.execute(SQL.lock_unseen, {"ids": list(doc_ids)})
    return c.execute(SQL.hide, {**_unseen(walk, lag_seconds), "ids": list(doc_ids), "beyond": beyond_guard}).rowcount


def missed_docs(c: Connection, walk: Walk, apart_seconds: float, after: int, limit: int) -> list[int]:
    """By id: hidden by an earlier walk, at least so long before this one began, and not seen by this one either."""
    values = {**_unseen(walk, 0), "apart": apart_seconds, "after": after, "limit": limit}
    return [r.id for r in c.execute(SQL.missed, values)]


def miss_again(c: Connection, walk: Walk, apart_seconds: float, doc_ids: Sequence[int]) -> None:
    """As ``hide_unseen``: locked, then decided. The note holds as long as the hide token is the one of now."""
    c.execute(SQL.lock_unseen, {"ids": list(doc_ids)})
    c.execute(SQL.miss_again, {**_unseen(walk, 0), "apart": apart_seconds, "ids": list(doc_ids)})


def awaits_second_listing(c: Connection, source_id: int, apart_seconds: float) -> bool:
    """Has something been hidden for so long that a listing of now would confirm it?"""
    return bool(one(c.execute(SQL.awaits_second, {"source": source_id, "apart": apart_seconds})).yes)


def deleted_since(c: Connection, source_id: int, external_ids: Sequence[str], mark: int) -> set[str]:
    """Of these, the ones of which a document was deleted after ``mark`` was drawn."""
    rows = c.execute(SQL.deleted_since, {"source": source_id, "ids": list(external_ids), "mark": mark})
    return {row.external_id for row in rows}


def hidden_docs(c: Connection, source_id: int, after: int, limit: int) -> list[Any]:
    """Hidden, not yet deleted. Rows: id, external_id, hidden_sync, missed_again, beyond_guard; by id."""
    return c.execute(SQL.hidden, {"source": source_id, "after": after, "limit": limit}).fetchall()


def _set_checkpoint(c: Connection, source_id: int, checkpoint: Json | None) -> None:
    c.execute(SQL.checkpoint, {"source": source_id, "checkpoint": None if checkpoint is None else Jsonb(checkpoint)})


def _forget(c: Connection, walk: Walk) -> None:
    _set_checkpoint(c, walk.source_id, None)
    c.execute(SQL.forget_seen, {"walk": walk.walk_id})


def _change(event: SyncEvent) -> dict[str, Any]:
    after, before = sync_change(event)
    return {"after": after.value, "before": before}


def _job(walk: Walk) -> dict[str, Any]:
    return {"job": walk.job_id, "verdict": walk.verdict.value, "reasons": Jsonb(walk.reasons), "counts": Jsonb(walk.counts)}


def _unseen(walk: Walk, lag_seconds: float) -> dict[str, Any]:
    return {"walk": walk.walk_id, "source": walk.source_id, "started": walk.started_at, "lag": lag_seconds}
