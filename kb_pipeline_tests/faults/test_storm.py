"""Everything at once: what must be true at any moment stays true, and in the end each space is what a fresh load would be.

``python -m kb_pipeline_tests.benchmarks.storm`` runs the same for hours.
"""

import random
from pathlib import Path

import pytest

from kb_pipeline.settings import Settings
from kb_pipeline.store.database import open_pool
from kb_pipeline.store.migrations import migrate
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.faults.aftermath import WRONG, compare_with_fresh_loads
from kb_pipeline_tests.faults.pooler import pooled
from kb_pipeline_tests.faults.storm import OPERATIONS, Storm
from kb_pipeline_tests.faults.test_pooler import PROGRAM

SECONDS, SECONDS_POOLED = 40.0, 10.0  # what is before and after the storm takes as long again as is left of a minute
SERVER_CONNECTIONS = 12  # fewer than half of the clients


def _stormed(settings: Settings, url: str, seconds: float, need: tuple[str, ...] = ()) -> Storm:
    seed = random.SystemRandom().randrange(10**6)
    storm = Storm(settings, url, seed)
    threads = storm.run(seconds, every=1.0, need=need)
    print(f"seed {seed}, {threads} threads\ndone: {dict(sorted(storm.done.items()))}\ntold: {dict(sorted(storm.told.items()))}")
    assert storm.findings == []
    assert threads >= 14
    return storm


def _assert_true(storm: Storm) -> None:
    found = compare_with_fresh_loads(storm)
    print(
        f"afterwards: {dict(sorted(found.items()))}, texts {len(storm.embedder.asked)}, embedded again {storm.embedder.repeated}"
    )
    assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)


@pytest.mark.slow
def test_everything_at_once_keeps_every_space_true(settings: Settings, database_url: str) -> None:
    storm = _stormed(settings, database_url, SECONDS, OPERATIONS)
    assert [name for name in OPERATIONS if not storm.done[name]] == []
    _assert_true(storm)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)")
def test_everything_at_once_through_a_transaction_pooler(
    settings: Settings, embedded_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("bouncer")
    with embedded_server.database() as direct, pooled(direct, folder, SERVER_CONNECTIONS) as url:
        with open_pool(url, max_size=2) as pool:
            migrate(pool)
        _assert_true(_stormed(settings, url, SECONDS_POOLED))
