"""What Dagster loads: the definitions, the instance's configuration, the workspace. And that nothing below needs Dagster."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, DagsterInstance, DagsterRunStatus, Definitions, in_process_executor
from psycopg.conninfo import conninfo_to_dict

import kb_pipeline
from kb_pipeline.orchestration.definitions import build_defs, defs
from kb_pipeline.orchestration.partitions import SLOT_TAG, SPACE, SPACES, SYNC_TAG
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.conftest import Server

ROOT = Path(kb_pipeline.__file__).parents[1]
FLOW = ["source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index"]
CORE_ALONE = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("dagster"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import kb_pipeline

def modules(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name == "kb_pipeline.orchestration" or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        yield found.name
        if found.ispkg:
            yield from modules(module)

print(len(list(modules(kb_pipeline))))
try:
    importlib.import_module("kb_pipeline.orchestration.definitions")
except ModuleNotFoundError as e:
    print(e)
"""


def test_definitions_load(instance: DagsterInstance) -> None:
    assert isinstance(defs, Definitions)
    Definitions.validate_loadable(defs)


def test_graph_of_assets_is_the_flow() -> None:
    graph = defs.resolve_asset_graph()
    checking = {"index_reconciliation", "data_quality"}
    assert {key.to_user_string() for key in graph.executable_asset_keys} == {*FLOW, *checking}
    for above, name in zip([None, *FLOW], FLOW, strict=False):
        node = graph.get(AssetKey(name))
        inside = [key.to_user_string() for key in node.parent_keys if not key.to_user_string().startswith("sources/")]
        assert inside == ([above] if above else [])
        assert node.partitions_def == SPACES
        assert node.group_name == "knowledge_base"
        assert node.owners == ["team:knowledge-base"]
        assert node.kinds
        assert "**A materialisation means:**" in (node.description or "")
        assert "**When it fails:**" in (node.description or "")


def test_jobs_take_the_whole_flow_and_what_is_behind_the_source() -> None:
    selected = {job: set(defs.resolve_job_def(job).asset_layer.executable_asset_keys) for job in ("sync_space", "ingest_batch")}
    assert selected == {"sync_space": {AssetKey(n) for n in FLOW}, "ingest_batch": {AssetKey(n) for n in FLOW[1:]}}
    assert all(defs.resolve_job_def(job).partitions_def == SPACES for job in selected)


def test_materialise_button_runs_in_one_process_too() -> None:
    assert defs.resolve_implicit_global_asset_job_def().executor_def is in_process_executor


def test_core_can_be_imported_without_dagster() -> None:
    done = subprocess.run([sys.executable, "-c", CORE_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, blocked = done.stdout.splitlines()
    assert int(imported) > 50
    assert blocked == "dagster is blocked"


def test_workspace_names_the_definitions() -> None:
    (location,) = yaml.safe_load((ROOT / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    assert location["python_module"]["module_name"] == build_defs.__module__


def test_instance_keeps_its_runs_in_postgresql(
    embedded_server: Server, filled: Space, kb: KbResource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = conninfo_to_dict(embedded_server.url)
    for name, value in {
        "HOST": where["host"],
        "PORT": where["port"],
        "USER": where["user"],
        "PASSWORD": where["password"],
    }.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", str(value))
    monkeypatch.setenv("DAGSTER_PG_DB", "dagster")
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with DagsterInstance.from_config(str(home)) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.run_monitoring_enabled
        assert instance.managed_python_loggers == ["kb_pipeline"]
        limits = instance.get_concurrency_config().run_queue_config
        assert limits is not None
        assert limits.tag_concurrency_limits == [
            {"key": tag, "value": {"applyLimitPerUniqueValue": True}, "limit": 1} for tag in (SYNC_TAG, SLOT_TAG)
        ]
        instance.add_dynamic_partitions(SPACE, [filled.key])
        job = build_defs({"kb": kb}).resolve_job_def("sync_space")
        done = job.execute_in_process(instance=instance, partition_key=filled.key)
    with DagsterInstance.from_config(str(home)) as again:
        run = again.get_run_by_id(done.run_id)
        assert run is not None
        assert run.status is DagsterRunStatus.SUCCESS
        assert run.tags["dagster/partition"] == filled.key
        assert again.get_latest_materialization_event(AssetKey("vector_index")) is not None
