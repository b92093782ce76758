"""The join of a search: 64 candidates to the best 16 current, permitted chunks, out of ten million; time, relations locked.

    python -m kb_pipeline_tests.benchmarks.join_ten_million FOLDER_OR_URL [CHUNKS=10000000] [SEARCHES=2000] [ROUNDS=2]

Time is the driver's: from the call to the last row, without BEGIN and COMMIT; with them on a line of its own, and before it the
least that a look at 64 rows costs on this machine at this moment. Candidates are spread over the whole space. Locks are read in
the same transaction after every run, through changed plans too.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg import sql

from kb_pipeline.model import Candidate
from kb_pipeline.store import answers
from kb_pipeline.store.answers import Standing
from kb_pipeline.store.database import Connection, Pool, open_pool, transaction
from kb_pipeline_tests.benchmarks.synthetic import (
    Filled,
    arguments,
    connect,
    database,
    fill,
    library,
    load_average,
    percentile_ms,
)

K, PRINCIPALS = 64, ("user:ada", "group:all", "group:engineering")
P50, P99, LOCKS = 1.6, 5.0, 12
SPACES = ("large-4m", "large-2m", "large-1m", "small-0001")
IDS = "SELECT id FROM kb_chunk_state WHERE shard = %(shard)s::int AND space_id = %(space)s"
FLAGS = "SELECT id FROM kb_chunk_state WHERE shard = %(shard)s::int AND id = ANY(%(ids)s::bigint[]) AND in_current"
SAMPLE = """
SELECT t.id, t.doc_id, t.vec_id FROM kb_chunk_state t WHERE t.shard = %(shard)s::int AND t.space_id = %(space)s AND t.id = ANY(%(ids)s::bigint[])
"""
INDEX = "CREATE INDEX bench_in_current ON {} (space_id) WHERE in_current AND vec_status = 9"
LOCKED = """
SELECT DISTINCT relation FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation' AND relation <> 'pg_locks'::regclass
"""
NAMES = """
SELECT relname, relkind IN ('r', 'p') AS is_table FROM pg_class WHERE oid = ANY(%(oids)s::oid[]) ORDER BY relkind IN ('r', 'p') DESC, relname
"""


def main() -> None:
    target, (chunks, searches, rounds) = arguments(10_000_000, 2000, 2)
    print(f"{chunks} chunks, {searches} searches of {K} candidates, {rounds} rounds", flush=True)
    with database(target) as url, connect(url) as c:
        began = time.perf_counter()
        filled = {x.spec.key: x for x in fill(c, library(chunks))}
        print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
        pool = open_pool(url, max_size=1)
        for number in range(rounds):
            print(f"round {number + 1}: {load_average()}")
            for key in SPACES:
                timed(pool, filled[key], candidates(c, filled[key], searches))
        for key in ("large-4m", "small-0001"):
            locked(pool, url, filled[key], candidates(c, filled[key], 20))
        pool.close()


def candidates(c: Connection, x: Filled, searches: int) -> list[list[Candidate]]:
    """Random chunks of the space, as an index would name them."""
    rng = random.Random(1)
    where = {"shard": x.shard, "space": x.space.id}
    ids = [r.id for r in c.execute(IDS, where)]
    rows = c.execute(SAMPLE, {**where, "ids": rng.sample(ids, min(len(ids), searches * K))}).fetchall()
    return [[Candidate(r.vec_id, r.id, r.doc_id, rng.random()) for r in rng.sample(rows, K)] for _ in range(searches)]


def standing(pool: Pool, x: Filled) -> Standing:
    with transaction(pool) as c:
        found = answers.standing(c, x.space.id)
    assert found is not None
    return found


def timed(pool: Pool, x: Filled, sets: list[list[Candidate]]) -> None:
    steps: dict[str, list[float]] = {"flags alone by key": [], "join": [], "join with BEGIN, timeouts, COMMIT": []}
    at, warm = standing(pool, x), len(sets) // 10
    cpu: list[float] = []
    for found in sets:
        with transaction(pool) as c:
            began = time.perf_counter()
            c.execute(FLAGS, {"shard": x.shard, "ids": [y.chunk_id for y in found]}).fetchall()
            steps["flags alone by key"].append(time.perf_counter() - began)
            backend = c.info.backend_pid
        cpu.append(cpu_seconds(backend))
        outer = time.perf_counter()
        with transaction(pool) as c:
            began = time.perf_counter()
            joined = answers.join_candidates(c, x.space.id, at, found, PRINCIPALS, K // 4)
            steps["join"].append(time.perf_counter() - began)
        steps["join with BEGIN, timeouts, COMMIT"].append(time.perf_counter() - outer)
        cpu[-1] = cpu_seconds(backend) - cpu[-1]
        assert len(joined.rows) == K // 4
    for label, seconds in steps.items():
        goal = f" (goal {P50} / {P99})" if label == "join" else ""
        p50, p99 = percentile_ms(seconds[warm:], 50), percentile_ms(seconds[warm:], 99)
        print(f"{x.spec.key}: {label}: p50 {p50:.2f} ms, p99 {p99:.2f} ms{goal}", flush=True)
    print(
        f"{x.spec.key}: CPU of the last, client and server: mean {1000 * sum(cpu[warm:]) / len(cpu[warm:]):.2f} ms", flush=True
    )


def cpu_seconds(backend: int) -> float:
    """Of this process and the server's: what a busy machine cannot change. Only of a server on this host."""
    run = Path(f"/proc/{backend}/schedstat")
    return time.process_time() + (int(run.read_text().split()[0]) / 1e9 if run.exists() else 0.0)


def locked(pool: Pool, url: str, x: Filled, sets: list[list[Candidate]]) -> None:
    """As the product asks; after changes of statistics, of the leaf's indexes and of the planner; and as it never asks."""
    at = standing(pool, x)
    leaf = sql.Identifier(f"kb_chunk_state_{x.shard}")
    with connect(url) as admin:
        print(f"{x.spec.key}: relations locked by one join (goal: at most {LOCKS} at every run)")
        changes: dict[str, Callable[[], Any]] = {
            "ordinary": lambda: None,
            "after ANALYZE": lambda: admin.execute(sql.SQL("ANALYZE {}").format(leaf)),
            "after an index came": lambda: admin.execute(sql.SQL(INDEX).format(leaf)),
            "after it went": lambda: admin.execute("DROP INDEX bench_in_current"),
        }
        for label, change in changes.items():
            change()
            with transaction(pool) as c:
                report(admin, label, x, at, sets, c)
        for label, option in {"hash joins only": "enable_nestloop=off", "no index scans": "enable_indexscan=off"}.items():
            with planned(url, f"-c {option}") as c:
                report(admin, label, x, at, sets, c)
        with planned(url, "", prepare_threshold=5) as c:
            report(admin, "prepared from the 6th run on (the product never does)", x, at, sets, c)


@contextmanager
def planned(url: str, options: str, prepare_threshold: int | None = None) -> Iterator[Connection]:
    c = connect(f"{url}?options={options.replace(' ', '%20').replace('=', '%3D')}" if options else url)
    c.prepare_threshold = prepare_threshold
    with c:
        yield c


def report(admin: Connection, label: str, x: Filled, at: Standing, sets: list[list[Candidate]], c: Connection) -> None:
    runs: list[set[int]] = []
    for found in sets:
        with c.transaction():
            answers.join_candidates(c, x.space.id, at, found, PRINCIPALS, K // 4)
            runs.append({r.relation for r in c.execute(LOCKED, prepare=False)})
    counts = [len(r) for r in runs]
    rows = admin.execute(NAMES, {"oids": list(runs[counts.index(max(counts))])}).fetchall()
    names = {kind: [r.relname for r in rows if r.is_table is kind] for kind in (True, False)}
    print(
        f"  {label}: {min(counts)} to {max(counts)} relations in {len(counts)} runs, of these {len(names[True])} tables",
        flush=True,
    )
    if label == "ordinary":
        print(f"    tables: {' '.join(names[True])}\n    their indexes, which the planner opens: {' '.join(names[False])}")


if __name__ == "__main__":
    main()
