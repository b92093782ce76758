"""One pass over a large source in which nothing changed: what it writes, with the listing's digest and without.

    python -m kb_pipeline_tests.benchmarks.unchanged_walk [--documents 500000] [--shuffled]

A source that is made up lists its documents in pages of 50. The first pass may compare digests, the second must list and look
at every document. Prints WAL, growth of kb_doc, and the statements that wrote most. Goals: WAL up to 40 MB, no growth.
"""

import argparse
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Fetched, Item, Json, Page, Presence
from kb_pipeline.ports import Capabilities
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import transaction
from kb_pipeline.sync import SyncReport, sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import peak_rss_mb, scratch
from kb_pipeline_tests.fakes import FakedApp

FILL = (
    "INSERT INTO kb_doc (space_id, source_id, external_id, title, uri, current_ver, last_ver, status, published_at) "
    "SELECT %(space)s, %(source)s, 'folder/' || lpad(n::text, 8, '0') || '.md', lpad(n::text, 8, '0') || '.md', "
    "'numbered:' || n, 1, 1, 'AVAILABLE', clock_timestamp() FROM generate_series(%(first)s::int, %(last)s::int) n",
    "INSERT INTO kb_doc_version (doc_id, version, space_id, status, revision, raw_sha256, raw_bytes, chunk_ids) "
    "SELECT id, 1, space_id, 'READY', 'r1', sha256(id::text::bytea), 1000, '{}' FROM kb_doc d "
    "WHERE space_id = %(space)s AND NOT EXISTS (SELECT FROM kb_doc_version v WHERE v.doc_id = d.id)",
    "INSERT INTO ingestion_task (space_id, doc_id, version, status, current_node) SELECT space_id, id, 1, 'SUCCESS', 'INDEXER' FROM kb_doc d "
    "WHERE space_id = %(space)s AND NOT EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = d.id)",
)
STATE = """
SELECT pg_current_wal_insert_lsn() AS lsn, pg_relation_size('kb_doc') AS doc_bytes, pg_relation_size('kb_doc_version') AS version_bytes,
       (SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'kb_doc') AS doc_updates,
       (SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'kb_doc_version') AS version_updates
"""
WRITERS = """
SELECT wal_bytes::bigint AS bytes, wal_fpi, calls, left(regexp_replace(query, '\\s+', ' ', 'g'), 90) AS query FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND wal_bytes > 100000 ORDER BY wal_bytes DESC LIMIT 8
"""


class NumberedSource:
    """``documents`` entries that are made when they are listed; none ever changes. ``order``: as the ids ascend, or shuffled."""

    def __init__(self, documents: int, *, shuffled: bool) -> None:
        self.capabilities = Capabilities(order_stable=True, snapshot_digest=True)
        self.order = list(range(1, documents + 1))
        if shuffled:
            random.Random(1).shuffle(self.order)

    def check(self) -> Json:
        return {"documents": len(self.order)}

    def clock(self) -> float:
        return time.time()

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        start = (checkpoint or {}).get("after", 0)
        for at in range(start, len(self.order), limit):
            end = min(at + limit, len(self.order))
            yield Page(tuple(self._item(n) for n in self.order[at:end]), (), {"after": end})

    def _item(self, n: int) -> Item:
        return Item(f"folder/{n:08}.md", "r1", f"{n:08}.md", f"numbered:{n}", 1000)

    def listing_digest(self) -> str | None:
        digest = hashlib.sha256()
        for n in self.order:
            digest.update(f"folder/{n:08}.md r1".encode())
        return digest.hexdigest()

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        raise Rejected(f"{external_id} has no content", code="no_content")

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        raise Rejected(f"{external_id} has no content", code="no_content")

    def presence(self, external_ids: list[str]) -> list[Presence]:
        return [Presence.PRESENT] * len(external_ids)


def filled(app: FakedApp, documents: int, *, shuffled: bool) -> Any:
    space = app.add_space("walked", embedder_options={"dimension": 8})
    source = app.add_fake_source(space, NumberedSource(documents, shuffled=shuffled))
    for first in range(1, documents + 1, 50_000):
        with transaction(app.pool) as c:
            for statement in FILL:
                last = min(first + 49_999, documents)
                c.execute(statement, {"space": space.id, "source": source.id, "first": first, "last": last})
    return space


def settled(app: App) -> None:
    """Nothing of the filling is left to be done by the server beside the measurement."""
    with app.pool.connection() as c:
        c.autocommit = True
        c.execute("VACUUM (ANALYZE) kb_doc, kb_doc_version, ingestion_task")
        c.execute("CHECKPOINT")
        c.execute("SELECT pg_stat_statements_reset()")
        c.autocommit = False


def measured(app: App, label: str, work: Callable[[], SyncReport]) -> None:
    settled(app)
    before, began = state(app), time.perf_counter()
    report = work()
    seconds = time.perf_counter() - began
    after = state(app)
    with app.pool.connection() as c:
        wal = c.execute("SELECT pg_wal_lsn_diff(%s, %s)::bigint AS n", (after.lsn, before.lsn)).fetchone().n
        writers = c.execute(WRITERS).fetchall()
    counts = {k: n for p in report.passes for k, n in p.counts.items() if n}
    print(f"== {label}: {counts} in {seconds:.1f} s, {report.errors or 'no error'}")
    print(f"   WAL {wal / 1e6:.1f} MB (goal: up to 40)")
    print(
        f"   kb_doc {before.doc_bytes} -> {after.doc_bytes} bytes, {after.doc_updates - before.doc_updates} updates (goal: no growth)"
    )
    print(
        f"   kb_doc_version {before.version_bytes} -> {after.version_bytes} bytes, {after.version_updates - before.version_updates} updates"
    )
    for row in writers:
        print(f"   {row.bytes / 1e6:7.1f} MB, {row.wal_fpi} page images, {row.calls} calls: {row.query}", flush=True)


def state(app: App) -> Any:
    app.pool.drain()  # idle backends report their counters when they end
    time.sleep(0.5)
    with app.pool.connection() as c:
        return c.execute(STATE).fetchone()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--documents", type=int, default=500_000)
    arguments.add_argument("--shuffled", action="store_true", help="list in another order than that of the documents' ids")
    options = arguments.parse_args()
    print(f"{options}, load average {os.getloadavg()[0]:.2f}", flush=True)
    with scratch() as work, open_app(load_settings({}, home=work / "home", embedder="hashing")) as opened:
        app = FakedApp(opened.settings, opened.pool, opened.schema_version)
        space = filled(app, options.documents, shuffled=options.shuffled)
        sync_space(app.engine, space)  # as every source once: it stores the digest of the listing
        measured(app, "the digest of the listing says that nothing changed", lambda: sync_space(app.engine, space))
        measured(app, "a full walk", lambda: sync_space(app.engine, space, full=True))
        print(f"peak memory {peak_rss_mb()} MB")


if __name__ == "__main__":
    main()
