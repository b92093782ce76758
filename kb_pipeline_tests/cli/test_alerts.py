"""What needs a person stands in ``kb status``, and is gone from it once it is put right."""

import shutil
from pathlib import Path

import pytest

from kb_pipeline.store.database import Pool, transaction
from kb_pipeline_tests.cli.conftest import Kb


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
