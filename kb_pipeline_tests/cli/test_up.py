"""``kb up`` for real, once; and how it treats its children."""

import os
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from psycopg.conninfo import make_conninfo

from kb_pipeline.cli import processes, up
from kb_pipeline.cli.processes import Child, start, stop, wait_until_ready
from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.errors import Fatal
from kb_pipeline.settings import Settings
from kb_pipeline_tests.cli.conftest import CODE, Kb, environment, run, spawn

definitions = CODE / "kb_pipeline" / "orchestration" / "definitions.py"
needs_dagster = pytest.mark.skipif(
    not definitions.is_file() or find_spec("dagster_webserver") is None,
    reason="needs kb_pipeline.orchestration and dagster-webserver",
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind((up.HOST, 0))
        return int(s.getsockname()[1])


@pytest.fixture
def child_of(tmp_path: Path) -> "type[Child]":
    def make(code: str) -> Child:
        keep = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            return start("child", [sys.executable, "-c", code], tmp_path / "child.log", dict(os.environ), keep=keep)
        finally:
            os.close(keep)

    return make  # type: ignore[return-value]


@needs_dagster
@pytest.mark.slow
def test_up_serves_the_web_ui_and_stops_everything_in_order(tmp_path: Path) -> None:
    home, port = tmp_path / ".kb", str(free_port())
    env = environment(KB_HOME=str(home))
    process = spawn(["up", "--port", port], env)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in said, process.communicate()
        assert "dagster_webserver_version" in httpx.get(f"http://127.0.0.1:{port}/server_info", trust_env=False).json()
        assert run(["init", "--json"], env).json["home"] == str(home)
        assert EmbeddedPostgres(home).running(), "another command must leave the database alone"
        taken = run(["up", "--port", port], env)
        assert taken.code == 2 and f"port {port} is not free" in taken.err
        second = run(["up", "--port", str(free_port())], env)
        assert second.code == 2 and "runs already" in second.err and str(process.pid) in second.err
        assert (home / "dagster" / "dagster.yaml").is_file()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 0, err
        order = [err.index(words) for words in ("webserver  stopped", "daemon     stopped", "database   left")]
        assert order == sorted(order)
        assert not EmbeddedPostgres(home).running()
    finally:
        process.kill()
        process.wait()
        EmbeddedPostgres(home).stop(mode="immediate")


def test_a_taken_port_is_refused_before_anything_starts(kb: Kb, home: Path) -> None:
    with socket.socket() as s:
        s.bind((up.HOST, 0))
        s.listen()
        ran = kb("up", "--port", s.getsockname()[1])
    assert ran.code == 2 and "--port" in ran.err
    assert not (home / "dagster").exists() and not (home / "up.lock").exists()


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


def test_a_child_that_dies_is_reported_with_the_end_of_its_own_log(tmp_path: Path, child_of) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "child.log").write_text("what an earlier one said\n")
    child = child_of("print('cannot go on'); raise SystemExit(7)")
    with pytest.raises(Fatal) as e:
        wait_until_ready(child, [child], "never said", threading.Event())
    assert "exit code 7" in e.value.message and "cannot go on" in e.value.message and "earlier" not in e.value.message


def test_ready_is_what_the_child_says_not_what_an_earlier_one_said(tmp_path: Path, child_of) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "child.log").write_text("ready\n")
    child, stopped = child_of("import signal\nprint('here', flush=True)\nsignal.pause()"), threading.Event()
    try:
        assert wait_until_ready(child, [child], "here", stopped)
        stopped.set()
        assert not wait_until_ready(child, [child], "ready", stopped)
    finally:
        stop(child)
    assert child.process.returncode == -signal.SIGTERM


def test_a_child_that_ignores_us_is_killed_with_what_it_started(
    tmp_path: Path, child_of, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(processes, "GROUP_SECONDS", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    grandchild = f"{deaf}f = open({str(pipe)!r}, 'w')\nprint('both', flush=True)\nsignal.pause()"
    child = child_of(f"{deaf}import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {grandchild!r}])\nsignal.pause()")
    with pipe.open() as end:  # opens when the grandchild opens it, ends when the last process that has it is dead
        assert wait_until_ready(child, [child], "both", threading.Event())
        stop(child)
        assert end.read() == ""
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_outlived_its_kb_up_holds_the_lock(kb: Kb, home: Path, tmp_path: Path) -> None:
    with up._alone(home) as lock:
        child = start(
            "daemon", [sys.executable, "-c", "import signal\nsignal.pause()"], tmp_path / "log", dict(os.environ), keep=lock
        )
        up._remember(lock, [child])
    try:
        ran = kb("up", "--port", free_port())
        assert ran.code == 2 and f"daemon {child.process.pid}" in ran.err
    finally:
        stop(child)
    with up._alone(home):
        pass
