"""Ports that fail as real ones do: late, in part, after the effect, or without saying so."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid4

import numpy as np

from kb_pipeline.errors import KbError, StateError, Transient
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Bucket, IndexRef, VectorEntry
from kb_pipeline.store.database import worker_id
from kb_pipeline_tests.fakes import MemoryBlobs, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow

TIMEOUT = Transient("vector index: no answer", code="index_timeout")
FAULTS = ("before", "after", "half", "lies", "half_lies", "late")


def befall(
    fault: str, write: Callable[[list], None], items: list, half: list, keep: Callable[[Callable[[], None]], object]
) -> None:
    """A write that goes wrong in one of FAULTS: "lies" say ok, all others raise; ``keep`` gets what lands later."""
    match fault:
        case "after":
            write(items)
        case "half":
            write(half)
        case "lies":
            return
        case "half_lies":
            write(half)
            return
        case "late":
            keep(lambda: write(items))
    raise TIMEOUT


class LateIndex(MemoryIndex):
    """Writes that were answered with a timeout are done when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()  # upsert, delete: kept back, and the caller gets a timeout
        self.kept: list[Callable[[], None]] = []

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        if "upsert" in self.late:
            self.kept.append(lambda: super(LateIndex, self).upsert(ref, entries))
            raise TIMEOUT
        super().upsert(ref, entries)

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        if "delete" in self.late:
            self.kept.append(lambda: super(LateIndex, self).delete(ref, vec_ids))
            raise TIMEOUT
        super().delete(ref, vec_ids)

    def land(self) -> int:
        """How many of the late writes still found their index."""
        landed = 0
        for write in self.kept:
            with suppress(StateError):  # the index was dropped, and a write makes none
                write()
                landed += 1
        self.kept.clear()
        return landed


class FailingIndex(MemoryIndex):
    """The call of this number fails, before its effect or after it; what is to be looked up there is down as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.failing: int | None = None
        self.after_effect = False

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        self._around(lambda: super(FailingIndex, self).upsert(ref, entries))

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        self._around(lambda: super(FailingIndex, self).delete(ref, vec_ids))

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        self._around(lambda: None)
        return super().present(ref, vec_ids)

    def _around(self, call: Callable[[], None]) -> None:
        self.calls += 1
        if self.calls - 1 != self.failing:
            return call()
        if self.after_effect:
            call()
        raise TIMEOUT


class ChaoticIndex(LateIndex):
    """Any call may fail before or after its effect, do half of it, lie about it, or be done much later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.trouble = 0.0  # probability of it, of each call

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        self._write(lambda part: MemoryIndex.upsert(self, ref, part), list(entries))

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        self._write(lambda part: MemoryIndex.delete(self, ref, part), list(vec_ids))

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        self._read()
        return super().present(ref, vec_ids)

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        self._read()
        return super().digest(ref)

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        self._read()
        return super().ids(ref, bucket)

    def _read(self) -> None:
        if self.rng.random() < self.trouble / 2:
            raise TIMEOUT

    def _write(self, write: Callable[[list], None], items: list) -> None:
        if self.kept and self.rng.random() < 0.3:
            self.land()
        if self.rng.random() >= self.trouble:
            return write(items)
        half = self.rng.sample(items, len(items) // 2)
        befall(self.rng.choice(FAULTS), write, items, half, self.kept.append)


class FailingBlobs(MemoryBlobs):
    """The put of this number finds the store full, after a part of its objects was written; all reads go on."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0
        self.failing: int | None = None

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        batch = list(objects)
        self.puts += bool(batch)
        if batch and self.puts - 1 == self.failing:
            super().put_many(batch[: len(batch) // 2])
            raise Transient("the object store has no space left", code="blob_store_full")
        super().put_many(batch)


# --- what is done to a space, and what must hold after it --------------------------------------------------------------


def lose(index: MemoryIndex, share: float, rng: random.Random) -> int:
    """Entries vanish from the index. How many."""
    lost = 0
    for rows in index.indexes.values():
        gone = rng.sample(sorted(rows), max(1, round(len(rows) * share)))
        lost += len(gone)
        for vec_id in gone:
            del rows[vec_id]
    return lost


def plant(flow: Flow, question: str, n: int) -> set[UUID]:
    """Entries of ids that no row knows, each the best answer to ``question`` and in the name of a living chunk."""
    vector = flow.embedder.embed_query(question)
    stored = (vector / np.linalg.norm(vector)).astype("<f2").tobytes()
    (rows,) = [held for name, held in flow.index.indexes.items() if name.startswith(f"kb_{flow.space.id}_")]
    model = next(iter(rows.values()))
    foreign = [uuid4() for _ in range(n)]
    for vec_id in foreign:
        rows[vec_id] = VectorEntry(vec_id, model.chunk_id, model.doc_id, stored, (), 0, 7, vec_id.int >> 116)
    return set(foreign)


def recover(flow: Flow) -> None:
    """One pass, one reconciliation and one GC in good weather."""
    flow.due()
    report = flow.sync()
    assert (report.errors, report.failed, report.ingest.stopped) == ({}, 0, None)
    found = reconcile(flow.engine, flow.space)
    assert found.remaining == 0
    collect_vectors(flow.engine, flow.space)


def assert_true(flow: Flow) -> None:
    """Everything that the source says, and nothing else, is found; each text was embedded once."""
    flow.assert_whole()
    current = {(e, h) for e, h, *_ in flow.chunks()}
    assert {e for e, _ in current} == set(flow.memory.items)
    for name, (_, raw) in flow.memory.items.items():
        shown = "".join(t for e, _, _, t, _ in sorted(flow.chunks(), key=str) if e == name)
        assert all(word.strip(".") in shown for word in raw.decode().split())
    assert tombstones(flow) == 0
    assert len(flow.embedder.texts) == len(set(flow.embedder.texts))
    assert unfinished(flow) == []


def tombstones(flow: Flow) -> int:
    return int(flow.rows()["vector_tombstone"])


def unfinished(flow: Flow) -> list[tuple[str, str]]:
    rows = flow.execute(
        "SELECT status, error_code FROM ingestion_task WHERE space_id = %(space)s AND status NOT IN ('SUCCESS', 'CANCELED')"
    )
    return [(r.status, r.error_code) for r in rows]


def hand_lease_to_another_process(flow: Flow) -> None:
    """A process may take its own lease again, so that two walks of one process exclude nobody: let our parent hold it."""
    me, parent = worker_id(), os.getppid()
    host, boot, _, _ = me.rsplit("/", 3)
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    owner = f"{host}/{boot}/{parent}/{started}"
    flow.execute("UPDATE sync_lease SET owner = %(owner)s WHERE source_id = %(source)s", owner=owner)


def quietly(work: Callable[[], object]) -> None:
    """Whatever comes of it, as long as it is an error with a name."""
    with suppress(KbError):
        work()
