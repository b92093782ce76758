"""Parse again what is stored: for a parser that has learned something since. Chunks that come out equal cost nothing.

It makes tasks and leaves the work to whoever ingests next. A document is locked while it is decided on, and one with a live
task is left alone: so it may run twice at once, beside a sync, or again after a kill, and no document gets two tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.errors import Rejected
from kb_pipeline.store import reparse, retention, spaces, tasks
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.store.reparse import Enqueued
from kb_pipeline.store.spaces import Space

DOCUMENTS = 500


@dataclass(slots=True)
class ReparseReport:
    """Documents. ``skipped``: their task is waiting or running already; ``fresh``: they got a version since this was asked
    for; ``without_original``: nothing that could be parsed is stored."""

    space: str
    queued: int = 0
    skipped: int = 0
    fresh: int = 0
    without_original: int = 0


def reparse_space(
    engine: Engine, space: Space, *, before: datetime | None = None, progress: Callable[[Progress], None] = silent
) -> ReparseReport:
    """Queue every document whose newest version was made ``before`` (now). Raises Rejected when the space is being removed."""
    since = before or retried(lambda: _swept(engine, space), idempotent=True)
    report = ReparseReport(space.key)
    after = done = 0
    while batch := retried(lambda: _some(engine, space, after), idempotent=True):  # noqa: B023 (as it is then)
        made = retried(lambda: _enqueue(engine, space, batch, since), idempotent=True)
        after = batch[-1]
        report.queued += made.queued
        report.skipped += made.busy
        report.fresh += made.fresh
        report.without_original += len(batch) - made.queued - made.busy - made.fresh
        done += len(batch)
        progress(Progress("queueing for the parser", done, 0))
    return report


def _swept(engine: Engine, space: Space) -> datetime:
    """What a cancelled task has left is cleaned up first: it would count as live."""
    with transaction(engine.pool) as c:
        tasks.sweep(c, space)
        return retention.clock(c)


def _some(engine: Engine, space: Space, after: int) -> list[int]:
    with transaction(engine.pool) as c:
        return reparse.some_living(c, space.id, after, DOCUMENTS)


def _enqueue(engine: Engine, space: Space, doc_ids: list[int], before: datetime) -> Enqueued:
    with transaction(engine.pool) as c:
        if spaces.lock_shared(c, space) is None:
            raise Rejected(f"space {space.key!r} is being removed", code="no_space")
        living = sorted(lock_documents(c, doc_ids))
        return reparse.enqueue(c, space.id, living, before, max_retries=engine.limits.max_retries)
