"""Reconciliation: the serving index against what is current, exact to the id, beside running writers.

The index is read first and rows second, by bucket digests, and ids only where they differ. Reported is what a second look
still shows. What is missing or wrong is upserted from the cache; what is too much gets a tombstone: only the vector GC deletes.
A vector that stays away is tried again after a back-off, five times in all, then only when somebody asks for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.errors import KbError
from kb_pipeline.maintenance.embed_missing import embed_missing
from kb_pipeline.maintenance.rows import with_rows
from kb_pipeline.model import Bucket, IndexRef, Json
from kb_pipeline.nodes.entries import entries
from kb_pipeline.nodes.index import ABSENT, remember, upsert_each
from kb_pipeline.store import alerts, digests, documents, indexes, retention, vector_retries
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.digests import Stray
from kb_pipeline.store.indexes import Index
from kb_pipeline.store.publications import Wanted
from kb_pipeline.store.spaces import Space

GROUP = 30_000  # ids of an index that are held at a time: each group costs a scan of the space's rows
SLICE = 2000  # vectors a call of the index
SAMPLES = 20  # of each kind


@dataclass(slots=True)
class ReconcileReport:
    """``repaired`` counts what a third look does not show any more; orphans are then waiting for the vector GC."""

    space: str
    chunks: int = 0  # current ones
    vectors: int = 0  # that the index holds, for whatever reason
    missing: int = 0
    orphaned: int = 0
    wrong: int = 0
    repaired: int = 0
    waiting: int = 0  # held, and condemned already: no difference
    postponed: int = 0  # of the remaining: not tried, because they failed before and are not due, or failed five times
    embedded: int = 0  # texts whose vector was not even in the cache
    samples: dict[str, list[Json]] = field(default_factory=lambda: {"missing": [], "orphaned": [], "wrong": []})
    error: KbError | None = None  # why a text could not be embedded

    @property
    def remaining(self) -> int:
        return self.missing + self.orphaned + self.wrong - self.repaired


@dataclass(slots=True)
class _Look:
    missing: dict[UUID, Wanted] = field(default_factory=dict)
    wrong: dict[UUID, Wanted] = field(default_factory=dict)
    orphaned: dict[UUID, Stray] = field(default_factory=dict)
    waiting: int = 0

    def __len__(self) -> int:
        return len(self.missing) + len(self.wrong) + len(self.orphaned)

    def of(self, earlier: "_Look") -> "_Look":
        """What the earlier look has shown as well, word for word: a row that moved in between is none of it."""
        return _Look(
            {i: w for i, w in self.missing.items() if i in earlier.missing},
            {i: w for i, w in self.wrong.items() if earlier.wrong.get(i) == w},
            {i: s for i, s in self.orphaned.items() if i in earlier.orphaned},
            self.waiting,
        )


def reconcile(
    engine: Engine,
    space: Space,
    *,
    repair: bool = True,
    retry_failed: bool = False,
    index: Index | None = None,
    progress: Callable[[Progress], None] = silent,
) -> ReconcileReport:
    """Compare, and repair unless told not to. Raises what the index raises, Transient while the space serves none.

    ``retry_failed``: vectors that failed before are tried now, and five times again. ``index``: another one than that which
    serves; then nothing is remembered about the space.
    """
    with transaction(engine.pool) as c:
        began = retention.clock(c)
        serving = indexes.serving(c, space.id)
        if repair and retry_failed:
            vector_retries.reset(c, space.id)
    index = index or serving
    held = engine.index(index.ref).digest(index.ref)
    rows = with_rows(engine, space, lambda c, shard: digests.row_digest(c, space.id, shard))
    report = ReconcileReport(space.key, sum(b.count for b in rows.values()), sum(b.count for b in held.values()))
    differing = sorted(b for b in held.keys() | rows.keys() if held.get(b) != rows.get(b))
    done = 0
    for group in _groups(differing, held, rows):
        _reconcile_group(engine, space, index, group, repair, report)
        done += len(group)
        progress(Progress("comparing", done, len(differing)))
    _name_samples(engine, report)
    if index.status == "SERVING" and not with_rows(
        engine, space, lambda c, shard: _close(c, space, index, shard, report, began if repair else None)
    ):
        return reconcile(engine, space, repair=repair, progress=progress)  # it has stood down: what it lacks is noted for it
    return report


def _reconcile_group(
    engine: Engine, space: Space, index: Index, buckets: Sequence[int], repair: bool, report: ReconcileReport
) -> None:
    ref = index.ref
    last = _look(engine, space, ref, buckets)
    if last:
        last = found = _look(engine, space, ref, buckets).of(last)
        _count(report, found)
        if found and repair:
            _condemn(engine, space, ref, list(found.orphaned.values()))
            tried = _upsert(engine, space, index, [*found.missing.values(), *found.wrong.values()], report)
            last = _look(engine, space, ref, buckets).of(found)
            report.repaired += len(found) - len(last)
            if index.status == "SERVING":
                _remember(engine, space, index, [*last.missing.values(), *last.wrong.values()], tried)
    report.waiting += last.waiting


def _look(engine: Engine, space: Space, ref: IndexRef, buckets: Sequence[int]) -> _Look:
    """R1 and R2 for some buckets: ids of the index, rows after them."""
    held: dict[UUID, int] = {}
    for bucket in buckets:
        held |= engine.index(ref).ids(ref, bucket)

    def read(c: Connection, shard: int) -> tuple[dict[UUID, Wanted], list[Stray]]:
        wanted = {w.vec_id: w for w in digests.current_in(c, space.id, shard, buckets)}
        extra = [i for i in held if i not in wanted]
        return wanted, digests.strays(c, space.id, shard, ref.index_id, extra) if extra else []

    wanted, strays = with_rows(engine, space, read)
    unneeded = [s for s in strays if not s.needed]
    return _Look(
        {i: w for i, w in wanted.items() if i not in held},
        {i: w for i, w in wanted.items() if held.get(i, w.checksum) != w.checksum},
        {s.vec_id: s for s in unneeded if not s.condemned},
        sum(s.condemned for s in unneeded),
    )


def _groups(differing: Sequence[int], *sides: Mapping[int, Bucket]) -> Iterator[list[int]]:
    """Buckets that together hold at most GROUP ids on either side, so that memory does not grow with the space."""
    group: list[int] = []
    size = 0
    for bucket in differing:
        n = max(side[bucket].count for side in sides if bucket in side)
        if group and size + n > GROUP:
            yield group
            group, size = [], 0
        group.append(bucket)
        size += n
    if group:
        yield group


# --- repair -----------------------------------------------------------------------------------------------------------


def _condemn(engine: Engine, space: Space, ref: IndexRef, found: Sequence[Stray]) -> None:
    if found:
        with_rows(engine, space, lambda c, _: digests.condemn(c, space.id, ref.index_id, found))


def _upsert(engine: Engine, space: Space, index: Index, wanted: Sequence[Wanted], report: ReconcileReport) -> dict[int, str]:
    """R3, from the cache. A chunk whose document moves on meanwhile gets at most a dead id back, which nobody can see.

    Returns the chunks that were tried, each with what is to be said if it is still not there.
    """
    tried: dict[int, str] = {}
    for start in range(0, len(wanted), SLICE):
        part = wanted[start : start + SLICE]
        ids = [w.chunk_id for w in part]
        later = with_rows(engine, space, lambda c, shard: vector_retries.postponed(c, space.id, shard, ids))  # noqa: B023
        report.postponed += len(later)
        part = [w for w in part if w.chunk_id not in later]
        ready = entries(engine, space, index.ref, part)
        if without := [w for w in part if w.chunk_id not in ready]:
            embedded = embed_missing(engine, space, index, [w.chunk_id for w in without])
            report.embedded, report.error = report.embedded + embedded.texts, embedded.error or report.error
            tried |= embedded.refused
            ready |= entries(engine, space, index.ref, without)
        refused = upsert_each(engine.index(index.ref), index.ref, list(ready.values()))
        tried |= {
            w.chunk_id: f"{e.code}: {e.message}" if (e := refused.get(w.vec_id)) else ABSENT
            for w in part
            if w.chunk_id in ready
        }
    return tried


def _remember(engine: Engine, space: Space, index: Index, still: Sequence[Wanted], tried: Mapping[int, str]) -> None:
    """Count a try for what stayed away, in slices, behind the locks of the documents."""
    for start in range(0, len(still), SLICE):
        part = still[start : start + SLICE]
        failures = {w.chunk_id: tried[w.chunk_id] for w in part if w.chunk_id in tried}

        def write(c: Connection, shard: int) -> None:
            if not _serves(c, space, index):
                return
            documents.lock_deleted(c, sorted({w.doc_id for w in part}))  # noqa: B023 (as it is then)
            remember(c, engine, space, shard, failures, current_only=True)  # noqa: B023
            vector_retries.touch(c, space.id, shard, [w.chunk_id for w in part if w.chunk_id not in failures])  # noqa: B023

        with_rows(engine, space, write)


def _serves(c: Connection, space: Space, index: Index) -> bool:
    """Still, behind the shared lock of the space: it cannot stand down before this transaction ends."""
    return indexes.serving(c, space.id).ref.index_id == index.ref.index_id


def _close(
    c: Connection, space: Space, index: Index, shard: int, report: ReconcileReport, repaired_since: datetime | None
) -> bool:
    """The outcome is kept: an alert tells of what remains. Vectors that did not fail this time have no count any more.

    False, and nothing is kept, where another index serves by now.
    """
    if not _serves(c, space, index):
        return False
    if repaired_since is not None:
        vector_retries.settle(c, space.id, shard, repaired_since)
    alerts.store_reconciliation(
        c,
        space.id,
        chunks=report.chunks,
        vectors=report.vectors,
        missing=report.missing,
        orphaned=report.orphaned,
        wrong=report.wrong,
        repaired=report.repaired,
        remaining=report.remaining,
    )
    return True


# --- what is told -----------------------------------------------------------------------------------------------------


def _count(report: ReconcileReport, found: _Look) -> None:
    report.missing += len(found.missing)
    report.orphaned += len(found.orphaned)
    report.wrong += len(found.wrong)
    kinds: dict[str, list[Wanted] | list[Stray]] = {
        "missing": list(found.missing.values()),
        "orphaned": list(found.orphaned.values()),
        "wrong": list(found.wrong.values()),
    }
    for kind, found_now in kinds.items():
        samples = report.samples[kind]
        for x in found_now[: SAMPLES - len(samples)]:
            samples.append({"vec_id": str(x.vec_id), "chunk_id": x.chunk_id or None, "document_id": x.doc_id or None})


def _name_samples(engine: Engine, report: ReconcileReport) -> None:
    shown = [s for samples in report.samples.values() for s in samples]
    ids = sorted({s["document_id"] for s in shown if s["document_id"]})
    if ids:
        with transaction(engine.pool) as c:
            names = digests.external_ids(c, ids)
        for sample in shown:
            sample["external_id"] = names.get(sample["document_id"])
