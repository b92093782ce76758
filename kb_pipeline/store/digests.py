"""PostgreSQL's side of a reconciliation: what the index must hold, and what an id that it holds is to us.

Every function is called after the index has been listed: an id that is in no row then is dead for good, since a row comes
before its vector and names are never used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from kb_pipeline.model import Bucket
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection
from kb_pipeline.store.publications import Wanted

SQL = load_statements(__package__, "digests.sql")


@dataclass(frozen=True, slots=True)
class Stray:
    """An id that an index holds beside what is current. ``chunk_id`` and ``doc_id`` are 0 where no row has this name."""

    vec_id: UUID
    chunk_id: int
    doc_id: int
    needed: bool  # current by now, or of a version that is being worked on
    condemned: bool  # has its tombstone: the vector GC will see to it


def row_digest(c: Connection, space_id: int, shard: int) -> dict[int, Bucket]:
    """Count and checksum sum of the current chunks, per bucket. One sequential scan of a narrow table."""
    rows = c.execute(SQL.digest, {"space": space_id, "shard": shard})
    return {r.bucket: Bucket(r.n, int(r.total)) for r in rows}


def current_in(c: Connection, space_id: int, shard: int, buckets: Sequence[int]) -> list[Wanted]:
    """What the index must hold in these buckets."""
    rows = c.execute(SQL.current, {"space": space_id, "shard": shard, "buckets": list(buckets)})
    return [Wanted(r[0], r[1], r[2], r[3], r[4], tuple(r.acl), r.acl_seq) for r in rows]


def strays(c: Connection, space_id: int, shard: int, index_id: int, vec_ids: Sequence[UUID]) -> list[Stray]:
    values = {"space": space_id, "shard": shard, "index": index_id, "ids": list(vec_ids)}
    return [Stray(*r) for r in c.execute(SQL.strays, values)]


def condemn(c: Connection, space_id: int, index_id: int, found: Sequence[Stray]) -> None:
    """A tombstone for each: E at once where no row has the name, else W, which the vector GC decides under the lock."""
    values = {
        "space": space_id,
        "index": index_id,
        "ids": [s.vec_id for s in found],
        "docs": [s.doc_id for s in found],
        "chunks": [s.chunk_id for s in found],
    }
    c.execute(SQL.condemn, values)


def hashes(c: Connection, space_id: int, shard: int, chunk_ids: Sequence[int]) -> dict[int, bytes]:
    """chunk -> hash of exactly what is embedded."""
    rows = c.execute(SQL.hashes, {"space": space_id, "shard": shard, "ids": list(chunk_ids)})
    return {r.id: bytes(r.content_hash) for r in rows}


def external_ids(c: Connection, doc_ids: Sequence[int]) -> dict[int, str]:
    return {r.id: r.external_id for r in c.execute(SQL.names, {"docs": list(doc_ids)})}
