"""kb_index and kb_index_todo: which index serves a space, which ones follow it, and what a following one must still be given.

What is served is a row here, moved in one transaction that asks once more whether the other one is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from kb_pipeline.errors import Misconfigured, Transient
from kb_pipeline.model import IndexRef, Json
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one
from kb_pipeline.store.publications import Wanted

SQL = load_statements(__package__, "indexes.sql")


@dataclass(frozen=True, slots=True)
class Index:
    """A living index of a space, and the model that its vectors are made by."""

    ref: IndexRef
    status: str  # FOLLOWING, SERVING
    base_done: bool
    embedder: str
    embedder_options: Json
    fingerprint: str
    wanted: int | None  # chunks that its base was made of
    served_at: datetime | None
    keep_until: datetime | None
    agreement: float | None
    error: str | None
    created_at: datetime

    @property
    def building(self) -> bool:
        """Made to replace the serving one, and not there yet."""
        return self.status == "FOLLOWING" and self.keep_until is None


@dataclass(frozen=True, slots=True)
class Todo:
    """``chunk_id`` 0: the permissions of the document's current chunks."""

    doc_id: int
    chunk_id: int
    seq: int


def living(c: Connection, space_id: int) -> list[Index]:
    """The serving one first, then the one that is being built, then former ones that are kept."""
    return _find(c, space_id, "FOLLOWING", "SERVING")


def serving(c: Connection, space_id: int) -> Index:
    """Raises Transient while a space is being made or removed."""
    for index in living(c, space_id):
        if index.status == "SERVING":
            return index
    raise Transient(f"space {space_id} serves no index", code="no_serving_index")


def by_id(c: Connection, index_id: int) -> Index | None:
    """Of whatever status."""
    found = [_index(r) for r in c.execute(SQL.find, {"space": None, "index": index_id, "statuses": None})]
    return found[0] if found else None


def former(c: Connection, space_id: int) -> list[Index]:
    """One of each model that served before, the last first. They may be dropped: their cached vectors may still be there."""
    served = [(i.served_at, i) for i in _find(c, space_id) if i.served_at is not None and i.status != "SERVING"]
    newest: dict[int, Index] = {}
    for _, index in sorted(served, key=lambda x: x[0], reverse=True):
        newest.setdefault(index.ref.model_id, index)
    return list(newest.values())


@dataclass(frozen=True, slots=True)
class Made:
    """What an index is made of."""

    kind: str
    options: Json
    model_id: int
    embedder: str
    embedder_options: Json

    @property
    def row(self) -> dict[str, Any]:
        return {
            "model": self.model_id, "kind": self.kind, "options": Jsonb(self.options), "embedder": self.embedder,
            "embedder_options": Jsonb(self.embedder_options),
        }  # fmt: skip


def begin(c: Connection, space_id: int, made: Made) -> int:
    """B1: the row comes before what it names. Raises Misconfigured while another one is being built, or without the space."""
    try:
        row = c.execute(SQL.begin, {"space": space_id, **made.row}).fetchone()
    except psycopg.errors.UniqueViolation as e:
        raise already_building() from e
    if row is None:
        raise Misconfigured("the space is being removed", code="no_space")
    return int(row.id)


def restate(c: Connection, index_id: int, made: Made) -> None:
    """Other options of the same index and the same model, from here on; of the space as well if it serves."""
    c.execute(SQL.restate, {"index": index_id, **made.row})
    c.execute(SQL.space_follows, {"index": index_id})


def already_building() -> Misconfigured:
    return Misconfigured(
        "another index of this space is being built: go on with kb space build SPACE, or give it up with kb space cancel SPACE",
        code="already_building",
    )


def base(c: Connection, space_id: int, shard: int, index_id: int, after: int, limit: int) -> tuple[int, int]:
    """B3: ask for the next ``limit`` current chunks behind ``after``. (how many, the last)"""
    where = {"space": space_id, "shard": shard, "index": index_id, "after": after, "limit": limit}
    row = one(c.execute(SQL.base, where))
    return row.n, row.last


def base_done(c: Connection, index_id: int, wanted: int) -> None:
    c.execute(SQL.base_done, {"index": index_id, "wanted": wanted})


def todo(c: Connection, index_id: int, after: tuple[int, int], limit: int) -> list[Todo]:
    """In the order of documents, behind (document, chunk)."""
    rows = c.execute(SQL.todo, {"index": index_id, "doc": after[0], "chunk": after[1], "limit": limit})
    return [Todo(r.doc_id, r.chunk_id, r.seq) for r in rows]


def todo_left(c: Connection, index_id: int) -> int:
    return int(one(c.execute(SQL.todo_left, {"index": index_id})).n)


def current(c: Connection, space_id: int, shard: int, todos: Sequence[Todo]) -> list[Wanted]:
    """What of it is current now."""
    where = {"space": space_id, "shard": shard}
    docs = sorted({t.doc_id for t in todos if t.chunk_id == 0})
    ids = {t.chunk_id for t in todos if t.chunk_id}
    if docs:
        ids |= {r.id for r in c.execute(SQL.chunks_of, {**where, "docs": docs})}
    rows = c.execute(SQL.current, {**where, "ids": sorted(ids)})
    return [Wanted(r[0], r[1], r[2], r[3], r[4], tuple(r.acl), r.acl_seq) for r in rows]


def done(c: Connection, index_id: int, todos: Sequence[Todo]) -> None:
    """B4: forget what was given, unless it was asked for again meanwhile."""
    columns = {"docs": [t.doc_id for t in todos], "chunks": [t.chunk_id for t in todos], "seqs": [t.seq for t in todos]}
    c.execute(SQL.done, {"index": index_id, **columns})


def stands_still(c: Connection, index_id: int, error: str | None) -> None:
    c.execute(SQL.stands_still, {"index": index_id, "error": error})


def agreed(c: Connection, index_id: int, agreement: float | None) -> None:
    c.execute(SQL.agreed, {"index": index_id, "agreement": agreement})


def switch(c: Connection, space_id: int, index_id: int, keep_seconds: float) -> bool:
    """B5, under the exclusive space lock: this index serves, the former one follows. False: it lacks something again, or is
    not there any more."""
    rows = {r.id: r for r in c.execute(SQL.lock_both, {"space": space_id}).fetchall()}
    target = rows.get(index_id)
    if target is None or target.status != "FOLLOWING" or not target.base_done:
        return False
    if one(c.execute(SQL.anything_to_do, {"index": index_id})).yes:
        return False
    c.execute(SQL.stand_down, {"space": space_id, "keep": keep_seconds})
    c.execute(SQL.stand_up, {"index": index_id})
    c.execute(SQL.space_follows, {"index": index_id})
    return True


def want_again(c: Connection, index_id: int) -> None:
    """A former index is to serve again."""
    try:
        c.execute(SQL.wanted_again, {"index": index_id})
    except psycopg.errors.UniqueViolation as e:
        raise already_building() from e


def keep(c: Connection, index_id: int, seconds: float) -> bool:
    """A former index that was to serve again does not, and is kept. False if it never served."""
    return c.execute(SQL.keep, {"index": index_id, "keep": seconds}).rowcount == 1


def give_up(c: Connection, index_id: int) -> bool:
    """FOLLOWING to DROPPING: from here on nobody may switch to it."""
    return c.execute(SQL.give_up, {"index": index_id}).rowcount == 1


def expire(c: Connection, space_id: int) -> int:
    """Former indexes whose time is over."""
    return len(c.execute(SQL.expire, {"space": space_id}).fetchall())


def dropping(c: Connection, space_id: int) -> list[Index]:
    """Given up, and not known to be gone."""
    return _find(c, space_id, "DROPPING")


def dropped(c: Connection, index_id: int) -> None:
    for statement in (SQL.forget_todo, SQL.forget_tombstones, SQL.dropped):
        c.execute(statement, {"index": index_id})


def building(c: Connection) -> list[str]:
    """Keys of the spaces that have one."""
    return [r.key for r in c.execute(SQL.building)]


def sample(c: Connection, space_id: int, shard: int, buckets: Sequence[int], limit: int) -> list[Any]:
    """Rows id, doc_id, content, prefix of some current chunks, spread over the space."""
    where = {"space": space_id, "shard": shard, "buckets": list(buckets), "limit": limit}
    return c.execute(SQL.sample, where).fetchall()


def _find(c: Connection, space_id: int, *statuses: str) -> list[Index]:
    values = {"space": space_id, "index": None, "statuses": list(statuses) or None}
    return [_index(r) for r in c.execute(SQL.find, values)]


def _index(r: Any) -> Index:
    return Index(IndexRef(*r[:7]), *r[7:])
