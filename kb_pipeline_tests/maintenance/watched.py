"""Fakes that run a test's own code at one moment, and hands that break an index behind our back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from threading import Thread
from typing import Any, BinaryIO
from uuid import UUID, uuid4

from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, one, transaction
from kb_pipeline_tests.fakes import MemoryBlobs, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow

Hook = Callable[[], Any]


class WatchedIndex(MemoryIndex):
    """Each hook runs once, at the next listing of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.before_ids: Hook | None = None
        self.after_ids: Hook | None = None

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        before, self.before_ids = self.before_ids, None
        if before is not None:
            before()
        found = super().ids(ref, bucket)
        after, self.after_ids = self.after_ids, None
        if after is not None:
            after()
        return found


class WatchedBlobs(MemoryBlobs):
    """``after_put``: written, and its row not yet. ``before_keys``: nothing has been listed yet. Each runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.after_put: Hook | None = None
        self.before_keys: Hook | None = None

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        super().put_many(objects)
        hook, self.after_put = self.after_put, None
        if hook is not None:
            hook()

    def keys(self, prefix: str) -> Iterator[str]:
        hook, self.before_keys = self.before_keys, None
        if hook is not None:
            hook()
        return super().keys(prefix)


class Tamper:
    """Changes the serving index of a flow's space past everything of ours, whichever kind of index it is."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        with transaction(flow.app.pool) as c:
            self.ref = spaces.serving_index(c, flow.space.id)
        self._table = f"kb_vector_m{self.ref.model_id}"

    @property
    def held(self) -> dict[UUID, VectorEntry]:
        return self.flow.index.indexes[self.ref.name]

    def lose(self, vec_id: UUID) -> None:
        if self.flow.app.index is not None:
            del self.held[vec_id]
        else:
            self.flow.execute(f"DELETE FROM {self._table} WHERE vec_id = %(id)s", id=vec_id)

    def spoil(self, vec_id: UUID) -> None:
        """Its payload is another than that of the row."""
        if self.flow.app.index is not None:
            self.held[vec_id] = replace(self.held[vec_id], acl=(7,), checksum=self.held[vec_id].checksum ^ 1)
        else:
            self.flow.execute(f"UPDATE {self._table} SET acl = '{{7}}', ck = ck # 1 WHERE vec_id = %(id)s", id=vec_id)

    def add(self, vec_id: UUID | None = None, *, chunk_id: int = 0, doc_id: int = 0) -> UUID:
        """A vector under a name that is not current; a new one by default."""
        vec_id = vec_id or uuid4()
        if self.flow.app.index is not None:
            vector = bytes(2 * self.ref.dimension)
            self.held[vec_id] = VectorEntry(vec_id, chunk_id, doc_id, vector, (), 0, 1, bucket_of(vec_id))
        else:
            copied = (
                f"INSERT INTO {self._table} SELECT shard, %(id)s, space_id, index_id, %(chunk)s, %(doc)s, 0, 1, %(bucket)s, '{{}}', v "
                f"FROM {self._table} WHERE space_id = %(space)s LIMIT 1"
            )
            self.flow.execute(copied, id=vec_id, chunk=chunk_id, doc=doc_id, bucket=bucket_of(vec_id))
        return vec_id


def bucket_of(vec_id: UUID) -> int:
    return vec_id.int >> 116


def text_for_bucket(flow: Flow, bucket: int) -> tuple[str, UUID]:
    """A text that, stored as the next chunk of the database, gets a vector id in ``bucket``: (the text, that id)."""
    (row,) = flow.execute("SELECT last_value + is_called::int AS id FROM kb_chunk_id")
    for number in range(10**6):
        text = f"text {number}"
        content = UUID(bytes=sha256(text.encode()).digest()[:16])
        vec_id = UUID(bytes=sha256(f"{row.id}:{content}:0".encode()).digest()[:16])
        if bucket_of(vec_id) == bucket:
            return text, vec_id
    raise AssertionError("no text falls into this bucket")


def await_blocked(pool: Pool, thread: Thread) -> None:
    """Until a transaction waits for a lock, or ``thread`` is over without one. PostgreSQL has no event for it."""
    query = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND pid <> pg_backend_pid()"
    )
    while thread.is_alive():
        with transaction(pool) as c:
            if one(c.execute(query)).n:
                return
        thread.join(0.02)
