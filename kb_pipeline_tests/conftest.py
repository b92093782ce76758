"""One embedded server for the whole run, a fresh migrated database per test file, and an application on top of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.engine import Engine
from kb_pipeline.settings import Settings
from kb_pipeline.store.database import Pool, open_pool
from kb_pipeline.store.migrations import migrate, migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.elasticsearch.node import elasticsearch_node, elasticsearch_url
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex

__all__ = ["elasticsearch_node", "elasticsearch_url"]  # fixtures

_number = count(1)


@dataclass(frozen=True)
class Server:
    """A PostgreSQL for tests. ``template`` is a migrated database that nobody is connected to."""

    url: str
    template: str
    has_pgvector: bool

    @contextmanager
    def database(self, template: str | None = None) -> Iterator[str]:
        """The URL of a new database, dropped in the end whoever is connected to it. Without a template it is empty."""
        name = f"test_{uuid4().hex[:12]}"
        made = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template:
            made += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with psycopg.connect(self.url, autocommit=True) as c:
            c.execute(made)
            try:
                yield _url_of(self.url, name)
            finally:
                c.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _url_of(url: str, database: str) -> str:
    return f"{url.rpartition('/')[0]}/{database}"


@contextmanager
def _server(url: str, template: str = "") -> Iterator[Server]:
    with psycopg.connect(url) as c:
        found = c.execute("SELECT count(*) FROM pg_available_extensions WHERE name = 'vector'").fetchone()
    bare = Server(url, template, found == (1,))
    if template:
        yield bare
        return
    with migrated(bare) as made:
        yield Server(url, made, bare.has_pgvector)


@contextmanager
def migrated(server: Server) -> Iterator[str]:
    """The name of a new database with the schema, to be a template."""
    with server.database() as url:
        pool = open_pool(url, max_size=1)
        migrate(pool)
        pool.close()
        yield str(conninfo_to_dict(url)["dbname"])


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that people get by default, in a data folder of its own, stopped with the run. Many short runs may share
    one that somebody else stops: TEST_EMBEDDED_URL names it, and TEST_EMBEDDED_TEMPLATE a migrated database there."""
    if url := os.environ.get("TEST_EMBEDDED_URL"):
        with _server(url, os.environ.get("TEST_EMBEDDED_TEMPLATE", "")) as server:
            yield server
        return
    postgres = EmbeddedPostgres(tmp_path_factory.mktemp("session") / ".kb")
    url = postgres.start()
    try:
        with _server(url) as server:
            yield server
    finally:
        postgres.stop(mode="immediate")


@pytest.fixture(scope="session")
def postgres15_server() -> Iterator[Server]:
    """The oldest server we support, where TEST_POSTGRES_URL names one: a role with CREATEDB, pgvector not needed."""
    url = os.environ.get("TEST_POSTGRES_URL")
    if not url:
        pytest.skip("TEST_POSTGRES_URL is not set: it names a PostgreSQL 15 whose role may create databases")
    with _server(url) as server:
        yield server


@pytest.fixture(scope="module")
def server(embedded_server: Server) -> Server:
    """What this file's database is on; the tests of the store run on both servers (store/conftest.py)."""
    return embedded_server


@pytest.fixture(scope="module")
def database_url(server: Server) -> Iterator[str]:
    """A fresh, migrated database for this test file."""
    with server.database(server.template) as url:
        yield url


@pytest.fixture(scope="module")
def pool(database_url: str) -> Iterator[Pool]:
    pool = open_pool(database_url, max_size=12, application="kb-test")
    yield pool
    pool.close()


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Cheap and quick to fail: a temporary home, the hashing embedder, no back-off."""
    return Settings(home=tmp_path / ".kb", database_url=database_url, embedder="hashing", retry_base_seconds=0.0)


@pytest.fixture
def make_app(settings: Settings, pool: Pool, server: Server) -> Callable[..., FakedApp]:
    """An application with the fakes that are passed. Without pgvector the index is a MemoryIndex."""

    def make(**fakes: Any) -> FakedApp:
        if not server.has_pgvector:
            fakes.setdefault("index", MemoryIndex())
        return FakedApp(settings, pool, migrations()[-1].version, **fakes)

    return make


@pytest.fixture
def app(make_app: Callable[..., FakedApp]) -> FakedApp:
    return make_app()


@pytest.fixture
def engine(app: FakedApp) -> Engine:
    return app.engine


@pytest.fixture
def space(app: FakedApp) -> Space:
    """A new space: the tests of a file share a database, not a space."""
    return app.add_space(f"space-{next(_number)}")
