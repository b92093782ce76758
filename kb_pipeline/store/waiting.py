"""What waits for somebody to work on it, over all spaces: bounded looks into partial indexes, however many tasks there are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kb_pipeline.statements import load_statements
from kb_pipeline.states import Node
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "waiting.sql")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A space with work that can be done now. ``tasks`` is a count up to the limit that was given; 0 where tasks must only be
    admitted or cleaned up. ``owners``: the workers that hold claims or walk a source there, and have not fallen silent;
    ``silent``: those that have, and still have claims that nobody has taken back.
    """

    space_id: int
    space: str
    tasks: int
    owners: list[str]
    silent: list[str]


def waiting_spaces(c: Connection, after: str, spaces: int, tasks: int) -> list[Waiting]:
    """At most ``spaces`` of them, by key: the ones behind ``after`` first, then from the beginning.

    Work: PENDING, FAILED and due, PROCESSING of a worker that fell silent, cancelled and not cleaned up, queued behind nothing.
    """
    return [Waiting(*row) for row in c.execute(SQL.waiting, {"after": after, "spaces": spaces, "tasks": tasks})]


def waiting_nodes(c: Connection, space_ids: Sequence[int], tasks: int) -> dict[int, Counter[Node]]:
    """Where the tasks of these spaces stand that can be worked on now, by space: of the ``tasks`` oldest and newest of each."""
    found: dict[int, Counter[Node]] = {space_id: Counter() for space_id in space_ids}
    for row in c.execute(SQL.nodes, {"spaces": list(space_ids), "tasks": tasks}):
        found[row.space_id][Node(row.node)] = row.n
    return found


def working_runs(c: Connection, limit: int) -> list[str]:
    """Runs that hold claims or leases, whether they still run or not."""
    return [row.run for row in c.execute(SQL.runs, {"limit": limit})]
