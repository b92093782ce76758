"""kb_alert_delivery and kb_alert_channel: which channel was told of which alert, and who is telling it right now.

One process at a time sends to a channel. If it dies between the message and ``note_told``, the next one sends it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kb_pipeline.model import AlertKind
from kb_pipeline.statements import load_statements
from kb_pipeline.store import alerts
from kb_pipeline.store.alerts import Alert
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "deliveries.sql")
LEASE_SECONDS = 180.0  # longer than a message takes
REMIND_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class News:
    """What a channel is to be told of an alert. ``told``: it knows it; still open, it is reminded; ``resolved``: it is over."""

    alert: Alert
    told: bool
    resolved: bool


def pending(c: Connection, channel: str) -> list[News]:
    """The oldest first. What was resolved before the channel heard of it is none."""
    rows = c.execute(SQL.pending, {"channel": channel, "remind": REMIND_SECONDS})
    return [News(Alert(r.id, r.space, AlertKind(r.kind), r.subject, r.message, r.since), r.told, r.resolved) for r in rows]


def claim(c: Connection, channel: str) -> int | None:
    """The right to send to a channel, as a token; None while another process has it."""
    row = c.execute(SQL.claim, {"channel": channel, "lease": LEASE_SECONDS}).fetchone()
    return None if row is None else int(row.token)


def release(c: Connection, channel: str, token: int) -> None:
    """Nothing happens to a claim that ran out and is another process's now."""
    c.execute(SQL.release, {"channel": channel, "token": token})


def note_told(c: Connection, channel: str, news: Sequence[News]) -> None:
    """The channel has accepted them. Idempotent."""
    opened = [n.alert.id for n in news if not n.resolved]
    c.execute(SQL.told, {"channel": channel, "ids": opened})
    c.execute(SQL.told_resolved, {"channel": channel, "ids": [n.alert.id for n in news if n.resolved]})
    alerts.mark_sent(c, opened)
