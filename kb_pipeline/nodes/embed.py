"""EMBEDDING: vectors for the texts that no document, version or space has had embedded yet."""

import time
from collections.abc import Sequence
from datetime import datetime

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Transient
from kb_pipeline.model import Json
from kb_pipeline.nodes.outcome import Outcome, commit
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline.store import embeddings, spaces, tasks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence

SLICE = 512  # texts claimed at a time: a claim must not outlive its lease
_POLL_SECONDS = 0.2


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    with transaction(engine.pool) as c:
        held = tasks.fence(c, space, claims)
        ids = [x.doc_id for x in held.claims]
        needed = embeddings.needed(c, space.id, held.shard, ids, [x.version for x in held.claims]) if ids else []
    waiting = {n.content_hash: n.doc_ids for n in needed}
    bad: dict[bytes, KbError] = {}
    embedded = 0
    while waiting:
        batch = list(waiting)[:SLICE]
        n, errors = _ensure(engine, space, held.claims, batch)
        embedded += n
        bad |= errors
        for content_hash in batch:
            if content_hash not in errors:
                waiting.pop(content_hash)
        if errors and any(isinstance(e, Transient) or e.code in _STOPS for e in errors.values()):
            bad |= dict.fromkeys(waiting, next(iter(errors.values())))
            break
        for content_hash in errors:
            waiting.pop(content_hash)
    by_doc = {d: e for h, e in bad.items() for d in next(n.doc_ids for n in needed if n.content_hash == h)} if bad else {}
    failed = [(x, by_doc[x.doc_id]) for x in claims if x.doc_id in by_doc]

    def save(_: Connection, fence: Fence) -> dict[int, Json]:
        return {x.task_id: {} for x in fence.claims}

    outcome = commit(engine, space, started, claims, failed, save)
    outcome.add(embedded=embedded)
    return outcome


_STOPS = ("unauthorized", "wrong_dimension", "wrong_count", "fatal")


def _ensure(engine: Engine, space: Space, claims: Sequence[Claim], hashes: list[bytes]) -> tuple[int, dict[bytes, KbError]]:
    """E1 to E4 for one slice: pin, claim, embed, store, wait for others. (texts embedded, errors by hash)."""
    embedded, errors = 0, {}  # type: ignore[var-annotated]
    deadline = time.monotonic() + 2 * engine.limits.lease_seconds
    left = set(hashes)
    while left:
        token, mine, texts = retried(lambda: _claim(engine, space, claims, sorted(left)))
        if texts is None:
            return embedded, errors  # nobody wants these any more
        done, failed = _embed(engine, space, claims, token, texts)
        embedded, errors = embedded + done, errors | failed
        with transaction(engine.pool) as c:
            embeddings.give_back(c, space.model_id, token)
            left = embeddings.missing(c, space.model_id, [h for h in hashes if h not in errors])
        if left and not mine:
            if time.monotonic() > deadline:
                raise Transient("another process holds the claim on these texts", code="embedding_claimed")
            time.sleep(_POLL_SECONDS)
    return embedded, errors


def _claim(
    engine: Engine, space: Space, claims: Sequence[Claim], hashes: list[bytes]
) -> tuple[int, set[bytes], list[tuple[bytes, str]] | None]:
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None or not claims:
            return 0, set(), None
        known = embeddings.pin(c, space.model_id, hashes)
        token, mine = embeddings.claim(c, space.model_id, [h for h in hashes if h not in known], engine.limits.lease_seconds)
        texts = embeddings.texts(c, space.id, shard, [x.doc_id for x in claims], sorted(mine)) if mine else []
        return token, mine | known, texts


def _embed(
    engine: Engine, space: Space, claims: Sequence[Claim], token: int, texts: list[tuple[bytes, str]]
) -> tuple[int, dict[bytes, KbError]]:
    count, errors = 0, {}  # type: ignore[var-annotated]
    if not texts:
        return count, errors
    alive = True
    for part in embed_texts(engine.embedder(space), texts, wanted=lambda: alive):
        errors |= part.errors
        if part.vectors:
            alive = retried(lambda vectors=part.vectors: _store(engine, space, claims, token, vectors))  # type: ignore[misc]
            count += len(part.vectors) if alive else 0
    return count, errors


def _store(engine: Engine, space: Space, claims: Sequence[Claim], token: int, vectors: dict[bytes, bytes]) -> bool:
    """Stored before anything else happens; not written when every task of the call was fenced off meanwhile."""
    with transaction(engine.pool) as c:
        if not tasks.fence(c, space, claims).claims:
            return False
        embeddings.store(c, space.model_id, token, vectors)
        return True
