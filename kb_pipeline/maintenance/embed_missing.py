"""Vectors for given chunks, under a claim as any worker takes it: for what is current and has none by an index's model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected
from kb_pipeline.maintenance.rows import with_rows
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline.store import digests, embeddings
from kb_pipeline.store.database import Connection
from kb_pipeline.store.indexes import Index
from kb_pipeline.store.spaces import Space


@dataclass(slots=True)
class Embedded:
    """``refused``: chunks whose text the embedder does not take, and why; ``error``: the last one, of whatever kind."""

    texts: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    error: KbError | None = None


def embed_missing(engine: Engine, space: Space, index: Index, chunk_ids: Sequence[int]) -> Embedded:
    """Exactly these texts, stored as they come. Texts that another process has claimed are left to it."""
    model = index.ref.model_id
    token = with_rows(engine, space, lambda c, _: embeddings.new_token(c))
    result = Embedded()
    refused: dict[bytes, str] = {}

    def claim(c: Connection, shard: int) -> list[tuple[bytes, str]]:
        texts = dict(embeddings.texts(c, space.id, shard, chunk_ids))
        _, mine = embeddings.claim(c, model, list(texts), engine.limits.lease_seconds, token)
        return [(h, t) for h, t in texts.items() if h in mine]

    try:
        for part in embed_texts(engine.embedder(index), with_rows(engine, space, claim)):
            result.error = next(iter(part.errors.values()), result.error)
            refused |= {h: f"{e.code}: {e.message}" for h, e in part.errors.items() if isinstance(e, Rejected)}
            vectors = part.vectors
            if vectors:
                result.texts += with_rows(engine, space, lambda c, _: embeddings.store(c, model, token, vectors))  # noqa: B023
    finally:
        with_rows(engine, space, lambda c, _: embeddings.give_back(c, model, token))
    if refused:
        hashes = with_rows(engine, space, lambda c, shard: digests.hashes(c, space.id, shard, chunk_ids))
        result.refused = {chunk: refused[h] for chunk, h in hashes.items() if h in refused}
    return result
