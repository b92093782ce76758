"""``kb up`` for real, once; and how it treats its children."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from kb_pipeline.cli import processes, up
from kb_pipeline.cli.notify import tell_manager
from kb_pipeline.cli.processes import start, stop
from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.service import condition
from kb_pipeline.settings import Settings
from kb_pipeline_tests.adapters.embedding_server import DIMENSION, EmbeddingServer, Said, embedding_server, well_behaved
from kb_pipeline_tests.cli.conftest import CODE, Kb, environment, run, spawn
from kb_pipeline_tests.fakes import Gate

definitions = CODE / "kb_pipeline" / "orchestration" / "definitions.py"
needs_dagster = pytest.mark.skipif(
    not definitions.is_file() or find_spec("dagster_webserver") is None,
    reason="needs kb_pipeline.orchestration and dagster-webserver",
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind((up.HOST, 0))
        return int(s.getsockname()[1])


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=30)


LAUNCH = """mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename } }"""
SELECTOR = {"repositoryLocationName": up.DEFINITIONS, "repositoryName": "__repository__", "jobName": "sync_space"}


def launch(url: str, space: str) -> None:
    tags = [{"key": "dagster/partition", "value": space}]
    params = {"selector": SELECTOR, "runConfigData": {}, "executionMetadata": {"tags": tags}}
    answer = httpx.post(f"{url}/graphql", json={"query": LAUNCH, "variables": {"p": params}}, trust_env=False, timeout=60)
    assert answer.json()["data"]["launchRun"]["__typename"] == "LaunchRunSuccess", answer.text


@needs_dagster
@pytest.mark.slow
def test_up_serves_and_a_run_that_it_interrupts_loses_nothing_and_embeds_nothing_twice(
    tmp_path: Path, slow: EmbeddingServer, held: Gate, hurry: threading.Event
) -> None:
    """All of a life: ready, healthy, used by others, refused twice, ended in the middle of a run, and gone without a trace."""
    home, port, service = tmp_path / ".kb", str(free_port()), str(free_port())
    env = environment(KB_HOME=str(home))
    prepare(env, tmp_path, slow)
    held.close()  # a sensor may be faster than we are
    process = spawn(["up", "--port", port, "--service-port", service], env)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        url, health = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{service}"
        assert url in said and f"{health}/healthz" in said, process.communicate()
        assert "dagster_webserver_version" in get(f"{url}/server_info").json()
        assert get(f"{health}/healthz").json() == {"status": "ok", "reasons": []}
        assert 'kb_child_ready{child="daemon"} 1.0' in get(f"{health}/metrics").text
        assert EmbeddedPostgres(home).running(), "another command must leave the database alone"
        second = run(["up", "--port", port, "--service-port", service], env)
        assert second.code == 2 and "runs already" in second.err and str(process.pid) in second.err
        assert (home / "dagster" / "dagster.yaml").is_file()
        pids = [c["pid"] for c in json.loads((home / condition.NAME).read_text()).values()]

        launch(url, "m")
        held.await_caller()  # a request of the run is under way
        hurry.clear()  # from now on the endpoint is slow: the run is told before it could be done
        held.open()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        hurry.set()
        assert process.returncode == 0, err
        order = [err.index(f"{name.ljust(10)} stopped") for name in ("service", "webserver", "daemon", "code")]
        assert order == sorted(order) and err.index("database   left") > order[-1]
        assert not EmbeddedPostgres(home).running() and not (home / condition.NAME).exists()
        assert [p for p in pids if _session_lives(p)] == []
        assert unfinished(home)[0] == []
        after_a_stop(env, home, slow)
    finally:
        held.open()
        process.kill()
        process.wait()
        EmbeddedPostgres(home).stop(mode="immediate")


def _session_lives(pid: int) -> bool:
    return any(processes._lives_in(pid, p) for p in Path("/proc").iterdir() if p.name.isdigit())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sync_that_is_stopped_gives_its_claims_back_and_the_next_embeds_nothing_twice(
    tmp_path: Path, slow: EmbeddingServer, held: Gate, number: signal.Signals
) -> None:
    home = tmp_path / ".kb"
    env = environment(KB_HOME=str(home))
    prepare(env, tmp_path, slow)
    held.close()
    process = spawn(["sync", "m"], env)
    try:
        held.await_caller()
        process.send_signal(number)
        held.open()
        _, err = process.communicate()
        assert process.returncode in (130, 143, 1) and "goes on from here" in err, err
        processing, log = unfinished(home)
        assert processing == [] and "INTERRUPTED" in log
        after_a_stop(env, home, slow)
    finally:
        held.open()
        process.kill()
        process.wait()
        EmbeddedPostgres(home).stop(mode="immediate")


DOCUMENTS = 40


@pytest.fixture
def held() -> Gate:
    return Gate()


@pytest.fixture
def hurry() -> threading.Event:
    made = threading.Event()
    made.set()
    return made


@pytest.fixture
def slow(held: Gate, hurry: threading.Event) -> Iterator[EmbeddingServer]:
    """An endpoint that answers when the test lets it, and takes its time unless it is in a hurry."""

    def behaviour(body: dict[str, Any]) -> Said:
        held.pass_through()
        hurry.wait(2.0)
        return well_behaved(body)

    with embedding_server() as server:
        server.behaviour = behaviour
        yield server


def prepare(env: dict[str, str], tmp_path: Path, server: EmbeddingServer) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for n in range(DOCUMENTS):
        (folder / f"d{n}.md").write_text(f"# Document {n}\n\n" + f"Words of number {n} and of no other. " * 20)
    options = {"base_url": server.url, "model": "m", "dimension": DIMENSION, "max_batch": 4, "concurrency": 2}
    chosen = [x for k, v in options.items() for x in ("--embedder-option", f"{k}={v}")]
    assert run(["space", "add", "m", "--embedder", "openai", *chosen], env).code == 0
    assert run(["source", "add", "m", "docs", "local_dir", f"path={folder}"], env).code == 0


def unfinished(home: Path) -> tuple[list[Any], set[str]]:
    """(tasks that somebody seems to work on, or that count a death; what the log knows)."""
    server = EmbeddedPostgres(home)
    try:
        with psycopg.connect(server.start()) as c:
            held = c.execute(
                "SELECT id, current_node FROM ingestion_task WHERE status = 'PROCESSING' OR claimed_by IS NOT NULL OR deaths > 0"
            )
            return held.fetchall(), {status for (status,) in c.execute("SELECT status FROM ingestion_node_log")}
    finally:
        server.stop_if_unused()


def after_a_stop(env: dict[str, str], home: Path, server: EmbeddingServer) -> None:
    """The next pass finishes, and no text was ever sent twice."""
    before = sum(server.sizes)
    assert 0 < before < DOCUMENTS
    done = run(["sync", "m", "--json"], env)
    assert done.code == 0 and done.json["unfinished"] == {}, done
    texts = [text for request in server.requests for text in request["input"]]
    assert len(texts) == len(set(texts)) == DOCUMENTS


def test_a_taken_port_is_refused_before_anything_starts(kb: Kb, home: Path) -> None:
    with socket.socket() as s:
        s.bind((up.HOST, 0))
        s.listen()
        ran = kb("up", "--port", s.getsockname()[1])
    assert ran.code == 2 and "--port" in ran.err
    assert not (home / "dagster").exists() and not (home / "up.lock").exists()


def test_the_manager_is_told_when_it_is_ready_and_when_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        tell_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    tell_manager("STOPPING=1")  # the manager is gone: nothing happens
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell_manager("READY=1")


def test_dagster_gets_the_packaged_configuration_and_keeps_it_current(tmp_path: Path) -> None:
    folder = up.dagster_home(tmp_path)
    packaged = (folder / "dagster.yaml").read_bytes()
    (folder / "dagster.yaml").write_text("old")
    up.dagster_home(tmp_path)
    assert (folder / "dagster.yaml").read_bytes() == packaged and packaged


def test_dagster_uses_the_database_that_the_url_names() -> None:
    url = "postgresql://me:p%40ss@db.example.com:6543/kb?sslmode=require"
    found = up.dagster_database(Settings(database_url=url))
    assert found == {
        "DAGSTER_PG_HOST": "db.example.com",
        "DAGSTER_PG_PORT": "6543",
        "DAGSTER_PG_USER": "me",
        "DAGSTER_PG_PASSWORD": "p@ss",
        "DAGSTER_PG_DB": "kb",
    }
    assert make_conninfo(url)
    assert up.dagster_database(Settings(database_url="postgresql:///x"))["DAGSTER_PG_PORT"] == "5432"


def test_a_child_that_outlived_its_kb_up_holds_the_lock(kb: Kb, home: Path, tmp_path: Path) -> None:
    with up._alone(home) as lock:
        child = start(
            "daemon", [sys.executable, "-c", "import signal\nsignal.pause()"], tmp_path / "log", dict(os.environ), keep=lock
        )
        up._remember(lock, [child])
    try:
        ran = kb("up", "--port", free_port(), "--service-port", free_port())
        assert ran.code == 2 and f"daemon {child.process.pid}" in ran.err
    finally:
        stop(child, 5.0)
    with up._alone(home):
        pass
