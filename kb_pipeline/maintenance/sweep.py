"""What lies outside and has no row any more: objects of dead attempts and of versions that are gone. And what deletions
leave in a vector index.

Objects are listed first, rows are read second: an object without a row then is either the work of a running attempt or dead.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol, runtime_checkable

from kb_pipeline.engine import Engine
from kb_pipeline.model import IndexRef
from kb_pipeline.store import retention, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space

BATCH = 1000
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


@runtime_checkable
class Compacting(Protocol):
    """An index whose deleted entries cost until it is told to rebuild."""

    def compact(self, ref: IndexRef) -> bool:
        """Rebuild if too much of it is dead, beside readers and writers; True if it did."""
        ...


def compact_index(engine: Engine, space: Space) -> bool:
    """Off-peak, after the vector GC. False where there is nothing to gain."""
    index = engine.index(space)
    if not isinstance(index, Compacting):
        return False
    with transaction(engine.pool) as c:
        ref = spaces.serving_index(c, space.id)
    return index.compact(ref)


def _batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    it = iter(items)
    while part := list(islice(it, size)):
        yield part
