"""INDEXER: look, upsert, look again, publish. Before the last transaction nothing is visible, and it is all or nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from uuid import UUID

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected, Transient
from kb_pipeline.model import IndexRef, Json, VectorEntry
from kb_pipeline.nodes.entries import entries
from kb_pipeline.nodes.outcome import Outcome, commit
from kb_pipeline.ports import VectorIndex
from kb_pipeline.states import Node
from kb_pipeline.store import publications, spaces, tasks, vector_retries
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.publications import Wanted
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence

SLICE = 2000  # vectors a call of the index
ABSENT = "the index does not hold it although it accepted it"


@dataclass(slots=True)
class _Brought:
    """What the index holds now. ``errors`` by document, ``failed`` by chunk: what it still lacks, and why."""

    upserted: int = 0
    unembedded: set[int] = field(default_factory=set)  # documents with a text that has no vector by the model of the index
    errors: dict[int, KbError] = field(default_factory=dict)
    failed: dict[int, dict[int, str]] = field(default_factory=dict)  # by document

    def lacks(self, ref: IndexRef, w: Wanted, refusal: Rejected | None) -> None:
        of = self.failed.setdefault(w.doc_id, {})
        of[w.chunk_id] = f"{refusal.code}: {refusal.message}" if refusal else ABSENT
        if refusal is not None:
            self.errors[w.doc_id] = refusal
        elif not isinstance(self.errors.get(w.doc_id), Rejected):
            self.errors[w.doc_id] = _absent_error(ref, len(of))


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    ref, wanted, verified = retried(lambda: _prepare(engine, space, claims), idempotent=True)
    brought = _Brought()
    try:
        _bring(engine, space, ref, wanted, brought)
    except KbError as e:
        if e.code == "index_gone" and _moved(engine, space, ref):
            verified = {}  # nothing may be published by it; the next try finds the one that serves
        else:
            brought.errors = dict.fromkeys((x.doc_id for x in claims), e)
    counts = {"published": 0, "appeared": 0}

    def save(c: Connection, fence: Fence) -> dict[int, Json]:
        back = [x for x in fence.claims if x.doc_id in brought.unembedded]
        tasks.give_back(c, back, Node.EMBEDDING)
        return _publish(c, space, ref, Fence(fence.shard, [x for x in fence.claims if x not in back]), verified, counts)

    def give_up(c: Connection, fence: Fence) -> None:
        failures = {chunk: why for x in fence.claims for chunk, why in brought.failed.get(x.doc_id, {}).items()}
        remember(c, engine, space, fence.shard, failures)

    failed = [(x, brought.errors[x.doc_id]) for x in claims if x.doc_id in brought.errors]
    outcome = commit(engine, space, started, claims, failed, save, give_up=give_up, brief=True)
    outcome.add(vectors_upserted=brought.upserted, published=counts["published"])
    return outcome


def remember(
    c: Connection, engine: Engine, space: Space, shard: int, failures: dict[int, str], *, current_only: bool = False
) -> None:
    """One more failed try for each chunk -> why."""
    base, longest = engine.limits.retry_base_seconds, engine.limits.retry_max_seconds
    vector_retries.record(c, space.id, shard, failures, base_seconds=base, max_seconds=longest, current_only=current_only)


def _prepare(engine: Engine, space: Space, claims: Sequence[Claim]) -> tuple[IndexRef, list[Wanted], dict[int, int]]:
    """Step 1: the serving index, what it must hold, and each document's acl_seq as it is now."""
    with transaction(engine.pool) as c:
        held = tasks.fence(c, space, claims, documents=True)
        ref = spaces.serving_index(c, space.id)
        docs = {x.doc_id: x.version for x in held.claims}
        wanted = publications.revive(c, space.id, held.shard, list(docs), list(docs.values())) if docs else []
        return ref, wanted, {d: acl_seq for d, (_, acl_seq) in publications.publishable(c, docs).items()}


def _bring(engine: Engine, space: Space, ref: IndexRef, wanted: Sequence[Wanted], brought: _Brought) -> None:
    """Steps 2 to 4. Raises what concerns the index as a whole."""
    index = engine.index(ref)
    for part in _slices(wanted):
        missing = _missing(index.present(ref, [w.vec_id for w in part]), part)
        if not missing:
            continue
        ready = entries(engine, space, ref, missing)
        refused = upsert_each(index, ref, list(ready.values()))
        brought.upserted += len(ready) - len(refused)
        brought.unembedded |= {w.doc_id for w in missing if w.chunk_id not in ready}
        for w in _missing(index.present(ref, [w.vec_id for w in missing]), missing):
            if w.doc_id not in brought.unembedded:
                brought.lacks(ref, w, refused.get(w.vec_id))


def _moved(engine: Engine, space: Space, ref: IndexRef) -> bool:
    """Does another index serve the space by now?"""
    with transaction(engine.pool) as c:
        return spaces.serving_index(c, space.id).index_id != ref.index_id


def upsert_each(index: VectorIndex, ref: IndexRef, given: Sequence[VectorEntry]) -> dict[UUID, Rejected]:
    """Upsert; what the index refuses is narrowed down to single entries, and costs no other. The refused ones."""
    if not given:
        return {}
    try:
        index.upsert(ref, given)
    except Rejected as e:
        if len(given) == 1:
            return {given[0].vec_id: e}
        middle = len(given) // 2
        return upsert_each(index, ref, given[:middle]) | upsert_each(index, ref, given[middle:])
    return {}


def _missing(present: dict[UUID, int], wanted: Sequence[Wanted]) -> list[Wanted]:
    return [w for w in wanted if present.get(w.vec_id, -1) < w.acl_seq]


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
    vector_retries.forget(c, space.id, list(going))
    counts["published"], counts["appeared"] = published.documents, published.appeared
    return {x.task_id: {"published": x.version} for x in going.values()}


def _slices(wanted: Iterable[Wanted]) -> Iterable[list[Wanted]]:
    it = iter(wanted)
    while part := list(islice(it, SLICE)):
        yield part
