"""Deleting documents: what a walk hid is confirmed by a point probe, or where the source has none by a second listing that
misses it as well; then it goes with its chunks, vectors and objects.
"""

from collections.abc import Sequence
from typing import Any

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Transient
from kb_pipeline.model import Presence
from kb_pipeline.ports import Connector
from kb_pipeline.store import documents, erasure, sources, spaces, versions, walks
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space

PROBE_BATCH = 500
REMOVAL_BATCH = 500


def confirm_hidden(engine: Engine, space: Space, source: Source) -> int:
    """Ask about everything hidden; what is gone is deleted, anything else stays hidden. Returns how many were deleted.

    What was hidden beyond the guard is taken off the operator's approval, and waits where that does not suffice.
    """
    after, deleted, waiting = 0, 0, 0
    while True:
        with transaction(engine.pool) as c:
            rows = walks.hidden_docs(c, source.id, after, PROBE_BATCH)
        if not rows:
            break
        after = rows[-1].id
        gone = _gone(engine.connector(source), rows)
        for beyond in (False, True):
            some = [(r.id, r.hidden_sync) for r in gone if r.beyond_guard is beyond]
            ids = retried(lambda some=some, beyond=beyond: _tombstone(engine, space, source, some, spend=beyond))  # type: ignore[misc]
            erase_documents(engine, space, ids)
            deleted += len(ids)
            waiting += len(some) if beyond and not ids else 0
    if waiting:
        with transaction(engine.pool) as c:
            walks.set_waiting(c, source.id, waiting)
    return deleted


def _gone(connector: Connector, rows: Sequence[Any]) -> list[Any]:
    if not connector.capabilities.probe:
        return [r for r in rows if r.missed_again]
    answers = connector.presence([r.external_id for r in rows])
    return [r for r, presence in zip(rows, answers, strict=True) if presence is Presence.GONE]


def _tombstone(engine: Engine, space: Space, source: Source, rows: Sequence[tuple[int, int]], *, spend: bool) -> list[int]:
    """Rows first, fenced by the hide token that was read before the probe."""
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None or not rows:
            return []
        ids = documents.still_hidden(c, [d for d, _ in rows], [t for _, t in rows])
        if spend and ids and not sources.spend_approval(c, source.id, len(ids)):
            return []
        documents.delete_documents(c, space.id, shard, ids)
        return ids


def delete_document(engine: Engine, space: Space, source_id: int, doc_id: int) -> None:
    """By an operator's word. The source still has it: the next walk brings it back as a new document."""

    def tombstone() -> None:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is not None and doc_id in documents.lock_documents(c, [doc_id]):
                documents.delete_documents(c, space.id, shard, [doc_id])
                sources.forget_digest(c, source_id)

    retried(tombstone)
    erase_documents(engine, space, [doc_id])


def remove_source(engine: Engine, space: Space, source: Source) -> int:
    """Delete every document of a source, in batches, and forget it. Returns how many; call it again if it was interrupted.

    It is PAUSED first and its lease taken, so that no walk adds to it. Raises Transient while one runs.
    """
    token = retried(lambda: _close(engine, source))
    deleted = 0
    while ids := retried(lambda: _tombstone_some(engine, space, source)):
        erase_documents(engine, space, ids)
        deleted += len(ids)
    with transaction(engine.pool) as c:
        sources.set_status(c, source.id, "REMOVED")
        walks.release_lease(c, source.id, token)
    return deleted


def _close(engine: Engine, source: Source) -> int:
    with transaction(engine.pool) as c:
        token = walks.take_lease(c, source.id, engine.limits.lease_seconds)
        if isinstance(token, str):
            raise Transient(f"source {source.name} is being walked by {token}: wait for it to end", code="source_busy")
        sources.set_status(c, source.id, "PAUSED")
        return token


def _tombstone_some(engine: Engine, space: Space, source: Source) -> list[int]:
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            return []
        ids = documents.lock_of_source(c, source.id, REMOVAL_BATCH)
        documents.delete_documents(c, space.id, shard, ids)
        return ids


def erase_documents(engine: Engine, space: Space, doc_ids: Sequence[int]) -> None:
    """Chunk rows and objects of deleted documents; their vectors have tombstones then."""
    if not doc_ids:
        return

    def erase() -> list[str]:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is None:
                return []
            documents.lock_deleted(c, doc_ids)
            erasure.erase(c, space.id, shard, doc_ids)
            return [p for p in versions.object_paths(c, doc_ids) if p]

    engine.blobs.delete_many(retried(erase))
