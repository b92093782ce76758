"""The opened application as a Dagster resource."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

from dagster import ConfigurableResource, InitResourceContext
from pydantic import PrivateAttr

from kb_pipeline.engine import Engine
from kb_pipeline.settings import Settings, load_settings
from kb_pipeline.store import indexes
from kb_pipeline.store.database import Pool, connection, work_for
from kb_pipeline.store.spaces import Space
from kb_pipeline.wiring import App, open_app, open_database


class KeptDatabase:
    """Connections that outlive a tick, in a process that does nothing but ticks. All else of an application is opened anew."""

    def __init__(self) -> None:
        self.on = False
        self._lock = Lock()
        self._opened: dict[Settings, tuple[Pool, str, int]] = {}
        self._stack = ExitStack()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False
            self._opened.clear()
            self._stack.close()

    def app(self, settings: Settings) -> App:
        with self._lock:
            if settings not in self._opened:
                self._opened[settings] = self._stack.enter_context(open_database(settings))
        return App(settings, *self._opened[settings])


KEPT = KeptDatabase()


class KbResource(ConfigurableResource[None]):
    """Opened at its first use and closed with the run: one pool and one embedder for all assets of an in-process run.

    Settings come from the ``KB_*`` variables, as for every ``kb`` command; ``home`` and ``database_url`` win when given.
    """

    home: str = ""
    database_url: str = ""
    _stack: ExitStack = PrivateAttr(default_factory=ExitStack)
    _app: App | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """A run's claims name it, so that they can be given back when it ends before its time. A tick is no run."""
        work_for(context.run_id or "")

    def settings(self) -> Settings:
        return load_settings(home=self.home or None, database_url=self.database_url or None)

    def app(self) -> App:
        if self._app is None:
            self._app = KEPT.app(self.settings()) if KEPT.on else self._stack.enter_context(open_app(self.settings()))
        return self._app

    def space(self, key: str) -> tuple[Engine, Space]:
        """Raises Misconfigured for a space that is not (or no longer) there."""
        app = self.app()
        return app.engine, app.space(key)

    def active_spaces(self) -> list[str]:
        """Keys in order. One that is being deleted is no longer active: nothing can be materialised in it."""
        return [s.key for s in self.app().spaces() if s.status == "ACTIVE"]

    def deleting_spaces(self) -> list[str]:
        """Keys of spaces whose deletion has begun and not ended."""
        return [s.key for s in self.app().spaces() if s.status == "DELETING"]

    def spaces_building(self) -> list[str]:
        """Keys of spaces with an index that is to serve next."""
        with connection(self.app().pool) as c:
            return indexes.building(c)

    def close(self) -> None:
        self._app = None
        self._stack.close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        work_for("")
        self.close()
