"""What a person sees of the flow in the web UI: where it comes from, where it goes, and what each run did."""

from pathlib import Path

from dagster import AssetKey, AssetSpec

from kb_pipeline.orchestration.definitions import defs
from kb_pipeline.orchestration.lineage import EXTERNAL_ASSETS, source_key
from kb_pipeline.registry import CONNECTORS
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.orchestration.conftest import Materialise

FLOW = ["source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index"]


def test_every_kind_of_connector_stands_before_the_flow() -> None:
    graph = defs.resolve_asset_graph()
    assert graph.get(AssetKey("source_snapshot")).parent_keys == {source_key(kind) for kind in CONNECTORS}
    assert not any(graph.get(source_key(kind)).is_executable for kind in CONNECTORS)


def test_search_stands_behind_the_flow_and_the_checks_behind_it() -> None:
    graph = defs.resolve_asset_graph()
    search = AssetKey(["search", "index"])
    assert graph.get(search).parent_keys == {AssetKey("vector_index")}
    assert not graph.get(search).is_executable
    assert graph.get(search).child_keys == {AssetKey("index_reconciliation"), AssetKey("data_quality")}


def test_external_assets_say_what_they_are() -> None:
    for spec in EXTERNAL_ASSETS:
        assert isinstance(spec, AssetSpec)
        assert spec.description and spec.owners and spec.kinds and spec.group_name
        assert any(name.startswith("kb/") for name in spec.tags)


def test_gates_block_and_the_other_checks_do_not() -> None:
    graph = defs.resolve_asset_graph()
    blocking = {key.asset_key.to_user_string() for key in graph.asset_check_keys if graph.get_check_spec(key).blocking}
    others = {key.asset_key.to_user_string() for key in graph.asset_check_keys if not graph.get_check_spec(key).blocking}
    assert blocking == set(FLOW)
    assert others == {"index_reconciliation", "data_quality"}


def test_embedder_and_index_have_pools_that_the_instance_can_limit() -> None:
    pools = {name: defs.resolve_assets_def(AssetKey(name)).op.pool for name in FLOW}
    assert pools == {**dict.fromkeys(FLOW), "embeddings": "kb_embedding", "vector_index": "kb_index"}


def test_materialisation_tells_what_the_run_did(filled: Space, folder: Path, materialise: Materialise) -> None:
    told = materialise(filled.key).metadata
    assert all(told[name]["documents"] == told[name]["documents_out"] == 10 for name in FLOW)
    assert all(told[name]["p95_seconds"] >= 0 and told[name]["seconds"] >= 0 for name in FLOW)
    assert told["source_snapshot"]["bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    assert told["chunks"]["tokens"] == told["embeddings"]["tokens"] > 1000
    assert told["embeddings"]["embeddings_saved"] == told["chunks"]["chunks_written"] - told["embeddings"]["embedded"]

    text = (folder / "guide-3.md").read_text(encoding="utf-8")
    (folder / "guide-3.md").write_text(text.replace("letter 6 ", "letter 66 ", 1), encoding="utf-8")
    told = materialise(filled.key).metadata
    assert told["source_snapshot"]["documents"] == 1
    assert told["embeddings"]["embeddings_saved"] == told["chunks"]["chunks_reused"] > 0
    assert 0 < told["chunks"]["reuse_rate"] < 1


def test_run_without_work_has_the_same_numbers_at_zero(filled: Space, materialise: Materialise) -> None:
    materialise(filled.key)
    told = materialise(filled.key).metadata
    assert told["embeddings"]["embedded"] == told["embeddings"]["embeddings_saved"] == told["embeddings"]["tokens"] == 0
    assert told["source_snapshot"]["bytes"] == 0
    assert all(told[name]["documents"] == 0 for name in FLOW)


def test_last_runs_stand_side_by_side_and_are_ten_at_most(filled: Space, folder: Path, materialise: Materialise) -> None:
    for n in range(12):
        (folder / "guide-0.md").write_text(f"# Guide 0\n\nRewritten {n} times.", encoding="utf-8")
        run = materialise(filled.key, "source_snapshot")
    head, _, first, *earlier = run.metadata["source_snapshot"]["last_runs"].splitlines()
    assert head == "| when | documents | failed | seconds | new | changed | deleted | bytes |"
    assert first.startswith("| this one |")
    assert len(earlier) == 9
    assert all("Z |" in row for row in earlier)


def test_last_runs_are_those_of_the_same_space(filled: Space, space: Space, materialise: Materialise) -> None:
    materialise(filled.key, "parsed_documents")
    run = materialise(filled.key, "parsed_documents")
    assert len(run.metadata["parsed_documents"]["last_runs"].splitlines()) == 4
