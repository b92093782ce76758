"""Readers of a document that is updated all the time: each answer is one whole version, never an older one than before.

One reader searches in the database's index or another one, one searches beside it, one asks the settled past.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from kb_pipeline.as_of import SETTLED_SECONDS, as_of
from kb_pipeline.errors import KbError
from kb_pipeline.model import Hit
from kb_pipeline.search import ROUNDS, search
from kb_pipeline.settings import Settings
from kb_pipeline.store.database import open_pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex, MemorySource

NAME, ALL = "news.md", 100
PERIOD = 6  # so many updates rewrite everything, then so many append
_PIECE = re.compile(r"news (whole|entry|constant) (\d+) (\d+) ")
Pieces = frozenset[tuple[str, int, int]]
PUBLISHED = """
SELECT count(*) AS n FROM kb_publication p JOIN kb_doc d ON d.id = p.doc_id
WHERE p.space_id = %s AND d.external_id = %s AND p.from_at > %s - interval '1 second'
"""


def pieces(n: int) -> list[tuple[str, int, int]]:
    """Of update ``n``, whose version is n + 1. Each is a chunk whose words name the update that brought it."""
    if n // PERIOD % 2 == 0:
        return [("constant", 0, 0), *(("whole", n, i) for i in range(3))]
    return [("constant", 0, 0), *(("entry", k, 0) for k in range(n // PERIOD * PERIOD, n + 1))]


def text_of(n: int) -> str:
    sections = []
    for kind, k, i in pieces(n):
        words = " ".join(f"{kind}{k}x{i}w{w}" for w in range(60))
        sections.append(f"## {kind} {k} {i}\n\nnews {kind} {k} {i} {words}.")
    return "# News\n\n" + "\n\n".join(sections) + "\n"


@dataclass
class Tally:
    """``overrun``: nothing found by a search during which its document was published more often than a search asks again."""

    updates: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by reader
    gaps: int = 0
    overrun: int = 0
    mixes: int = 0
    back: int = 0  # an older version than the same reader had seen
    versions: set[int] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)  # what was wrong

    def line(self) -> str:
        readers = " ".join(f"{k}={n}" for k, n in sorted(self.answers.items()))
        return (
            f"updates={self.updates} answers={self.answers.total()} ({readers}) gaps={self.gaps} mixes={self.mixes} "
            f"back={self.back} distinct_versions={len(self.versions)} overrun={self.overrun}"
        )


class Readers:
    """``index``: another store than the database for the vectors, shared by all."""

    def __init__(self, settings: Settings, url: str, key: str, index: MemoryIndex | None = None) -> None:
        self.settings, self.url, self.index = settings, url, index
        self.source, self.tally, self.lock = MemorySource({NAME: text_of(0)}), Tally(), threading.Lock()
        self.known: dict[Pieces, int] = {frozenset(pieces(0)): 0}
        self.over, self.errors = threading.Event(), list[BaseException]()
        with self.process() as app:
            self.space: Space = app.add_space(key)
            self.source_row = app.add_fake_source(self.space, self.source)
            for n in range(5):  # others stand in the same index
                self.source.put(f"other{n}.md", text_of(0).replace("news", f"other{n}").replace("whole0", f"o{n}"))
            assert sync_space(self.engine_of(app), self.space).ingest.published == 6
            with transaction(app.pool) as c:
                self.first: datetime = c.execute("SELECT clock_timestamp() AS now").fetchone().now  # type: ignore[union-attr]

    @contextmanager
    def process(self) -> Iterator[FakedApp]:
        pool = open_pool(self.url, max_size=4, application="kb-readers")
        try:
            yield FakedApp(self.settings, pool, migrations()[-1].version, index=self.index)
        finally:
            pool.close()

    def engine_of(self, app: FakedApp):  # type: ignore[no-untyped-def]
        app.connectors[self.source_row.id] = self.source
        return app.engine

    def run(self, updates: int) -> Tally:
        readers = [("search", self._search), ("search_too", self._search), ("as_of", self._past)]
        threads = [threading.Thread(target=self._read, args=reader) for reader in readers]
        for thread in threads:
            thread.start()
        try:
            with self.process() as app:
                engine = self.engine_of(app)
                for n in range(1, updates + 1):
                    self.known[frozenset(pieces(n))] = n
                    self.source.put(NAME, text_of(n))
                    report = sync_space(engine, self.space)
                    assert (report.errors, report.ingest.published) == ({}, 1), report
                    self.tally.updates += 1
                    if self.errors:
                        break
        finally:
            self.over.set()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]
        return self.tally

    def _read(self, name: str, ask: Callable[[FakedApp], tuple[Hit, ...] | None]) -> None:
        newest = 0
        try:
            with self.process() as app:
                while not self.over.is_set():
                    began = time.time()
                    hits = ask(app)
                    if hits is not None:
                        newest = self._judge(app, name, hits, newest, began)
        except BaseException as e:
            self.errors.append(e)

    def _search(self, app: FakedApp) -> tuple[Hit, ...]:
        return search(app.engine, self.space, "news constant 0 0", k=ALL).hits

    def _past(self, app: FakedApp) -> tuple[Hit, ...] | None:
        """As of the newest moment that is settled; None while there is none."""
        with transaction(app.pool) as c:
            at = c.execute("SELECT clock_timestamp() AS now").fetchone().now - timedelta(seconds=SETTLED_SECONDS + 0.1)  # type: ignore[union-attr]
        if at < self.first:
            self.over.wait(0.1)
            return None
        try:
            return as_of(app.engine, self.space, "news constant 0 0", at, k=ALL).hits
        except KbError as e:
            if e.code != "not_settled":  # a publish is open: asked again
                raise
            return None

    def _judge(self, app: FakedApp, name: str, hits: tuple[Hit, ...], newest: int, began: float) -> int:
        mine = [h for h in hits if h.external_id == NAME]
        shown: Pieces = frozenset((k, int(n), int(i)) for h in mine for k, n, i in _PIECE.findall(h.text))
        update = self.known.get(shown)
        with self.lock:
            self.tally.answers[name] += 1
            if not mine:
                overrun = name != "as_of" and self._published_since(app, began) >= ROUNDS
                self.tally.overrun, self.tally.gaps = self.tally.overrun + overrun, self.tally.gaps + (not overrun)
                return newest
            if update is None or {h.version for h in mine} != {update + 1}:
                self.tally.mixes += 1
                self.tally.seen.append(f"{name}: {sorted(shown)} as version {sorted({h.version for h in mine})}")
                return newest
            if update < newest:
                self.tally.back += 1
                self.tally.seen.append(f"{name}: version {update + 1} after {newest + 1}")
            self.tally.versions.add(update + 1)
        return max(update, newest)

    def _published_since(self, app: FakedApp, began: float) -> int:
        with transaction(app.pool) as c:
            since = datetime.fromtimestamp(began).astimezone()
            return int(c.execute(PUBLISHED, [self.space.id, NAME, since]).fetchone().n)  # type: ignore[union-attr]
