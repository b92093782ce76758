"""Connections and transactions. Works behind a transaction pooler: nothing here lives longer than a transaction.

``prepare_threshold=None`` on purpose: a prepared statement's generic plan locks every partition when it is built.
"""

import os
import random
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.rows import namedtuple_row
from psycopg_pool import ConnectionPool

from kb_pipeline.errors import Fatal, Misconfigured, StateError, Transient
from kb_pipeline.statements import load_statements

SQL = load_statements(__package__, "database.sql")
Connection = psycopg.Connection[Any]
Pool = ConnectionPool[Connection]
T = TypeVar("T")

LOCK_SECONDS, STATEMENT_SECONDS = 5.0, 120.0
BRIEF_LOCK_SECONDS, BRIEF_STATEMENT_SECONDS = 2.0, 5.0  # where searches, writers or a whole space wait for the transaction
_RETRIED = (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable, psycopg.errors.SerializationFailure)
_TRIES = 8


class DatabaseBusy(Transient):
    """A deadlock or a lock timeout: nothing of the transaction happened, and all of it may be done again at once."""

    code = "database_busy"


class StatementTimeout(DatabaseBusy):
    """A statement took longer than it may, and would so again: only ``briefly`` repeats it, with more time."""


class ConnectionLost(Transient):
    """The server ended a transaction's connection. ``in_commit``: during COMMIT, so that it may have happened or not."""

    code = "database_down"

    def __init__(self, message: str, *, in_commit: bool) -> None:
        super().__init__(message)
        self.in_commit = in_commit


def open_pool(url: str, *, max_size: int = 8, application: str = "kb") -> Pool:
    """A pool whose connections return named tuples. Raises Misconfigured, Fatal when the server cannot be used."""
    kwargs = {"prepare_threshold": None, "row_factory": namedtuple_row, "application_name": application, "connect_timeout": 10}
    _probe(url, kwargs)
    pool: Pool = _CheckedPool(url, min_size=1, max_size=max_size, kwargs=kwargs, open=False, name=application)
    pool.open()
    return pool


class _CheckedPool(ConnectionPool[Connection]):
    """Hands out no connection that the server has ended. The library's own ``check`` waits longer and longer after each."""

    def getconn(self, timeout: float | None = None) -> Connection:
        while not _is_open(c := super().getconn(timeout)):
            c.close()
            self.putconn(c)  # which makes a new one in its place
        return c


def _is_open(c: Connection) -> bool:
    """A server that restarts, or ends an idle connection, says so on its socket: only then is asking worth a round trip."""
    try:
        waiting = select.poll()
        waiting.register(c.fileno(), select.POLLIN)
        if waiting.poll(0):
            ConnectionPool.check_connection(c)
    except psycopg.OperationalError:
        return False
    return True


def _probe(url: str, kwargs: dict[str, Any]) -> None:
    try:
        with psycopg.connect(url, **kwargs) as c:
            version = c.info.server_version
    except psycopg.OperationalError as e:
        reason = str(e).strip().splitlines()[-1] if str(e).strip() else "no answer"
        raise Fatal(
            f"database unreachable: {reason}. Check KB_DATABASE_URL and that the server runs", code="database_down"
        ) from e
    except psycopg.ProgrammingError as e:
        raise Misconfigured(f"KB_DATABASE_URL is not a connection string: {e}", code="bad_setting") from e
    if version < 150000:
        raise Misconfigured(f"PostgreSQL {version // 10000} is too old: 15 or later is needed", code="database_too_old")


@contextmanager
def connection(pool: Pool) -> Iterator[Connection]:
    """A connection outside of a transaction block: each statement commits by itself."""
    try:
        with pool.connection() as c:
            c.autocommit = True
            try:
                yield c
            finally:
                if not c.closed and c.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                    c.autocommit = False
    except psycopg.OperationalError as e:
        raise _translated(e) from e


@contextmanager
def transaction(
    pool: Pool, *, statement_seconds: float = STATEMENT_SECONDS, lock_seconds: float = LOCK_SECONDS
) -> Iterator[Connection]:
    """One transaction with bounded waits. Vendor errors become Transient, so that the caller's work is tried again."""
    c: Connection | None = None
    in_commit = False
    try:
        with pool.connection() as c, c.transaction():
            c.execute(SQL.bound_waits, {"lock": _milliseconds(lock_seconds), "statement": _milliseconds(statement_seconds)})
            yield c
            in_commit = True
    except _RETRIED as e:
        raise DatabaseBusy(f"the database was busy ({type(e).__name__}): run the same command again") from e
    except psycopg.errors.QueryCanceled as e:
        raise StatementTimeout(f"a statement took longer than {statement_seconds:.0f} s: run the same command again") from e
    except psycopg.OperationalError as e:
        if c is not None and c.closed:
            raise ConnectionLost(_sentence(e), in_commit=in_commit) from e
        raise _translated(e) from e


def retried(work: Callable[[], T], *, idempotent: bool = False) -> T:
    """Run ``work`` again after a deadlock, a lock timeout or a lost connection: it must be one whole transaction.

    Where the loss hid the answer to COMMIT it runs again only if it is ``idempotent``: a second time changes nothing.
    """
    for left in reversed(range(_TRIES)):
        try:
            return work()
        except StatementTimeout:
            raise
        except DatabaseBusy:
            if not left:
                raise
        except ConnectionLost as e:
            if not left or (e.in_commit and not idempotent):
                raise
        time.sleep(random.uniform(0.05, 0.3))
    raise AssertionError("unreachable")


def briefly(pool: Pool, work: Callable[[Connection], T], *, idempotent: bool = False) -> T:
    """``work`` in one transaction with short limits, as ``retried``, where others wait for the locks it holds.

    After a statement that reached its limit it has twice the time: what is very large must get through at last.
    """
    seconds = BRIEF_STATEMENT_SECONDS
    while True:
        try:
            return retried(lambda: _within(pool, work, seconds), idempotent=idempotent)  # noqa: B023 (as it is then)
        except StatementTimeout:
            if seconds >= STATEMENT_SECONDS:
                raise
            seconds = min(2 * seconds, STATEMENT_SECONDS)


def _within(pool: Pool, work: Callable[[Connection], T], seconds: float) -> T:
    with transaction(pool, statement_seconds=seconds, lock_seconds=BRIEF_LOCK_SECONDS) as c:
        return work(c)


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _translated(e: Exception) -> Transient | Fatal:
    if isinstance(e, psycopg.errors.DiskFull):
        return Fatal("the database's disk is full: free some space and run the same command again", code="database_full")
    return Transient(_sentence(e), code="database_down")


def _sentence(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return f"database: {lines[0] if lines else type(e).__name__}: check that its server runs, then run the same command again"


def one(cursor: psycopg.Cursor[Any]) -> Any:
    """The row of a statement that always has one. Raises StateError."""
    row = cursor.fetchone()
    if row is None:
        raise StateError("a statement that always has a row had none", code="no_row")
    return row


def copy_rows(c: Connection, statement: Any, types: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Binary COPY of ``rows``; ``types`` are PostgreSQL type names, one a column."""
    with c.cursor().copy(statement) as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


_run = ""


def work_for(run_id: str) -> None:
    """From now on this process's claims and leases name the run it works for; "" when it has ended."""
    global _run  # noqa: PLW0603 (as the process: there is one, and every thread of it is the same worker)
    _run = run_id


def worker_id() -> str:
    """Who we are to other processes: [run@]host, boot, pid, its start: so that a dead owner on this host is known as dead."""
    return f"{_run}@{_process()}" if _run else _process()


def run_of(owner: str) -> str:
    """The run that a worker works for, "" where it works for none."""
    return owner.partition("@")[0] if "@" in owner else ""


def is_dead(owner: str) -> bool:
    """True only if ``owner`` was a process of this host and boot and does not run any more."""
    parts = owner.rpartition("@")[2].rsplit("/", 3)
    if len(parts) != 4 or parts[0] != os.uname().nodename or not _boot():
        return False
    return parts[1] != _boot() or _started(int(parts[2])) != parts[3]


@cache
def _process() -> str:
    return f"{os.uname().nodename}/{_boot()}/{os.getpid()}/{_started(os.getpid())}"


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8] + _pid_namespace()
    except OSError:
        return ""


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:")


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
