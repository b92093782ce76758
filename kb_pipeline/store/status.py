"""Counts for people, and the one question whether anything waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.states import Node
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "status.sql")


@dataclass(frozen=True, slots=True)
class Unfinished:
    tasks: int  # not counting those that only wait for their next try
    bytes: int  # of their originals, where nothing is chunked yet
    tombstones: bool
    left_shard: bool


def unfinished(c: Connection, space_id: int) -> Unfinished:
    return Unfinished(*one(c.execute(SQL.unfinished, {"space": space_id})))


def counts(c: Connection, space_id: int) -> dict[str, dict[str, int]]:
    """documents, tasks, chunks, vectors: each by status."""
    found: dict[str, dict[str, int]] = {"documents": {}, "tasks": {}, "chunks": {}, "vectors": {}}
    for row in c.execute(SQL.counts, {"space": space_id}):
        found[row.kind][row.status] = row.n
    return found


def last_jobs(c: Connection, space_id: int) -> dict[int, Any]:
    """The last pass of each source: status, verdict, reasons, counts, started_at, finished_at, error."""
    return {r.source_id: r for r in c.execute(SQL.last_jobs, {"space": space_id})}


def published_state(c: Connection, space_id: int) -> str:
    """Count and digest over (document, current version) of all that search can show: equal while no answer may change."""
    return str(one(c.execute(SQL.published_state, {"space": space_id})).state)


def reached_state(c: Connection, space_id: int, nodes: Sequence[Node]) -> str:
    """The same over (document, newest version) of those that stand at one of ``nodes``, or are published."""
    return str(one(c.execute(SQL.reached_state, {"space": space_id, "nodes": [n.value for n in nodes]})).state)
