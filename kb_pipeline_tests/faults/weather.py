"""Ports in bad weather, for many threads at once: an index whose calls come late, lie and break off, an embedder that fails
before or after its work, a source that is edited while it is read. In calm weather each keeps its port's contract."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from threading import Lock, RLock
from typing import Any, BinaryIO
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.errors import KbError, Transient
from kb_pipeline.model import Bucket, Candidate, Fetched, IndexRef, Json, Page, Presence, VectorEntry
from kb_pipeline.ports import VectorIndex, Vectors
from kb_pipeline_tests.fakes import CountingEmbedder, MemoryBlobs, MemoryIndex, MemorySource
from kb_pipeline_tests.faults.faulty import FAULTS, TIMEOUT, befall

_OFTEN = {"slow": 0.5, "silent": 0.05, "read": 0.2, "embedding": 0.3}  # shares of ``trouble``; others: all of it
_OFTEN_IN_A_SPELL = 4.0


class Weather:
    """Shared by all ports of a storm. ``trouble``: the probability of a fault in each call; 0 is calm.

    It comes in spells: for some seconds nearly every call of one kind fails, as with a server that is down, so that what was
    begun stays half done while everything else goes on.
    """

    def __init__(self, seed: int, trouble: float) -> None:
        self.rng, self.trouble = random.Random(seed), trouble
        self.met: Counter[str] = Counter()
        self._late: deque[Callable[[], None]] = deque()
        self._spell, self._turns_at = "", 0.0

    def strikes(self, kind: str) -> bool:
        if time.monotonic() > self._turns_at:
            self._spell = self.rng.choice(["", "delete", "delete", "upsert", "read", "embedding"])
            self._turns_at = time.monotonic() + self.rng.uniform(0.5, 3.0)
        often = _OFTEN_IN_A_SPELL if kind == self._spell else _OFTEN.get(kind, 1.0)
        return self.rng.random() < self.trouble * often

    def slow(self) -> None:
        """Now and then an answer takes so long that somebody else gets into between, or takes the caller for dead."""
        if self.strikes("slow"):
            time.sleep(self.rng.random() * 0.03)
        elif self.strikes("silent"):
            time.sleep(self.rng.uniform(0.2, 1.0))

    def keep(self, write: Callable[[], None]) -> None:
        self._late.append(write)

    def land(self, most: int) -> int:
        """Carry out up to ``most`` late writes. One whose index was dropped meanwhile finds nothing to write to."""
        landed = 0
        with suppress(IndexError):
            for _ in range(most):
                write = self._late.popleft()
                with suppress(KbError):
                    write()
                    landed += 1
        return landed


class StormyIndex:
    """Any index behind a bad line. What it holds it keeps, and reads tell the truth or fail, as real ones do."""

    def __init__(self, inner: VectorIndex, weather: Weather) -> None:
        self.inner, self.weather = inner, weather
        self.capabilities = inner.capabilities

    def ensure(self, ref: IndexRef) -> None:
        self.inner.ensure(ref)

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        self._write(lambda part: self.inner.upsert(ref, part), list(entries), "upsert")

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        self._write(lambda part: self.inner.delete(ref, part), list(vec_ids), "delete")

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        self._read()
        return self.inner.present(ref, vec_ids)

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        found = self.inner.search(ref, vector, k, acl)
        self.weather.slow()
        return found

    def settle(self, ref: IndexRef) -> bool:
        return self.inner.settle(ref)

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        self._read()
        return self.inner.digest(ref)

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        self._read()
        return self.inner.ids(ref, bucket)

    def drop(self, ref: IndexRef) -> int:
        return self.inner.drop(ref)

    def _read(self) -> None:
        self.weather.slow()
        if self.weather.strikes("read"):
            self.weather.met["read_failed"] += 1
            raise TIMEOUT

    def _write(self, write: Callable[[list[Any]], None], items: list[Any], kind: str) -> None:
        self.weather.slow()
        if not self.weather.strikes(kind):
            return write(items)
        half, fault = items[: len(items) // 2], self.weather.rng.choice(FAULTS)
        self.weather.met[f"{kind}_{fault}"] += 1
        befall(fault, write, items, half, self.weather.keep)


class SharedIndex(MemoryIndex):
    """For many threads: an id may go between two looks."""

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        rows = self._rows(ref)
        return {i: e.acl_seq for i in vec_ids if (e := rows.get(i)) is not None}


class StormyEmbedder(CountingEmbedder):
    """``asked``: how often each text was embedded, by its hash; what fails before its work does not count."""

    def __init__(self, weather: Weather, dimension: int = 256) -> None:
        super().__init__(dimension)
        self.weather = weather
        self.asked: Counter[bytes] = Counter()
        self._lock = Lock()

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        self.weather.slow()
        fault = self.weather.rng.choice(["refused", "lost"]) if self.weather.strikes("embedding") else ""
        if fault:
            self.weather.met[f"embedding_{fault}"] += 1
        if fault == "refused":
            raise Transient("embedding endpoint: connection refused", code="endpoint_down")
        with self._lock:
            self.asked.update(sha256(t.encode()).digest() for t in texts)
        vectors = self._inner.embed_documents(texts)
        if fault == "lost":
            raise Transient("embedding endpoint: the answer was lost", code="timeout")
        return vectors

    @property
    def repeated(self) -> int:
        return self.asked.total() - len(self.asked)


class SharedSource(MemorySource):
    """A keyset listing: each page shows what is there when it is asked for, whoever edits meanwhile."""

    def __init__(self, weather: Weather, documents: dict[str, str] | None = None) -> None:
        self.weather, self.lock = weather, RLock()
        super().__init__(documents)

    def put(self, external_id: str, content: bytes | str, **changes: Any) -> None:
        with self.lock:
            super().put(external_id, content, **changes)

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        after, part = (checkpoint or {}).get("after", ""), [""]
        while part:
            self.weather.slow()
            with self.lock:
                part = sorted(n for n in self.items if n > after)[:limit]
                items = tuple(self.items[n][0] for n in part)
            after = part[-1] if part else after
            yield Page(items, (), {"after": after})

    def listing_digest(self) -> str | None:
        with self.lock:
            return super().listing_digest()

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        with self.lock:
            return super().content_digest(external_id)

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        self.weather.slow()
        with self.lock:
            self.fetched.clear()
            return super().fetch(external_id, max_bytes)

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        with self.lock:
            return super().presence(external_ids)


class SharedBlobs(MemoryBlobs):
    """Objects for many threads."""

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self.weather, self._lock = weather, RLock()

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        self.weather.slow()
        with self._lock:
            super().put_many(objects)

    def delete_many(self, keys: Iterable[str]) -> None:
        with self._lock:
            super().delete_many(keys)

    def keys(self, prefix: str) -> Iterator[str]:
        with self._lock:
            return super().keys(prefix)
