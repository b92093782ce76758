"""Everything at once on one server: the engine of the storm tests and of the storm benchmark.

Three spaces share texts, server and cache. ``steady`` has its vectors in the database, is promoted in the middle of it and
changes its model again and again,
``outside`` has them in another store, ``phoenix`` is loaded, promoted and deleted again and again. Every thread has an
application of its own, as every process has.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from kb_pipeline.engine import Modelled
from kb_pipeline.errors import KbError
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.deletion import delete_document
from kb_pipeline.maintenance.promotion import GRACE, clear_left_shard, promote_if_large
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import IndexRef, Verdict
from kb_pipeline.pipeline import IngestReport, ingest
from kb_pipeline.ports import Embedder, VectorIndex
from kb_pipeline.settings import Settings
from kb_pipeline.store import documents, spaces, tasks
from kb_pipeline.store.database import Pool, connection, open_pool, retried, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import SyncReport, sync_space, take_snapshot
from kb_pipeline.versions import rollback
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.faults.changer import MODELS, IndexChanger, served_since
from kb_pipeline_tests.faults.faulty import FAULTS
from kb_pipeline_tests.faults.invariants import Checker
from kb_pipeline_tests.faults.onlookers import Onlooker
from kb_pipeline_tests.faults.users import NEVER_GONE, Users
from kb_pipeline_tests.faults.weather import SharedBlobs, SharedIndex, SharedSource, StormyEmbedder, StormyIndex, Weather

# What an actor may be told when others are at it, or the weather is bad. Anything else is a finding.
TOLD = frozenset({
    "already_building", "index_behind", "index_incomplete", "no_index", "nothing_building", "timeout",  # of the next index
    "endpoint_down", "index_down", "index_gone", "index_timeout", "lease_lost", "no_document", "no_serving_index", "no_source",
    "no_space", "no_version", "not_settled", "purged", "search_moved", "shard_busy", "source_busy", "space_gone",
})  # fmt: skip
# How a task may fail in this weather: everything else is wrong with nobody's document.
FAILS = frozenset({"endpoint_down", "gone", "index_gone", "index_incomplete", "index_timeout", "no_serving_index", "source_removed", "timeout"})  # fmt: skip
OPERATIONS = (
    "published", "walked", "synced", "walk_taken_over", "added", "edited", "moved", "removed", "reappeared", "acl_changed",
    "documents_deleted", "versions_archived", "chunks_erased", "embeddings_forgotten", "vectors_erased", "reconciled",
    "lease_expired", "canceled", "retried", "rolled_back", "deleted_by_hand", "promoted", "left_shard_cleared", "searched",
    "asked_the_past", "compared_with_the_past", "index_begun", "index_switched", "index_given_up", "space_made", "space_deleted", "looks", "landed_late",
    "read_failed", "embedding_refused", "embedding_lost", *(f"upsert_{f}" for f in FAULTS), *(f"delete_{f}" for f in FAULTS),
)  # fmt: skip
RECENT = 24  # tasks that an operator looks at
MOMENT = timedelta(seconds=1)  # stands for the ten minutes that readers of a left shard are given
CONNECTIONS = 4


class StormApp(FakedApp):
    """What one process has: a pool of its own, and the ports of the storm."""

    def __init__(self, storm: "Storm", pool: Pool) -> None:
        self.storm = storm
        self._keys: dict[int, str] = {}  # an id never comes back under another key
        super().__init__(storm.settings, pool, migrations()[-1].version, blobs=storm.blobs)
        self.connectors = storm.connectors

    def _embedder(self, of: Modelled) -> Embedder:
        return self.storm.embedders[of.embedder_options.get("dimension", MODELS[0])]

    def _index(self, ref: IndexRef) -> VectorIndex:
        if ref.space_id not in self._keys:
            with connection(self.pool) as c:
                space = spaces.space_by_id(c, ref.space_id)
            self._keys[ref.space_id] = space.key if space else ""
        inner = self.storm.index if self._keys[ref.space_id] == "outside" else super()._index(ref)
        return StormyIndex(inner, self.storm.weather)


@dataclass(frozen=True, slots=True)
class Place:
    """A space under the storm, with its one source and the people who edit it."""

    space: Space
    source: Source
    users: Users


@dataclass
class Storm:
    """``findings``: what should never happen. ``done``: how often each operation had an effect."""

    settings: Settings
    url: str
    seed: int
    trouble: float = 0.2
    done: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = replace(
            self.settings,
            retry_base_seconds=0.0,
            max_retries=50,
            batch_size=4,
            page_size=4,
            shrink_guard=0.0,
            embedder="hashing",
        )
        self.weather = Weather(self.seed, 0.0)
        self.embedders = {d: StormyEmbedder(self.weather, d) for d in MODELS}
        self.embedder, self.blobs = self.embedders[MODELS[0]], SharedBlobs(self.weather)
        self.index, self.connectors = SharedIndex(), dict[int, Any]()
        self.over = threading.Event()
        self.began = time.monotonic()
        self.first_finding: float | None = None
        self.rolled_back: set[tuple[int, int]] = set()
        self.dying = False
        self.gone: list[Space] = []
        with psycopg.connect(self.url, autocommit=True) as c:  # it is about what others see, not about what a crash leaves
            c.execute(SQL("ALTER DATABASE {} SET synchronous_commit = off").format(Identifier(c.info.dbname)))
        with self.process() as app:
            self.steady, self.outside = self.settle_place(app, "steady"), self.settle_place(app, "outside")
            self.phoenix = self.settle_place(app, "phoenix")
            self.changer = IndexChanger(self, app, self.steady.space)

    @contextmanager
    def process(self) -> Iterator[StormApp]:
        pool = open_pool(self.url, max_size=CONNECTIONS, application="kb-storm")
        try:
            yield StormApp(self, pool)
        finally:
            pool.close()

    def settle_place(self, app: StormApp, key: str) -> Place:
        space = app.add_space(key, retained_versions=2 if key == "steady" else 5)
        users = Users(SharedSource(self.weather), self.done)
        return Place(space, app.add_fake_source(space, users.source), users)

    # --- the course of it ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float, tell: Callable[[], Any] = lambda: None, every: float = 30, need: tuple[str, ...] = ()) -> int:
        """``tell`` is called again and again while it blows. Ends early with the first finding, and on a machine so busy that one
        of ``need`` is not done yet up to three times as late. The number of threads."""
        self.weather.trouble, self.began = self.trouble, time.monotonic()
        threads = [threading.Thread(target=self._go_on, args=(n, name, act)) for n, (name, act) in enumerate(self.actors())]
        threads.append(threading.Thread(target=self._watch))
        for thread in threads:
            thread.start()
        while (left := self._end(seconds, need) - time.monotonic()) > 0 and not self.over.wait(min(every, left)):
            tell()
        self.over.set()
        for thread in threads:
            thread.join()
        self.done += self.weather.met
        return len(threads)

    def _end(self, seconds: float, need: tuple[str, ...]) -> float:
        return self.began + seconds * (1 if all(self.done[x] or self.weather.met[x] for x in need) else 3)

    def actors(self) -> list[tuple[str, Callable[[StormApp, random.Random], object]]]:
        s, o = self.steady, self.outside
        watch = Onlooker(self, s.space), Onlooker(self, o.space)
        return [
            ("worker 1", lambda a, r: self.work(a, s.space, r)),
            ("worker 2", lambda a, r: self.work(a, s.space, r)),
            ("worker 3", lambda a, r: self.work(a, s.space, r)),
            ("users", lambda a, r: self.edit(s, r)),
            ("walker", lambda a, r: self.walk(a, s.space)),
            ("sync", lambda a, r: self.sync(a, s.space)),
            ("purge", lambda a, r: self.purge(a, s.space, timedelta(0))),
            ("gc", lambda a, r: self.collect(a, s.space)),
            ("reconcile", self.reconcile),
            ("operator", lambda a, r: self.operate(a, s, r)),
            ("reader", watch[0].search),
            ("index changer", self.changer.change),
            ("worker outside 1", lambda a, r: self.work(a, o.space, r)),
            ("worker outside 2", lambda a, r: self.work(a, o.space, r)),
            ("users outside", lambda a, r: self.edit(o, r)),
            ("sync outside", lambda a, r: self.sync(a, o.space)),
            ("gc outside", lambda a, r: self.collect(a, o.space)),
            ("purge outside", lambda a, r: self.purge(a, o.space, timedelta(seconds=5))),
            ("operator outside", lambda a, r: self.operate(a, o, r)),
            ("reader outside", watch[1].search),
            ("reader of the past", watch[1].ask_the_past),
            ("phoenix", self.live),
            ("worker phoenix", lambda a, r: self.work(a, self.phoenix.space, r)),
            ("crowd phoenix", self.crowd),
            ("mover", self.move),
            ("late writes", self.land),
        ]  # fmt: skip

    def _go_on(self, number: int, name: str, act: Callable[[StormApp, random.Random], object]) -> None:
        chance = random.Random(self.seed * 1000 + number)
        with self.process() as app:
            while not self.over.is_set():
                try:
                    act(app, chance)
                except KbError as e:
                    self.told[e.code] += 1
                    if e.code not in TOLD:
                        self.find(f"{name}: {type(e).__name__} {e.code}: {e.message}")
                except BaseException as e:
                    self.find(f"{name}: {type(e).__name__} {e}")

    def find(self, *what: str) -> None:
        if what:
            self.first_finding = self.first_finding or time.monotonic() - self.began
            self.findings += what
            self.over.set()

    def checker(self) -> Checker:
        return Checker(self.url, self.changer.models, self.outside.space.id, self.index, NEVER_GONE)

    def _watch(self) -> None:
        try:
            with closing(self.checker()) as checker:
                while not self.over.is_set():
                    self.find(*checker.look())
                    self.done["looks"] += 1
        except BaseException as e:
            self.find(f"the checker: {type(e).__name__} {e}")

    def rest(self, seconds: float) -> None:
        self.over.wait(seconds)

    # --- what goes on ---------------------------------------------------------------------------------------------------------

    def edit(self, place: Place, chance: random.Random) -> None:
        place.users.act(chance)
        self.rest(chance.random() * 0.06)

    def work(self, app: StormApp, space: Space, chance: random.Random) -> None:
        report = ingest(app.engine, space, limit=chance.choice([1, 2, 4, 12]))
        self._count(report)
        if not report.tasks:
            self.rest(0.01)

    def _count(self, report: IngestReport) -> None:
        self.done["published"] += report.published
        wrong = [(x.external_id, f.code, f.message) for x, f in report.failures if f.code not in FAILS]
        if wrong:
            self.find(f"a task failed: {wrong[0]}")

    def _count_passes(self, report: SyncReport) -> None:
        for error in report.errors.values():
            self.told[error.code] += 1
            if error.code not in TOLD:
                self.find(f"a pass: {error.code}: {error.message}")
        self.done["walked"] += sum(p.verdict is Verdict.COMPLETE for p in report.passes)
        self.done["documents_deleted"] += sum(p.counts["deleted"] for p in report.passes)

    def walk(self, app: StormApp, space: Space) -> None:
        self._count_passes(take_snapshot(app.engine, space))
        self.rest(0.05)

    def sync(self, app: StormApp, space: Space) -> None:
        report = sync_space(app.engine, space)
        self._count_passes(report)
        self._count(report.ingest)
        self.done["synced"] += not report.errors
        self.done["vectors_erased"] += report.vectors_deleted

    def purge(self, app: StormApp, space: Space, keep: timedelta) -> None:
        report = purge(app.engine, space, keep=keep)
        self.done["versions_archived"] += report.versions
        self.done["chunks_erased"] += report.chunks
        self.done["embeddings_forgotten"] += report.embeddings
        self.done["vectors_erased"] += report.vectors

    def collect(self, app: StormApp, space: Space) -> None:
        self.done["vectors_erased"] += collect_vectors(app.engine, space)

    def reconcile(self, app: StormApp, chance: random.Random) -> None:
        self.rest(0.15)
        space = chance.choice([self.steady, self.outside]).space
        compared = served_since(app, space)
        report = reconcile(app.engine, space)
        self.done["reconciled"] += 1
        self.done["orphans_condemned"] += report.orphaned
        if report.missing and served_since(app, space) == compared:  # what stood down meanwhile may lack something
            self.find(f"reconcile: current, and not in the index: {report.samples['missing'][:3]}")

    def land(self, app: StormApp, chance: random.Random) -> None:
        self.rest(chance.random() * 0.3)
        self.done["landed_late"] += self.weather.land(chance.randint(1, 3))

    def move(self, app: StormApp, chance: random.Random) -> None:
        """To a shard of its own, and the old rows away: once in the steady space, and in every life of the phoenix."""
        self.rest(0.5 + chance.random())
        places = [self.phoenix.space] + ([self.steady.space] if time.monotonic() - self.began > 5 else [])
        for space in places:
            self.done["promoted"] += promote_if_large(app.engine, space, promised_chunks=10**6) is not None
            cleared = clear_left_shard(app.engine, space, now=datetime.now(UTC) + GRACE - MOMENT)
            self.done["left_shard_cleared"] += cleared > 0

    def live(self, app: StormApp, chance: random.Random) -> None:
        """One life: loaded, edited, deleted under everybody, made anew under the same key."""
        place = self.phoenix
        for _ in range(0 if self.dying else chance.randint(1, 4)):
            for _ in range(4):
                place.users.act(chance)
            self._count_passes(take_snapshot(app.engine, place.space))
            self.rest(0.4)
        self.end_life(app)

    def end_life(self, app: StormApp) -> None:
        """Begun, and gone on with where an index that is down has ended it."""
        self.dying = True
        residue = delete_space(app.engine, self.phoenix.space)
        self.done["space_deleted"] += 1
        if any(residue[k] for k in residue.keys() - {"objects"}):
            self.find(f"left by a deletion: {residue}")
        self.gone.append(self.phoenix.space)
        self.phoenix = self.settle_place(app, "phoenix")
        self.done["space_made"] += 1
        self.dying = False

    def crowd(self, app: StormApp, chance: random.Random) -> None:
        """Whoever else is at a space while it is removed; another deleter, too."""
        self.rest(0.1)
        space = self.phoenix.space
        if self.gone and chance.random() < 0.2:
            delete_space(app.engine, self.gone[-1])
        chance.choice([
            lambda: self.sync(app, space), lambda: self.collect(app, space), lambda: reconcile(app.engine, space),
            lambda: self.purge(app, space, timedelta(0)), lambda: Onlooker(self, space).look_at(app, chance),
        ])()  # fmt: skip

    def operate(self, app: StormApp, place: Place, chance: random.Random) -> None:
        """Leases run out under living workers and walkers; people cancel, try again, roll back and delete."""
        self.rest(0.01)
        with transaction(app.pool) as c:
            rows = c.execute(
                "SELECT t.id, t.doc_id, t.version, d.external_id FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id "
                "WHERE t.space_id = %s ORDER BY t.id DESC LIMIT %s", [place.space.id, RECENT],
            ).fetchall()  # fmt: skip
        if not rows:
            return
        row = chance.choice(rows)
        acts: list[tuple[str, Callable[[], object]]] = [
            ("lease_expired", lambda: self._expire(app, place.space)),
            ("lease_expired", lambda: self._expire(app, place.space)),
            ("walk_taken_over", lambda: self._expire_walk(app, place.source)),
            ("canceled", lambda: self._cancel(app, row)),
            ("retried", lambda: self._retry(app, place.space)),
            ("rolled_back", lambda: self._roll_back(app, place.space, row)),
            ("deleted_by_hand", lambda: self._delete(app, place, row, chance)),
        ]
        name, act = chance.choice(acts)
        self.done[name] += bool(retried(act))

    def _expire(self, app: StormApp, space: Space) -> bool:
        """Of the task that has been worked on for the longest. The zombie goes on; its deaths are not counted, or its document
        would be held to be poison."""
        with transaction(app.pool) as c:
            return c.execute(
                "UPDATE ingestion_task SET lease_until = '-infinity', claimed_by = 'elsewhere/1/1/1', deaths = 0 "
                "WHERE id = (SELECT id FROM ingestion_task WHERE space_id = %s AND status = 'PROCESSING' "
                "ORDER BY node_started_at LIMIT 1) AND status = 'PROCESSING'", [space.id],
            ).rowcount > 0  # fmt: skip

    def _expire_walk(self, app: StormApp, source: Source) -> bool:
        with transaction(app.pool) as c:
            taken = "UPDATE sync_lease SET until = '-infinity' WHERE source_id = %s AND until > clock_timestamp()"
            return c.execute(taken, [source.id]).rowcount > 0

    def _cancel(self, app: StormApp, row: Any) -> bool:
        with transaction(app.pool) as c:
            return tasks.cancel(c, row.id, "by hand")

    def _retry(self, app: StormApp, space: Space) -> bool:
        with transaction(app.pool) as c:
            dead = tasks.list_tasks(c, space.id, "DEAD", 1) or tasks.list_tasks(c, space.id, "FAILED", 1)
        return any(retried(lambda row=row: self.retry_task(app, row)) for row in dead)  # type: ignore[misc]

    def retry_task(self, app: StormApp, row: Any) -> bool:
        with transaction(app.pool) as c:
            return bool(documents.lock_documents(c, [row.document_id])) and tasks.retry(c, row.task_id)

    def _roll_back(self, app: StormApp, space: Space, row: Any) -> bool:
        self.rolled_back.add((row.doc_id, rollback(app.engine, space, row.doc_id, row.version)))
        return True

    def _delete(self, app: StormApp, place: Place, row: Any, chance: random.Random) -> bool:
        if row.external_id in NEVER_GONE or chance.random() < 0.5:
            return False
        delete_document(app.engine, place.space, place.source.id, row.doc_id)
        return True
