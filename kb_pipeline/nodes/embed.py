"""EMBEDDING: vectors for the texts that no document, version or space has had embedded yet."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Fatal, KbError, Transient
from kb_pipeline.model import Json
from kb_pipeline.nodes.outcome import Outcome, commit
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline.store import embeddings, publications, spaces, tasks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.embeddings import Needed
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence

SLICE = 2000  # texts claimed at a time: a claim must not outlive its lease
_POLL_SECONDS = 0.2


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    needed = retried(lambda: _needed(engine, space, claims), idempotent=True)
    bad: dict[bytes, KbError] = {}
    embedded = 0
    for batch in _slices(needed):
        n, errors = _ensure(engine, space, claims, batch)
        embedded, bad = embedded + n, bad | errors
        if engine.stop.is_set() or any(_is_over(e) for e in errors.values()):
            break
    over = next((e for e in bad.values() if _is_over(e)), None)
    failed = _by_claim(claims, needed, bad, over, engine, space) if bad else []
    # Asked to end: a document that has all its vectors goes on, the others are released by commit().
    short = _without_vector(engine, space, needed) if engine.stop.is_set() else set()

    def save(_: Connection, fence: Fence) -> dict[int, Json]:
        going = [x for x in fence.claims if x.doc_id not in short]
        # The batch's number stands at one of its tasks: texts are shared, so no document has a number of its own.
        return {x.task_id: {"embedded": embedded} if x is going[0] else {} for x in going}

    outcome = commit(engine, space, started, claims, failed, save)
    outcome.add(embedded=embedded)
    return outcome


def _needed(engine: Engine, space: Space, claims: Sequence[Claim]) -> list[Needed]:
    with transaction(engine.pool) as c:
        held = tasks.fence(c, space, claims)
        ids = publications.chunk_ids(c, [x.doc_id for x in held.claims], [x.version for x in held.claims])
        return embeddings.needed(c, space.id, held.shard, space.model_id, [i for of in ids.values() for i in of])


def _without_vector(engine: Engine, space: Space, needed: Sequence[Needed]) -> set[int]:
    """Documents with a text that nobody has embedded yet."""
    with transaction(engine.pool) as c:
        missing = embeddings.missing(c, space.model_id, [n.content_hash for n in needed])
    return {d for n in needed if n.content_hash in missing for d in n.doc_ids}


def _slices(needed: list[Needed]) -> Iterator[list[Needed]]:
    for start in range(0, len(needed), SLICE):
        yield needed[start : start + SLICE]


def _is_over(error: KbError) -> bool:
    """Does this error concern the endpoint, so that no further text is worth a request?"""
    return isinstance(error, Transient | Fatal)


def _by_claim(
    claims: Sequence[Claim],
    needed: Sequence[Needed],
    bad: dict[bytes, KbError],
    over: KbError | None,
    engine: Engine,
    space: Space,
) -> list[tuple[Claim, KbError]]:
    """Each document with a text that has no vector, and why; with the endpoint gone also those that were not asked for."""
    without = {n.content_hash for n in needed if n.content_hash in bad}
    if over is not None:
        with transaction(engine.pool) as c:
            without |= embeddings.missing(c, space.model_id, [n.content_hash for n in needed])
    errors = {d: bad.get(n.content_hash, over) for n in needed if n.content_hash in without for d in n.doc_ids}
    return [(x, e) for x in claims if (e := errors.get(x.doc_id)) is not None]


def _ensure(engine: Engine, space: Space, claims: Sequence[Claim], batch: Sequence[Needed]) -> tuple[int, dict[bytes, KbError]]:
    """E1 to E4 for one slice: pin, claim, embed, store, wait for others. (texts embedded, errors by hash)."""
    embedded = 0
    errors: dict[bytes, KbError] = {}
    rows = {n.content_hash: n.chunk_id for n in batch}
    deadline = time.monotonic() + 2 * engine.limits.lease_seconds
    left = set(rows)
    token = retried(lambda: _token(engine), idempotent=True)  # known before the claim, which may be lost on its way to us
    while left:
        mine, texts = retried(
            lambda left=left: _claim(engine, space, token, {h: rows[h] for h in left}),  # type: ignore[misc]
            idempotent=True,
        )
        try:
            done, failed = _embed(engine, space, claims, token, texts)
        except BaseException:
            _give_back(engine, space, token)  # whoever tries these texts next must not wait for our claim to expire
            raise
        embedded, errors = embedded + done, errors | failed
        with transaction(engine.pool) as c:
            embeddings.give_back(c, space.model_id, token)
            left = embeddings.missing(c, space.model_id, [h for h in rows if h not in errors])
            wanted = bool(tasks.fence(c, space, claims).claims)
        if not wanted or engine.stop.is_set():
            return embedded, errors
        if left and not mine:
            if time.monotonic() > deadline:
                raise Transient("another process holds the claim on these texts", code="embedding_claimed")
            time.sleep(_POLL_SECONDS)
    return embedded, errors


def _give_back(engine: Engine, space: Space, token: int) -> None:
    with transaction(engine.pool) as c:
        embeddings.give_back(c, space.model_id, token)


def _token(engine: Engine) -> int:
    with transaction(engine.pool) as c:
        return embeddings.new_token(c)


def _claim(engine: Engine, space: Space, token: int, rows: dict[bytes, int]) -> tuple[set[bytes], list[tuple[bytes, str]]]:
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            return set(), []
        known = embeddings.pin(c, space.model_id, list(rows))
        hashes = [h for h in rows if h not in known]
        _, mine = embeddings.claim(c, space.model_id, hashes, engine.limits.lease_seconds, token)
        texts = embeddings.texts(c, space.id, shard, [rows[h] for h in mine]) if mine else []
        return mine | known, texts


def _embed(
    engine: Engine, space: Space, claims: Sequence[Claim], token: int, texts: list[tuple[bytes, str]]
) -> tuple[int, dict[bytes, KbError]]:
    count = 0
    errors: dict[bytes, KbError] = {}
    alive = True
    parts = embed_texts(engine.embedder(space), texts, wanted=lambda: alive, last=engine.stop.is_set) if texts else ()
    for part in parts:
        errors |= part.errors
        if part.vectors:
            alive = retried(
                lambda vectors=part.vectors: _store(engine, space, claims, token, vectors),  # type: ignore[misc]
                idempotent=True,
            )
            count += len(part.vectors) if alive else 0
    return count, errors


def _store(engine: Engine, space: Space, claims: Sequence[Claim], token: int, vectors: dict[bytes, bytes]) -> bool:
    """Stored before anything else happens; not written when every task of the call was fenced off meanwhile."""
    with transaction(engine.pool) as c:
        if not tasks.fence(c, space, claims).claims:
            return False
        embeddings.store(c, space.model_id, token, vectors)
        return True
