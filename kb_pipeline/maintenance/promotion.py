"""A space that outgrows the shared shards gets one of its own: one transaction, beside readers and writers of other spaces."""

from datetime import UTC, datetime, timedelta

from kb_pipeline.engine import Engine
from kb_pipeline.store import spaces
from kb_pipeline.store.database import briefly, retried, transaction
from kb_pipeline.store.spaces import Space

GRACE = timedelta(minutes=10)  # readers that looked the old shard up are done by then
BATCH = 5000


def promote_if_large(engine: Engine, space: Space, promised_chunks: int = 0) -> int | None:
    """Move the space once it holds, or is promised, more than the threshold. The new shard, or None if it stays."""

    def wanted() -> bool:
        with transaction(engine.pool) as c:
            return spaces.wants_own_shard(c, space, engine.limits.own_shard_chunks, promised_chunks)

    return briefly(engine.pool, lambda c: spaces.promote(c, space)) if retried(wanted, idempotent=True) else None


def clear_left_shard(engine: Engine, space: Space, *, now: datetime | None = None) -> int:
    """Remove the old copy of a promoted space, in batches, once nobody can read it any more. Rows removed."""
    removed = 0
    while True:
        with transaction(engine.pool) as c:
            if spaces.lock_shared(c, space) is None:
                return removed
            n = spaces.clear_left(c, space.id, before=(now or datetime.now(UTC)) - GRACE, limit=BATCH)
        if not n:
            return removed
        removed += n
