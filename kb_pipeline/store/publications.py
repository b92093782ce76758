"""The INDEXER's transactions: what has to be in the index, and the one that publishes (old or new, never none, never both)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "publications.sql")
SLICE = 5000  # ids a statement


@dataclass(frozen=True, slots=True)
class Wanted:
    """A vector that must be in the index before its version may be published."""

    chunk_id: int
    doc_id: int
    vec_id: UUID
    checksum: int
    bucket: int
    acl: tuple[int, ...]
    acl_seq: int


def revive(c: Connection, space_id: int, shard: int, docs: Sequence[int], versions: Sequence[int]) -> list[Wanted]:
    """INDEXER 1: chunks whose vector is being erased get a new name; then everything that the versions want indexed.

    From here on nobody can mark them for erasing: the version is PROCESSING. Documents are locked by the caller.
    """
    ids = [i for ids in chunk_ids(c, docs, versions).values() for i in ids]
    wanted = []
    for start in range(0, len(ids), SLICE):
        values = {"space": space_id, "shard": shard, "ids": ids[start : start + SLICE]}
        c.execute(SQL.revive, values)
        wanted += [Wanted(r[0], r[1], r[2], r[3], r[4], tuple(r.acl), r.acl_seq) for r in c.execute(SQL.wanted, values)]
    return wanted


def chunk_ids(c: Connection, docs: Sequence[int], versions: Sequence[int]) -> dict[int, list[int]]:
    """The chunks of these versions in reading order. Read first, and passed as a parameter: a join would be planned blindly."""
    rows = c.execute(SQL.chunk_ids, {"docs": list(docs), "versions": list(versions)})
    return {r.doc_id: r.chunk_ids or [] for r in rows}


def publishable(c: Connection, docs: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """doc -> (current version, acl_seq) of documents that are not deleted."""
    rows = c.execute(SQL.publishable, {"docs": list(docs)})
    return {r.id: (r.current_ver, r.acl_seq) for r in rows}


def close_publications(c: Connection, docs: Sequence[int]) -> datetime:
    """End what is current of these documents, which the caller has locked. Returns the moment, read after the lock."""
    at: datetime = one(c.execute(SQL.stamp)).at
    c.execute(SQL.close_publications, {"docs": list(docs), "at": at})
    return at


@dataclass(frozen=True, slots=True)
class Published:
    documents: int
    appeared: int  # chunks that became current
    left: int


def publish(c: Connection, space_id: int, shard: int, versions: Mapping[int, int]) -> Published:
    """INDEXER 5, behind the fence with documents and index locked: doc -> version become current, all of them or none."""
    values = {"space": space_id, "shard": shard, "docs": list(versions), "versions": list(versions.values())}
    at = close_publications(c, list(versions))  # one moment for both: a document is never without a version
    row = one(c.execute(SQL.publish, {**values, "at": at}))
    c.execute(SQL.restate, values)
    return Published(row.documents, row.appeared, row.lost)
