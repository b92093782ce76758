"""What no single step can see: documents that should not be shown, tasks that nobody takes, vectors that were given up."""

from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "integrity.sql")
MAX_ATTEMPTS = 5  # of a vector, before a person is asked


def ghosts(c: Connection, space_id: int, shard: int, limit: int) -> list[Any]:
    """Documents that search shows although they are gone: doc_id, external_id, what."""
    return c.execute(SQL.ghosts, {"space": space_id, "shard": shard, "limit": limit}).fetchall()


def stuck(c: Connection, space_id: int, seconds: float, limit: int) -> list[Any]:
    """Unfinished tasks that nothing has touched for so long, though nothing keeps them: doc_id, external_id, task_id, status,
    current_node, updated_at. The oldest first."""
    return c.execute(SQL.stuck, {"space": space_id, "seconds": seconds, "limit": limit}).fetchall()


def given_up(c: Connection, space_id: int, shard: int, limit: int) -> list[Any]:
    """Vectors that failed MAX_ATTEMPTS times: doc_id, external_id, chunk_id, attempts, error."""
    values = {"space": space_id, "shard": shard, "attempts": MAX_ATTEMPTS, "limit": limit}
    return c.execute(SQL.given_up, values).fetchall()
