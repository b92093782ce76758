"""Two at once in a chosen order: one begins, and the test goes on when it waits for a lock or has ended without one.

PostgreSQL has no event for a lock that is waited for: it is asked.
"""

from collections.abc import Callable
from threading import Thread
from typing import Any

from kb_pipeline.store.database import Pool, one, transaction

_WAITING = """SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
              AND pid <> pg_backend_pid()"""


class Begun:
    """``work`` in a thread of its own. ``waiting``: how many wait for locks when the constructor returns, unless it has ended."""

    def __init__(self, pool: Pool, work: Callable[[], Any], *, waiting: int = 1) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,))
        self._thread.start()
        while self._thread.is_alive():
            with transaction(pool) as c:
                if one(c.execute(_WAITING)).n >= waiting:
                    return
            self._thread.join(0.02)

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as e:
            self._error = e

    def result(self) -> Any:
        """What it returned, when it has ended. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
