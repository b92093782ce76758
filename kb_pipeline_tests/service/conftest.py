"""The service's application in this process, on the database of the test file."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from kb_pipeline.service import condition
from kb_pipeline.service.app import make_app
from kb_pipeline.service.condition import Condition
from kb_pipeline.service.database import Database
from kb_pipeline.settings import Settings

READY = {"daemon": Condition("ready", 1), "webserver": Condition("ready", 2, restarts=3, reason="grew")}


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """``kb up`` says that all is well."""
    settings.home.mkdir(parents=True, exist_ok=True)
    condition.write(settings.home, READY)
    database = Database(settings)
    yield TestClient(make_app(settings, database))
    database.close()
