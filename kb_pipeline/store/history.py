"""What was current at a time, or in the snapshot of an answer, and what of it may be shown today."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "history.sql")


@dataclass(frozen=True, slots=True)
class Moment:
    """``snapshot`` decides where it is given: transactions commit in another order than their stamps say."""

    at: datetime
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """Can the space still, and already, tell what was current at a time?"""

    shard: int
    now: datetime
    purged: bool
    horizon: datetime | None
    open: bool  # a transaction that may publish as of this time still runs


def settled(c: Connection, space_id: int, at: datetime) -> Settled | None:
    """None: the space is not alive. A publish holds the shared space lock, so an old holder may still commit an old stamp."""
    row = c.execute(SQL.moment, {"space": space_id, "at": at}).fetchone()
    return Settled(*row) if row else None


def ended_documents(c: Connection, space_id: int, at: datetime, after: int, limit: int) -> list[int]:
    """Documents with a publication that ended since ``at``, by id: only these can have chunks that were current then and are
    not now. Three minutes are more than lies between the end of one version and the beginning of the next."""
    values = {"space": space_id, "at": at, "after": after, "limit": limit}
    return [r.doc_id for r in c.execute(SQL.ended, values)]


def every_document(c: Connection, space_id: int, after: int, limit: int) -> list[int]:
    """By id, deleted ones too."""
    return [r.doc_id for r in c.execute(SQL.every, {"space": space_id, "after": after, "limit": limit})]


@dataclass(frozen=True, slots=True)
class Then:
    """A document that had a current version. Of those that are not ``shown`` today, ``counted`` says that it was once.

    ACLs keep no history: one that never changed has never permitted more than it does now, so nobody learns from a count of
    a document that was never theirs to read.
    """

    doc_id: int
    version: int
    deleted: bool
    shown: bool
    counted: bool


def then(c: Connection, space_id: int, when: Moment, docs: Sequence[int], principals: Sequence[str]) -> list[Then]:
    """Of these documents, the ones that had a current version. Between two versions of one publish the older one counts."""
    values = {
        "space": space_id,
        "at": when.at,
        "snapshot": when.snapshot,
        "docs": list(docs),
        "principals": list(principals),
    }
    return [Then(*r) for r in c.execute(SQL.then, values)]


def left(c: Connection, docs: Sequence[int], versions: Sequence[int], since: datetime) -> dict[int, int]:
    """chunk -> document, of the chunks of these versions that an index asked at ``since`` may not have shown."""
    return {r.id: r.doc_id for r in c.execute(SQL.left, {"docs": list(docs), "versions": list(versions), "since": since})}


def owners(c: Connection, space_id: int, shard: int, ids: Sequence[int]) -> dict[int, int]:
    """chunk -> document, of chunks that still exist."""
    return {r.id: r.doc_id for r in c.execute(SQL.owners, {"space": space_id, "shard": shard, "ids": list(ids)})}


def texts(c: Connection, space_id: int, shard: int, versions: Mapping[int, int]) -> dict[int, Any]:
    """chunk -> its text as stored, with its document as it was called in the version given for it."""
    values = {"space": space_id, "shard": shard, "ids": list(versions), "versions": list(versions.values())}
    return {r.chunk_id: r for r in c.execute(SQL.texts, values)}
