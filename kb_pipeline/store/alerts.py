"""kb_alert and kb_reconciliation: what needs a person, one open record per cause, opened and resolved from the state itself.

Nobody reports an alert where something fails: ``observe`` looks at what is, as often as anybody likes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kb_pipeline.model import AlertKind
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "alerts.sql")
OWN = frozenset(AlertKind) - {AlertKind.SCHEDULE_MISSED}  # the kinds that are found here
LONGEST = 500  # of a message's variable part


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that holds now. ``space_id`` None: it concerns the installation.

    ``opens`` False: it keeps an open record open, but opens none, because somebody is at work on it right now.
    """

    kind: AlertKind
    subject: str
    message: str
    space_id: int | None = None
    opens: bool = True


@dataclass(frozen=True, slots=True)
class Alert:
    id: int
    space: str | None  # its key
    kind: AlertKind
    subject: str
    message: str
    since: datetime


def observe(c: Connection, extra: Sequence[Finding] | None = None) -> list[Alert]:
    """Open what is new, refresh what persists, resolve what is gone, in all spaces. The records that were opened now.

    ``extra``: all findings of the kinds that are not found here, none of them included; without it those records stay as
    they are. Several observers wait for each other.
    """
    c.execute(SQL.alone)  # a statement of its own: the next ones see what the observer before has written
    found = {(f.space_id, f.kind, f.subject): f for f in (*_find(c), *(extra or ()))}
    observed = set(AlertKind) if extra is not None else OWN
    values = {
        "spaces": [f.space_id for f in found.values()],
        "kinds": [f.kind.value for f in found.values()],
        "subjects": [f.subject for f in found.values()],
        "messages": [f.message for f in found.values()],
        "opens": [f.opens for f in found.values()],
        "observed": sorted(kind.value for kind in observed),
    }
    return [_alert(r) for r in c.execute(SQL.note, values)]


def open_alerts(c: Connection, space_id: int | None = None) -> list[Alert]:
    """The oldest first; of one space, or all."""
    return [_alert(r) for r in c.execute(SQL.open, {"space": space_id})]


def mark_sent(c: Connection, ids: Sequence[int]) -> None:
    """When somebody was first told of each, on whichever channel."""
    c.execute(SQL.mark_sent, {"ids": list(ids)})


def store_reconciliation(
    c: Connection,
    space_id: int,
    *,
    chunks: int,
    vectors: int,
    missing: int,
    orphaned: int,
    wrong: int,
    repaired: int,
    remaining: int,
) -> None:
    """The caller holds the shared space lock and has seen the space living."""
    values = {"chunks": chunks, "vectors": vectors, "missing": missing, "orphaned": orphaned, "wrong": wrong}
    c.execute(SQL.reconciled, {**values, "space": space_id, "repaired": repaired, "remaining": remaining})


def forget_old(c: Connection, space_id: int, before: datetime) -> int:
    """Reconciliations before then but the newest, and alerts resolved before then. How many."""
    values = {"space": space_id, "before": before}
    return sum(c.execute(s, values).rowcount for s in (SQL.forget_reconciliations, SQL.forget_resolved))


# --- what is found ----------------------------------------------------------------------------------------------------


def _find(c: Connection) -> list[Finding]:
    found = [_failed_sync(r) for r in c.execute(SQL.failed_syncs)]
    found += [_dead_tasks(r) for r in c.execute(SQL.dead_tasks)]
    found += [_waiting_approval(r) for r in c.execute(SQL.waiting_approvals)]
    found += [_differences(r) for r in c.execute(SQL.differences)]
    return found + [_failed_vectors(r) for r in c.execute(SQL.failed_vectors)]


def _failed_sync(r: Any) -> Finding:
    why = (r.error or "no reason is known")[:LONGEST]
    message = f"source {r.source} could not be read: {why}. Then: kb sync {r.key} --source {r.source}"
    return Finding(AlertKind.SYNC_FAILED, r.source, message, r.space_id, opens=r.idle)


def _dead_tasks(r: Any) -> Finding:
    message = f"{_documents(r.n, r.names)} failed for good with {r.code}: kb task list {r.key} --status DEAD"
    return Finding(AlertKind.TASK_DEAD, r.code, message, r.space_id)


def _waiting_approval(r: Any) -> Finding:
    message = (
        f"{r.n} deletion{'s' * (r.n != 1)} in source {r.source} wait{'s' * (r.n == 1)} for approval. If the documents are "
        f"really gone: kb source approve {r.key} {r.source} --up-to {r.n}"
    )
    return Finding(AlertKind.APPROVAL_WAITING, r.source, message, r.space_id)


def _differences(r: Any) -> Finding:
    message = f"index and database differ in {r.remaining} place{'s' * (r.remaining != 1)} after the reconciliation: "
    return Finding(AlertKind.RECONCILIATION_FAILED, r.key, f"{message}kb reconcile {r.key}", r.space_id)


def _failed_vectors(r: Any) -> Finding:
    message = (
        f"the index did not take {r.n} vector{'s' * (r.n != 1)} of {_documents(r.docs, r.names)} in five tries, and is not "
        f"asked again. Look into the index, then: kb reconcile {r.key} --retry-failed"
    )
    return Finding(AlertKind.VECTOR_FAILED, r.index, message, r.space_id)


def _documents(n: int, names: Sequence[str]) -> str:
    shown = ", ".join(name if len(name) <= 120 else f"{name[:119]}…" for name in names)
    return f"{n} document{'s' * (n != 1)} ({shown}{', ...' if n > len(names) else ''})"


def _alert(r: Any) -> Alert:
    return Alert(r.id, r.space, AlertKind(r.kind), r.subject, r.message, r.since)
