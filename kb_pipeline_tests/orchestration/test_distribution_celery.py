"""Runs in a Celery queue on a real Redis: a worker that is killed loses nothing, another one goes on, and Dagster says so."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile, which

import pytest
from dagster import DagsterRunStatus

import kb_pipeline.orchestration
from kb_pipeline.store.database import Pool, run_of, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.orchestration.cluster import EMBED_BATCH, Cluster, cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FILES = Path(kb_pipeline.orchestration.__file__).parent / "deploy" / "celery"
QUEUES = "dagster,kb_embedding,kb_index"  # one word: of several -q Celery takes the last


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The distribution's, in memory only, as long as the block lasts."""
    program = which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: the package redis-server of the distribution has it")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def workers(
    embedded_server: Server, pool: Pool, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A daemon and two workers for one run each, with the files that are shipped."""
    folder = tmp_path_factory.mktemp("celery")
    with redis_server(folder) as url:
        urls = {"CELERY_BROKER_URL": f"{url}/0", "CELERY_RESULT_BACKEND": f"{url}/1"}
        with cluster(embedded_server, pool, database_url, folder, FILES / "dagster.yaml", **urls) as made:
            copyfile(FILES / "worker.yaml", folder / "worker.yaml")
            program = str(Path(sys.executable).parent / "dagster-celery")
            for name in ("one", "two"):
                common = ("worker", "start", "-A", "dagster_celery.app", "-y", "worker.yaml", "-n", name)
                made.start(name, program, *common, "-q", QUEUES, "--", "--concurrency", "1")
            made.start_daemon()
            yield made


def worker_of(cluster: Cluster, owner: str) -> str:
    """The name of the worker whose process this is, by its session."""
    session = Path(f"/proc/{owner.split('/')[2]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[3]
    return next(name for name, process in cluster.processes.items() if process.pid == int(session))


def move_to_another_host(cluster: Cluster, space: Space) -> None:
    """From here nobody can see any more whether the owner of these claims lives: only its lease tells."""
    with transaction(cluster.app.pool) as c:
        c.execute("UPDATE ingestion_task SET claimed_by = replace(claimed_by, '@', '@far-') WHERE space_id = %s", (space.id,))


def test_killed_worker_loses_nothing_and_another_goes_on_when_its_lease_has_ended(workers: Cluster) -> None:
    for word in ("lost", "kept"):
        workers.doors.close(word)
    lost, kept = workers.add_space("lost", 10), workers.add_space("kept", 10)
    until("two runs are at the endpoint", lambda: workers.doors.came("lost") and workers.doors.came("kept"))
    ((owner,), (other,)) = workers.owners(lost), workers.owners(kept)
    first, second = worker_of(workers, owner), worker_of(workers, other)
    assert {first, second} == {"one", "two"}

    move_to_another_host(workers, lost)
    workers.kill(first)
    killed = time.monotonic()
    for word in ("lost", "kept"):
        workers.doors.open(word)
    known, continued = workers.after_kill(lost, owner)
    until("every document is published", lambda: workers.published(lost) == workers.published(kept) == 10)
    print(f"shown as failed after {known - killed:.1f} s, work goes on after {continued - killed:.1f} s")

    workers.check(lost, 10, repeated=EMBED_BATCH)
    workers.check(kept, 10)
    assert "died: no worker has Celery task" in workers.log(run_of(owner))
    assert workers.status(run_of(other)) is DagsterRunStatus.SUCCESS
