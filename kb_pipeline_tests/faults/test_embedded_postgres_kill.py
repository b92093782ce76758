"""kill -9 of the starter, of initdb, of the postmaster and of a user: the next start finds a whole server or makes one."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import kb_pipeline
from kb_pipeline.embedded_postgres import EmbeddedPostgres

START = """
import sys
from pathlib import Path
from kb_pipeline.embedded_postgres import EmbeddedPostgres
EmbeddedPostgres(Path(sys.argv[1])).start(progress=lambda line: print(line, flush=True))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / ".kb"
    EmbeddedPostgres(tmp_path / ".kb").stop(mode="immediate")


def starter(home: Path, until: str) -> subprocess.Popen[str]:
    """A process that starts the server, once it has said ``until``."""
    env = {**os.environ, "PYTHONPATH": str(Path(kb_pipeline.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(home)], text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for line in process.stdout:
        if until in line:
            return process
    raise AssertionError(f"the starter never said {until!r}")


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def postmaster(home: Path) -> int:
    return int((home / "postgres" / "data" / "postmaster.pid").read_text().split()[0])


def one(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchone()[0]


def test_kill_of_the_starter_while_it_creates_the_database(home: Path) -> None:
    kill(starter(home, until="creating"))
    assert one(EmbeddedPostgres(home).start(), "SELECT 1") == 1
    assert not (home / "postgres" / "data.partial").exists()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_kill_of_starter_and_initdb_in_the_middle(home: Path) -> None:
    process = starter(home, until="creating")
    partial = home / "postgres" / "data.partial"
    while not (partial / "PG_VERSION").exists() and not (home / "postgres" / "data").exists():
        os.sched_yield()
    kill(process)
    for pid in [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]:
        try:
            if os.fsencode(partial) in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended by itself
    assert partial.exists()
    assert not (home / "postgres" / "data").exists()
    assert one(EmbeddedPostgres(home).start(), "SELECT 1") == 1
    assert not partial.exists()


def test_kill_of_the_starter_before_the_server_is_ready(home: Path) -> None:
    kill(starter(home, until="starting"))
    first = EmbeddedPostgres(home).start()
    assert one(first, "SELECT 1") == 1
    assert EmbeddedPostgres(home).start() == first


def test_kill_of_a_user_does_not_keep_the_server_up(home: Path) -> None:
    user = starter(home, until="ready")
    embedded = EmbeddedPostgres(home)
    assert embedded.running()
    assert embedded.stop_if_unused() is False
    kill(user)
    assert embedded.running()
    assert embedded.stop_if_unused() is True


def test_kill_of_the_postmaster_under_load_keeps_every_committed_row(home: Path) -> None:
    embedded = EmbeddedPostgres(home)
    url = embedded.start()
    committed: list[int] = []
    enough = threading.Event()

    def load() -> None:
        try:
            with psycopg.connect(url, autocommit=True) as c:
                c.execute("CREATE TABLE t (n int PRIMARY KEY, text text)")
                for n in range(1_000_000):
                    c.execute("INSERT INTO t VALUES (%s, repeat('x', 1000))", [n])
                    committed.append(n)
                    if n == 300:
                        enough.set()
        except psycopg.OperationalError:
            pass
        finally:
            enough.set()

    writer = threading.Thread(target=load)
    writer.start()
    enough.wait()
    os.kill(postmaster(home), signal.SIGKILL)
    again = embedded.start()  # at once: zombies, orphans and their shared memory are still about
    writer.join()
    assert len(committed) > 300
    with psycopg.connect(again) as c:
        kept = {n for (n,) in c.execute("SELECT n FROM t").fetchall()}
    assert kept >= set(committed)
    assert len(kept) - len(committed) <= 1  # at most the one whose answer never came


def test_recycled_pid_is_neither_believed_nor_killed(home: Path) -> None:
    embedded = EmbeddedPostgres(home)
    embedded.start()
    data = home / "postgres" / "data"
    pid_file = data / "postmaster.pid"
    lines = pid_file.read_text().split("\n")
    embedded.stop(mode="immediate")
    # To PostgreSQL a process of the server's own account under the recorded pid looks like the server.
    account = data.stat().st_uid
    bystander = subprocess.Popen(["sleep", "600"], user=account if os.geteuid() == 0 else None)
    try:
        pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]))
        os.chown(pid_file, account, -1)
        assert not embedded.running()
        assert embedded.stop() is False
        assert one(embedded.start(), "SELECT 1") == 1
        assert bystander.poll() is None
        # And while the server runs: a pid file that names somebody else must not lead to a signal.
        own = pid_file.read_text()
        pid_file.write_text(own.replace(own.split("\n")[0], str(bystander.pid), 1))
        with pytest.raises(Exception, match="gave up"):
            embedded.stop(timeout_seconds=0.1)
        assert bystander.poll() is None
        pid_file.write_text(own)
        assert embedded.stop() is True
    finally:
        bystander.kill()
        bystander.wait()
