"""A lock that somebody holds for long, or a statement that takes long: tried again, at nobody's cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from threading import Event
from typing import Any

import pytest

from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.store import database
from kb_pipeline.store.database import DatabaseBusy, Pool, StatementTimeout, briefly, open_pool, retried, transaction
from kb_pipeline_tests.fakes import LONGEST_WAIT, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set as soon as a transaction has given up waiting, which is after a moment here."""
    told = Event()

    class Told(DatabaseBusy):
        def __init__(self, message: str) -> None:
            super().__init__(message)
            told.set()

    monkeypatch.setattr(database, "DatabaseBusy", Told)
    monkeypatch.setattr(database, "BRIEF_LOCK_SECONDS", 0.05)
    return told


@contextmanager
def held(flow: Flow, statement: str) -> Iterator[Any]:
    with transaction(flow.app.pool) as c:
        c.execute(statement, {"space": flow.space.id})
        yield c


def _beside_a_lock(flow: Flow, statement: str, work: Callable[[], Any], busy: Event) -> Any:
    """What ``work`` comes to when the lock is held until it has run into its limit once."""
    with held(flow, statement):
        other = flow.beside(work)
        ended = other.__enter__()
        assert busy.wait(LONGEST_WAIT) or ended
    other.__exit__(None, None, None)
    assert busy.is_set()
    assert not isinstance(ended[0], BaseException), ended[0]
    return ended[0]


@pytest.mark.parametrize("lock", [
    "SELECT 1 FROM kb_index WHERE space_id = %(space)s FOR UPDATE", "SELECT pg_advisory_xact_lock(1, %(space)s)",
    "SELECT 1 FROM kb_doc WHERE space_id = %(space)s FOR UPDATE",
], ids=["index", "space", "document"])  # fmt: skip
def test_a_held_lock_delays_a_publication_and_fails_no_document(make_flow: Callable[..., Flow], busy: Event, lock: str) -> None:
    flow = make_flow({"a.md": article("aa", 2)}, index=MemoryIndex())
    flow.walk()
    flow.index.gate.close()  # before its vectors are written: the next transaction is the publication
    with flow.beside(flow.ingest) as ended:
        flow.index.gate.await_caller()
        with held(flow, lock):
            flow.index.gate.open()
            assert busy.wait(LONGEST_WAIT)
    assert (ended[0].published, ended[0].failed) == (1, 0)
    task = flow.task("a.md")
    assert (task.status, task.retry_count, task.error_code) == ("SUCCESS", 0, None)
    assert flow.execute("SELECT 1 FROM ingestion_node_log WHERE space_id = %(space)s AND status = 'FAILED'") == []
    flow.assert_whole()


def test_a_held_lock_delays_a_promotion(make_flow: Callable[..., Flow], busy: Event) -> None:
    flow = make_flow({"a.md": article("aa", 2)}, index=MemoryIndex())
    flow.sync()
    shard = _beside_a_lock(
        flow,
        "SELECT pg_advisory_xact_lock_shared(1, %(space)s)",
        lambda: promote_if_large(flow.engine, flow.space, promised_chunks=10**6),
        busy,
    )
    assert shard is not None
    flow.assert_whole()


def test_a_held_document_delays_a_purge(make_flow: Callable[..., Flow], busy: Event) -> None:
    flow = make_flow({"a.md": article("aa", 2)}, index=MemoryIndex())
    flow.sync()
    for n in range(6):
        flow.memory.put("a.md", article("aa", 2, tag=str(n)))
        flow.sync()
    report = _beside_a_lock(
        flow,
        "SELECT 1 FROM kb_doc WHERE space_id = %(space)s FOR UPDATE",
        lambda: purge(flow.engine, flow.space, keep=timedelta(0)),
        busy,
    )
    assert report.versions == 2 and report.chunks == 4
    flow.assert_whole()


def test_a_brief_transaction_waits_less_than_others(pool: Pool) -> None:
    def limits(c: database.Connection) -> list[str]:
        return [c.execute(sql).fetchone()[0] for sql in ("SHOW statement_timeout", "SHOW lock_timeout")]  # type: ignore[index]

    assert briefly(pool, limits) == ["5s", "2s"]
    with transaction(pool) as c:
        assert limits(c) == ["2min", "5s"]


def test_a_statement_that_reached_its_limit_has_twice_the_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BRIEF_STATEMENT_SECONDS", 0.02)
    limits: list[str] = []

    def work(c: database.Connection) -> str:
        limits.append(c.execute("SHOW statement_timeout").fetchone()[0])  # type: ignore[index]
        c.execute("SELECT pg_sleep(0.1)")
        return "done"

    assert briefly(pool, work) == "done"
    assert limits[:3] == ["20ms", "40ms", "80ms"] and len(limits) > 3


def test_a_statement_that_is_too_slow_by_far_is_an_error_at_last(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BRIEF_STATEMENT_SECONDS", 0.02)
    monkeypatch.setattr(database, "STATEMENT_SECONDS", 0.05)
    with pytest.raises(StatementTimeout) as e:
        briefly(pool, lambda c: c.execute("SELECT pg_sleep(60)"))
    assert e.value.code == "database_busy"


def test_elsewhere_a_statement_that_reached_its_limit_is_not_sent_again(pool: Pool) -> None:
    tries = count(1)

    def work() -> None:
        next(tries)
        with transaction(pool, statement_seconds=0.02) as c:
            c.execute("SELECT pg_sleep(60)")

    with pytest.raises(DatabaseBusy):
        retried(work)
    assert next(tries) == 2


def test_limits_end_with_their_transaction(pool: Pool) -> None:
    """So they hold behind a pooler too, where the next transaction of a connection is somebody else's."""
    with open_pool(pool.conninfo, max_size=1) as pool:
        with transaction(pool, statement_seconds=5, lock_seconds=2) as c:
            assert [c.execute(f"SHOW {name}").fetchone()[0] for name in ("statement_timeout", "lock_timeout")] == ["5s", "2s"]  # type: ignore[index,call-overload]
        with pool.connection() as c:
            assert c.execute("SHOW lock_timeout").fetchone()[0] == "0"  # type: ignore[index]
