"""What may be forgotten, and when: old versions, unused embeddings, old answers and logs, objects that no row names.

Functions that decide about versions and chunks want the document locked in an earlier statement of the same transaction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "retention.sql")
LOG_WINDOW = timedelta(days=7)  # one partition of the log


def clock(c: Connection) -> datetime:
    """The database's own time: every stamp that is compared with it is the database's."""
    now: datetime = one(c.execute(SQL.clock)).now
    return now


def some_documents(c: Connection, space_id: int, after: int, limit: int) -> list[int]:
    """Document ids behind ``after``, deleted ones included: an interrupted deletion may have left rows."""
    return [r.id for r in c.execute(SQL.documents, {"space": space_id, "after": after, "limit": limit})]


# --- versions and chunks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Archived:
    """``paths``: objects that no other version of their document refers to."""

    versions: int
    paths: list[str]


def with_many_versions(c: Connection, doc_ids: Sequence[int], retained: int) -> list[int]:
    """Of these, documents with more published versions than are retained: worth a lock."""
    return [r.doc_id for r in c.execute(SQL.many_versions, {"docs": list(doc_ids), "retained": retained})]


def archive(c: Connection, space_id: int, doc_ids: Sequence[int], retained: int, before: datetime) -> Archived:
    """Versions beyond the newest ``retained`` and superseded before then; as_of is refused for the time they were current."""
    values = {"space": space_id, "docs": list(doc_ids), "retained": retained, "before": before}
    row = one(c.execute(SQL.archive, values))
    return Archived(row.versions, row.paths)


def with_unreferenced(c: Connection, space_id: int, shard: int, doc_ids: Sequence[int]) -> list[int]:
    """Of these, documents with chunk rows that no PROCESSING or READY version refers to. ERASE decides again, locked."""
    return [r.id for r in c.execute(SQL.unreferenced, {"space": space_id, "shard": shard, "docs": list(doc_ids)})]


# --- the embedding cache: three steps of one transaction, in this order -------------------------------------------------


def stage_unused(c: Connection, model_id: int, before: datetime, after: bytes, limit: int) -> tuple[int, bytes]:
    """Candidates not used since ``before``, behind the hash ``after``: how many, and the last of them."""
    c.execute(SQL.stage)
    values = {"model": model_id, "before": before, "after": after, "limit": limit}
    row = one(c.execute(SQL.unused, values))
    return row.n, bytes(row.last or b"")


def stage_of_space(c: Connection, space_id: int, shard: int, after: int, limit: int) -> tuple[int, int]:
    """Texts of a space, behind the chunk ``after``, that no other space has: how many chunks were read, and the last."""
    c.execute(SQL.stage)
    row = one(c.execute(SQL.of_space, {"space": space_id, "shard": shard, "after": after, "limit": limit}))
    for other in every_shard(c):
        c.execute(SQL.spare_elsewhere, {"shard": other, "space": space_id})
    return row.n, row.last


def spare_living(c: Connection) -> None:
    """Candidates that a chunk of any space refers to are none, shard by shard."""
    for shard in every_shard(c):
        c.execute(SQL.spare_living, {"shard": shard})


def every_shard(c: Connection) -> Iterator[int]:
    """All over again if a space has moved meanwhile: its rows may have been in neither place when it was looked at."""
    before, now = None, one(c.execute(SQL.places)).of_all
    while before != now:
        yield from (r.shard for r in c.execute(SQL.shards).fetchall())
        before, now = now, one(c.execute(SQL.places)).of_all


def forget_staged(c: Connection, model_id: int, before: datetime) -> int:
    """The guard is asked of the row itself, so that a pin since then wins. A living claim stays."""
    return c.execute(SQL.forget_embeddings, {"model": model_id, "before": before}).rowcount


def retired_models(c: Connection, space_id: int, before: datetime) -> list[int]:
    """Models that served the space, and nothing since then: kept until no answer of that time is."""
    return [r.model_id for r in c.execute(SQL.retired, {"space": space_id, "before": before})]


def forget_retired(c: Connection, model_id: int, before: datetime, limit: int) -> int:
    """None of them once an index of this model is there again: it counts on what it has found."""
    c.execute(SQL.lock_model, {"model": model_id})
    return c.execute(SQL.forget_retired, {"model": model_id, "before": before, "limit": limit}).rowcount


# --- answers, logs, walks -------------------------------------------------------------------------------------------


def forget_answers(c: Connection, space_id: int, before: datetime, limit: int) -> int:
    return c.execute(SQL.answers, {"space": space_id, "before": before, "limit": limit}).rowcount


def forget_logs(c: Connection, space_id: int, before: datetime) -> int | None:
    """The oldest week of node logs before then; None when there is none left. No partition is dropped in a running system."""
    since = one(c.execute(SQL.oldest_log, {"space": space_id, "before": before})).at
    if since is None:
        return None
    return c.execute(SQL.logs, {"space": space_id, "since": since, "before": min(before, since + LOG_WINDOW)}).rowcount


def forget_walks(c: Connection, space_id: int, before: datetime) -> int:
    """What closed walks have seen, and finished passes before then except each source's last. How many passes."""
    c.execute(SQL.seen, {"space": space_id})
    return c.execute(SQL.jobs, {"space": space_id, "before": before}).rowcount


# --- objects --------------------------------------------------------------------------------------------------------


def referenced_paths(c: Connection, doc_ids: Sequence[int]) -> set[str]:
    """Objects that a version relies on, or that a retry of it would go on from."""
    return {r.path for r in c.execute(SQL.referenced, {"docs": list(doc_ids)})}


def attempts_worked_on(c: Connection, doc_ids: Sequence[int]) -> set[tuple[int, int, int]]:
    """(doc, version, attempt) of tasks in work: they may have put an object that their next transaction names."""
    return {(r.doc_id, r.version, r.attempt) for r in c.execute(SQL.worked_on, {"docs": list(doc_ids)})}
