"""What needs a person stands in ``kb status`` and ``kb alerts``, and is gone from there once it is put right."""

import shutil
from pathlib import Path

import pytest

from kb_pipeline.store import schedules
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.schedules import Kind
from kb_pipeline_tests.cli.conftest import Kb, Ran
from kb_pipeline_tests.webhook import listening


def test_a_source_that_cannot_be_read_is_told_until_it_can(kb: Kb, loaded: str, folder: Path) -> None:
    assert kb.json("status", loaded)["alerts"] == []
    away = folder.rename(folder.with_name("away"))
    assert kb("sync", loaded).code == 1
    (alert,) = kb.json("status", loaded)["alerts"]
    assert alert.keys() == {"space", "kind", "subject", "message", "since"}
    assert (alert["space"], alert["kind"], alert["subject"]) == (loaded, "SYNC_FAILED", "docs")
    assert "root_missing" in alert["message"]
    assert alert in kb.json("status")["alerts"]
    assert kb.json("status", loaded)["alerts"] == [alert]  # one record, since the same moment
    told = kb("status", loaded).out
    assert "SYNC_FAILED" in told and f"kb sync {loaded} --source docs" in told
    shutil.move(away, folder)
    assert kb("sync", loaded).code == 0
    assert kb.json("status", loaded)["alerts"] == []
    assert "SYNC_FAILED" not in kb("status", loaded).out


def test_alerts_of_other_spaces_are_not_shown_with_a_space(kb: Kb, loaded: str, folder: Path) -> None:
    other = f"{loaded}-other"
    kb("space", "add", other)
    shutil.rmtree(folder)
    kb("sync", loaded)
    assert kb.json("status", other)["alerts"] == []


def test_vectors_that_failed_are_tried_when_somebody_asks(kb: Kb, loaded: str, pool: Pool, server: object) -> None:
    if not getattr(server, "has_pgvector", False):
        pytest.skip("this server has no pgvector")
    with transaction(pool) as c:
        c.execute(
            "INSERT INTO vector_retry (shard, chunk_id, space_id, doc_id, attempts, error) SELECT t.shard, t.id, t.space_id, t.doc_id, 5, 'x' "
            "FROM kb_chunk_state t JOIN kb_space s ON s.id = t.space_id AND s.shard = t.shard WHERE s.key = %s LIMIT 1",
            [loaded],
        )
        row = c.execute("SELECT s.id, s.model_id FROM kb_space s WHERE s.key = %s", [loaded]).fetchone()
        assert row is not None
        c.execute(
            f"DELETE FROM kb_vector_m{row.model_id} WHERE chunk_id IN (SELECT chunk_id FROM vector_retry WHERE space_id = {row.id})"  # type: ignore[arg-type]
        )
    assert kb.json("status", loaded)["spaces"][0]["vectors"] == {"failed": 1, "indexed": 1}
    told = kb("reconcile", loaded)
    assert told.code == 3
    assert (
        f"1 vector not tried: failed before, and not due yet or five times: to try now, kb reconcile {loaded} --retry-failed"
        in told.err
    )
    assert {a["kind"] for a in kb.json("status", loaded)["alerts"]} == {"VECTOR_FAILED", "RECONCILIATION_FAILED"}
    assert kb.json("reconcile", loaded, "--retry-failed")["repaired"] == 1
    found = kb.json("status", loaded)
    assert found["alerts"] == [] and found["spaces"][0]["vectors"] == {"indexed": 2}


# --- kb alerts ----------------------------------------------------------------------------------------------------------


def test_open_alerts_are_listed_with_command_and_page(kb: Kb, loaded: str, folder: Path) -> None:
    shutil.rmtree(folder)
    kb("sync", loaded)
    (alert,) = [a for a in kb.json("alerts")["alerts"] if a["space"] == loaded]
    assert alert.keys() == {"space", "kind", "subject", "message", "since", "link"}
    assert alert["kind"] == "SYNC_FAILED"
    assert alert["link"] == f"http://127.0.0.1:3000/assets/source_snapshot?view=partitions&partition={loaded}"
    told = kb("alerts")
    assert told.code == 0 and f"kb sync {loaded} --source docs" in told.out and alert["link"] in told.out
    assert kb("source", "pause", loaded, "docs").code == 0
    assert [a for a in kb.json("alerts")["alerts"] if a["space"] == loaded] == []


def test_a_missed_schedule_is_listed_and_leaves(kb: Kb, loaded: str, pool: Pool) -> None:
    def listed() -> list[str]:
        return [a["message"] for a in kb.json("alerts")["alerts"] if (a["space"], a["kind"]) == (loaded, "SCHEDULE_MISSED")]

    with transaction(pool) as c:
        for _ in range(schedules.MISSES):
            schedules.failed(c, loaded, Kind.PURGE)
    (message,) = listed()
    assert message.endswith(f"kb purge {loaded}") and "3 times in a row" in message
    with transaction(pool) as c:
        row = c.execute("SELECT id FROM kb_space WHERE key = %s", [loaded]).fetchone()
        assert row is not None
        schedules.succeeded(c, row.id, Kind.PURGE)
    assert listed() == []


def test_a_test_message_goes_to_every_channel_and_each_is_told_of(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as hook:
        monkeypatch.setenv("KB_SECRET_HOOK", f"json://me:pl4nted@127.0.0.1:{hook.port}/pl4nted")
        monkeypatch.setenv("KB_ALERT_URLS", "env:KB_SECRET_HOOK")
        monkeypatch.setenv("KB_ALERT_LINK", "https://kb.example.com")
        name = f"channel 1 (json://127.0.0.1:{hook.port})"
        assert kb("alerts", "test") == Ran(0, f"{name}: ok\n", "")
        (message,) = hook.take()
        assert message["title"] == "kb: test message" and "https://kb.example.com/" in message["message"]
        monkeypatch.setenv("KB_ALERT_URLS", "env:KB_SECRET_HOOK,json://127.0.0.1:1/pl4nted,env:KB_SECRET_NONE")
        good, down, missing = kb.json("alerts", "test", code=1)["channels"]
        assert good == {"channel": name, "ok": True, "reason": ""}
        assert not down["ok"] and not missing["ok"] and "the variable is not set" in missing["reason"]
        ran = kb("alerts", "test")
    assert ran.code == 1 and "pl4nted" not in ran.out + ran.err + str((down, missing))


def test_without_a_channel_there_is_nothing_to_test(kb: Kb) -> None:
    ran = kb("alerts", "test")
    assert ran.code == 2 and "KB_ALERT_URLS is empty" in ran.err


def test_a_link_that_is_no_address_is_refused(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_ALERT_LINK", "kb.example.com")
    ran = kb("alerts")
    assert ran.code == 2 and "KB_ALERT_LINK=kb.example.com: must be http://... or https://..." in ran.err
