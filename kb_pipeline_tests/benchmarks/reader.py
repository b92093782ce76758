"""A document is updated through sync and ingest while readers search all the time: gaps, mixtures, steps back.

    python -m kb_pipeline_tests.benchmarks.reader [UPDATES=1000] [database|outside]

``outside``: its vectors are in another store than the database. Ends with 1 where an answer was not one whole version.
"""

import sys
import time

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import open_pool
from kb_pipeline.store.migrations import migrate
from kb_pipeline_tests.benchmarks.corpus import scratch
from kb_pipeline_tests.faults.reading import Readers
from kb_pipeline_tests.faults.weather import SharedIndex


def main() -> None:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    index = SharedIndex() if "outside" in sys.argv else None
    with scratch() as work:
        postgres = EmbeddedPostgres(work / "server")
        try:
            url = postgres.start()
            with open_pool(url, max_size=2) as pool:
                migrate(pool)
            settings = load_settings({}, home=work / "home", database_url=url, embedder="hashing")
            readers = Readers(settings, url, "readers", index)
            began = time.monotonic()
            tally = readers.run(updates)
        finally:
            postgres.stop(mode="immediate")
    print("\n".join(tally.seen[:10]))
    print(f"seconds={time.monotonic() - began:.0f} {tally.line()}")
    sys.exit(1 if tally.gaps or tally.mixes or tally.back else 0)


if __name__ == "__main__":
    main()
