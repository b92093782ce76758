"""One transaction on a space's partitioned rows: the shared lock first, then the shard, as every writer does it."""

from collections.abc import Callable
from typing import TypeVar

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Rejected
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.spaces import Space

T = TypeVar("T")


def with_rows(engine: Engine, space: Space, work: Callable[[Connection, int], T]) -> T:
    """``work`` gets the connection and the shard, and may run again. Raises Rejected without the space."""

    def run() -> T:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is None:
                raise Rejected(f"space {space.key!r} is being removed", code="no_space")
            return work(c, shard)

    return retried(run, idempotent=True)
