"""Claiming from one busy space: 8 processes take 50 of a million waiting tasks at a time, with and without an old snapshot.

    python -m kb_pipeline_tests.benchmarks.claims FOLDER_OR_URL [TASKS=1000000] [SECONDS=15] [ROUNDS=2]

A claim is one call that takes 50 tasks, in its own transaction as the product makes it. Every document also has a task that is
done. The old snapshot is a transaction (REPEATABLE READ, idle) that began before the first claim. All times are a client's.
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier

from kb_pipeline.states import FLOW
from kb_pipeline.store import tasks
from kb_pipeline.store.database import Connection, one, open_pool, transaction
from kb_pipeline.store.spaces import Space, get_space
from kb_pipeline_tests.benchmarks.synthetic import SpaceSpec, arguments, connect, database, fill, load_average, percentile_ms

CLIENTS, LIMIT, LEASE_SECONDS = 8, 50, 120
GOAL_RATE, GOAL_P99 = 500, 45
KEY = "busy"
DONE = """
INSERT INTO ingestion_task (space_id, doc_id, version, status, current_node, attempt, size_bytes)
SELECT space_id, id, 1, 'SUCCESS', 'INDEXER', 1, 2000 FROM kb_doc WHERE space_id = %(space)s ORDER BY id
"""
WAITING = """
INSERT INTO ingestion_task (space_id, doc_id, version, status, size_bytes)
SELECT space_id, id, 2, 'PENDING', 2000 FROM kb_doc WHERE space_id = %(space)s ORDER BY id
"""
TAKEN = """
SELECT count(*) FILTER (WHERE status = 'PROCESSING') AS taken, count(*) FILTER (WHERE attempt > 1) AS twice,
       count(*) FILTER (WHERE status = 'PENDING') AS left FROM ingestion_task WHERE space_id = %(space)s AND version = 2
"""


@dataclass(frozen=True)
class Call:
    """One claim: when it ended, how long it took, how many tasks it got."""

    ended: float
    seconds: float
    taken: int


def main() -> None:
    target, (waiting, seconds, rounds) = arguments(1_000_000, 15, 2)
    print(f"{waiting} waiting, {CLIENTS} clients, claims of {LIMIT}, {seconds} s, {rounds} rounds", flush=True)
    with database(target) as url, connect(url) as c:
        fill(c, [SpaceSpec(KEY, waiting, 0, own_shard=True)])
        space = get_space(c, KEY)
        for number in range(rounds):
            for old in (True, False):
                prepare(c, space)
                label = f"round {number + 1}, {'old snapshot' if old else 'no old snapshot'}"
                before = load_average()
                with snapshot(url, space, old):
                    calls = race(url, seconds)
                report(f"{label}; {before}", calls, seconds)
                row = one(c.execute(TAKEN, {"space": space.id}))
                assert (row.taken, row.twice) == (sum(x.taken for x in calls), 0)
        prepare(c, space)
        beside(url, space)


def prepare(c: Connection, space: Space) -> None:
    """A fresh table: a million done, and as many waiting behind them."""
    c.execute("TRUNCATE ingestion_task")
    for statement in (DONE, WAITING):
        c.execute(statement, {"space": space.id})
    c.execute("VACUUM (ANALYZE) ingestion_task")
    c.execute("CHECKPOINT")


@contextmanager
def snapshot(url: str, space: Space, wanted: bool) -> Iterator[None]:
    with connect(url) as c:
        if wanted:
            c.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            c.execute("SELECT FROM ingestion_task WHERE space_id = %s LIMIT 1", [space.id])
        yield


def race(url: str, seconds: float) -> list[Call]:
    """All clients begin at the same moment, and go on until it is over."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(CLIENTS) as pool:
        found = pool.starmap(_claim_until, [(url, seconds, manager.Barrier(CLIENTS))] * CLIENTS, chunksize=1)
    return sorted((x for calls in found for x in calls), key=lambda x: x.ended)


def _claim_until(url: str, seconds: float, start: Barrier) -> list[Call]:
    pool = open_pool(url, max_size=1)
    with transaction(pool) as c:
        space = get_space(c, KEY)
    start.wait()
    calls: list[Call] = []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        with transaction(pool) as c:
            taken = len(tasks.claim(c, space, LIMIT, LEASE_SECONDS, FLOW))
        now = time.monotonic()
        calls.append(Call(now, now - began, taken))
        if not taken:
            break
    pool.close()
    return calls


def report(label: str, calls: list[Call], seconds: float) -> None:
    full = [x for x in calls if x.taken == LIMIT]
    elapsed = calls[-1].ended - (calls[0].ended - calls[0].seconds)
    parts = [[x.seconds for x in full[i * len(full) // 4 : (i + 1) * len(full) // 4]] for i in (0, 3)]
    every = [x.seconds for x in full]
    print(f"{label}: {len(full) / elapsed:.0f} claims/s (goal {GOAL_RATE}), {sum(x.taken for x in calls) / elapsed:.0f} tasks/s; one claim "
          f"p50 {percentile_ms(every, 50):.1f} ms, p99 {percentile_ms(every, 99):.1f} ms (goal {GOAL_P99}); p99 of the first and the last "
          f"quarter {percentile_ms(parts[0], 99):.1f}, {percentile_ms(parts[1], 99):.1f} ms", flush=True)  # fmt: skip


def beside(url: str, space: Space) -> None:
    """What a worker does before and after each claim, while all wait and 8 workers have a batch of 200 each."""
    pool = open_pool(url, max_size=1)
    with transaction(pool) as c:
        tasks.claim(c, space, CLIENTS * 200, LEASE_SECONDS, FLOW)
    swept, counted = [], []
    for _ in range(20):
        with transaction(pool) as c:
            began = time.perf_counter()
            tasks.sweep(c, space)
            swept.append(time.perf_counter() - began)
            began = time.perf_counter()
            tasks.waiting(c, space.id)
            counted.append(time.perf_counter() - began)
    pool.close()
    print(
        f"beside a claim, p50: sweep {percentile_ms(swept, 50):.1f} ms, count of what waits {percentile_ms(counted, 50):.1f} ms"
    )


if __name__ == "__main__":
    main()
