"""kb_embedding: the durable cache, with claims, so that a text is embedded once per model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, copy_rows, is_dead, one, worker_id

SQL = load_statements(__package__, "embeddings.sql")


@dataclass(frozen=True, slots=True)
class Needed:
    """A text that a version needs a vector for. ``doc_ids`` wait for it; ``chunk_id`` is a row that holds it."""

    content_hash: bytes
    doc_ids: tuple[int, ...]
    chunk_id: int


def needed(c: Connection, space_id: int, shard: int, model_id: int, chunk_ids: Sequence[int]) -> list[Needed]:
    """Hashes of those chunks that are not current, new and revived ones, and of current ones that have lost their vector."""
    rows = c.execute(SQL.needed, {"space": space_id, "shard": shard, "model": model_id, "ids": list(chunk_ids)})
    return [Needed(bytes(r.content_hash), tuple(r.docs), r.chunk_id) for r in rows]


def pin(c: Connection, model_id: int, hashes: Sequence[bytes]) -> set[bytes]:
    """E1: those with a vector, marked as used now, so that no purge takes them."""
    rows = c.execute(SQL.pin, {"model": model_id, "hashes": sorted(hashes)})
    return {bytes(r.content_hash) for r in rows}


def new_token(c: Connection) -> int:
    return int(one(c.execute(SQL.token)).token)


def claim(
    c: Connection, model_id: int, hashes: Sequence[bytes], lease_seconds: int, token: int | None = None
) -> tuple[int, set[bytes]]:
    """E2: a token, and the hashes that are now ours to embed. The rest has a vector or another's claim.

    With the ``token`` of an earlier claim its hashes are ours again: it may have been made without our hearing of it.
    """
    token = new_token(c) if token is None else token
    values = {"model": model_id, "hashes": sorted(hashes), "token": token, "me": worker_id(), "ttl": lease_seconds}
    mine = {bytes(r.content_hash) for r in c.execute(SQL.insert_claims, values)}
    if len(mine) < len(set(hashes)):
        dead = [r.owner for r in c.execute(SQL.owners, values) if is_dead(r.owner)]
        mine |= {bytes(r.content_hash) for r in c.execute(SQL.take_over, {**values, "dead": dead})}
    return token, mine


def texts(c: Connection, space_id: int, shard: int, chunk_ids: Sequence[int]) -> list[tuple[bytes, str]]:
    """(hash, exactly what is embedded), from the chunk rows."""
    rows = c.execute(SQL.texts, {"space": space_id, "shard": shard, "ids": list(chunk_ids)})
    return [(bytes(r.content_hash), f"{r.prefix}\n\n{r.content}" if r.prefix else r.content) for r in rows]


def store(c: Connection, model_id: int, token: int, vectors: dict[bytes, bytes]) -> int:
    """E3: vectors of our own claims, behind a fence of the caller. How many were still ours."""
    c.execute(SQL.stage)
    copy_rows(c, SQL.copy, ("bytea", "bytea"), sorted(vectors.items()))
    return c.execute(SQL.store, {"model": model_id, "token": token}).rowcount


def give_back(c: Connection, model_id: int, token: int) -> None:
    """Claims of ours that will not be embedded now."""
    c.execute(SQL.give_back, {"model": model_id, "token": token})


def missing(c: Connection, model_id: int, hashes: Sequence[bytes]) -> set[bytes]:
    """Of these, the ones without a vector."""
    have = {bytes(r.content_hash) for r in c.execute(SQL.have, {"model": model_id, "hashes": list(hashes)})}
    return set(hashes) - have


def vectors_of(
    c: Connection, space_id: int, shard: int, model_id: int, chunk_ids: Sequence[int], *, texts: bool = False
) -> list[Any]:
    """Rows chunk_id, vector: float16 bytes, from the cache. A chunk without a vector is absent.

    ``texts``: rows have content, prefix and title_path as well.
    """
    values = {"space": space_id, "shard": shard, "model": model_id, "ids": list(chunk_ids)}
    return c.execute(SQL.vectors_and_texts if texts else SQL.vectors, values, binary=True).fetchall()
