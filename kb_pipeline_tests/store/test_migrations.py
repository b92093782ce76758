"""Migrations: at once, again, too new, changed, without rights."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import kb_pipeline
from kb_pipeline.errors import Fatal, Misconfigured
from kb_pipeline.store.database import Pool, open_pool
from kb_pipeline.store.migrations import migrate, migrations
from kb_pipeline_tests.conftest import Server

NEWEST = migrations()[-1].version
MIGRATE = """
import sys
from kb_pipeline.store.database import open_pool
from kb_pipeline.store.migrations import migrate
pool = open_pool(sys.argv[1], max_size=1)
print("ready", flush=True)
sys.stdin.readline()
print(migrate(pool), flush=True)
pool.close()
"""


@pytest.fixture
def empty(server: Server) -> Iterator[Pool]:
    with server.database() as url:
        pool = open_pool(url, max_size=2)
        yield pool
        pool.close()


@pytest.fixture
def migrated(server: Server) -> Iterator[Pool]:
    with server.database(server.template) as url:
        pool = open_pool(url, max_size=2)
        yield pool
        pool.close()


def test_four_processes_at_once_migrate_an_empty_database_once(server: Server) -> None:
    environment = {"PYTHONPATH": str(Path(kb_pipeline.__file__).parents[1])}
    with server.database() as url:
        command = [sys.executable, "-c", MIGRATE, url]
        started = [
            subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(4)
        ]
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        ended = [(*process.communicate(), process.returncode) for process in started]
        assert [(out.strip(), code) for out, _, code in ended] == [(str(NEWEST), 0)] * 4, ended
        with psycopg.connect(url) as c:
            assert [v for (v,) in c.execute("SELECT version FROM kb_schema ORDER BY 1")] == [m.version for m in migrations()]
            assert c.execute("SELECT count(*) FROM kb_shard").fetchone() == (40,)


def test_migrating_again_changes_nothing(migrated: Pool) -> None:
    with migrated.connection() as c:
        before = c.execute("SELECT version, sha256, applied_at FROM kb_schema ORDER BY 1").fetchall()
    assert migrate(migrated) == NEWEST
    with migrated.connection() as c:
        assert c.execute("SELECT version, sha256, applied_at FROM kb_schema ORDER BY 1").fetchall() == before


def test_a_database_that_stopped_half_way_is_brought_up_to_date(empty: Pool) -> None:
    assert migrate(empty, migrations()[:2]) == 2
    assert migrate(empty) == NEWEST
    with empty.connection() as c:
        assert c.execute("SELECT count(*) AS n FROM kb_schema").fetchone().n == NEWEST  # type: ignore[union-attr]


def test_a_step_that_fails_leaves_nothing_of_itself(empty: Pool) -> None:
    steps = migrations()
    broken = [*steps[:2], replace(steps[2], text=steps[2].text + "\nSELECT 1 / 0;")]
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty, broken)
    with empty.connection() as c:
        row = c.execute("SELECT max(version) AS newest, to_regclass('kb_chunk') AS chunks FROM kb_schema").fetchone()
        assert (row.newest, row.chunks) == (2, None)  # type: ignore[union-attr]
    assert migrate(empty) == NEWEST


@pytest.mark.parametrize("ours", [NEWEST, NEWEST + 1], ids=["nothing to do", "with a step to do"])
def test_a_newer_database_is_refused_with_what_to_install(migrated: Pool, ours: int) -> None:
    with migrated.connection() as c:
        c.execute("INSERT INTO kb_schema (version, name, sha256) VALUES (%s, 'future', 'x')", [NEWEST + 5])
    steps = [*migrations(), replace(migrations()[-1], version=NEWEST + 1, name="next", text="SELECT 1")][:ours]
    with pytest.raises(Fatal, match=f"schema {NEWEST + 5}, this program knows up to {ours}: install the newer") as e:
        migrate(migrated, steps)
    assert e.value.code == "schema_newer"


@pytest.mark.parametrize("number", [0, NEWEST - 1])
def test_a_file_that_was_changed_after_it_ran_is_refused_by_its_name(migrated: Pool, number: int) -> None:
    steps = migrations()
    steps[number] = replace(steps[number], text=steps[number].text + "\n-- changed")
    steps.append(replace(steps[-1], version=NEWEST + 1, name="next", text="CREATE TABLE must_not_be (n int)"))
    with pytest.raises(Fatal, match=f"{number + 1:04d}_{steps[number].name} was changed") as e:
        migrate(migrated, steps)
    assert e.value.code == "schema_differs"
    with migrated.connection() as c:
        assert c.execute("SELECT to_regclass('must_not_be') AS made").fetchone().made is None  # type: ignore[union-attr]


@contextmanager
def without_rights_on_the_schema(url: str) -> Iterator[str]:
    """The URL of a role that may connect and read. Where we may make no role it is ours, its rights taken away."""
    role = sql.Identifier(f"guest_{conninfo_to_dict(url)['dbname']}")
    with psycopg.connect(url, autocommit=True) as c:
        may_make_roles = c.execute("SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").fetchone()
        if may_make_roles != (True,):
            c.execute("REVOKE CREATE ON SCHEMA public FROM pg_database_owner")
            yield url
            return
        c.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'guest'").format(role))
        try:
            c.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}").format(role))
            yield make_conninfo(url, user=role.as_string().strip('"'), password="guest")
        finally:
            c.execute(sql.SQL("DROP OWNED BY {}").format(role))
            c.execute(sql.SQL("DROP ROLE {}").format(role))


def test_a_role_that_may_not_create_is_told_which_right_is_missing(empty: Pool) -> None:
    with without_rights_on_the_schema(empty.conninfo) as url:
        pool = open_pool(url, max_size=1)
        with pytest.raises(
            Misconfigured, match="may not create tables: permission denied for schema public. Grant CREATE"
        ) as e:
            migrate(pool)
        pool.close()
    assert e.value.code == "missing_right"


def test_a_migrated_database_is_opened_by_a_role_that_may_not_create(migrated: Pool) -> None:
    with without_rights_on_the_schema(migrated.conninfo) as url:
        pool = open_pool(url, max_size=1)
        assert migrate(pool) == NEWEST
        pool.close()


def test_the_schema_uses_nothing_of_an_extension(migrated: Pool) -> None:
    query = """SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
               JOIN pg_depend d ON d.classid = 'pg_type'::regclass AND d.objid = a.atttypid AND d.deptype = 'e'
               WHERE c.relnamespace = 'public'::regnamespace AND (c.relname LIKE 'kb%' OR c.relname LIKE 'ingestion%')"""
    with migrated.connection() as c:
        assert c.execute(query).fetchall() == []


def test_a_server_that_does_not_answer_is_named_without_the_password() -> None:
    with pytest.raises(Fatal, match="database unreachable.*KB_DATABASE_URL") as e:
        open_pool("postgresql://kb:s3cret@127.0.0.1:1/kb")
    assert e.value.code == "database_down"
    assert "s3cret" not in e.value.message
