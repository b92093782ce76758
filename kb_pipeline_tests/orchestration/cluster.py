"""Dagster as people run it: a daemon, processes that run what it launches, and an embedding endpoint that holds them at work."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter
from psycopg.conninfo import conninfo_to_dict

import kb_pipeline
from kb_pipeline.cli import up
from kb_pipeline.orchestration.partitions import PARTITION_TAG, SPACE
from kb_pipeline.settings import Settings, as_environment
from kb_pipeline.store.database import Pool, run_of, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import take_snapshot
from kb_pipeline_tests.adapters.embedding_server import EmbeddingServer, Said, embedding_server, well_behaved
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.fakes import FakedApp

ROOT = Path(kb_pipeline.__file__).parents[1]
DEFINITIONS = "kb_pipeline.orchestration.definitions"
EMBED_BATCH, CLAIM_BATCH, LEASE_SECONDS = 4, 5, 5
LONGEST_WAIT = 180.0  # of a machine that does much else
T = TypeVar("T")


def until(what: str, look: Callable[[], T]) -> T:
    """The first truthy answer. What other processes write to a database can only be looked at."""
    end = time.monotonic() + LONGEST_WAIT
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {LONGEST_WAIT:.0f} s in vain: {what}")
        threading.Event().wait(0.1)
    return found


class Doors:
    """Holds every embedding request with a certain word in it, until the door of this word is opened."""

    def __init__(self, server: EmbeddingServer) -> None:
        self.server = server
        self._closed: dict[str, threading.Event] = {}
        self._came: Counter[str] = Counter()
        server.behaviour = self._answer

    def close(self, word: str) -> None:
        self._closed[word] = threading.Event()

    def open(self, word: str) -> None:
        self._closed.pop(word).set()

    def came(self, word: str) -> int:
        """Requests that were held here."""
        return self._came[word]

    def texts(self, word: str) -> Counter[str]:
        """How often each text of this word was asked for."""
        return Counter(t for body in self.server.requests for t in body.get("input", ()) if word in t)

    def _answer(self, body: dict[str, Any]) -> Said:
        for word, door in list(self._closed.items()):
            if any(word in text for text in body["input"]):
                self._came[word] += 1
                door.wait(LONGEST_WAIT)
        return well_behaved(body)


class Cluster:
    """``instance`` is the one that the daemon uses. Processes live in sessions of their own and end with it."""

    def __init__(
        self, folder: Path, app: FakedApp, instance: DagsterInstance, doors: Doors, environment: dict[str, str]
    ) -> None:
        self.folder, self.app, self.instance, self.doors, self.environment = folder, app, instance, doors, environment
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_daemon(self) -> None:
        self.start("daemon", sys.executable, "-m", "dagster._daemon", "run", "-m", DEFINITIONS)

    def start_here(self) -> None:
        """As ``kb up`` does: runs are processes of this machine. Each time with a code server at a place of its own."""
        folder = Path(mkdtemp(dir=self.folder))
        code, where = up.code_server(folder)
        self.start("code", *code)
        until("the code server is there", lambda: up.CODE_READY in (self.folder / "code.log").read_text(encoding="utf-8"))
        self.start("daemon", sys.executable, "-m", "dagster._daemon", "run", *where)

    def switch_off(self) -> None:
        """The machine."""
        for name in list(self.processes):
            self.kill(name)

    def kill(self, name: str) -> None:
        """With all that it has started, at once."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for name, process in list(self.processes.items()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # --- a space -----------------------------------------------------------------------------------------------------------

    def add_space(self, key: str, documents: int) -> Space:
        """A space whose documents wait, found and not fetched. Each has a text of its own with the space's key in it."""
        folder = self.folder / key
        folder.mkdir()
        for n in range(documents):
            file = folder / f"d{n:03}.md"
            file.write_text(f"# Document {n}\n\nWhat {key} has to say in its document {n}.\n", encoding="utf-8")
            os.utime(file, (1e9, 1e9))  # not so young that the next walk would look at it again
        options: dict[str, Any] = {
            "base_url": self.doors.server.url,
            "model": "fake",
            "dimension": 8,
            "max_batch": EMBED_BATCH,
            "concurrency": 1,
            "timeout_seconds": 2 * LONGEST_WAIT,
        }
        space = self.app.add_space(key, embedder="openai", embedder_options=options)
        self.app.add_source(space, "docs", "local_dir", {"path": str(folder)})
        self.instance.add_dynamic_partitions(SPACE, [key])
        assert not take_snapshot(self.app.engine, space).errors
        return space

    def rows(self, query: str, space: Space) -> list[Any]:
        with transaction(self.app.pool) as c:
            return c.execute(query, {"space": space.id}).fetchall()

    def owners(self, space: Space) -> set[str]:
        query = "SELECT DISTINCT claimed_by FROM ingestion_task WHERE space_id = %(space)s AND status = 'PROCESSING'"
        return {row.claimed_by for row in self.rows(query, space)}

    def published(self, space: Space) -> int:
        return len(self.rows("SELECT doc_id FROM kb_publication WHERE space_id = %(space)s", space))

    def runs(self, space: Space) -> list[DagsterRun]:
        return list(self.instance.get_runs(RunsFilter(tags={PARTITION_TAG: space.key})))

    def status(self, run_id: str) -> DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def after_kill(self, space: Space, owner: str) -> tuple[float, float]:
        """When Dagster knew that the owner's run had failed, and when another one had taken up its work (monotonic)."""
        run_id = run_of(owner)
        at: dict[str, float] = {}

        def both() -> bool:
            if "known" not in at and self.status(run_id) is DagsterRunStatus.FAILURE:
                at["known"] = time.monotonic()
            others = {run_of(o) for o in self.owners(space)} - {run_id}
            if "continued" not in at and (others or self.published(space)):
                at["continued"] = time.monotonic()
            return len(at) == 2

        until("the dead run is shown as failed, and another one works", both)
        return at["known"], at["continued"]

    def log(self, run_id: str) -> str:
        return "\n".join(e.user_message or e.message for e in self.instance.all_logs(run_id))

    def check(self, space: Space, documents: int, *, repeated: int = 0) -> None:
        """Each document is published, and once; at most ``repeated`` texts were embedded a second time."""
        published = self.rows("SELECT doc_id, version FROM kb_publication WHERE space_id = %(space)s", space)
        assert len({row.doc_id for row in published}) == len(published) == documents
        states = self.rows("SELECT DISTINCT status FROM ingestion_task WHERE space_id = %(space)s", space)
        assert [row.status for row in states] == ["SUCCESS"]
        texts = self.doors.texts(space.key)
        assert len(texts) == documents
        assert texts.total() - documents <= repeated


@contextmanager
def cluster(
    server: Server, pool: Pool, url: str, folder: Path, instance_file: Path, *, split: bool = False, **environment: str
) -> Iterator[Cluster]:
    """Looks for dead runs every two seconds instead of every thirty."""
    settings = Settings(
        home=folder / ".kb",
        database_url=url,
        lease_seconds=LEASE_SECONDS,
        batch_size=CLAIM_BATCH,
        fanout_tasks=10,
        fanout_runs=3,
        split_nodes=split,
    )
    home = folder / "dagster"
    home.mkdir()
    text = instance_file.read_text(encoding="utf-8")
    assert "poll_interval_seconds: 30" in text
    (home / "dagster.yaml").write_text(text.replace("poll_interval_seconds: 30", "poll_interval_seconds: 2"), encoding="utf-8")
    with ExitStack() as stack:
        where = conninfo_to_dict(stack.enter_context(server.database()))
        names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "DB": "dbname"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {f"DAGSTER_PG_{name}": str(where[key]) for name, key in names.items()} | environment
        own |= {"DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": path, "DAGSTER_DISABLE_TELEMETRY": "1"}
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in own.items():
            patch.setenv(name, value)
        instance = stack.enter_context(DagsterInstance.from_config(str(home)))
        doors = Doors(stack.enter_context(embedding_server()))
        app = FakedApp(settings, pool, migrations()[-1].version)
        made = Cluster(folder, app, instance, doors, {**os.environ, **as_environment(settings), **own})
        stack.callback(made.stop)
        yield made
