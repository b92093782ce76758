"""Everything at once over one space: workers, an editor, garbage collectors, cancellations, leases that run out.

In the end the index holds exactly what is current, no living version refers to a missing row, and nothing is stuck.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kb_pipeline.errors import Misconfigured
from kb_pipeline.maintenance.deletion import delete_document
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.pipeline import ingest
from kb_pipeline.store import database, documents, tasks
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space, take_snapshot
from kb_pipeline.versions import rollback
from kb_pipeline_tests.fakes import FakedApp, MemorySource

SECONDS = 8.0
DOCUMENTS = 10


class Storm:
    """Actors that go on until the wind stops. What one raises is a finding."""

    def __init__(self, app: FakedApp, space: Space, source: Source, users: MemorySource, seed: int) -> None:
        self.app, self.engine, self.space, self.source, self.users = app, app.engine, space, source, users
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.findings: list[str] = []
        self.until = 0.0
        self.stop = threading.Event()

    def run(self, *actors: Callable[[random.Random], None]) -> None:
        self.until = time.monotonic() + SECONDS
        threads = [threading.Thread(target=self._go_on, args=(actor, n)) for n, actor in enumerate(actors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _go_on(self, actor: Callable[[random.Random], None], number: int) -> None:
        chance = random.Random(self.seed * 100 + number)
        while time.monotonic() < self.until and not self.findings:
            try:
                actor(chance)
                self.done[actor.__name__] += 1
            except BaseException as e:
                self.findings.append(f"{actor.__name__}: {type(e).__name__} {e}")

    # --- actors -------------------------------------------------------------------------------------------------------------

    def work(self, chance: random.Random) -> None:
        """A worker on one task or many. A failure of a document would be a finding, too: nothing here is wrong with one."""
        report = ingest(self.engine, self.space, limit=chance.choice([1, 3, 20]))
        self.done["published"] += report.published
        # What a user removes between listing and fetching is gone, and that is right.
        self.findings += [f"{x.external_id}: {f.code} {f.message}" for x, f in report.failures if f.code != "gone"]

    def edit(self, chance: random.Random) -> None:
        """A user of the source, and the walk that sees it. Paragraphs come from few, so that old texts come back."""
        for _ in range(chance.randint(1, 3)):
            name = f"d{chance.randrange(DOCUMENTS)}.md"
            if chance.random() < 0.15 and name in self.users.items:
                self.users.remove(name)
                continue
            parts = chance.sample("abcdefgh", chance.randint(1, 4))
            self.users.put(name, "\n\n".join(f"# Part {p}\n\n{f'text of {p} in {name} ' * 20}" for p in parts))
        take_snapshot(self.engine, self.space)

    def collect(self, chance: random.Random) -> None:
        self.done["erased"] += collect_vectors(self.engine, self.space)

    def disturb(self, chance: random.Random) -> None:
        """Leases run out under living workers; operators cancel, try again, roll back and delete."""
        with transaction(self.app.pool) as c:
            rows = c.execute(
                "SELECT id, doc_id, version, status FROM ingestion_task WHERE space_id = %s", [self.space.id]
            ).fetchall()
        if not rows:
            return
        row = chance.choice(rows[-2 * DOCUMENTS :])
        what: list[Callable[[Any], object]] = [
            self._expire,
            self._expire,
            self._cancel,
            self._retry,
            self._roll_back,
            self._delete,
        ]
        act = chance.choice(what)
        retried(lambda: act(row))
        self.done[act.__name__] += 1

    def _expire(self, row: Any) -> None:
        with transaction(self.app.pool) as c:
            # The living zombie goes on; its deaths are not counted here, or documents would be held to be poison.
            c.execute(
                "UPDATE ingestion_task SET lease_until = '-infinity', claimed_by = 'elsewhere/1/1/1', deaths = 0 WHERE id = %s AND status = 'PROCESSING'",
                [row.id],
            )

    def _cancel(self, row: Any) -> None:
        with transaction(self.app.pool) as c:
            tasks.cancel(c, row.id, "the storm's")

    def _retry(self, row: Any) -> None:
        with transaction(self.app.pool) as c:
            if documents.lock_documents(c, [row.doc_id]):
                tasks.retry(c, row.id)

    def _roll_back(self, row: Any) -> None:
        with suppress(Misconfigured):  # it is deleted, or was never published
            rollback(self.engine, self.space, row.doc_id, row.version)

    def _delete(self, row: Any) -> None:
        if row.id % 4 == 0:
            delete_document(self.engine, self.space, self.source.id, row.doc_id)

    def promote(self, chance: random.Random) -> None:
        """Once, in the middle of it all."""
        self.stop.wait(SECONDS / 2)
        self.done["promoted"] += promote_if_large(self.engine, self.space, promised_chunks=10**6) is not None

    def look(self, chance: random.Random) -> None:
        """I1 and I5, at any moment: rows and vectors are in one database, so one snapshot decides."""
        self.findings += looked(self.app, self.space)


def looked(app: FakedApp, space: Space) -> list[str]:
    with app.pool.connection() as c, c.transaction():
        c.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [space.id]).fetchone().shard  # type: ignore[union-attr]
        where = {"space": space.id, "shard": shard}
        unfindable = c.execute(
            f"""SELECT s.id FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.space_id = %(space)s AND s.in_current
                AND NOT EXISTS (SELECT FROM kb_vector_m{space.model_id} v WHERE v.shard = %(shard)s AND v.vec_id = s.vec_id)""",
            where,
        ).fetchall()
        dangling = c.execute(
            """SELECT v.doc_id, v.version, v.status FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)
               WHERE v.space_id = %(space)s AND v.status IN ('PROCESSING', 'READY') AND NOT (
                   EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.id = u.id)
                   AND EXISTS (SELECT FROM kb_chunk t WHERE t.shard = %(shard)s AND t.id = u.id))""",
            where,
        ).fetchall()
        divided = c.execute(
            """SELECT d.id FROM kb_doc d LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
               WHERE d.space_id = %(space)s AND d.status <> 'DELETED'
                 AND (SELECT coalesce(array_agg(s.id ORDER BY s.id), '{}') FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.doc_id = d.id AND s.in_current)
                 <> (SELECT coalesce(array_agg(i ORDER BY i), '{}') FROM unnest(v.chunk_ids) i)""",
            where,
        ).fetchall()
    found = {
        "I1 current but not in the index": unfindable,
        "I5 a version without its rows": dangling,
        "I4 neither old nor new": divided,
    }
    return [f"{name}: {rows[:3]}" for name, rows in found.items() if rows]


def test_everything_at_once_keeps_the_index_true(app: FakedApp, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    deadlocks: list[str] = []
    surfaced(monkeypatch, deadlocks)
    app.engine = replace(app.engine, limits=replace(app.engine.limits, shrink_guard=0.0, max_retries=50))
    users = MemorySource()
    source = app.add_fake_source(space, users)
    storm = Storm(app, space, source, users, seed)
    storm.run(
        storm.work, storm.work, storm.work, storm.edit, storm.collect, storm.collect, storm.disturb, storm.look, storm.promote
    )
    print(dict(storm.done), "deadlocks retried:", len(deadlocks))
    assert storm.findings == []
    assert storm.done["published"] >= 10 and storm.done["erased"] >= 1 and storm.done["promoted"] == 1
    settle(app, space, users)


def surfaced(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    """Count what ``retried`` hides; a deadlock that nobody retries reaches an actor and is a finding."""
    real = database.retried

    def counting(work: Callable[[], Any], **options: Any) -> Any:
        def attempt() -> Any:
            try:
                return work()
            except database.DatabaseBusy as e:
                seen.append(str(e))
                raise

        return real(attempt, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("kb_pipeline.") and getattr(module, "retried", None) is real:
            monkeypatch.setattr(module, "retried", counting)


def settle(app: FakedApp, space: Space, users: MemorySource) -> None:
    """The wind has stopped: one pass after the other until nothing waits, then everything must be exact."""
    with transaction(app.pool) as c:
        c.execute(
            "UPDATE ingestion_task SET lease_until = '-infinity' WHERE space_id = %s AND status = 'PROCESSING'", [space.id]
        )
        c.execute("UPDATE vector_tombstone SET not_before = clock_timestamp() WHERE space_id = %s", [space.id])
    for _ in range(4):
        report = sync_space(app.engine, space, full=True)
        assert report.errors == {}
        assert [f for _, f in report.ingest.failures if f.code != "gone"] == []
    collect_vectors(app.engine, space)
    assert looked(app, space) == []
    with transaction(app.pool) as c:
        shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [space.id]).fetchone().shard  # type: ignore[union-attr]
        held = c.execute(
            f"SELECT vec_id FROM kb_vector_m{space.model_id} WHERE shard = %s AND space_id = %s", [shard, space.id]
        )
        vectors = {r.vec_id for r in held}
        current = c.execute(
            "SELECT vec_id FROM kb_chunk_state WHERE shard = %s AND space_id = %s AND in_current", [shard, space.id]
        )
        assert vectors == {r.vec_id for r in current}
        left = tasks.waiting(c, space.id)
        assert left == {}
        living = c.execute(
            "SELECT external_id FROM kb_doc WHERE space_id = %s AND status <> 'DELETED' AND hidden_at IS NULL", [space.id]
        )
        assert {r.external_id for r in living} == set(users.items)
        claims = c.execute("SELECT count(*) AS n FROM kb_embedding WHERE model_id = %s AND vector IS NULL", [space.model_id])
        assert claims.fetchone().n == 0  # type: ignore[union-attr]
