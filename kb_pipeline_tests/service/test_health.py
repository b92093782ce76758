"""What /healthz looks at, and that /livez looks at nothing."""

import json
import os
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from kb_pipeline.service import condition, database, health
from kb_pipeline.service.app import make_app
from kb_pipeline.service.condition import Condition
from kb_pipeline.service.database import Database
from kb_pipeline.settings import Settings
from kb_pipeline_tests.service.conftest import READY


def reasons(client: TestClient, status: int) -> str:
    answer = client.get("/healthz")
    assert answer.status_code == status, answer.text
    assert answer.json()["status"] == ("ok" if status == 200 else "failing")
    return "; ".join(answer.json()["reasons"])


def test_all_is_well(client: TestClient) -> None:
    assert reasons(client, 200) == ""


def test_a_database_that_does_not_answer_is_a_reason_and_the_service_lives(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_SECONDS", 0.1)
    away = Database(replace(settings, database_url="postgresql://nobody@127.0.0.1:1/none"))
    lonely = TestClient(make_app(settings, away))
    assert "database" in reasons(lonely, 503)
    assert lonely.get("/livez").json() == {"status": "ok"}
    text = lonely.get("/metrics").text
    assert "kb_database_up 0.0" in text and 'kb_child_ready{child="daemon"} 1.0' in text


def test_another_schema_than_the_programs_is_a_reason(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = health.migrations()
    monkeypatch.setattr(health, "migrations", lambda: newer[:1])
    assert "schema" in reasons(client, 503) and "restart" in reasons(client, 503)


@pytest.mark.parametrize("state", ["starting", "restarting", "stopping"])
def test_a_daemon_that_is_not_ready_is_a_reason(client: TestClient, settings: Settings, state: str) -> None:
    condition.write(settings.home, {**READY, "daemon": Condition(state, 1, 1, "ended with exit code 1")})
    assert f"daemon is {state}: ended with exit code 1" in reasons(client, 503)


def test_a_kb_up_that_fell_silent_is_a_reason(client: TestClient, settings: Settings) -> None:
    path = settings.home / condition.NAME
    old = path.stat().st_mtime - condition.STALE_SECONDS - 5
    os.utime(path, (old, old))
    assert "has ended, or it hangs" in reasons(client, 503)
    condition.clear(settings.home)
    assert "has ended, or it hangs" in reasons(client, 503)
    condition.write(settings.home, READY)
    assert reasons(client, 200) == ""


def test_a_reader_never_sees_half_a_condition(settings: Settings) -> None:
    settings.home.mkdir(parents=True, exist_ok=True)
    condition.write(settings.home, READY)
    with (settings.home / condition.NAME).open() as before:
        condition.write(settings.home, {})
        assert set(json.load(before)) == set(READY)
    assert condition.read(settings.home) == {}
