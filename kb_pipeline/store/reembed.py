"""Vectors that replace those of the cache, and the chunks of any space whose index has to follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection
from kb_pipeline.store.publications import Wanted

SQL = load_statements(__package__, "reembed.sql")


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk's text, exactly as it is embedded, and its vector in the cache, None where there is none."""

    chunk_id: int
    content_hash: bytes
    text: str
    vector: bytes | None


def texts(c: Connection, space_id: int, shard: int, model_id: int, after: int, limit: int) -> list[Stored]:
    """Current chunks, and those that wait to be, with an id above ``after``, by id."""
    values = {"space": space_id, "shard": shard, "model": model_id, "after": after, "limit": limit}
    return [
        Stored(
            r.chunk_id,
            bytes(r.content_hash),
            f"{r.prefix}\n\n{r.content}" if r.prefix else r.content,
            None if r.vector is None else bytes(r.vector),
        )
        for r in c.execute(SQL.texts, values)
    ]


def holders(c: Connection, space_id: int, shard: int, hashes: Sequence[bytes]) -> list[tuple[bytes, Wanted]]:
    """Current chunks of a space with one of these texts. A scan of its narrow rows: there is no index on the hash alone."""
    rows = c.execute(SQL.holders, {"space": space_id, "shard": shard, "names": [UUID(bytes=h[:16]) for h in hashes]})
    return [(bytes(r.content_hash), Wanted(r[0], r[1], r[2], r[3], r[4], tuple(r.acl), r.acl_seq)) for r in rows]


def replace(c: Connection, model_id: int, vectors: Mapping[bytes, bytes]) -> None:
    c.execute(SQL.replace, {"model": model_id, "hashes": list(vectors), "vectors": list(vectors.values())})
