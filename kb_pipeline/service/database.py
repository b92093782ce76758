"""The service's few connections: opened when the database answers, and again after it was away."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.settings import Settings
from kb_pipeline.store.database import Connection, Pool, connection, open_pool, transaction

CONNECTIONS = 3  # one a health check, one a scrape, one to spare
WAIT_SECONDS = 5.0  # for a connection: whoever asks about health wants an answer


class Database:
    """The service serves while the database is away, and says so. It starts and migrates nothing: ``kb up`` has done that."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Each statement commits by itself. Raises KbError while the database cannot be reached."""
        with connection(self._opened()) as c:
            yield c

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Raises KbError while the database cannot be reached."""
        with transaction(self._opened()) as c:
            yield c

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _opened(self) -> Pool:
        with self._lock:
            if self._pool is None:
                url = self._settings.database_url or EmbeddedPostgres(self._settings.home).url()
                self._pool = open_pool(url, max_size=CONNECTIONS, application="kb-service")
                self._pool.timeout = WAIT_SECONDS
            return self._pool
