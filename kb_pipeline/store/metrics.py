"""What monitoring asks. Totals come from the log of the steps, in which every step stands exactly once; no step counts itself.

Nothing here depends on how many documents there are that need nothing: queues are counted in their partial indexes.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "metrics.sql")
EVERY_SECONDS = 1.0  # not more often: each time is a write
STEP = timedelta(hours=6)  # of the log, added up at a time


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rows as they are now. ``totals``: space, name, total; names as in the statement ``add``."""

    queue: list[Any]
    oldest: list[Any]
    lag: list[Any]
    alerts: list[Any]
    totals: list[Any]
    database_bytes: int


def numbers(c: Connection) -> Numbers:
    return Numbers(
        queue=c.execute(SQL.queue).fetchall(),
        oldest=c.execute(SQL.oldest).fetchall(),
        lag=c.execute(SQL.lag).fetchall(),
        alerts=c.execute(SQL.alerts).fetchall(),
        totals=c.execute(SQL.totals).fetchall(),
        database_bytes=int(one(c.execute(SQL.size)).bytes),
    )


def add_up(c: Connection) -> bool:
    """Take a piece of the log into the totals; True: more of it waits. The caller's transaction must be READ COMMITTED.

    Exactly once, whoever does it and however often: a row's time is not before the begin of the transaction that writes it.
    So what running transactions will yet bring is later than ``bound`` (the begin of the oldest that has written, and the
    begin of the statement that asks), and what is earlier is there for the next statement, which has a later snapshot.
    """
    counted = c.execute(SQL.lock, {"every": EVERY_SECONDS}).fetchone()
    if counted is None or not counted.due:
        return False
    bound: datetime = one(c.execute(SQL.bound)).at
    since: datetime = counted.until
    until = min(bound, since + STEP)
    if until <= since:
        return False
    c.execute(SQL.add, {"since": since, "until": until})
    c.execute(SQL.advance, {"until": until})
    c.execute(SQL.forget)
    return until < bound
