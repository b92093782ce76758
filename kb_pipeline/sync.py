"""One pass over a space, here and now: walk its sources, ingest what waits, delete and erase what is gone."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.errors import KbError, Misconfigured, Transient
from kb_pipeline.maintenance.deletion import confirm_hidden
from kb_pipeline.maintenance.promotion import clear_left_shard, promote_if_large
from kb_pipeline.maintenance.rebuild import follow
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Verdict
from kb_pipeline.pipeline import IngestReport, ingest
from kb_pipeline.store import sources, spaces, status, walks
from kb_pipeline.store.database import transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.walk import PassReport, walk_source

log = logging.getLogger(__name__)
LOOK_SECONDS, TELL_SECONDS = 0.5, 10.0  # how often a busy source is looked at, and waiting for it is told
BYTES_PER_CHUNK = 600  # how many chunks a listing promises: on the low side, so that a large load gets its shard first


@dataclass(slots=True)
class SyncReport:
    """``errors``: sources that could not be walked, by name; the others were."""

    space: str
    passes: list[PassReport] = field(default_factory=list)
    errors: dict[str, KbError] = field(default_factory=dict)
    ingest: IngestReport = field(default_factory=IngestReport)
    vectors_deleted: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return self.ingest.failed + sum(p.counts["failed"] for p in self.passes)

    @property
    def waiting_deletions(self) -> int:
        return sum(p.waiting_deletions for p in self.passes)

    @property
    def incomplete(self) -> bool:
        """Did a listing end in a way that removes nothing?"""
        return any(p.verdict is not Verdict.COMPLETE for p in self.passes)


def sync_space(
    engine: Engine,
    space: Space,
    *,
    source: str | None = None,
    full: bool = False,
    progress: Callable[[Progress], None] = silent,
) -> SyncReport:
    """Everything that ``kb sync`` and a materialisation of all five assets do. Raises Misconfigured without a source."""
    began = time.monotonic()
    report = take_snapshot(engine, space, source=source, full=full, progress=progress)
    if pending(engine, space):
        report.ingest = ingest(engine, space, progress=progress)
    if not engine.stop.is_set():
        report.vectors_deleted = settle(engine, space, loaded=report.ingest.published)
    report.seconds = time.monotonic() - began
    return report


def take_snapshot(
    engine: Engine,
    space: Space,
    *,
    source: str | None = None,
    full: bool = False,
    patience_seconds: float = 0.0,
    progress: Callable[[Progress], None] = silent,
) -> SyncReport:
    """Walk the active sources; each error is that source's own. What a complete listing lacks is hidden, confirmed, deleted.

    A source that somebody else walks is an error, unless that walk ends within ``patience_seconds``.
    """
    began = time.monotonic()
    report = SyncReport(space.key)
    for each in _chosen(engine, space, source):
        if engine.stop.is_set():
            break
        try:
            found = _walk(engine, space, each, full, patience_seconds, progress)
        except KbError as e:
            report.errors[each.name] = e
            continue
        report.passes.append(found)
        if found.resumed:
            found.reasons.append(
                "it went on where an interrupted pass had stopped: the next one sees what was edited before that point"
            )
        if found.verdict is Verdict.COMPLETE:
            found.counts["deleted"] += confirm_hidden(engine, space, each)
    report.seconds = time.monotonic() - began
    return report


def _walk(
    engine: Engine, space: Space, source: Source, full: bool, patience: float, progress: Callable[[Progress], None]
) -> PassReport:
    until = time.monotonic() + patience
    while True:
        try:
            return walk_source(engine, space, source, full=full, progress=progress)
        except Transient as e:
            if e.code != "source_busy" or not _freed(engine, source, until):
                raise


def _freed(engine: Engine, source: Source, until: float) -> bool:
    """Wait until nobody walks the source. False where that takes too long, or we are to stop."""
    told = -TELL_SECONDS
    while (left := until - time.monotonic()) > 0:
        with transaction(engine.pool) as c:
            owner = walks.walked_by(c, source.id)
        if owner is None:
            return True
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            log.info("source %s is walked by %s: waiting for it to end, %.0f s more at most", source.name, owner, left)
        if engine.stop.wait(min(LOOK_SECONDS, left)):
            return False
    return False


def pending(engine: Engine, space: Space) -> bool:
    """Is there a task to work on, or one that somebody else may have left?"""
    with transaction(engine.pool) as c:
        waits = status.unfinished(c, space.id)
    if waits.bytes:
        promote_if_large(engine, space, waits.bytes // BYTES_PER_CHUNK)
    return waits.tasks > 0


def settle(engine: Engine, space: Space, *, loaded: int) -> int:
    """After work: erase vectors that are due, give a space that has grown its own shard and index, and close the passes that
    left nothing behind. Vectors deleted."""
    with transaction(engine.pool) as c:
        waits = status.unfinished(c, space.id)
    erased = collect_vectors(engine, space) if waits.tombstones else 0
    if loaded:
        promote_if_large(engine, space)
        with transaction(engine.pool) as c:
            serving = spaces.serving_index(c, space.id)
        engine.index(serving).settle(serving)
    follow(engine, space)
    if waits.left_shard:
        clear_left_shard(engine, space)
    with transaction(engine.pool) as c:
        walks.close_cleaned(c, space.id)
    return erased


def _chosen(engine: Engine, space: Space, name: str | None) -> list[Source]:
    with transaction(engine.pool) as c:
        if name is not None:
            one = sources.get_source(c, space.id, name)
            if one.status == "PAUSED":
                raise Misconfigured(f"source {name!r} is paused: kb source resume {space.key} {name}", code="source_paused")
            return [one]
        found = sources.list_sources(c, space.id)
    active = [s for s in found if s.status == "ACTIVE"]
    if not active:
        what = "all its sources are paused" if found else "it has no source yet"
        raise Misconfigured(
            f"space {space.key!r}: {what}. Add one with: kb source add {space.key} docs local_dir path=FOLDER", code="no_source"
        )
    return active
