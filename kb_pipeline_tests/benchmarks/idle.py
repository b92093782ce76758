"""What `kb up` costs while nothing is to do.

    python -m kb_pipeline_tests.benchmarks.idle FOLDER [SECONDS]

FOLDER is a data folder of an embedded database, made when it is missing; `kb up` is started on free ports, left alone for half a
minute, then measured for SECONDS (150): processor time and proportional memory of each process and what it started, and rows that
Dagster writes into its tables, extrapolated to a day. Asserts nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql

from kb_pipeline.embedded_postgres import EmbeddedPostgres

SETTLE_SECONDS = 30.0
TABLES = ("event_logs", "job_ticks", "runs", "run_tags", "asset_keys", "daemon_heartbeats", "jobs", "instigators")
PROGRAM = "import sys\nfrom kb_pipeline.cli.main import main\nsys.exit(main())"


def main() -> None:
    home, seconds = Path(sys.argv[1]).absolute(), float(sys.argv[2]) if len(sys.argv) > 2 else 150.0
    ports = [str(_free_port()) for _ in range(2)]
    up = [sys.executable, "-c", PROGRAM, "--home", str(home), "up", "--port", ports[0], "--service-port", ports[1]]
    process = subprocess.Popen(up, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    try:
        assert "http://" in process.stdout.readline(), "kb up did not start"
        time.sleep(SETTLE_SECONDS)
        _measure(psutil.Process(process.pid), EmbeddedPostgres(home), seconds)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _measure(up: psutil.Process, server: EmbeddedPostgres, seconds: float) -> None:
    before, rows_before, began = _processes(up, server), _written(server.dagster_url()), time.monotonic()
    time.sleep(seconds)
    after, rows_after, took = _processes(up, server), _written(server.dagster_url()), time.monotonic() - began
    total = 0.0
    for name, (cpu, pss, count) in after.items():
        share = 100 * (cpu - before.get(name, (0.0, 0, 0))[0]) / took
        total += share
        print(f"idle_{name}_cpu_percent={share:.1f} idle_{name}_pss_mb={pss / 2**20:.0f} processes={count}")
    print(f"idle_cpu_percent={total:.1f} idle_pss_mb={sum(pss for _, pss, _ in after.values()) / 2**20:.0f} seconds={took:.0f}")
    for table, n in sorted(rows_after.items()):
        per_day = (n - rows_before[table]) * 86400 / took
        print(f"idle_{table}_writes_a_day={per_day:.0f}")


def _processes(up: psutil.Process, server: EmbeddedPostgres) -> dict[str, tuple[float, int, int]]:
    """Processor seconds, bytes and how many, by part."""
    parts: dict[str, list[psutil.Process]] = {"kb_up": [up]}
    for child in up.children():
        words = " ".join(child.cmdline())
        name = next((n for n in ("code_server", "daemon", "webserver", "service") if f"{n} " in f"{words} "), "other")
        parts[name] = [child, *child.children(recursive=True)]
    postmaster = server._postmaster()
    if postmaster is not None:
        root = psutil.Process(postmaster)
        parts["database"] = [root, *root.children(recursive=True)]
    return {name: _sum(processes) for name, processes in parts.items()}


def _sum(processes: list[psutil.Process]) -> tuple[float, int, int]:
    cpu, pss = 0.0, 0
    for p in processes:
        try:
            times = p.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            pss += p.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return cpu, pss, len(processes)


def _written(url: str) -> Counter[str]:
    """Rows ever written to each of Dagster's tables, updates included."""
    found: Counter[str] = Counter()
    with psycopg.connect(url, autocommit=True) as c:
        c.execute("SELECT pg_stat_force_next_flush()")
        query = sql.SQL("SELECT relname, n_tup_ins + n_tup_upd FROM pg_stat_user_tables WHERE relname = ANY(%s)")
        rows: list[Any] = c.execute(query, [list(TABLES)]).fetchall()
        found.update(dict(rows))
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    main()
