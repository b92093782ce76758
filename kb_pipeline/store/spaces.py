"""kb_space, and what belongs to it alone: its model, its index row, its shard. The space lock lives here."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from kb_pipeline.errors import Misconfigured, Transient
from kb_pipeline.model import ChunkParams, IndexRef, Json
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "spaces.sql")
WAITING_KILOBYTES = 4096  # of words that an index has not sorted in yet, as sql/0012 makes it
MOVING_KILOBYTES = 2**20  # the same while they move


@dataclass(frozen=True, slots=True)
class Space:
    """One knowledge base. ``generation`` fences every write; ``shard`` is read again in each transaction that writes."""

    id: int
    key: str
    name: str
    status: str
    generation: int
    model_id: int
    fingerprint: str
    dimension: int
    embedder: str
    embedder_options: Json
    index_kind: str
    index_options: Json
    chunking: Json
    retained_versions: int
    schedule: str
    audience: list[list[str]] | None
    time_zone: str  # of the schedule

    @property
    def chunk_params(self) -> ChunkParams:
        return ChunkParams(**self.chunking)


def create_space(c: Connection, values: Mapping[str, Any]) -> Space:
    """A new space in the emptiest shared shard, with its FOLLOWING index row. Raises Misconfigured if the key is taken."""
    try:
        c.execute(SQL.create, _json(values))
    except psycopg.errors.UniqueViolation as e:
        raise Misconfigured(f"space {values['key']!r} exists already", code="space_exists") from e
    except psycopg.errors.CheckViolation as e:
        raise Misconfigured(
            f"space key {values['key']!r}: use 1 to 63 of a-z, 0-9, '-' and '_', beginning with a letter or digit",
            code="bad_space_key",
        ) from e
    space = get_space(c, str(values["key"]))
    c.execute(SQL.create_index, {"space": space.id})
    c.execute(SQL.create_floor, {"space": space.id})
    return space


def serve_index(c: Connection, space_id: int) -> None:
    """The first index of a space is served as soon as it has been made."""
    c.execute(SQL.serve_index, {"space": space_id})


def ensure_model(c: Connection, fingerprint: str, dimension: int) -> int:
    return int(one(c.execute(SQL.ensure_model, {"fingerprint": fingerprint, "dimension": dimension})).id)


def get_space(c: Connection, key: str) -> Space:
    """The living space of this key. Raises Misconfigured with the keys that exist."""
    row = c.execute(SQL.get, {"key": key, "id": None}).fetchone()
    if row is None:
        keys = ", ".join(s.key for s in list_spaces(c)) or "none yet"
        raise Misconfigured(f"no space {key!r} (there are: {keys}). Make it with: kb space add {key}", code="no_space")
    return Space(*row)


def space_by_id(c: Connection, space_id: int) -> Space | None:
    row = c.execute(SQL.get, {"key": None, "id": space_id}).fetchone()
    return Space(*row) if row else None


def list_spaces(c: Connection) -> list[Space]:
    return [Space(*row) for row in c.execute(SQL.list_all)]


def update_space(c: Connection, space_id: int, values: Mapping[str, Any]) -> None:
    """Set name, schedule, time_zone, retained_versions, chunking or audience; keys that are absent stay."""
    current = {
        "name": None,
        "schedule": None,
        "time_zone": None,
        "retained_versions": None,
        "chunking": None,
        "audience": None,
        "set_audience": False,
    }
    c.execute(SQL.update, _json({**current, **values, "space": space_id}))


def lock_shared(c: Connection, space: Space) -> int | None:
    """Take the shared space lock in a statement of its own, then the shard; None if the space is gone or another generation."""
    c.execute(SQL.lock_shared, {"space": space.id})
    row = c.execute(SQL.shard, {"space": space.id, "generation": space.generation}).fetchone()
    return None if row is None else int(row.shard)


def lock_exclusive(c: Connection, space_id: int) -> None:
    c.execute(SQL.lock_exclusive, {"space": space_id})


def living_indexes(c: Connection, space_id: int) -> list[IndexRef]:
    """Indexes that may hold vectors of the space, the serving one first."""
    return [IndexRef(*row) for row in c.execute(SQL.living_indexes, {"space": space_id})]


def serving_index(c: Connection, space_id: int) -> IndexRef:
    """Raises Transient while a space is being made or removed."""
    row = c.execute(SQL.serving_index, {"space": space_id}).fetchone()
    if row is None:
        raise Transient(f"space {space_id} serves no index", code="no_serving_index")
    return IndexRef(*row)


def lock_serving_index(c: Connection, space_id: int) -> int | None:
    """FOR SHARE on the serving and the following index rows; the id of the serving one."""
    rows = c.execute(SQL.lock_indexes, {"space": space_id}).fetchall()
    return next((int(r.id) for r in rows if r.status == "SERVING"), None)


def wants_own_shard(c: Connection, space: Space, threshold: int, promised: int = 0) -> bool:
    """Is the space in a shared shard, and past the threshold, or promised to pass it?"""
    return bool(one(c.execute(SQL.wants_own_shard, {"space": space.id, "threshold": threshold, "promised": promised})).yes)


def promote(c: Connection, space: Space) -> int | None:
    """Move the space to a spare shard in this transaction (it takes the exclusive lock). None: somebody did, or it is gone."""
    lock_exclusive(c, space.id)
    row = c.execute(SQL.promotable, {"space": space.id, "generation": space.generation}).fetchone()
    if row is None:
        return None
    c.execute(SQL.ensure_spares, {"wanted": 2})
    taken = c.execute(SQL.take_spare, {"space": space.id}).fetchone()
    if taken is None:
        raise Transient("no spare shard is free", code="no_spare_shard")
    where = {"space": space.id, "old": row.shard, "new": taken.shard}
    for statement in (SQL.copy_state, SQL.copy_text, SQL.copy_retry):
        c.execute(statement, where)
    for table in _vector_tables(c, space.id):
        c.execute(sql.SQL(SQL.copy_vectors).format(table=sql.Identifier(table)), where)
    if one(c.execute(SQL.has_words, where)).yes:
        _copy_words(c, where)
    c.execute(SQL.moved, where)
    return int(taken.shard)


def _copy_words(c: Connection, where: Mapping[str, int]) -> None:
    """Their index takes them into its list of what waits, as a whole: to sort them in would take writers of the space ten times
    as long. The index's settle() does it, later and beside them."""
    index = sql.Identifier(f"kb_words_{where['new']}_terms_idx")
    c.execute(sql.SQL(SQL.words_wait).format(index=index, kilobytes=sql.Literal(MOVING_KILOBYTES)))
    c.execute(SQL.copy_words, where)
    c.execute(sql.SQL(SQL.words_wait).format(index=index, kilobytes=sql.Literal(WAITING_KILOBYTES)))


def clear_left(c: Connection, space_id: int, *, before: datetime, limit: int) -> int:
    """Delete up to ``limit`` old rows of a promoted space; when none is left, forget the old shard."""
    row = c.execute(SQL.left, {"space": space_id, "before": before}).fetchone()
    if row is None:
        return 0
    where = {"space": space_id, "old": row.left_shard, "limit": limit}
    removed = one(c.execute(SQL.clear_chunks, where)).n
    for table in _vector_tables(c, space_id):
        removed += c.execute(sql.SQL(SQL.clear_vectors).format(table=sql.Identifier(table)), where).rowcount
    removed += c.execute(SQL.clear_words, where).rowcount
    if not removed:
        c.execute(SQL.forget_left, where)
    return int(removed)


def _vector_tables(c: Connection, space_id: int) -> list[str]:
    """Tables that the pgvector index keeps beside the chunks, if it is used here."""
    return [r.name for r in c.execute(SQL.vector_tables, {"space": space_id})]


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = ("embedder_options", "index_options", "chunking", "audience")
    return {k: Jsonb(v) if k in wrapped and v is not None else v for k, v in values.items()}
