"""One tick's question over all spaces: where does work wait? A million waiting tasks in two thousand spaces.

    python -m kb_pipeline_tests.benchmarks.waiting_tick [TASKS=1000000] [SPACES=2000] [TICKS=30]

In an embedded server in a temporary folder. Cases: every space waits, none does, one of them has half of all tasks. Times are
a client's, without the first tick of a case; beside them what a tick costs the server in CPU, which other load does not change.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.store import waiting
from kb_pipeline.store.database import Pool, connection, open_pool, transaction
from kb_pipeline.store.migrations import migrate

GOAL_MS = 200
SPACES_A_TICK, FANOUT = 60, 2000 * 4
FILL = """
SELECT kb_ensure_model('none', 8);
INSERT INTO kb_space (key, name, shard, model_id, embedder, index_kind)
SELECT 's' || lpad(n::text, 5, '0'), 'x', 0, 1, 'hashing', 'pgvector' FROM generate_series(1, {spaces}) n;
INSERT INTO kb_source (space_id, name, kind) SELECT id, 'docs', 'local_dir' FROM kb_space;
INSERT INTO sync_lease (source_id) SELECT id FROM kb_source;
INSERT INTO kb_doc (space_id, source_id, external_id, title, uri)
SELECT r.space_id, r.id, 'd' || n, 't', 'u' FROM kb_source r CROSS JOIN generate_series(1, {each}) n;
INSERT INTO ingestion_task (space_id, doc_id, version, status, next_attempt_at, lease_until)
SELECT space_id, id, 1, CASE id % 10 WHEN 0 THEN 'FAILED' WHEN 1 THEN 'PROCESSING' ELSE 'PENDING' END,
       CASE id % 10 WHEN 0 THEN clock_timestamp() + (id % 3 - 1) * interval '1 hour' END,
       CASE id % 10 WHEN 1 THEN clock_timestamp() + (id % 3 - 1) * interval '1 hour' END FROM kb_doc;
"""


def main(tasks: int = 1_000_000, spaces: int = 2000, ticks: int = 30) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder))
        pool = open_pool(server.start(), max_size=1)
        try:
            migrate(pool)
            with connection(pool) as c:
                c.execute(FILL.format(spaces=spaces, each=tasks // spaces))
                c.execute("VACUUM ANALYZE ingestion_task")
                c.execute("VACUUM ANALYZE kb_doc")
            show("every space waits", pool, ticks)
            with transaction(pool) as c:
                c.execute("UPDATE ingestion_task SET space_id = 1 WHERE id % 2 = 0")
            show("one space has half of all, not vacuumed", pool, ticks)
            with transaction(pool) as c:
                c.execute("SELECT set_config('statement_timeout', '0', true)")
                c.execute("UPDATE ingestion_task SET status = 'SUCCESS'")
            show("none waits, not vacuumed", pool, ticks)
            with connection(pool) as c:
                c.execute("VACUUM ANALYZE ingestion_task")
            show("none waits", pool, ticks)
        finally:
            pool.close()
            server.stop(mode="immediate")


def show(case: str, pool: Pool, ticks: int) -> None:
    times, after, found = [], "", 0
    with connection(pool) as c:
        backend, before = c.info.backend_pid, 0.0
    for _ in range(ticks + 1):
        begin = time.perf_counter()
        with connection(pool) as c:
            spaces = waiting.waiting_spaces(c, after, SPACES_A_TICK, FANOUT)
            waiting.working_runs(c, 100)
        before = before or cpu_ms(backend)
        times.append((time.perf_counter() - begin) * 1000)
        after, found = (spaces[-1].space, len(spaces)) if spaces else ("", 0)
    ordered = sorted(times[1:])
    p50, worst = ordered[len(ordered) // 2], ordered[-1]
    cpu = (cpu_ms(backend) - before) / ticks
    print(f"{case:<42} {found:>3} spaces  p50 {p50:7.1f} ms  max {worst:7.1f} ms  CPU {cpu:6.1f} ms  goal {GOAL_MS} ms")


def cpu_ms(pid: int) -> float:
    """User and system time of a process so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return sum(int(n) for n in ticks) * 1000 / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
