"""PostgreSQL restarts, ends connections at random, or dies between COMMIT and its answer: nothing is lost, nothing done twice."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psycopg
import pytest

import kb_pipeline
from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.errors import KbError, Transient
from kb_pipeline.settings import Settings
from kb_pipeline.store import embeddings
from kb_pipeline.store.database import ConnectionLost, Pool, open_pool, retried, transaction
from kb_pipeline.store.migrations import migrate, migrations
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, Gate, MemoryBlobs, MemorySource
from kb_pipeline_tests.faults.commit_cutter import CommitCutter
from kb_pipeline_tests.faults.faulty import assert_true, quietly, recover
from kb_pipeline_tests.flow.scenario import Flow, article

NAMES = "abcdefgh"
NOISE = ("Traceback", "kb: unexpected")


# --- a server that restarts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that may be stopped: nobody else's."""
    home = tmp_path_factory.mktemp("restarted") / ".kb"
    postgres = EmbeddedPostgres(home)
    pool = open_pool(postgres.start(), max_size=1)
    migrate(pool)
    pool.close()
    yield postgres
    postgres.stop(mode="immediate")


@pytest.fixture
def restarted(own_server: EmbeddedPostgres, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Flow]:
    """A space on that server, listed by nobody yet, with the index that people get."""
    pool = open_pool(own_server.url(), max_size=8)
    settings = Settings(home=tmp_path / ".kb", embedder="hashing", retry_base_seconds=0.0)
    app = FakedApp(settings, pool, migrations()[-1].version, embedder=CountingEmbedder(), blobs=MemoryBlobs())
    key = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60]
    memory = MemorySource({f"{key}-{n}.md": article(f"{key}{n}".replace("-", ""), 2) for n in NAMES})
    space = app.add_space(key)
    yield Flow(app, space, memory, app.add_fake_source(space, memory))
    pool.close()


def _gates(flow: Flow) -> dict[str, Gate]:
    return {"listing": flow.memory.gate, "embedding": flow.embedder.gate}


@pytest.mark.parametrize("place", ["listing", "embedding"])
def test_a_restart_between_two_transactions_is_not_noticed(restarted: Flow, own_server: EmbeddedPostgres, place: str) -> None:
    gate = _gates(restarted)[place]
    gate.close()
    with restarted.beside(restarted.sync) as ended:
        gate.await_caller()
        own_server.stop(mode="immediate")
        own_server.start()
        gate.open()
    assert not isinstance(ended[0], BaseException), ended[0]
    assert (ended[0].errors, ended[0].failed, ended[0].ingest.published) == ({}, 0, 8)
    assert_true(restarted)


def test_work_waits_for_a_server_that_comes_back(restarted: Flow, own_server: EmbeddedPostgres) -> None:
    restarted.embedder.gate.close()
    pool = restarted.app.pool
    with restarted.beside(restarted.sync) as ended:
        restarted.embedder.gate.await_caller()
        own_server.stop(mode="immediate")
        restarted.embedder.gate.open()
        while not pool.get_stats().get("requests_waiting"):
            os.sched_yield()
        own_server.start()
    assert not isinstance(ended[0], BaseException), ended[0]
    assert (ended[0].failed, ended[0].ingest.published) == (0, 8)
    assert_true(restarted)


def test_a_server_that_stays_away_ends_the_pass_with_what_to_do_and_the_next_completes_it(
    restarted: Flow, own_server: EmbeddedPostgres
) -> None:
    restarted.embedder.gate.close()
    restarted.app.pool.timeout = 0.2
    with restarted.beside(restarted.sync) as ended:
        restarted.embedder.gate.await_caller()
        own_server.stop(mode="immediate")
        restarted.embedder.gate.open()
    assert isinstance(ended[0], Transient)
    assert ended[0].code == "database_down"
    assert "check that its server runs" in ended[0].message
    own_server.start()
    restarted.app.pool.timeout = 30.0
    restarted.expire_leases()
    report = restarted.sync()
    assert report.failed == 0
    restarted.assert_whole()
    assert {e for e, *_ in restarted.chunks()} == set(restarted.memory.items)


def test_kb_sync_survives_a_restart_or_says_so_and_the_next_one_completes_it(
    own_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for n in range(150):
        (folder / f"{n:03}.md").write_text(article(f"restart{n}", 2))
    settings = {"KB_HOME": str(tmp_path / ".kb"), "KB_DATABASE_URL": own_server.url(), "KB_EMBEDDER": "hashing"}
    _kb(settings, "space", "add", "by-command").communicate()
    _kb(settings, "source", "add", "by-command", "docs", "local_dir", f"path={folder}").communicate()
    first = _kb(settings, "sync", "by-command")
    with psycopg.connect(own_server.url(), autocommit=True) as c:
        published = "SELECT count(*) FROM kb_publication p JOIN kb_space s ON s.id = p.space_id WHERE s.key = 'by-command'"
        while not c.execute(published).fetchone()[0] and first.poll() is None:  # type: ignore[index]
            os.sched_yield()
    own_server.stop(mode="immediate")
    own_server.start()
    _, said = first.communicate()
    assert not any(noise in said for noise in NOISE), said
    assert first.returncode in (0, 1, 3)
    assert first.returncode == 0 or "database" in said or "vector index" in said
    with psycopg.connect(own_server.url(), autocommit=True) as c:
        c.execute("UPDATE ingestion_task SET next_attempt_at = '-infinity' WHERE status = 'FAILED'")
        second = _kb(settings, "sync", "by-command")
        _, said = second.communicate()
        assert second.returncode == 0, said
        assert c.execute(published).fetchone() == (150,)


def _kb(settings: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    env = {k: v for k, v in os.environ.items() if not k.startswith("KB_")} | settings
    env["PYTHONPATH"] = str(Path(kb_pipeline.__file__).parents[1])
    program = "import sys\nfrom kb_pipeline.cli.main import main\nsys.exit(main())"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, env=env, **pipes)


# --- connections that end ---------------------------------------------------------------------------------------------

CUT_ONE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = %s ORDER BY random() LIMIT 1
"""


def test_a_connection_that_was_cut_while_it_was_idle_is_replaced(database_url: str) -> None:
    pool = open_pool(database_url, max_size=1, application="idle")
    try:
        for _ in range(3):
            with transaction(pool) as c:
                pid = c.info.backend_pid
            with psycopg.connect(database_url, autocommit=True) as killer:
                killer.execute(CUT_ONE, ("idle",))
                while killer.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone():
                    pass
            with transaction(pool) as c:
                assert c.info.backend_pid != pid
    finally:
        pool.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_connections_that_end_at_random_lose_nothing_and_repeat_nothing(
    make_flow: Callable[..., Flow], database_url: str, seed: int
) -> None:
    flow = make_flow({f"{n}.md": article(f"{n}{seed}", 2) for n in NAMES}, max_retries=100, batch_size=3, page_size=3)
    rng, stop, cut = random.Random(seed), threading.Event(), []

    def cut_connections() -> None:
        with psycopg.connect(database_url, autocommit=True) as killer:
            while not stop.wait(rng.uniform(0.0, 0.15)):
                cut.extend(killer.execute(CUT_ONE, ("kb-test",)).fetchall())

    with flow.beside(cut_connections) as ended:
        try:
            for n in range(6):
                name = f"{rng.choice(NAMES)}.md"
                if name in flow.memory.items and n % 3 == 2:
                    flow.memory.remove(name)
                else:
                    flow.memory.put(name, article(f"{name[0]}{seed}", rng.randint(1, 3), tag=rng.choice("xyz")))
                quietly(flow.sync)
        finally:
            stop.set()
    assert ended == [None]
    assert len(cut) > 5
    flow.approve(8)
    flow.expire_leases()
    recover(flow)
    assert_true(flow)


# --- the answer to COMMIT is lost -------------------------------------------------------------------------------------


@pytest.fixture
def cutter(database_url: str) -> Iterator[CommitCutter]:
    cutter = CommitCutter(database_url)
    yield cutter
    cutter.close()


@pytest.fixture
def cut_pool(cutter: CommitCutter) -> Iterator[Pool]:
    pool = open_pool(cutter.url, max_size=8)
    yield pool
    pool.close()


@pytest.fixture
def cut_flow(settings: Settings, cut_pool: Pool) -> Callable[[Flow], Flow]:
    """The same space and the same ports, through the cutter."""

    def made(flow: Flow) -> Flow:
        app = FakedApp(settings, cut_pool, migrations()[-1].version, embedder=flow.embedder, blobs=flow.blobs)
        app.connectors[flow.source.id] = flow.memory
        return Flow(app, flow.space, flow.memory, flow.source)

    return made


@pytest.mark.parametrize(
    ("fate", "idempotent", "rows"), [("done", False, 1), ("undone", False, 0), ("done", True, 2), ("undone", True, 1)]
)
def test_a_lost_commit_is_repeated_only_where_that_is_harmless(
    cutter: CommitCutter, cut_pool: Pool, pool: Pool, fate: Literal["done", "undone"], idempotent: bool, rows: int
) -> None:
    with transaction(pool) as c:
        c.execute("CREATE TABLE IF NOT EXISTS written (n int)")
        c.execute("TRUNCATE written")

    def write() -> None:
        with transaction(cut_pool) as c:
            c.execute("INSERT INTO written VALUES (1)")

    cutter.cut(0, fate)
    if idempotent:
        retried(write, idempotent=True)
    else:
        with pytest.raises(ConnectionLost, match="check that its server runs") as lost:
            retried(write)
        assert (lost.value.in_commit, lost.value.code) == (True, "database_down")
    with transaction(pool) as c:
        assert len(c.execute("SELECT n FROM written").fetchall()) == rows


def test_a_connection_lost_before_its_commit_is_tried_again(pool: Pool) -> None:
    tries = []

    def write() -> int:
        with transaction(pool) as c:
            tries.append(c.info.backend_pid)
            if len(tries) < 3:
                with psycopg.connect(pool.conninfo, autocommit=True) as killer:
                    killer.execute("SELECT pg_terminate_backend(%s)", (tries[-1],))
            return int(c.execute("SELECT 7 AS n").fetchone().n)  # type: ignore[union-attr]

    assert retried(write) == 7
    assert len(set(tries)) == 3


def test_a_claim_on_texts_whose_commit_was_not_answered_is_ours_all_the_same(
    make_flow: Callable[..., Flow], cut_flow: Callable[[Flow], Flow], cutter: CommitCutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the work would wait for the end of its own lease."""
    flow = make_flow({f"{n}.md": article(f"claim{n}", 1) for n in NAMES})
    real, calls = embeddings.claim, []

    def claim(*arguments: object) -> object:
        if not calls:
            cutter.cut(0, "done")
        calls.append(real(*arguments))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(embeddings, "claim", claim)
    report = cut_flow(flow).sync()
    assert cutter.has_cut and len(calls) == 2
    assert (report.failed, report.ingest.published) == (0, 8)
    assert_true(flow)


STRIDE = 8


@pytest.mark.parametrize(("fate", "first"), [("done", 0), ("undone", 4)])
def test_the_answer_to_any_commit_of_a_pass_may_be_lost(
    make_flow: Callable[..., Flow],
    cut_flow: Callable[[Flow], Flow],
    cutter: CommitCutter,
    fate: Literal["done", "undone"],
    first: int,
) -> None:
    """Each pass has a document to add, one to change and one to delete."""
    flow = make_flow({f"{n}.md": article(f"{fate}{n}", 2) for n in NAMES})
    flow.sync()
    cut = cut_flow(flow)
    n, reached = first, True
    while reached:
        flow.memory.put(f"new{n}.md", article(f"{fate}new{n}", 2))
        flow.memory.put("a.md", article(f"{fate}a", 2, tag=f"t{n}x"))
        flow.memory.remove(f"new{n - STRIDE}.md" if n > first else "h.md")
        cutter.cut(n, fate)
        ended = _end_of(cut.sync)
        reached = cutter.has_cut
        assert not reached or ended is None or isinstance(ended, KbError), ended
        flow.expire_leases()  # what this process has claimed and never heard of; at its end that is known at once
        recover(flow)
        assert_true(flow)
        n += STRIDE
    assert n > 30


def _end_of(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as e:
        return e
    return None
