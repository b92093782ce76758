"""Purge: old versions are archived, then what no version refers to is erased; nothing that a kept answer was based on.

Every decision is made behind the lock of its document, every step may be repeated, and an interrupted purge is finished by the
next one: it looks for rows that nothing refers to, not for its own notes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.maintenance.rebuild import drop_former
from kb_pipeline.maintenance.sweep import sweep_objects
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.store import alerts, documents, erasure, retention, spaces
from kb_pipeline.store.database import Connection, briefly, retried, transaction
from kb_pipeline.store.retention import Archived
from kb_pipeline.store.spaces import Space

T = TypeVar("T")
KEEP = timedelta(days=30)  # answers, what they were based on, and embeddings that nothing refers to
LOGS = timedelta(days=90)
MARGIN = timedelta(minutes=10)  # a search that was under way when a version was superseded stores its answer later
DOCUMENTS = 500
CHUNKS = 1000
ANSWERS = 5000
EMBEDDINGS = 500_000  # hashes staged at a time, on the server: each batch reads the hashes of every chunk


@dataclass(slots=True)
class PurgeReport:
    """What was archived (versions) and removed (everything else)."""

    space: str
    versions: int = 0
    chunks: int = 0
    vectors: int = 0
    objects: int = 0
    indexes: int = 0  # that served before, and whose time is over
    embeddings: int = 0
    answers: int = 0
    logs: int = 0  # rows of the node log, finished passes, reconciliations and resolved alerts


def purge(
    engine: Engine, space: Space, *, keep: timedelta = KEEP, progress: Callable[[Progress], None] = silent
) -> PurgeReport:
    """Remove what is older than ``keep`` (logs: than 90 days) and not needed. Safe beside everything else, at any time."""
    start = _run(engine, retention.clock)
    report = PurgeReport(space.key)
    report.answers = _all(engine, lambda c: retention.forget_answers(c, space.id, start - keep, ANSWERS), ANSWERS)
    _documents(engine, space, start - keep - min(keep, MARGIN), report, progress)
    report.indexes = drop_former(engine, space)
    report.vectors = collect_vectors(engine, space)
    report.objects += sweep_objects(engine, space)
    report.embeddings = forget_embeddings(engine, space, start - keep) + _forget_retired(engine, space, start - keep)
    report.logs = _logs(engine, space, start - LOGS)
    return report


def _documents(
    engine: Engine, space: Space, before: datetime, report: PurgeReport, progress: Callable[[Progress], None]
) -> None:
    after = done = 0
    while ids := _run(engine, lambda c: retention.some_documents(c, space.id, after, DOCUMENTS)):  # noqa: B023 (as it is then)
        after = ids[-1]
        archived = _archive(engine, space, ids, before)
        engine.blobs.delete_many(archived.paths)  # a path whose answer was lost on its way to us is left to the sweep
        report.versions += archived.versions
        report.objects += len(archived.paths)
        report.chunks += erase_unreferenced(engine, space, ids)
        done += len(ids)
        progress(Progress("purging documents", done, 0))


def _archive(engine: Engine, space: Space, doc_ids: Sequence[int], before: datetime) -> Archived:
    def archive(c: Connection) -> Archived:
        if spaces.lock_shared(c, space) is None:
            return Archived(0, [])
        many = retention.with_many_versions(c, doc_ids, space.retained_versions)
        documents.lock_deleted(c, many)
        return retention.archive(c, space.id, many, space.retained_versions, before)

    return _run(engine, archive)


def erase_unreferenced(engine: Engine, space: Space, doc_ids: Sequence[int]) -> int:
    """ERASE for those of these documents that have something to erase, CHUNKS rows a transaction. Rows erased."""

    def look(c: Connection) -> list[int]:
        shard = spaces.lock_shared(c, space)
        return [] if shard is None else retention.with_unreferenced(c, space.id, shard, doc_ids)

    found = _run(engine, look)

    def erase(c: Connection) -> int:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            return 0
        documents.lock_deleted(c, found)
        return erasure.erase(c, space.id, shard, found, CHUNKS)

    return _all(engine, erase, CHUNKS) if found else 0


def forget_embeddings(engine: Engine, space: Space, before: datetime) -> int:
    """Cached vectors of the space's model that nothing used since then and no chunk of any space refers to."""
    after = b""

    def forget(c: Connection) -> tuple[int, bytes, int]:
        n, last = retention.stage_unused(c, space.model_id, before, after, EMBEDDINGS)
        if not n:
            return n, last, 0
        retention.spare_living(c)
        return n, last, retention.forget_staged(c, space.model_id, before)

    forgotten, n = 0, EMBEDDINGS
    while n == EMBEDDINGS:
        n, after, removed = _at_length(engine, forget)
        forgotten += removed
    return forgotten


def _forget_retired(engine: Engine, space: Space, before: datetime) -> int:
    """All cached vectors of a model that served the space once, living chunks or not."""
    forgotten = 0
    for model in _run(engine, lambda c: retention.retired_models(c, space.id, before)):
        forgotten += _all(engine, lambda c: retention.forget_retired(c, model, before, ANSWERS), ANSWERS)  # noqa: B023
    return forgotten


def _logs(engine: Engine, space: Space, before: datetime) -> int:
    removed = 0
    while (n := _at_length(engine, lambda c: retention.forget_logs(c, space.id, before))) is not None:
        removed += n
    removed += _run(engine, lambda c: retention.forget_walks(c, space.id, before))
    return removed + _run(engine, lambda c: alerts.forget_old(c, space.id, before))


def _all(engine: Engine, work: Callable[[Connection], int], full: int) -> int:
    """Repeat ``work``, one transaction of at most ``full`` rows, until it found fewer. Rows in all."""
    rows = n = _run(engine, work)
    while n == full:
        n = _run(engine, work)
        rows += n
    return rows


def _run(engine: Engine, work: Callable[[Connection], T]) -> T:
    """One transaction. Repeating it changes nothing: at worst what it did the first time is not counted."""
    return briefly(engine.pool, work, idempotent=True)


def _at_length(engine: Engine, work: Callable[[Connection], T]) -> T:
    """The same for what reads much and holds no document: nobody waits for it."""

    def run() -> T:
        with transaction(engine.pool) as c:
            return work(c)

    return retried(run, idempotent=True)
