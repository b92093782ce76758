"""Dagster's storage keeps its connections, and does not notice when the server ends one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dagster import DagsterInstance
from sqlalchemy import event

from kb_pipeline.orchestration import storage
from kb_pipeline.orchestration.partitions import SPACE
from kb_pipeline_tests.conftest import Server

SHIPPED = Path(__file__).parents[2] / "dagster.yaml"
OURS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"


@pytest.fixture
def instance(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    """Of the shipped file."""
    found = psycopg.conninfo.conninfo_to_dict(database_url)
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "DB": "dbname"}
    for name, key in names.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", str(found[key]))
    monkeypatch.setenv("KB_FANOUT_RUNS", "4")
    (tmp_path / "dagster.yaml").write_text(SHIPPED.read_text(encoding="utf-8"), encoding="utf-8")
    with DagsterInstance.from_config(str(tmp_path)) as opened:
        yield opened
        storage._engines.pop((os.getpid(), url_of(opened))).dispose()


def backends(url: str) -> set[int]:
    with psycopg.connect(url) as c:
        return {row[0] for row in c.execute(OURS).fetchall()}


def work(instance: DagsterInstance) -> Any:
    instance.add_dynamic_partitions(SPACE, ["hr"])
    return instance.get_dynamic_partitions(SPACE), instance.get_runs(limit=1), instance.all_instigator_state()


def test_statements_share_the_connections_of_a_process(instance: DagsterInstance, database_url: str) -> None:
    work(instance)
    before = backends(database_url)
    for _ in range(5):
        work(instance)
    assert backends(database_url) == before and 1 <= len(before) <= 3


def test_a_connection_that_the_server_ended_is_replaced_unnoticed(instance: DagsterInstance, database_url: str) -> None:
    work(instance)
    before = backends(database_url)
    with psycopg.connect(database_url, autocommit=True) as c:
        for pid in before:
            c.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    assert work(instance)[0] == ["hr"]
    assert not backends(database_url) & before


@contextmanager
def statements(instance: DagsterInstance) -> Iterator[list[str]]:
    engine = instance.schedule_storage._engine  # type: ignore[union-attr]
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


def test_another_instance_of_the_process_shares_them_and_asks_for_no_table(
    instance: DagsterInstance, database_url: str, tmp_path: Path
) -> None:
    """Each tick of a sensor makes one."""
    work(instance)
    before = backends(database_url)
    with statements(instance) as seen, DagsterInstance.from_config(str(tmp_path)) as other:
        assert work(other)[0] == ["hr"]
    assert backends(database_url) == before
    assert seen and not [s for s in seen if "pg_catalog" in s]


def url_of(instance: DagsterInstance) -> str:
    return str(instance.schedule_storage.postgres_url)  # type: ignore[union-attr]


def test_another_database_gets_its_tables(
    instance: DagsterInstance, embedded_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_server.database() as url:
        monkeypatch.setenv("DAGSTER_PG_DB", str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))
        with DagsterInstance.from_config(str(tmp_path)) as other:
            assert work(other)[0] == ["hr"]
        instance.add_dynamic_partitions(SPACE, ["finance"])
        with DagsterInstance.from_config(str(tmp_path)) as other:
            assert other.get_dynamic_partitions(SPACE) == ["hr"]
        storage._engines.pop((os.getpid(), url_of(other))).dispose()


def test_a_no_is_asked_again_and_a_yes_never() -> None:
    answers = iter([False, True])
    asked = storage._remembered("nowhere", "has_moved", lambda *_: next(answers))
    assert [asked("x"), asked("x"), asked("x")] == [False, True, True]
