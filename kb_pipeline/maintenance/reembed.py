"""Ask the embedder again for what a space holds: for an endpoint whose model has changed behind its name.

A text is in the cache once per model, for every space that uses it. So an index of each of these spaces gets the new vector,
and only then the cache: a run that is killed in between finds the difference again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kb_pipeline.engine import Engine, Progress, Stopped, silent
from kb_pipeline.errors import Fatal, KbError, Rejected, Transient
from kb_pipeline.maintenance.rows import with_rows
from kb_pipeline.nodes.entries import entries
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline.store import reembed, spaces
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.reembed import Stored
from kb_pipeline.store.spaces import Space

TEXTS = 1000  # a batch; what it settled is stored before the next one
SAME = 0.9999  # cosine: below it another model has answered; above it is float16 and the endpoint's own noise
MAX_SAMPLES = 50


@dataclass(slots=True)
class ReembedReport:
    """Texts. ``last_chunk``: everything up to this chunk is done, pass it as ``after`` to go on; ``stopped``: why it is not
    all."""

    space: str
    asked: int = 0
    changed: int = 0
    failed: int = 0
    upserted: int = 0  # vectors, in all indexes
    last_chunk: int = 0
    errors: list[KbError] | None = None  # the first of single texts
    stopped: KbError | None = None


def reembed_space(
    engine: Engine, space: Space, *, after: int = 0, progress: Callable[[Progress], None] = silent
) -> ReembedReport:
    """Every text of the space that is current or waits to be. Raises Misconfigured for another embedder than the space's,
    Transient for an index that is down."""
    report = ReembedReport(space.key, last_chunk=after, errors=[])
    while batch := _read(engine, space, report.last_chunk):
        new = _ask(engine, space, batch, report)
        old = {s.content_hash: s.vector for s in batch}
        changed = {h: v for h, v in new.items() if _differs(old[h], v)}
        if changed:
            _replace(engine, space, changed, report)
        if report.stopped is not None:
            return report
        report.last_chunk = batch[-1].chunk_id
        progress(Progress("asking the embedder again", report.asked, 0))
        if engine.stop.is_set():
            report.stopped = Stopped()
            return report
    return report


def _read(engine: Engine, space: Space, after: int) -> list[Stored]:
    return with_rows(engine, space, lambda c, shard: reembed.texts(c, space.id, shard, space.model_id, after, TEXTS))


def _ask(engine: Engine, space: Space, batch: Sequence[Stored], report: ReembedReport) -> dict[bytes, bytes]:
    texts = list({s.content_hash: s.text for s in batch}.items())
    vectors: dict[bytes, bytes] = {}
    for part in embed_texts(engine.embedder(space), texts):
        vectors |= part.vectors
        report.asked += len(part.vectors) + len(part.errors)
        report.failed += len(part.errors)
        for error in part.errors.values():
            if isinstance(error, Transient | Fatal):
                report.stopped = error
            elif report.errors is not None and len(report.errors) < MAX_SAMPLES:
                report.errors.append(error)
    return vectors


def _differs(old: bytes | None, new: bytes) -> bool:
    if old is None or len(old) != len(new):
        return True
    a, b = (np.frombuffer(x, "<f2").astype(np.float64) for x in (old, new))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return not (np.isfinite(norms) and norms > 0 and float(a @ b) / norms >= SAME)


def _replace(engine: Engine, space: Space, vectors: dict[bytes, bytes], report: ReembedReport) -> None:
    """Indexes first, then the cache, then whatever was published with the old vector meanwhile."""
    with transaction(engine.pool) as c:
        sharing = [s for s in spaces.list_spaces(c) if s.model_id == space.model_id and s.status == "ACTIVE"]
    brought: dict[int, set[int]] = {s.id: set() for s in sharing}
    for s in sharing:
        report.upserted += _upsert(engine, s, vectors, brought[s.id])

    def store() -> None:
        with transaction(engine.pool) as c:
            reembed.replace(c, space.model_id, vectors)

    retried(store, idempotent=True)
    report.changed += len(vectors)
    for s in sharing:
        report.upserted += _upsert(engine, s, vectors, brought[s.id])


def _upsert(engine: Engine, space: Space, vectors: dict[bytes, bytes], brought: set[int]) -> int:
    try:
        found = with_rows(engine, space, lambda c, shard: reembed.holders(c, space.id, shard, list(vectors)))
    except Rejected:
        return 0  # another space of the model, that is being removed
    due = [(h, w) for h, w in found if h in vectors and w.chunk_id not in brought]
    if not due:
        return 0
    with transaction(engine.pool) as c:
        living = [ref for ref in spaces.living_indexes(c, space.id) if ref.model_id == space.model_id]
    upserted = 0
    for ref in living:
        ready = entries(engine, space, ref, [w for _, w in due], {w.chunk_id: vectors[h] for h, w in due})
        engine.index(ref).upsert(ref, list(ready.values()))
        upserted += len(ready)
    brought.update(w.chunk_id for _, w in due)
    return upserted
