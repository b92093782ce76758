"""Everything at once for as long as it takes, with faulty calls and workers that were taken for dead; then every space against
a fresh load of its sources.

    python -m kb_pipeline_tests.benchmarks.storm [SECONDS=3600] [SEED] [--pooler]

``--pooler``: through PgBouncer in transaction mode. A line every 30 s and a table in the end; 1 where anything was wrong.
"""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import open_pool
from kb_pipeline.store.migrations import migrate
from kb_pipeline_tests.benchmarks.corpus import scratch
from kb_pipeline_tests.faults.aftermath import WRONG, compare_with_fresh_loads
from kb_pipeline_tests.faults.pooler import pooled
from kb_pipeline_tests.faults.storm import OPERATIONS, Storm

SERVER_CONNECTIONS = 12


@contextmanager
def database(work: Path, *, pooler: bool) -> Iterator[tuple[str, str]]:
    """(URL to work through, URL of the server itself)"""
    postgres = EmbeddedPostgres(work / "server")
    try:
        direct = postgres.start()
        with ExitStack() as stack:
            url = stack.enter_context(pooled(direct, work, SERVER_CONNECTIONS)) if pooler else direct
            with open_pool(url, max_size=2) as pool:
                migrate(pool)
            yield url, direct
    finally:
        postgres.stop(mode="immediate")


def line(storm: Storm) -> str:
    done = storm.done
    return (
        f"{time.monotonic() - storm.began:6.0f} s  published={done['published']} edited={done['edited']} walked={done['walked']} "
        f"erased={done['vectors_erased']} searched={done['searched']} past={done['asked_the_past']} zombies={done['lease_expired']} "
        f"spaces_deleted={done['space_deleted']} promoted={done['promoted']} looks={done['looks']} findings={len(storm.findings)}"
    )


def table(storm: Storm, found: dict[str, int]) -> None:
    never = [name for name in OPERATIONS if not storm.done[name]]
    for title, counts in (("done", storm.done), ("told", storm.told), ("afterwards", found)):
        print(f"\n{title}")
        for name, n in sorted(counts.items()):
            print(f"  {name:28} {n:>9}")
    print(f"\nnever done: {', '.join(never) or '-'}")


def main() -> None:
    numbers = [a for a in sys.argv[1:] if not a.startswith("-")]
    seconds = float(numbers[0]) if numbers else 3600.0
    seed = int(numbers[1]) if len(numbers) > 1 else random.SystemRandom().randrange(10**6)
    with scratch() as work, database(work, pooler="--pooler" in sys.argv) as (url, direct):
        storm = Storm(load_settings({}, home=work / "home", database_url=url, embedder="hashing"), url, seed)
        threads = storm.run(seconds, lambda: print(line(storm), flush=True))
        found = compare_with_fresh_loads(storm) if not storm.findings else {}
        with psycopg.connect(direct) as c:
            (deadlocks,) = c.execute(
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone() or (0,)
    table(storm, found)
    wrong = {name: found.get(name, 0) for name in WRONG}
    print(f"seed={seed} threads={threads} {line(storm).strip()} deadlocks_retried={deadlocks}")
    print(f"{wrong} texts={len(storm.embedder.asked)} embedded_again={storm.embedder.repeated}")
    for finding in storm.findings:
        print(f"after {storm.first_finding:.1f} s: {finding}")
    sys.exit(1 if storm.findings or any(wrong.values()) else 0)


if __name__ == "__main__":
    main()
