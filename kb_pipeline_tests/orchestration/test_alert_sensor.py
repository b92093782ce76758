"""The sensor `alerts`: a tick says who was told of what, and a channel that fails is no failed tick."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, SensorResult, build_sensor_context

from kb_pipeline.model import AlertKind
from kb_pipeline.notify import _PAGES
from kb_pipeline.orchestration.definitions import build_defs
from kb_pipeline.orchestration.partitions import PARTITION_TAG
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.sensors import alerts
from kb_pipeline.store import schedules
from kb_pipeline.store.database import transaction
from kb_pipeline.store.schedules import Kind
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.webhook import Webhook, listening


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with listening() as made:
        yield made


@pytest.fixture
def missed(app: FakedApp, space: Space) -> Space:
    """A space whose reconciliation did not succeed three times in a row, and no other alert."""
    with transaction(app.pool) as c:
        c.execute("DELETE FROM kb_alert")
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE id <> %s", (space.id,))
        for _ in range(schedules.MISSES):
            schedules.failed(c, space.key, Kind.RECONCILIATION)
    return space


def tick(instance: DagsterInstance, kb: KbResource) -> str:
    with build_sensor_context(instance=instance, resources={"kb": kb}) as context:
        result: Any = alerts(context)
    assert isinstance(result, SensorResult) and result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def test_a_tick_sends_what_is_new_once_and_says_so(
    instance: DagsterInstance, kb: KbResource, missed: Space, app: FakedApp, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_ALERT_URLS", hook.url)
    name = f"channel 1 (json://127.0.0.1:{hook.port})"
    assert tick(instance, kb) == f"{name}: 1 alerts"
    assert tick(instance, kb) == "nothing to tell"
    with transaction(app.pool) as c:
        schedules.succeeded(c, missed.id, Kind.RECONCILIATION)
    assert tick(instance, kb) == f"{name}: 1 resolved"
    first, second = hook.messages
    assert f"kb reconcile {missed.key}" in first["message"]
    assert second["message"] == f"resolved: SCHEDULE_MISSED in {missed.key}: reconciliation"


def test_a_channel_that_fails_fails_no_tick_and_is_tried_at_the_next_one(
    instance: DagsterInstance, kb: KbResource, missed: Space, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_ALERT_URLS", hook.url)
    hook.status = 500
    for _ in range(2):
        assert "was told nothing" in tick(instance, kb)
    hook.status = 200
    assert "1 alerts" in tick(instance, kb)
    assert len(hook.messages) == 1


def test_without_a_channel_a_tick_says_that_nobody_is_told(instance: DagsterInstance, kb: KbResource, missed: Space) -> None:
    assert "1 alerts opened; KB_ALERT_URLS is empty" in tick(instance, kb)


def test_every_alert_leads_to_a_page_that_exists() -> None:
    assets = {key.to_user_string() for key in build_defs().resolve_all_asset_keys()}
    assert AssetKey("vector_index").to_user_string() in assets
    assert set(_PAGES) == set(AlertKind)
    for page in _PAGES.values():
        asset = re.match(r"/assets/(\w+)\?", page)
        assert asset[1] in assets if asset else page.startswith("/runs?") and PARTITION_TAG.replace("/", "%2F") in page
