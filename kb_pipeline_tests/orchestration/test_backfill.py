"""Run configuration and backfills: many partitions, refused values, and a reparse beside a sync."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, DagsterInvalidConfigError

from kb_pipeline.orchestration.definitions import build_defs, defs
from kb_pipeline.orchestration.partitions import SPACE, SPACES
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.orchestration.conftest import Materialise

FLOW = ["source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index"]


def versions(app: FakedApp, space: Space) -> dict[str, int]:
    with transaction(app.pool) as c:
        rows = c.execute("SELECT external_id, current_ver FROM kb_doc WHERE space_id = %s AND status <> 'DELETED'", (space.id,))
        return {r.external_id: r.current_ver for r in rows}


def test_backfill_is_one_run_a_space() -> None:
    """A run over a range of partitions has no partition key, and the queue could not tell the spaces of such runs apart."""
    graph = defs.resolve_asset_graph()
    for name in (*FLOW, "index_reconciliation", "data_quality"):
        policy = graph.get(AssetKey(name)).backfill_policy
        assert policy is None or policy.max_partitions_per_run == 1


def test_all_a_range_and_one_space_can_be_materialised(
    app: FakedApp, filled: Space, folder: Path, instance: DagsterInstance, kb: KbResource
) -> None:
    made = [filled]
    for n in (1, 2):
        made.append(app.add_space(f"{filled.key}-{n}"))
        app.add_source(made[-1], "docs", "local_dir", {"path": str(folder)})
    keys = [s.key for s in made]
    instance.add_dynamic_partitions(SPACE, keys)
    job = build_defs({"kb": kb}).resolve_job_def("sync_space")
    for key in keys[:2]:
        assert job.execute_in_process(instance=instance, partition_key=key).success
    assert [len(versions(app, s)) for s in made] == [10, 10, 0]
    assert set(instance.get_materialized_partitions(AssetKey("vector_index"))) == set(keys[:2])
    for key in SPACES.get_partition_keys(dynamic_partitions_store=instance):
        assert job.execute_in_process(instance=instance, partition_key=key).success
    assert [set(versions(app, s).values()) for s in made] == [{1}] * 3


def test_two_runs_of_a_space_at_once_do_no_harm(app: FakedApp, filled: Space, materialise: Materialise) -> None:
    runs: list[Any] = []
    thread = Thread(target=lambda: runs.append(sync_space(app.engine, filled)))
    thread.start()
    materialise(filled.key)
    thread.join()
    assert materialise(filled.key).success
    found = versions(app, filled)
    assert set(found) == {f"guide-{n}.md" for n in range(10)}
    assert all(found.values())
    with transaction(app.pool) as c:
        unfinished = c.execute(
            "SELECT status FROM ingestion_task WHERE space_id = %s AND status NOT IN ('SUCCESS', 'CANCELED')", (filled.id,)
        )
        assert unfinished.fetchall() == []


def test_source_and_full_reach_the_walk(app: FakedApp, filled: Space, tmp_path: Path, materialise: Materialise) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.md").write_text("# B\n\nOf the other source.", encoding="utf-8")
    app.add_source(filled, "other", "local_dir", {"path": str(other)})
    run = materialise(filled.key, source_snapshot={"source": "other"})
    assert run.success
    assert run.metadata["source_snapshot"]["seen"] == 1
    assert set(versions(app, filled)) == {"b.md"}
    assert materialise(filled.key, source_snapshot={"full": True}).metadata["source_snapshot"]["seen"] == 11


def test_unknown_source_is_refused_with_those_there_are(filled: Space, materialise: Materialise) -> None:
    description, told = materialise(filled.key, source_snapshot={"source": "dox"}).failures["source_snapshot"]
    assert "no source 'dox'" in description
    assert "docs" in description
    assert told["code"] == "no_source"


@pytest.mark.parametrize(
    ("asset", "config", "message"),
    [
        ("source_snapshot", {"fulll": True}, "fulll"),
        ("source_snapshot", {"full": "perhaps"}, "full"),
        ("parsed_documents", {"reparse": 7}, "reparse"),
        ("embeddings", {"reembed_after": "x"}, "reembed_after"),
    ],
)
def test_bad_config_is_refused_before_anything_runs(
    filled: Space, materialise: Materialise, asset: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(DagsterInvalidConfigError, match=message):
        materialise(filled.key, **{asset: config})


def test_launchpad_shows_every_default() -> None:
    shown = {}
    for name in (*FLOW, "index_reconciliation"):
        schema = defs.resolve_assets_def(AssetKey(name)).op.config_schema.config_type
        shown[name] = {k: f.default_value for k, f in getattr(schema, "fields", {}).items()}
    assert shown["source_snapshot"] == {"full": False, "source": ""}
    assert shown["parsed_documents"] == {"reparse": False}
    assert shown["embeddings"] == {"reembed": False, "reembed_after": 0}
    assert shown["index_reconciliation"] == {"report_only": False}


def test_reparse_makes_a_version_of_everything_and_embeds_nothing(
    app: FakedApp, filled: Space, materialise: Materialise
) -> None:
    materialise(filled.key)
    run = materialise(filled.key, parsed_documents={"reparse": True})
    assert run.success
    assert run.metadata["parsed_documents"]["reparse_queued"] == 10
    assert run.metadata["parsed_documents"]["documents"] == 10
    assert run.metadata["embeddings"]["embedded"] == 0
    assert run.metadata["vector_index"]["published"] == 10
    assert set(versions(app, filled).values()) == {2}


def test_reparse_beside_a_sync_loses_and_duplicates_nothing(
    app: FakedApp, filled: Space, folder: Path, materialise: Materialise
) -> None:
    materialise(filled.key)
    for n in range(5):
        (folder / f"guide-{n}.md").write_text(f"# Guide {n}\n\nEdited for the {n}th time.", encoding="utf-8")
    (folder / "new.md").write_text("# New\n\nNot known before.", encoding="utf-8")
    ended: list[Any] = []
    thread = Thread(target=lambda: ended.append(sync_space(app.engine, filled)))
    thread.start()
    materialise(filled.key, "parsed_documents", parsed_documents={"reparse": True})
    thread.join()
    assert ended and not ended[0].errors
    assert materialise(filled.key).success
    with transaction(app.pool) as c:
        where = (filled.id,)
        live = c.execute(
            "SELECT count(*) AS n FROM ingestion_task WHERE space_id = %s AND status NOT IN ('SUCCESS', 'CANCELED')", where
        )
        assert live.fetchone().n == 0  # type: ignore[union-attr]
        twice = c.execute(
            "SELECT doc_id FROM kb_doc_version WHERE space_id = %s AND status = 'READY' GROUP BY doc_id HAVING count(*) > 3",
            where,
        )
        assert twice.fetchall() == []
        texts = c.execute(
            "SELECT d.external_id, c.content FROM kb_space s JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id AND t.in_current "
            "JOIN kb_chunk c ON c.shard = s.shard AND c.id = t.id JOIN kb_doc d ON d.id = t.doc_id WHERE s.id = %s",
            where,
        ).fetchall()
    assert {r.external_id for r in texts if "Edited" in r.content} == {f"guide-{n}.md" for n in range(5)}
    assert {r.external_id for r in texts} == {f"guide-{n}.md" for n in range(10)} | {"new.md"}


def test_reembed_reports_what_it_asked_and_changed(filled: Space, materialise: Materialise) -> None:
    chunks = materialise(filled.key).metadata["chunks"]["chunks_written"]
    told = materialise(filled.key, embeddings={"reembed": True}).metadata["embeddings"]
    assert told["reembed_asked"] == chunks
    assert told["reembed_changed"] == told["reembed_failed"] == 0
    assert told["reembed_last_chunk"] > 0
