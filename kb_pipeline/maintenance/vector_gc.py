"""Vector GC: decide under the document's lock, delete by id in batches, ask the index, and only then forget.

Any number of GCs may run, die or be late: an id once declared dead is never used again.
"""

from uuid import UUID

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError
from kb_pipeline.model import IndexRef
from kb_pipeline.store import documents, erasure, spaces
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.spaces import Space

DOCUMENT_BATCH = 200
VECTOR_BATCH = 2000


def collect_vectors(engine: Engine, space: Space) -> int:
    """Erase every vector that is due. Returns how many left the index; one that is down leaves the rest for the next time."""
    _decide(engine, space)
    with transaction(engine.pool) as c:
        living = spaces.living_indexes(c, space.id)
    return sum(_erase(engine, space, ref) for ref in living)


def _decide(engine: Engine, space: Space) -> None:
    seen: set[int] = set()
    while True:

        def decide() -> list[int]:
            with transaction(engine.pool) as c:
                shard = spaces.lock_shared(c, space)
                if shard is None:
                    return []
                due = [d for d in erasure.due_documents(c, space.id, DOCUMENT_BATCH + len(seen)) if d not in seen]
                documents.lock_deleted(c, due)
                erasure.decide(c, space.id, shard, due)
                return due

        due = retried(decide, idempotent=True)
        if not due:
            return
        seen.update(due)


def _erase(engine: Engine, space: Space, ref: IndexRef) -> int:
    index = engine.index(ref)
    erased, after = 0, None
    while True:
        with transaction(engine.pool) as c:
            dead = erasure.dead_vectors(c, ref.index_id, after, VECTOR_BATCH)
        if not dead:
            return erased
        after = dead[-1]
        try:
            held = set(index.present(ref, dead))
            index.delete(ref, dead)
            still = set(index.present(ref, dead))
        except KbError:
            return erased  # the tombstones stay and are tried again
        erased += len(held - still)
        _confirm(engine, space, ref, [v for v in dead if v not in still], sorted(still))


def _confirm(engine: Engine, space: Space, ref: IndexRef, gone: list[UUID], still: list[UUID]) -> None:
    def confirm() -> None:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is not None:
                erasure.confirm_dead(c, space.id, shard, ref.index_id, gone, still)

    retried(confirm, idempotent=True)
