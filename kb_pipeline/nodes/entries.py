"""What an index is given for chunks: ids, permissions, the cached vector, and the text where the index searches by words."""

from collections.abc import Mapping, Sequence
from typing import Any

from kb_pipeline.engine import Engine
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.store import embeddings, spaces
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.publications import Wanted
from kb_pipeline.store.spaces import Space


def entries(
    engine: Engine, space: Space, ref: IndexRef, wanted: Sequence[Wanted], vectors: Mapping[int, bytes] | None = None
) -> dict[int, VectorEntry]:
    """chunk -> entry, for those whose vector by the index's model is cached or among ``vectors``. {} without the space."""
    worded = engine.index(ref).capabilities.keyword
    ids = [w.chunk_id for w in wanted]
    if not worded and vectors is not None:
        return {w.chunk_id: _entry(w, vectors[w.chunk_id]) for w in wanted if w.chunk_id in vectors}

    def read() -> dict[int, tuple[bytes, str, str]]:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is None:
                return {}
            rows = embeddings.vectors_of(c, space.id, shard, ref.model_id, ids, texts=worded)
            return {r.chunk_id: (bytes(r.vector), *(_words(r) if worded else ("", ""))) for r in rows}

    found = retried(read, idempotent=True)
    return {w.chunk_id: _entry(w, *_given(found[w.chunk_id], w, vectors)) for w in wanted if w.chunk_id in found}


def _given(found: tuple[bytes, str, str], w: Wanted, vectors: Mapping[int, bytes] | None) -> tuple[bytes, str, str]:
    return (vectors or {}).get(w.chunk_id, found[0]), found[1], found[2]


def _words(row: Any) -> tuple[str, str]:
    return row.content, "\n".join(x for x in (row.prefix, *row.title_path) if x)


def _entry(w: Wanted, vector: bytes, text: str = "", title: str = "") -> VectorEntry:
    return VectorEntry(w.vec_id, w.chunk_id, w.doc_id, vector, w.acl, w.acl_seq, w.checksum, w.bucket, text, title)
