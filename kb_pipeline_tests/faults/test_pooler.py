"""Behind PgBouncer in transaction mode, where a session is nobody's: migrations, passes, searches, exclusion, deletion."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.search import search
from kb_pipeline.settings import Settings
from kb_pipeline.store.database import Pool, open_pool
from kb_pipeline.store.migrations import migrate, migrations
from kb_pipeline.sync import sync_space
from kb_pipeline.versions import rollback
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.faults.faulty import assert_true, hand_lease_to_another_process, recover
from kb_pipeline_tests.flow.scenario import Flow, article

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
SERVER_CONNECTIONS = 3  # fewer than clients: they are shared from one transaction to the next

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)")

CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server_port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 100
{account}
"""


@pytest.fixture(scope="module")
def database_url(embedded_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A fresh database that is reached through the pooler, and migrated through it."""
    folder = tmp_path_factory.mktemp("bouncer")
    with embedded_server.database() as direct:
        parts = urlsplit(direct)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        users = folder / "users.txt"
        users.write_text(f'"{parts.username}" "{parts.password}"\n')
        account = "user = nobody" if os.geteuid() == 0 else ""  # it refuses to run as root
        ini = folder / "pgbouncer.ini"
        ini.write_text(
            CONFIGURATION.format(server_port=parts.port, port=port, users=users, size=SERVER_CONNECTIONS, account=account)
        )
        process = subprocess.Popen([str(PROGRAM), "-q", str(ini)], stderr=subprocess.DEVNULL)
        try:
            url = direct.replace(f":{parts.port}/", f":{port}/")
            _await(url, process)
            with open_pool(url, max_size=2) as pool:
                assert migrate(pool) == migrations()[-1].version
            yield url
        finally:
            process.terminate()
            process.wait()


def _await(url: str, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as e:
            if "refused" not in str(e):
                raise
    raise AssertionError(f"pgbouncer ended with {process.returncode}")


@pytest.fixture
def flow(make_flow: Callable[..., Flow]) -> Flow:
    return make_flow({f"{n}.md": article(n, 2) for n in "abcdefgh"}, batch_size=2)


def test_sessions_are_shared_here(pool: Pool) -> None:
    """Otherwise this file would prove nothing."""
    with ExitStack() as held:
        clients = [held.enter_context(pool.connection()) for _ in range(SERVER_CONNECTIONS + 2)]
        backends = set()
        for c in clients:
            backends.add(c.execute("SELECT pg_backend_pid() AS pid").fetchone().pid)  # type: ignore[union-attr]
            c.commit()
    assert len(backends) <= SERVER_CONNECTIONS


def test_load_edit_move_delete_and_rollback(flow: Flow) -> None:
    assert flow.sync().ingest.published == 8
    assert_true(flow)
    asked = len(flow.embedder.texts)
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "novelty"))
    flow.memory.rename("b.md", "moved.md")
    flow.memory.remove("c.md")
    flow.sync()
    assert flow.showing("novelty") == {"a.md"} and flow.document("c.md") is None
    assert len(flow.embedder.texts) == asked + 1
    assert_true(flow)
    rollback(flow.engine, flow.space, flow.document("a.md").id, 1)
    flow.sync()
    assert flow.showing("novelty") == set()
    assert search(flow.engine, flow.space, "aword1x7", k=1).hits[0].external_id == "a.md"


def test_workers_and_searches_side_by_side(flow: Flow) -> None:
    flow.walk()
    with ExitStack() as crowd:
        ends = [crowd.enter_context(flow.beside(flow.ingest)) for _ in range(4)]
        looks = [crowd.enter_context(flow.beside(lambda: flow.hits("aword1x7"))) for _ in range(4)]
    assert [end[0] for end in (*ends, *looks) if isinstance(end[0], BaseException)] == []
    assert sum(end[0].published for end in ends) == 8
    assert_true(flow)


def test_two_syncs_of_one_source_exclude_each_other(flow: Flow) -> None:
    flow.memory.gate.close()
    with flow.beside(flow.sync) as ended:
        flow.memory.gate.await_caller()
        hand_lease_to_another_process(flow)
        assert flow.sync().errors["memory"].code == "source_busy"
        flow.memory.gate.open()
    assert ended[0].ingest.published == 8
    assert_true(flow)


def test_a_large_space_gets_its_own_shard_and_index(make_flow: Callable[..., Flow]) -> None:
    """CREATE INDEX CONCURRENTLY, beside writers, from a connection that is only borrowed."""
    flow = make_flow({f"{n}.md": article(f"own{n}", 3) for n in "abcdefgh"}, own_shard_chunks=10)
    flow.sync()
    (shard,) = flow.execute("SELECT h.shard FROM kb_shard h WHERE h.space_id = %(space)s AND h.state = 'OWNED'")
    name = f"kb_vector_m{flow.space.model_id}_{shard.shard}_hnsw"
    built = "SELECT i.indisvalid AS valid FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid WHERE c.relname = %(name)s"
    assert [r.valid for r in flow.execute(built, name=name)] == [True]
    flow.memory.put("a.md", article("owna", 3).replace("ownaword1x7", "novelty"))
    flow.sync()
    assert flow.showing("novelty") == {"a.md"}
    assert_true(flow)


def test_cleaning_up_and_deleting_the_space(flow: Flow) -> None:
    flow.sync()
    flow.memory.put("a.md", article("a", 1, tag="t"))
    flow.sync()
    recover(flow)
    purge(flow.engine, flow.space, keep=timedelta(0))
    flow.assert_whole()
    assert set(delete_space(flow.engine, flow.space).values()) == {0}
    assert {k: n for k, n in flow.rows().items() if n and k != "kb_embedding"} == {}


def test_the_opened_application_works_through_it(settings: Settings, database_url: str, tmp_path: Path) -> None:
    """As people have it: the URL in KB_DATABASE_URL and nothing else."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(article("opened", 2))
    for published in (1, 0):
        with open_app(settings) as app:
            space = app.space("opened") if published == 0 else app.add_space("opened")
            if published:
                app.add_source(space, "docs", "local_dir", {"path": str(tmp_path / "docs")})
            assert sync_space(app.engine, space).ingest.published == published
            assert search(app.engine, space, "openedword1x7", k=1).hits[0].external_id == "a.md"
