"""source_event and kb_source_request: what says that a source may have changed, and when a walk of it was asked for last.

A hint is never the change itself: it asks for a walk, and a walk that began after it and completed has answered it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from kb_pipeline.model import Json
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one
from kb_pipeline.store.sources import Source

SQL = load_statements(__package__, "events.sql")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 3600.0


@dataclass(frozen=True, slots=True)
class Hint:
    """A source and its mark: the change token of its last completed walk, or its newest event that no walk has answered.

    ``asked``: the mark for which a walk was requested last, ``waited`` seconds ago, for the ``tries``-th time in a row.
    ``done``: that request was answered, or there was none.
    """

    source_id: int
    space_id: int
    space: str
    name: str
    mark: str | None
    asked: str | None
    tries: int
    waited: float
    done: bool

    def may_ask(self, mark: str) -> bool:
        """A request that brought no completed walk is repeated ever later; one for another mark, after the shortest wait."""
        return self.done or self.waited >= self.wait_seconds(mark)

    def wait_seconds(self, mark: str) -> float:
        if mark != self.asked:
            return FIRST_WAIT_SECONDS
        return min(FIRST_WAIT_SECONDS * 2.0 ** min(self.tries - 1, 20), LONGEST_WAIT_SECONDS)


def record_event(c: Connection, source_id: int, event_id: str, payload: Json) -> bool:
    """Store a hint that the source sent. False where it is known already, or the source or its space is gone.

    ``external_id`` in the payload names the item for people; what has changed is found out by the walk.
    """
    named = payload.get("external_id")
    values = {"source": source_id, "event": event_id, "payload": Jsonb(payload)}
    return c.execute(SQL.record, {**values, "external_id": named if isinstance(named, str) else None}).rowcount == 1


def take_events(c: Connection, source_id: int, before: datetime) -> int:
    """A completed walk that began at ``before`` has answered every event received until then. How many."""
    return c.execute(SQL.take, {"source": source_id, "before": before}).rowcount


def waiting_events(c: Connection) -> list[Hint]:
    """Active sources with events that no walk has answered, and the newest of each."""
    return [_hint(row) for row in c.execute(SQL.waiting)]


def probed_sources(c: Connection, after: int, limit: int) -> list[tuple[Source, Hint]]:
    """Active sources with the token of their last completed walk: the ones behind ``after`` first, then from the beginning."""
    rows = c.execute(SQL.probed, {"after": after, "limit": limit})
    return [(Source(*row[:12]), _hint(row)) for row in rows]


def request_walk(c: Connection, hint: Hint, reason: str, mark: str) -> int:
    """Note that a walk is asked for. The number of this request, which no other request of the source has."""
    values = {"source": hint.source_id, "reason": reason, "mark": mark, "done": hint.done}
    return int(one(c.execute(SQL.request, values)).number)


def store_token(c: Connection, source_id: int, token: str | None) -> None:
    """Of the source as it was when the walk began that completes in this transaction. None: nothing can be compared with it."""
    c.execute(SQL.store_token, {"source": source_id, "token": token})


def _hint(r: Any) -> Hint:
    waited = float(r.waited or 0.0)
    return Hint(r.source_id, r.space_id, r.space, r.name, r.mark, r.asked, r.tries or 0, waited, r.done)
