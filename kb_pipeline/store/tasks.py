"""ingestion_task and its log: claim, fence, advance, fail, sweep. Nobody else writes a task's status.

Every write of a task happens in a transaction that began with ``fence``: shared space lock, generation, [documents,] attempt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json
from kb_pipeline.statements import load_statements
from kb_pipeline.states import Event, Node, TaskStatus, next_node, next_state, sources_of
from kb_pipeline.store import erasure
from kb_pipeline.store.database import Connection, is_dead, one, worker_id
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.store.spaces import Space, lock_shared

SQL = load_statements(__package__, "tasks.sql")
MAX_DEATHS = 3  # dead processes at one node before a document is held to be poison


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on one version, as long as ``attempt`` is the row's."""

    task_id: int
    doc_id: int
    version: int
    attempt: int
    node: Node
    size_bytes: int
    retry_count: int
    max_retry_count: int
    trace_id: UUID
    source_id: int
    external_id: str
    title: str


@dataclass(frozen=True, slots=True)
class Failure:
    """How a try ended: with a time it is FAILED and due then, without one DEAD. ``node``: where the next try begins."""

    code: str
    message: str
    next_attempt_at: datetime | None
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Fence:
    """What a fenced transaction may touch: the space's shard now, and the claims that still hold."""

    shard: int
    claims: list[Claim]


def ensure_log(c: Connection) -> None:
    """Partitions of the log for the weeks to come, made before work begins: a row without one would be refused."""
    c.execute(SQL.log_weeks)


def claim(c: Connection, space: Space, limit: int, lease_seconds: int, nodes: Sequence[Node]) -> list[Claim]:
    """Take up to ``limit`` waiting tasks of a space that stand at one of ``nodes``, oldest readiness first."""
    values = {"space": space.id, "generation": space.generation, "limit": limit, "me": worker_id(), "ttl": lease_seconds,
              "nodes": [n.value for n in nodes], "floor": one(c.execute(SQL.floor, {"space": space.id})).floor}  # fmt: skip
    rows = c.execute(SQL.claim, values).fetchall()
    if len(rows) < limit:  # a slow inserter may have committed below the floor
        rows += c.execute(SQL.claim, {**values, "floor": 0, "limit": limit - len(rows)}).fetchall()
    if rows:
        c.execute(SQL.raise_floor, {"space": space.id, "claimed": min(r.ready_seq for r in rows)})
    rows.sort(key=lambda r: r.ready_seq)
    return [Claim(r.id, r.doc_id, r.version, r.attempt, Node(r.current_node), *r[5:12]) for r in rows]


def renew(c: Connection, claims: Sequence[tuple[int, int]], lease_seconds: int) -> None:
    """Heartbeat for (task, attempt) pairs. A lost claim is found out by the fence."""
    c.execute(SQL.renew, {"ids": [i for i, _ in claims], "attempts": [a for _, a in claims], "ttl": lease_seconds})


def fence(c: Connection, space: Space, claims: Sequence[Claim], *, documents: bool = False) -> Fence:
    """The begin of every writing transaction. Claims that no longer hold are dropped quietly; with the space gone, all."""
    shard = lock_shared(c, space)
    if shard is None:
        return Fence(-1, [])
    if documents:
        living = lock_documents(c, [x.doc_id for x in claims])
        claims = [x for x in claims if x.doc_id in living]
    rows = c.execute(SQL.fence, {"ids": [x.task_id for x in claims], "attempts": [x.attempt for x in claims]})
    held = {r.id for r in rows}
    return Fence(shard, [x for x in claims if x.task_id in held])


def advance(c: Connection, claims: Sequence[Claim], started: datetime, outputs: Mapping[int, Json]) -> None:
    """One node done: the next one, and the log row; behind the last one SUCCESS. Claims are of one node."""
    if not claims:
        return
    following = next_node(claims[0].node)
    event = Event.PUBLISH if following is None else Event.ADVANCE
    _move(c, claims, event, started, outputs, node=following or claims[0].node)


def fail(c: Connection, space_id: int, shard: int, failures: Sequence[tuple[Claim, Failure]], started: datetime) -> None:
    """FAILED and due again, or DEAD with its version given up. Documents are locked by the caller's fence."""
    kinds: dict[tuple[bool, Node | None], list[tuple[Claim, Failure]]] = {}
    for x, f in failures:
        kinds.setdefault((f.next_attempt_at is None, f.node), []).append((x, f))
    for (dead, node), part in kinds.items():
        event = Event.GIVE_UP if dead else Event.FAIL
        _move(c, [x for x, _ in part], event, started, {}, node=node, failures=[f for _, f in part])
        if dead:
            erasure.give_up(c, space_id, shard, [(x.doc_id, x.version) for x, _ in part])


def release(c: Connection, claims: Sequence[Claim], started: datetime) -> None:
    """Back to the queue at the same node: the process stops in order, or a premise of the work has moved."""
    if claims:
        _move(c, claims, Event.RELEASE, started, {}, log="INTERRUPTED")


def give_back(c: Connection, claims: Sequence[Claim], node: Node | None = None) -> None:
    """Back to the queue, at whatever node each stands: the next node is somebody else's work. Or at ``node``, an earlier one,
    whose output is needed again."""
    if claims:
        values = {"ids": [x.task_id for x in claims], "attempts": [x.attempt for x in claims], "node": node}
        c.execute(SQL.give_back, {**values, "from": sources_of(Event.RELEASE)})


def supersede(c: Connection, claims: Sequence[Claim]) -> None:
    """Something newer is published already: these versions are cleaned up by the sweeper."""
    if claims:
        ids, attempts = [x.task_id for x in claims], [x.attempt for x in claims]
        c.execute(SQL.supersede, {"ids": ids, "attempts": attempts, "from": sources_of(Event.CANCEL)})


def _move(
    c: Connection,
    claims: Sequence[Claim],
    event: Event,
    started: datetime,
    outputs: Mapping[int, Json],
    *,
    node: Node | None = None,
    failures: Sequence[Failure] = (),
    log: str | None = None,
) -> None:
    target = next_state(TaskStatus.PROCESSING, event)
    nothing: list[None] = [None] * len(claims)
    c.execute(
        SQL.move,
        {
            "ids": [x.task_id for x in claims],
            "attempts": [x.attempt for x in claims],
            "at_nodes": [x.node.value for x in claims],
            "outputs": [json.dumps(outputs.get(x.task_id, {}), ensure_ascii=False) for x in claims],
            "codes": [f.code for f in failures] or nothing,
            "messages": [f.message for f in failures] or nothing,
            "next_at": [f.next_attempt_at for f in failures] or nothing,
            "from": sources_of(event),
            "to": target.value,
            "node": node.value if node else None,
            "advanced": event in (Event.ADVANCE, Event.PUBLISH),
            "failed": event in (Event.FAIL, Event.GIVE_UP),
            "log": log or ("FAILED" if failures else "SUCCESS"),
            "started": started,
        },
    )


# --- the sweeper: what a dead worker cannot do ----------------------------------------------------------------------


def sweep(c: Connection, space: Space) -> int:
    """Return due and abandoned tasks, clean up cancelled ones, admit queued ones: one transaction. How many it moved.

    Tasks of a process of this host that is known to be dead are taken back at once, all others when their lease runs out.
    """
    shard = lock_shared(c, space)
    if shard is None:
        return 0
    moved = c.execute(SQL.due, {"space": space.id}).rowcount
    owners = [r.claimed_by for r in c.execute(SQL.owners, {"space": space.id})]
    values = {"space": space.id, "dead": [o for o in owners if o and is_dead(o)], "deaths": MAX_DEATHS}
    moved += c.execute(SQL.interrupt, values).rowcount
    moved += _bury(c, space.id, shard, values)
    moved += _clean(c, space.id, shard)
    try:
        with c.transaction():
            moved += c.execute(SQL.admit, {"space": space.id}).rowcount
    except psycopg.errors.UniqueViolation:
        return moved  # somebody else admitted one of them: the next sweep sees it
    return moved


def release_run(c: Connection, run_id: str, *, died: bool) -> int:
    """Give back what a run that has ended still holds. How many tasks.

    Where its process died their leases end, so that the next sweep takes them back as it does for any dead process; else they
    go straight back to the queue, and it is not counted against their documents.
    """
    statement = SQL.end_leases if died else SQL.release_run
    return c.execute(statement, {"run": run_id, "from": sources_of(Event.RELEASE)}).rowcount


def _bury(c: Connection, space_id: int, shard: int, values: dict[str, Any]) -> int:
    poison = c.execute(SQL.poison, values).fetchall()
    if not poison:
        return 0
    lock_documents(c, [r.doc_id for r in poison])
    buried = c.execute(SQL.bury, {**values, "ids": [r.id for r in poison]}).fetchall()
    erasure.give_up(c, space_id, shard, [(r.doc_id, r.version) for r in buried])
    return len(buried)


def _clean(c: Connection, space_id: int, shard: int) -> int:
    waiting = c.execute(SQL.canceling, {"space": space_id}).fetchall()
    if not waiting:
        return 0
    lock_documents(c, [r.doc_id for r in waiting])
    rows = c.execute(SQL.lock_canceling, {"ids": [r.id for r in waiting]}).fetchall()
    erasure.give_up(c, space_id, shard, [(r.doc_id, r.version) for r in rows], status="CANCELED")
    erasure.erase(c, space_id, shard, [r.doc_id for r in rows])
    return c.execute(SQL.cleaned, {"ids": [r.id for r in rows]}).rowcount


# --- for people -----------------------------------------------------------------------------------------------------


def waiting(c: Connection, space_id: int) -> dict[str, int]:
    """Unfinished tasks by status."""
    return {r.status: r.n for r in c.execute(SQL.waiting, {"space": space_id})}


def next_due_seconds(c: Connection, space_id: int) -> float | None:
    """How long until the next FAILED task is due; None if there is none."""
    value = one(c.execute(SQL.next_due, {"space": space_id})).seconds
    return None if value is None else float(value)


def list_tasks(c: Connection, space_id: int, status: str | None, limit: int, before: int | None = None) -> list[Any]:
    return c.execute(SQL.list_all, {"space": space_id, "status": status, "limit": limit, "before": before}).fetchall()


def get_task(c: Connection, task_id: int) -> tuple[Any, list[Any]]:
    """The task and its log, oldest first. Raises Misconfigured if there is none."""
    row = c.execute(SQL.get, {"task": task_id}).fetchone()
    if row is None:
        raise Misconfigured(f"no task {task_id}: kb task list SPACE shows them", code="no_task")
    return row, c.execute(SQL.log, {"task": task_id}).fetchall()


def retry(c: Connection, task_id: int) -> bool:
    """DEAD or FAILED back to the queue, where it stopped. The document is locked by the caller. False: not in such a state."""
    values = {"task": task_id, "from": sources_of(Event.RETRY)}
    try:
        with c.transaction():
            return c.execute(SQL.retry, values).rowcount == 1
    except psycopg.errors.UniqueViolation:
        # The sweeper, which locks no document, has admitted the version behind it: this one queues up.
        return c.execute(SQL.retry, values).rowcount == 1


def cancel(c: Connection, task_id: int, reason: str) -> bool:
    """Fenced off at once; what it may have written is cleaned up by the sweeper. False: not in such a state."""
    return c.execute(SQL.cancel, {"task": task_id, "reason": reason, "from": sources_of(Event.CANCEL)}).rowcount == 1


def cancel_unfinished(c: Connection, space_id: int, doc_id: int | None, reason: str) -> int:
    """As ``cancel``, for up to 1,000 tasks of a space, or of one document, queued or worked on. 0: none left."""
    return int(one(c.execute(SQL.cancel_unfinished, {"space": space_id, "doc": doc_id, "reason": reason})).n)


def failed_documents(c: Connection, space_id: int, limit: int) -> list[Any]:
    """The newest failures: external_id, status, node, code, message."""
    return c.execute(SQL.failed_documents, {"space": space_id, "limit": limit}).fetchall()
