"""Deleting a space: fenced, owned by nobody, restartable at any point; it ends with a count that is zero everywhere.

A space's own shard is truncated under the lock of its row, never dropped or detached.
"""

import random
import time
from itertools import islice

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Transient
from kb_pipeline.maintenance.rebuild import drop_given_up
from kb_pipeline.store import removal, retention, spaces
from kb_pipeline.store.database import DatabaseBusy, retried, transaction
from kb_pipeline.store.spaces import Space

BATCH = 5000
HASHES = 100_000  # chunks looked through at a time, on the server: far from the time limit of a statement
TRUNCATE_TRIES = 30
ROUNDS = 3


def delete_space(engine: Engine, space: Space) -> dict[str, int]:
    """Remove a space and everything of it. Returns the residue by kind, all zero; call it again if it was interrupted."""
    retried(lambda: _begin(engine, space), idempotent=True)
    residue: dict[str, int] = {}
    for _ in range(ROUNDS):
        _forget_embeddings(engine, space)
        _clear_shards(engine, space)  # before the index: vectors that lie beside the chunks are truncated with them
        drop_given_up(engine, space)
        _delete_objects(engine, space)
        _delete_rows(engine, space)
        residue = _residue(engine, space)
        if not any(residue.values()):
            with transaction(engine.pool) as c:
                removal.finish(c, space.id)
            return residue
    return residue


def _begin(engine: Engine, space: Space) -> None:
    with transaction(engine.pool) as c:
        spaces.lock_exclusive(c, space.id)
        removal.begin(c, space.id)


def _forget_embeddings(engine: Engine, space: Space) -> None:
    """Cached vectors of texts that no other space has, while the rows that name them are still there."""
    with transaction(engine.pool) as c:
        shards, models = removal.shards(c, space.id), removal.models(c, space.id)
    for shard, _ in shards:
        after, n = 0, HASHES
        while n == HASHES:
            with transaction(engine.pool) as c:
                before = retention.clock(c)  # before the look: whoever pins a text from here on keeps it
                n, after = retention.stage_of_space(c, space.id, shard, after, HASHES)
                for model in models:
                    retention.forget_staged(c, model, before)


def _clear_shards(engine: Engine, space: Space) -> None:
    with transaction(engine.pool) as c:
        shards = removal.shards(c, space.id)
    for shard, owned in shards:
        if owned:
            _truncate(engine, space, shard)
        else:
            while True:
                with transaction(engine.pool) as c:
                    if not removal.delete_chunks(c, space.id, shard, BATCH):
                        break


def _truncate(engine: Engine, space: Space, shard: int) -> None:
    """A leaf that somebody reads is tried again after a short wait: waiting in the lock queue would stop neighbours' DDL."""
    for _ in range(TRUNCATE_TRIES):
        try:
            with transaction(engine.pool) as c:
                removal.truncate_own_shard(c, space.id, shard)
            return
        except DatabaseBusy:
            time.sleep(random.uniform(0.2, 1.0))
    raise Transient(f"space {space.key}: its tables are being read for minutes; run the same command again", code="shard_busy")


def _delete_objects(engine: Engine, space: Space) -> None:
    engine.blobs.clear(f"spaces/{space.id}/")


def _delete_rows(engine: Engine, space: Space) -> None:
    while True:
        with transaction(engine.pool) as c:
            if not removal.delete_documents(c, space.id, BATCH):
                break
    with transaction(engine.pool) as c:
        models = removal.models(c, space.id)
        removal.delete_rest(c, space.id)
        for model in models:
            removal.forget_unused_embeddings(c, model)


def _residue(engine: Engine, space: Space) -> dict[str, int]:
    with transaction(engine.pool) as c:
        left = removal.count_left(c, space.id)
    left["objects"] = sum(1 for _ in islice(engine.blobs.keys(f"spaces/{space.id}/"), 10_000))
    return left
