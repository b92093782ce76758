"""INDEXER: look, upsert, look again, publish. Before the last transaction nothing is visible, and it is all or nothing."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from uuid import UUID

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Transient
from kb_pipeline.model import IndexRef, Json, VectorEntry
from kb_pipeline.nodes.outcome import Outcome, commit
from kb_pipeline.store import embeddings, publications, spaces, tasks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.publications import Wanted
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence

SLICE = 2000  # vectors a call of the index


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    ref, wanted, verified = retried(lambda: _prepare(engine, space, claims), idempotent=True)
    errors: dict[int, KbError] = {}
    upserted = 0
    try:
        upserted, absent = _bring(engine, space, ref, wanted)
        errors = {doc: _absent_error(ref, n) for doc, n in absent.items()}
    except KbError as e:
        errors = {x.doc_id: e for x in claims}
    counts = {"published": 0, "appeared": 0}

    def save(c: Connection, fence: Fence) -> dict[int, Json]:
        return _publish(c, space, ref, fence, verified, counts)

    failed = [(x, errors[x.doc_id]) for x in claims if x.doc_id in errors]
    outcome = commit(engine, space, started, claims, failed, save)
    outcome.add(vectors_upserted=upserted, published=counts["published"])
    return outcome


def _prepare(engine: Engine, space: Space, claims: Sequence[Claim]) -> tuple[IndexRef, list[Wanted], dict[int, int]]:
    """Step 1: the serving index, what it must hold, and each document's acl_seq as it is now."""
    with transaction(engine.pool) as c:
        held = tasks.fence(c, space, claims, documents=True)
        ref = spaces.serving_index(c, space.id)
        docs = {x.doc_id: x.version for x in held.claims}
        wanted = publications.revive(c, space.id, held.shard, list(docs), list(docs.values())) if docs else []
        return ref, wanted, {d: acl_seq for d, (_, acl_seq) in publications.publishable(c, docs).items()}


def _bring(engine: Engine, space: Space, ref: IndexRef, wanted: Sequence[Wanted]) -> tuple[int, dict[int, int]]:
    """Steps 2 to 4. (vectors upserted, documents with vectors that are still not there)."""
    index = engine.index(space)
    upserted, absent = 0, {}  # type: ignore[var-annotated]
    for part in _slices(wanted):
        missing = _missing(index.present(ref, [w.vec_id for w in part]), part)
        if not missing:
            continue
        vectors = _vectors(engine, space, ref, missing)
        index.upsert(ref, [_entry(w, vectors[w.chunk_id]) for w in missing if w.chunk_id in vectors])
        upserted += len(vectors)
        for w in _missing(index.present(ref, [w.vec_id for w in missing]), missing):
            absent[w.doc_id] = absent.get(w.doc_id, 0) + 1
    return upserted, absent


def _missing(present: dict[UUID, int], wanted: Sequence[Wanted]) -> list[Wanted]:
    return [w for w in wanted if present.get(w.vec_id, -1) < w.acl_seq]


def _vectors(engine: Engine, space: Space, ref: IndexRef, missing: Sequence[Wanted]) -> dict[int, bytes]:
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            return {}
        rows = embeddings.vectors_of(c, space.id, shard, ref.model_id, [w.chunk_id for w in missing])
        return {r.chunk_id: bytes(r.vector) for r in rows}


def _entry(w: Wanted, vector: bytes) -> VectorEntry:
    return VectorEntry(w.vec_id, w.chunk_id, w.doc_id, vector, w.acl, w.acl_seq, w.checksum, w.bucket)


def _absent_error(ref: IndexRef, n: int) -> Transient:
    return Transient(f"{n} of its vectors are not in index {ref.name} although it accepted them", code="index_incomplete")


def _publish(
    c: Connection, space: Space, ref: IndexRef, fence: Fence, verified: dict[int, int], counts: dict[str, int]
) -> dict[int, Json]:
    """Step 5. Only claims whose premises still hold are in the answer; the others go back to the queue at this node."""
    if spaces.lock_serving_index(c, space.id) != ref.index_id:
        return {}
    now = publications.publishable(c, {x.doc_id: x.version for x in fence.claims})
    tasks.supersede(c, [x for x in fence.claims if x.doc_id in now and now[x.doc_id][0] >= x.version])
    going = {x.doc_id: x for x in fence.claims if x.doc_id in now and now[x.doc_id][0] < x.version}
    going = {d: x for d, x in going.items() if verified.get(d) == now[d][1]}
    if not going:
        return {}
    published = publications.publish(c, space.id, fence.shard, {d: x.version for d, x in going.items()})
    counts["published"], counts["appeared"] = published.documents, published.appeared
    return {x.task_id: {"published": x.version} for x in going.values()}


def _slices(wanted: Iterable[Wanted]) -> Iterable[list[Wanted]]:
    it = iter(wanted)
    while part := list(islice(it, SLICE)):
        yield part
