"""One small fake per port. Each keeps its port's contract until a test tells it to fail, to lie or to wait."""

import hashlib
import io
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.blobs import checked_key
from kb_pipeline.embedders.hashing import Config as HashingConfig
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.engine import Modelled
from kb_pipeline.errors import KbError, Rejected, StateError, Transient
from kb_pipeline.model import BadItem, Bucket, Candidate, Fetched, IndexRef, Item, Json, Page, Presence, VectorEntry, Verdict
from kb_pipeline.ports import BlobStore, Capabilities, Connector, Embedder, IndexCapabilities, VectorIndex, Vectors
from kb_pipeline.settings import Settings
from kb_pipeline.store import sources
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.wiring import App

LONGEST_WAIT = 60.0  # a test that forgot to open a gate fails instead of hanging


class Gate:
    """Holds calls back: while it is closed, a call that comes by sets ``reached`` and waits."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def await_caller(self) -> None:
        if not self.reached.wait(LONGEST_WAIT):
            raise AssertionError("nobody came to the gate")

    def pass_through(self) -> None:
        if not self._open.is_set():
            self.reached.set()
            if not self._open.wait(LONGEST_WAIT):
                raise AssertionError("the gate was never opened")


class MemorySource:
    """A connector over documents in memory; ``put``, ``remove`` and ``rename`` are the edits of its users."""

    def __init__(self, documents: Mapping[str, bytes | str] | None = None, capabilities: Capabilities | None = None) -> None:
        self.capabilities = capabilities or Capabilities(order_stable=True, digest=True, snapshot_digest=True)
        self.items: dict[str, tuple[Item, bytes]] = {}
        self.bad: dict[str, BadItem] = {}  # listed as such
        self.page_errors: dict[int, KbError] = {}  # by number of the page within one walk, from 0: raised instead of it
        self.partial: set[int] = set()  # these pages could not be listed as a whole
        self.vanishing: set[str] = set()  # listed, and gone when they are read
        self.fetch_errors: dict[str, KbError] = {}
        self.answers: dict[str, Presence] = {}  # what presence() says instead of the truth
        self.fetched: list[str] = []
        self.listings = 0
        self.gate = Gate()  # before each page
        self._revisions = 0
        for external_id, content in (documents or {}).items():
            self.put(external_id, content)

    def put(self, external_id: str, content: bytes | str, **changes: Any) -> None:
        """``changes`` are fields of the Item: acl, identity, provisional ..."""
        raw = content.encode() if isinstance(content, str) else content
        self._revisions += 1
        item = Item(external_id, f"r{self._revisions}", external_id, f"memory:{external_id}", len(raw))
        self.items[external_id] = (replace(item, **changes), raw)

    def remove(self, *external_ids: str) -> None:
        for external_id in external_ids:
            del self.items[external_id]

    def rename(self, old: str, new: str) -> None:
        item, raw = self.items.pop(old)
        self.items[new] = (replace(item, external_id=new, title=new, uri=f"memory:{new}"), raw)

    def check(self) -> Json:
        return {"documents": len(self.items)}

    def clock(self) -> float:
        return time.time()

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        self.listings += 1
        after = (checkpoint or {}).get("after", "")
        names = sorted(n for n in {*self.items, *self.bad} if n > after)
        for number in range(max(1, -(-len(names) // limit))):
            self.gate.pass_through()
            if number in self.page_errors:
                raise self.page_errors[number]
            part = names[number * limit : (number + 1) * limit]
            items = tuple(self.items[n][0] for n in part if n in self.items and n not in self.bad)
            verdict, reasons = (Verdict.PARTIAL, ("a folder is closed",)) if number in self.partial else (Verdict.COMPLETE, ())
            bad = tuple(self.bad[n] for n in part if n in self.bad)
            yield Page(items, bad, {"after": part[-1] if part else after}, verdict, reasons)

    def listing_digest(self) -> str | None:
        open_end = self.bad or self.page_errors or self.partial or any(item.provisional for item, _ in self.items.values())
        if open_end or not self.capabilities.snapshot_digest:
            return None
        listed = sorted((item.external_id, item.revision) for item, _ in self.items.values())
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        if external_id in self.vanishing or external_id not in self.items:
            return None
        item, raw = self.items[external_id]
        return item.revision, hashlib.sha256(raw).digest()

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        self.fetched.append(external_id)
        if external_id in self.fetch_errors:
            raise self.fetch_errors[external_id]
        if external_id in self.vanishing or external_id not in self.items:
            raise Rejected(f"{external_id} is gone", code="gone")
        item, raw = self.items[external_id]
        if len(raw) > max_bytes:
            raise Rejected(f"{len(raw)} bytes, more than KB_MAX_FILE_BYTES={max_bytes}", code="too_large")
        return Fetched(io.BytesIO(raw), len(raw), item.revision)

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        here = {n for n in self.items if n not in self.vanishing}
        return [self.answers.get(n, Presence.PRESENT if n in here else Presence.GONE) for n in external_ids]


class CountingEmbedder:
    """The hashing embedder with a record of what it was asked."""

    max_batch, max_batch_tokens, concurrency = 64, 100_000, 1

    def __init__(self, dimension: int = 256) -> None:
        self._inner = HashingEmbedder(HashingConfig(dimension=dimension))
        self.fingerprint, self.dimension = self._inner.fingerprint, dimension
        self.calls: list[list[str]] = []  # of embed_documents, failed ones too
        self.failures: list[KbError] = []  # each costs one call, first come first served
        self.refused: dict[str, KbError] = {}  # a text that holds this word never gets through
        self.gate = Gate()

    @property
    def texts(self) -> list[str]:
        return [text for call in self.calls for text in call]

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        self.calls.append(list(texts))
        self.gate.pass_through()
        if self.failures:
            raise self.failures.pop(0)
        for word, error in self.refused.items():
            if any(word in text for text in texts):
                raise error
        return self._inner.embed_documents(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self._inner.embed_query(text)


class MemoryIndex:
    """Exact search over what was written. It can lie, too: accept entries or deletions and forget about them."""

    capabilities = IndexCapabilities(named=True)

    def __init__(self) -> None:
        self.indexes: dict[str, dict[UUID, VectorEntry]] = {}
        self.dropped: set[str] = set()
        self.drops_upserts = False
        self.drops_deletes = False
        self.down = False
        self.gate = Gate()  # before each write
        self._lock = threading.Lock()

    def ensure(self, ref: IndexRef) -> None:
        self._check(ref)
        self.indexes.setdefault(ref.name, {})

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        self.gate.pass_through()
        rows = self._rows(ref)
        if any(len(e.vector) != 2 * ref.dimension for e in entries):
            raise Rejected(f"vector index {ref.name}: a vector of another length", code="index_refused")
        with self._lock:
            for entry in () if self.drops_upserts else entries:
                old = rows.get(entry.vec_id)
                if old is None or entry.acl_seq >= old.acl_seq:
                    rows[entry.vec_id] = entry

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        rows = self._rows(ref)
        return {i: rows[i].acl_seq for i in vec_ids if i in rows}

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        self.gate.pass_through()
        rows = self._rows(ref)
        with self._lock:
            for vec_id in () if self.drops_deletes else vec_ids:
                rows.pop(vec_id, None)

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        with self._lock:
            rows = [e for e in self._rows(ref).values() if acl is None or not e.acl or set(e.acl) & set(acl)]
        scores = [(float(np.frombuffer(e.vector, "<f2").astype(np.float32) @ vector), e) for e in rows]
        best = sorted(scores, key=lambda scored: (-scored[0], scored[1].vec_id))[:k]
        return [Candidate(e.vec_id, e.chunk_id, e.doc_id, score) for score, e in best]

    def settle(self, ref: IndexRef) -> bool:
        self._check(ref)
        return False

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        found: dict[int, Bucket] = {}
        for e in list(self._rows(ref).values()):
            old = found.get(e.bucket, Bucket(0, 0))
            found[e.bucket] = Bucket(old.count + 1, old.checksum_sum + e.checksum)
        return found

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        return {e.vec_id: e.checksum for e in list(self._rows(ref).values()) if e.bucket == bucket}

    def drop(self, ref: IndexRef) -> int:
        if self.down:
            raise Transient("vector index: down", code="index_down")
        self.dropped.add(ref.name)
        self.indexes.pop(ref.name, None)
        return 0

    def _check(self, ref: IndexRef) -> None:
        if self.down:
            raise Transient("vector index: down", code="index_down")
        if ref.name in self.dropped:
            raise StateError(f"index {ref.name} is gone", code="index_gone")

    def _rows(self, ref: IndexRef) -> dict[UUID, VectorEntry]:
        self._check(ref)
        if ref.name not in self.indexes:
            raise StateError(f"index {ref.name} was never made", code="index_gone")
        return self.indexes[ref.name]


class MemoryBlobs:
    """Objects in a dict. ``full``: nothing more is taken; a batch is written whole or not at all."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.full = False

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        batch = {checked_key(key): data if isinstance(data, bytes) else data.read() for key, data in objects}
        if self.full and batch:
            raise Transient("the object store has no space left", code="blob_store_full")
        self.objects |= batch

    def get(self, key: str) -> bytes:
        try:
            return self.objects[checked_key(key)]
        except KeyError:
            raise Rejected(f"object {key} is missing", code="blob_missing") from None

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self.objects.pop(checked_key(key), None)

    def clear(self, folder: str) -> None:
        self.delete_many(list(self.keys(folder)))

    def keys(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))


class FakedApp(App):
    """The application with fakes where a test put them. ``index`` and ``embedder`` may be changed at any time."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        schema_version: int,
        *,
        index: VectorIndex | None = None,
        embedder: Embedder | None = None,
        blobs: BlobStore | None = None,
    ) -> None:
        self.index, self.embedder, self.blobs = index, embedder, blobs
        self.connectors: dict[int, Connector] = {}
        super().__init__(settings, pool, "a test's", schema_version)

    def add_fake_source(self, space: Space, connector: Connector, name: str = "memory") -> Source:
        """A source that only this application can open."""
        with transaction(self.pool) as c:
            source = sources.add_source(c, space.id, name, "memory", {})
        self.connectors[source.id] = connector
        return source

    def _connector(self, source: Source) -> Connector:
        return self.connectors[source.id] if source.id in self.connectors else super()._connector(source)

    def _embedder(self, of: Modelled) -> Embedder:
        return self.embedder or super()._embedder(of)

    def _index(self, ref: IndexRef) -> VectorIndex:
        return self.index or super()._index(ref)

    def _blobs(self) -> BlobStore:
        return self.blobs or super()._blobs()
