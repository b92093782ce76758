"""The statements of a space's deletion. Each may run again; each asks for the DELETING space it belongs to."""

from kb_pipeline.statements import load_statements
from kb_pipeline.store import vector_retries
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "removal.sql")


def begin(c: Connection, space_id: int) -> None:
    """D1, under the exclusive space lock: DELETING, generation + 1, tasks fenced off, sources paused."""
    for statement in (SQL.begin, SQL.cancel_tasks, SQL.pause_sources, SQL.drop_indexes):
        c.execute(statement, {"space": space_id})


def shards(c: Connection, space_id: int) -> list[tuple[int, bool]]:
    """(shard, is it the space's own) of every place where its rows may be."""
    return [(r.shard, r.owned) for r in c.execute(SQL.shards, {"space": space_id})]


def models(c: Connection, space_id: int) -> list[int]:
    """Every model that has vectors of the space, or had."""
    return [r.model_id for r in c.execute(SQL.models, {"space": space_id})]


def delete_chunks(c: Connection, space_id: int, shard: int, limit: int) -> int:
    return int(one(c.execute(SQL.delete_chunks, {"space": space_id, "shard": shard, "limit": limit})).n)


def truncate_own_shard(c: Connection, space_id: int, shard: int) -> bool:
    """TRUNCATE has no WHERE: the owner's row is locked first, and the shard goes back to the spares in the same transaction."""
    if c.execute(SQL.lock_own_shard, {"space": space_id, "shard": shard}).fetchone() is None:
        return False
    c.execute(SQL.short_wait)
    c.execute(SQL.truncate, {"shard": shard})
    c.execute(SQL.return_shard, {"space": space_id, "shard": shard})
    return True


def delete_documents(c: Connection, space_id: int, limit: int) -> int:
    """A batch of documents with versions, tasks and publications."""
    ids = [r.id for r in c.execute(SQL.some_documents, {"space": space_id, "limit": limit})]
    for statement in (SQL.delete_tasks, SQL.delete_versions, SQL.delete_docs):
        c.execute(statement, {"docs": ids})
    return len(ids)


def delete_rest(c: Connection, space_id: int) -> None:
    vector_retries.reset(c, space_id)
    for statement in (
        SQL.delete_publications, SQL.delete_restated, SQL.delete_tombstones, SQL.delete_todo,
        SQL.delete_logs, SQL.delete_answers, SQL.delete_seen, SQL.delete_events, SQL.delete_jobs, SQL.delete_leases,
        SQL.delete_indexes, SQL.delete_sources, SQL.delete_floor, SQL.delete_schedules,
        SQL.delete_alerts, SQL.delete_reconciliations,
    ):  # fmt: skip
        c.execute(statement, {"space": space_id})


def forget_unused_embeddings(c: Connection, model_id: int) -> int:
    """Cached vectors of the model that no living chunk refers to."""
    return c.execute(SQL.forget_embeddings, {"model": model_id}).rowcount


def count_left(c: Connection, space_id: int) -> dict[str, int]:
    return {r.kind: r.n for r in c.execute(SQL.count_left, {"space": space_id})}


def finish(c: Connection, space_id: int) -> None:
    c.execute(SQL.finish, {"space": space_id})
