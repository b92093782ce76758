"""kb_source: one configured connector in a space."""

from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.types.json import Jsonb

from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "sources.sql")


@dataclass(frozen=True, slots=True)
class Source:
    """``listing_*`` describe the last complete listing; ``approved`` deletions may go beyond the guard."""

    id: int
    space_id: int
    name: str
    kind: str
    config: Json
    status: str
    listing_count: int | None
    listing_at: datetime | None
    listing_digest: str | None
    approved: int
    waiting_deletions: int
    watermark: Json


def add_source(c: Connection, space_id: int, name: str, kind: str, config: Json) -> Source:
    """Raises Misconfigured if the name is taken in this space."""
    try:
        row = one(c.execute(SQL.add, {"space": space_id, "name": name, "kind": kind, "config": Jsonb(config)}))
    except psycopg.errors.UniqueViolation as e:
        raise Misconfigured(f"source {name!r} exists already in this space", code="source_exists") from e
    c.execute(SQL.add_lease, {"source": row.id})
    return get_source(c, space_id, name)


def get_source(c: Connection, space_id: int, name: str) -> Source:
    """Raises Misconfigured with the names that exist."""
    for source in (found := list_sources(c, space_id)):
        if source.name == name:
            return source
    names = ", ".join(s.name for s in found) or "none yet"
    raise Misconfigured(f"no source {name!r} in this space (there are: {names})", code="no_source")


def find_sources(c: Connection, name: str) -> list[Source]:
    """Sources of this name in any living space."""
    return [Source(*row) for row in c.execute(SQL.find, {"name": name})]


def list_sources(c: Connection, space_id: int) -> list[Source]:
    return [Source(*row) for row in c.execute(SQL.list_all, {"space": space_id})]


def set_status(c: Connection, source_id: int, status: str) -> None:
    c.execute(SQL.set_status, {"source": source_id, "status": status})


def approve(c: Connection, source_id: int, up_to: int) -> None:
    c.execute(SQL.approve, {"source": source_id, "up_to": up_to})


def spend_approval(c: Connection, source_id: int, count: int) -> bool:
    """Take ``count`` deletions off the approval, all or none."""
    return c.execute(SQL.spend, {"source": source_id, "count": count}).rowcount == 1


def forget_digest(c: Connection, source_id: int) -> None:
    """The next pass walks, whatever the listing's digest says."""
    c.execute(SQL.forget_digest, {"source": source_id})
