"""Which names found outside are nobody's: asked after the listing, since a row comes before what it names.

A name holds a number that this database gave out, and never gives out again. One above the last is not ours to judge: it
belongs to another installation, or to a later state of this one than a backup has brought back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kb_pipeline.model import IndexRef
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection

SQL = load_statements(__package__, "outside.sql")
LARGEST = 2**31 - 1  # of the ids; a larger number is in no name of ours


@dataclass(frozen=True, slots=True)
class Judged:
    dead: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)


def judge_spaces(c: Connection, ids: Sequence[int]) -> Judged:
    """Of these, the spaces that are DELETED or have no row."""
    return _judged(ids, c.execute(SQL.spaces, {"ids": [i for i in ids if i <= LARGEST]}))


def judge_indexes(c: Connection, ids: Sequence[int]) -> Judged:
    """Of these, the indexes that are dropped, or have no row, or are of a DELETED space."""
    return _judged(ids, c.execute(SQL.indexes, {"ids": [i for i in ids if i <= LARGEST]}))


def _judged(ids: Sequence[int], rows: Any) -> Judged:
    found = Judged(foreign=[i for i in ids if i > LARGEST])
    for row in rows:
        (found.foreign if row.foreign else found.dead).append(row.id)
    return found


def index_kinds(c: Connection) -> list[IndexRef]:
    """One index, dropped or not, for each kind of index and its options."""
    return [IndexRef(*row) for row in c.execute(SQL.index_kinds)]
