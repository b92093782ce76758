"""What lies outside and has no row any more: objects of dead attempts and of versions that are gone, what was written late for
a space that is deleted. And what deletions leave in a vector index.

Objects are listed first, rows are read second: an object without a row then is either the work of a running attempt or dead.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

from kb_pipeline.engine import Engine
from kb_pipeline.model import IndexRef
from kb_pipeline.store import outside, retention, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space

BATCH = 1000
_SPACE = re.compile(r"spaces/(\d+)/.+")
_INDEX = re.compile(r"kb_(\d+)_(\d+)")  # as store/spaces.sql names them: of space, and its own id
_KEY = re.compile(r"spaces/\d+/docs/(\d+)/v(\d+)/[a-z]+-a(\d+)")  # as nodes.outcome names them


def sweep_objects(engine: Engine, space: Space) -> int:
    """Delete objects of the space that no version refers to, unless an attempt that runs has put them. How many."""
    swept = 0
    for keys in _batched(engine.blobs.keys(f"spaces/{space.id}/docs/"), BATCH):
        dead = _dead(engine, keys)
        engine.blobs.delete_many(dead)
        swept += len(dead)
    return swept


def _dead(engine: Engine, keys: list[str]) -> list[str]:
    named = {key: (int(m[1]), int(m[2]), int(m[3])) for key in keys if (m := _KEY.fullmatch(key))}
    docs = sorted({doc for doc, _, _ in named.values()})
    with transaction(engine.pool) as c:
        # In this order: an attempt commits its path while its task is PROCESSING, and only then goes on.
        running = retention.attempts_worked_on(c, docs)
        referenced = retention.referenced_paths(c, docs)
    return [key for key, attempt in named.items() if key not in referenced and attempt not in running]


# --- what belongs to no space any more ----------------------------------------------------------------------------------


@runtime_checkable
class Listing(Protocol):
    """A vector store that can say which indexes it holds: one where each is a thing of its own."""

    def names(self) -> Iterable[str]:
        """Exact names of everything that begins with ``kb_``."""
        ...


@dataclass(slots=True)
class Removed:
    """``foreign``: names of spaces that this database has never made. They may be somebody else's, and stay."""

    objects: int = 0
    indexes: int = 0
    foreign: int = 0


def sweep_removed(engine: Engine) -> Removed:
    """Remove again what arrived late for spaces that are DELETED or whose row is gone. Of the whole installation: it lists
    every object once, so call it nightly and not per space."""
    removed = Removed()
    _sweep_spaces(engine, removed)
    _sweep_indexes(engine, removed)
    return removed


def _sweep_spaces(engine: Engine, removed: Removed) -> None:
    dead: dict[int, bool] = {}
    for keys in _batched(engine.blobs.keys("spaces/"), BATCH):
        named = {key: int(m[1]) for key in keys if (m := _SPACE.fullmatch(key))}
        if new := sorted(set(named.values()) - dead.keys()):
            with transaction(engine.pool) as c:
                found = outside.judge_spaces(c, new)
            dead |= {i: i in found.dead for i in new}
            removed.foreign += len(found.foreign)
        doomed = [key for key, space_id in named.items() if dead[space_id]]
        engine.blobs.delete_many(doomed)
        removed.objects += len(doomed)
    for space_id in (i for i, is_dead in dead.items() if is_dead):
        engine.blobs.clear(f"spaces/{space_id}/")  # what is half-written is in no listing


def _sweep_indexes(engine: Engine, removed: Removed) -> None:
    with transaction(engine.pool) as c:
        samples = outside.index_kinds(c)
    for sample in samples:
        index = engine.index(sample)
        if not isinstance(index, Listing):
            continue
        named = {int(m[2]): (name, int(m[1])) for name in index.names() if (m := _INDEX.fullmatch(name))}
        with transaction(engine.pool) as c:
            found = outside.judge_indexes(c, sorted(named))
        removed.foreign += len(found.foreign)
        for index_id in found.dead:
            name, space_id = named[index_id]
            index.drop(IndexRef(index_id, space_id, 0, name, 0, sample.kind, sample.options))
            removed.indexes += 1


@runtime_checkable
class Compacting(Protocol):
    """An index whose deleted entries cost until it is told to rebuild."""

    def compact(self, ref: IndexRef) -> bool:
        """Rebuild if too much of it is dead, beside readers and writers; True if it did."""
        ...


def compact_index(engine: Engine, space: Space) -> bool:
    """Off-peak, after the vector GC. False where there is nothing to gain."""
    with transaction(engine.pool) as c:
        ref = spaces.serving_index(c, space.id)
    index = engine.index(ref)
    return index.compact(ref) if isinstance(index, Compacting) else False


def _batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    it = iter(items)
    while part := list(islice(it, size)):
        yield part
