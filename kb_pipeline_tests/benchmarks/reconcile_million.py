"""Reconciliation of a large space: in sync, and with differences planted.

    python -m kb_pipeline_tests.benchmarks.reconcile_million FOLDER_OR_URL [--chunks 1000000] [--dimensions 8] [--planted 100]

Prints seconds and how many ids were read from how many buckets. Small vectors: the digest reads every row of the index's leaf, so
larger ones cost the reading of more pages. Goals: in sync up to 1 s, ids read from buckets that differ and from no other.
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from uuid import UUID

from psycopg import sql

from kb_pipeline.engine import Engine
from kb_pipeline.maintenance.reconcile import ReconcileReport, reconcile
from kb_pipeline.model import Bucket, IndexRef
from kb_pipeline.ports import VectorIndex
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import Connection
from kb_pipeline.store.spaces import serving_index
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.benchmarks.corpus import peak_rss_mb, scratch
from kb_pipeline_tests.benchmarks.synthetic import Filled, SpaceSpec, connect, database, fill, load_average

PICKED = "SELECT vec_id FROM {table} WHERE shard = %(shard)s ORDER BY md5(vec_id::text) LIMIT %(n)s OFFSET %(offset)s"
PLANTS = {
    "missing": "DELETE FROM {table} WHERE shard = %(shard)s AND vec_id = ANY(%(ids)s::uuid[])",
    "wrong": "UPDATE {table} SET acl = '{{7}}', ck = kb_checksum(vec_id, '{{7}}') WHERE shard = %(shard)s AND vec_id = ANY(%(ids)s::uuid[])",
    "orphaned": "INSERT INTO {table} (shard, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v) "
    "SELECT shard, n.id, space_id, index_id, chunk_id, doc_id, acl_seq, kb_checksum(n.id, '{{}}'), kb_bucket(n.id), acl, v FROM {table} t "
    "CROSS JOIN LATERAL (SELECT md5('planted ' || t.vec_id)::uuid AS id) n WHERE shard = %(shard)s AND vec_id = ANY(%(ids)s::uuid[])",
}


class CountedIndex:
    """The space's index, with a count of the ids that are read from it, and of the buckets they are read from."""

    def __init__(self, inner: VectorIndex) -> None:
        self._inner = inner
        self.read: Counter[int] = Counter()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        self.read.clear()
        self.calls = 0
        return self._inner.digest(ref)

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        found = self._inner.ids(ref, bucket)
        self.calls += 1
        self.read[bucket] += len(found)
        return found


def plant(c: Connection, filled: Filled, differences: int) -> None:
    table = sql.Identifier(f"kb_vector_m{filled.space.model_id}")
    each = [differences // 3] * 2 + [differences - 2 * (differences // 3)]
    offset = 0
    for (kind, statement), n in zip(PLANTS.items(), each, strict=True):
        where = {"shard": filled.shard, "n": n, "offset": offset}
        ids = [r.vec_id for r in c.execute(sql.SQL(PICKED).format(table=table), where)]
        c.execute(sql.SQL(statement).format(table=table), {"shard": filled.shard, "ids": ids})
        print(f"   planted: {n} {kind}")
        offset += n


def measured(engine: Engine, index: CountedIndex, filled: Filled, label: str, *, repair: bool, times: int) -> ReconcileReport:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        report = reconcile(engine, filled.space, repair=repair)
        seconds.append(time.perf_counter() - began)
    print(
        f"== {label}: median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s of {times}\n"
        f"   {report.chunks} chunks, {report.vectors} vectors, {report.missing} missing, {report.orphaned} orphaned, "
        f"{report.wrong} wrong, {report.repaired} repaired, {report.remaining} remaining, {report.waiting} waiting\n"
        f"   ids read from {len(index.read)} of 4096 buckets, in {index.calls} calls: {index.read.total()}",
        flush=True,
    )
    return report


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("target", metavar="FOLDER_OR_URL")
    arguments.add_argument("--chunks", type=int, default=1_000_000)
    arguments.add_argument("--dimensions", type=int, default=8)
    arguments.add_argument("--planted", type=int, default=100)
    options = arguments.parse_args()
    print(f"{options}, {load_average()}", flush=True)
    spec = SpaceSpec("million", options.chunks // 20, 20, own_shard=True, vectors=True, dimensions=options.dimensions)
    with database(options.target) as url, connect(url) as c, scratch() as home:
        (filled,) = fill(c, [spec])
        with open_app(load_settings({}, home=home, database_url=url, embedder="hashing")) as app:
            index = CountedIndex(app.engine.index(serving_index(c, filled.space.id)))
            engine = replace(app.engine, index=lambda _: index)
            measured(engine, index, filled, "in sync (goal: up to 1 s)", repair=True, times=7)
            plant(c, filled, options.planted)
            measured(engine, index, filled, f"{options.planted} differences, report only", repair=False, times=3)
            measured(engine, index, filled, f"{options.planted} differences, repaired", repair=True, times=1)
            measured(engine, index, filled, "afterwards", repair=True, times=1)
    print(f"peak memory {peak_rss_mb()} MB")


if __name__ == "__main__":
    main()
