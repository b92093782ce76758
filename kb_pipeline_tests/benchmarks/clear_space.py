"""Removing a large space beside searches in a neighbour and a transaction that stays open.

    python -m kb_pipeline_tests.benchmarks.clear_space FOLDER_OR_URL [--chunks 2000000] [--dimensions 8]

Prints the seconds of each step, and the latency of searches in the neighbour before and during it. In a folder the disk work is
compared with removing files of the same sizes. Goals: gone for users within 20 ms, the disk work up to 1.5 times that removal,
the neighbour's p99 unmoved.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg

from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance import delete_space as deletion
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import Connection
from kb_pipeline.store.spaces import Space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import scratch
from kb_pipeline_tests.benchmarks.synthetic import Filled, SpaceSpec, connect, database, fill, load_average, percentile_ms

STEPS = ("_begin", "drop_given_up", "_forget_embeddings", "_clear_shards", "_delete_objects", "_delete_rows", "_residue")
SEGMENT = 2**30  # PostgreSQL cuts a relation into files of this size
FILES = """
WITH leaf AS (SELECT c.oid, c.reltoastrelid FROM pg_class c JOIN pg_inherits h ON h.inhrelid = c.oid JOIN pg_class p ON p.oid = h.inhparent
              WHERE (p.relname IN ('kb_chunk', 'kb_chunk_state') OR p.relname LIKE 'kb\\_vector\\_m%%') AND c.relname = p.relname || '_' || %(shard)s),
     tables AS (SELECT oid FROM leaf UNION ALL SELECT reltoastrelid FROM leaf WHERE reltoastrelid <> 0),
     files AS (SELECT oid FROM tables UNION ALL SELECT i.indexrelid FROM pg_index i JOIN tables t ON t.oid = i.indrelid)
SELECT pg_relation_size(f.oid, k.fork) AS bytes FROM files f CROSS JOIN unnest(ARRAY['main', 'fsm', 'vm']) k (fork) WHERE pg_relation_size(f.oid, k.fork) > 0
"""


class Searches:
    """One reader of the neighbour that never rests: (when it ended, how long it took) of each search."""

    def __init__(self, app: App, space: Space) -> None:
        self.app, self.space = app, space
        self.taken: list[tuple[float, float]] = []
        self._end = Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            began = time.perf_counter()
            search(self.app.engine, self.space, f"what is document {len(self.taken)}")
            ended = time.perf_counter()
            self.taken.append((ended, ended - began))
            self._end.wait(0.005)

    def __enter__(self) -> "Searches":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def between(self, since: float, until: float) -> list[float]:
        return [seconds for ended, seconds in self.taken if since <= ended - seconds and ended <= until]

    def show(self, label: str, since: float, until: float) -> None:
        found = self.between(since, until)
        if found:
            p50, p99 = (percentile_ms(found, p) for p in (50, 99))
            print(
                f"   neighbour {label}: {len(found)} searches, p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {max(found) * 1e3:.1f} ms"
            )


@contextmanager
def timed_steps() -> Iterator[list[tuple[str, float, float]]]:
    """(step, begin, end) of a removal, while this is open."""
    taken: list[tuple[str, float, float]] = []
    original: dict[str, Callable[..., Any]] = {name: getattr(deletion, name) for name in STEPS}

    def timed(name: str) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return original[name](*args)
            finally:
                taken.append((name, began, time.perf_counter()))

        return step

    for name in STEPS:
        setattr(deletion, name, timed(name))
    try:
        yield taken
    finally:
        for name in STEPS:
            setattr(deletion, name, original[name])


def removal_of_files(folder: Path, sizes: list[int]) -> float:
    """Write files of these sizes, to the disk, and time their removal."""
    block, made = os.urandom(2**20), []
    for size in sizes:
        for part in range(0, size, SEGMENT):
            left = min(size - part, SEGMENT)
            made.append(folder / f"file{len(made)}")
            with made[-1].open("wb") as f:
                while left > 0:
                    left -= f.write(block[: min(left, len(block))])
                os.fsync(f.fileno())
    began = time.perf_counter()
    for path in made:
        path.unlink()
    return time.perf_counter() - began


def long_reader(url: str, neighbour: Filled) -> Connection:
    """A transaction that has read the neighbour and stays open, with its snapshot."""
    c: Connection = psycopg.connect(url, prepare_threshold=None)
    c.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    c.execute("SELECT count(*) FROM kb_chunk_state WHERE shard = %s AND space_id = %s", [neighbour.shard, neighbour.space.id])
    c.execute("SELECT count(*) FROM kb_doc WHERE space_id = %s", [neighbour.space.id])
    return c


def refused(app: App, space: Space) -> bool:
    try:
        search(app.engine, space, "anything")
    except Rejected:
        return True
    return False


def remove(app: App, doomed: Filled, searches: Searches, removal: float | None) -> None:
    time.sleep(8)  # the quiet before
    with timed_steps() as taken:
        began = time.perf_counter()
        residue = deletion.delete_space(app.engine, doomed.space)
        ended = time.perf_counter()
    searches.show("before", began - 8, began)
    searches.show("during", began, ended)
    print(f"== removed in {ended - began:.2f} s, left: {sum(residue.values())}; gone for users: {refused(app, doomed.space)}")
    for name, since, until in taken:
        print(f"   {name.strip('_')}: {(until - since) * 1e3:.1f} ms")
        searches.show(f"during {name.strip('_')}", since, until)
    begin, clear = (next(until - since for step, since, until in taken if step == name) for name in ("_begin", "_clear_shards"))
    print(f"   gone for users after {begin * 1e3:.1f} ms (goal: up to 20)")
    if removal is not None:
        print(
            f"   disk work {clear * 1e3:.0f} ms, removal of such files {removal * 1e3:.0f} ms: {clear / removal:.2f} times (goal: up to 1.5)"
        )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("target", metavar="FOLDER_OR_URL")
    arguments.add_argument("--chunks", type=int, default=2_000_000)
    arguments.add_argument("--dimensions", type=int, default=8)
    options = arguments.parse_args()
    print(f"{options}, {load_average()}", flush=True)
    large = SpaceSpec("doomed", options.chunks // 20, 20, own_shard=True, vectors=True, dimensions=options.dimensions)
    small = SpaceSpec("neighbour", 250, 20, vectors=True, dimensions=options.dimensions)
    with database(options.target) as url, connect(url) as c, scratch() as home:
        doomed, neighbour = fill(c, [large, small])
        sizes = [r.bytes for r in c.execute(FILES, {"shard": doomed.shard})]
        print(f"   {len(sizes)} files, {sum(sizes) / 1e9:.2f} GB in the space's leaves", flush=True)
        removal = None if "://" in options.target else removal_of_files(Path(options.target), sizes)
        settings = load_settings({}, home=home, database_url=url, embedder="hashing", answer_log=False)
        with open_app(settings) as app, Searches(app, neighbour.space) as searches, long_reader(url, neighbour):
            remove(app, doomed, searches, removal)


if __name__ == "__main__":
    main()
