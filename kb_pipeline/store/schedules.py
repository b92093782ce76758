"""kb_schedule: when a space is due for what. It is moved on before a run is asked for: whatever comes of it, there is a next.

A request that is followed by no success is a miss, whether its run failed, never began or was lost on the way.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from kb_pipeline.cron import next_time
from kb_pipeline.errors import Misconfigured
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "schedules.sql")
log = logging.getLogger(__name__)
MISSES = 3  # in a row: somebody should look
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 3600.0  # of a space whose queue could not be worked on


class Kind(StrEnum):
    SYNC = "sync"  # by the space's own cron line
    SWEEP = "sweep"  # a full listing, whatever the sources say has changed
    RECONCILIATION = "reconciliation"
    PURGE = "purge"
    GC = "gc"
    QUALITY = "quality"
    INGEST = "ingest"  # no schedule: when the queue of a space is tried again after a failed run


@dataclass(frozen=True, slots=True)
class Due:
    """``due_at`` names the occurrence: it is requested once."""

    space_id: int
    space: str
    kind: Kind
    due_at: datetime
    schedule: str
    time_zone: str


@dataclass(frozen=True, slots=True)
class Missed:
    space: str
    kind: Kind
    misses: int
    last_requested_at: datetime | None
    last_success_at: datetime | None
    due_at: datetime | None


def follow_crons(c: Connection, now: datetime) -> int:
    """Give every space whose cron line or time zone is new or gone its next time. How many."""
    rows = c.execute(SQL.timed).fetchall()
    for row in rows:
        due = _next(row.schedule, now, row.time_zone)
        cron = f"{row.schedule} {row.time_zone}" if row.schedule else ""
        c.execute(SQL.set_due, {"space": row.space_id, "kind": Kind.SYNC.value, "due": due, "cron": cron})
    return len(rows)


def mark_due(c: Connection, kind: Kind) -> int:
    """Every active space that has something of this kind to do is due now. How many. One that was due already stays so."""
    return c.execute(SQL.mark, {"kind": kind.value}).rowcount


def due_spaces(c: Connection, limit: int) -> list[Due]:
    """The longest due first."""
    return [Due(r.space_id, r.space, Kind(r.kind), *r[3:]) for r in c.execute(SQL.due, {"limit": limit})]


def request(c: Connection, due: Due) -> bool:
    """Move on to the next time, and note that a run is asked for. False: somebody else has done so."""
    return c.execute(SQL.request, _moved(due)).rowcount == 1


def pass_over(c: Connection, due: Due) -> None:
    """Move on to the next time without a run: the one of the time before is still at work."""
    c.execute(SQL.postpone, _moved(due))


def _moved(due: Due) -> dict[str, object]:
    following = _next(due.schedule, datetime.now(UTC), due.time_zone) if due.kind is Kind.SYNC else None
    return {"space": due.space_id, "kind": due.kind.value, "due": due.due_at, "next": following}


def _next(cron: str, after: datetime, zone: str) -> datetime | None:
    """None also for a line that somebody stored unchecked: it costs its own space the schedule, and nobody else's."""
    try:
        return next_time(cron, after, zone) if cron else None
    except Misconfigured as e:
        log.warning("%s", e.message)
        return None


def succeeded(c: Connection, space_id: int, kind: Kind) -> None:
    """At the end of a run that did all of it."""
    c.execute(SQL.succeed, {"space": space_id, "kind": kind.value})


def failed(c: Connection, space: str, kind: Kind) -> None:
    """A run that was asked for ended otherwise. What waits in a queue is tried again later and later, up to an hour."""
    waits = {"base": FIRST_WAIT_SECONDS, "longest": LONGEST_WAIT_SECONDS}
    c.execute(SQL.fail, {"key": space, "kind": kind.value, **waits})


def missed(c: Connection, misses: int = MISSES) -> list[Missed]:
    """What has not succeeded so many times in a row, the worst first."""
    return [Missed(r.space, Kind(r.kind), *r[2:]) for r in c.execute(SQL.missed, {"misses": misses})]
