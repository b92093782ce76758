"""Runs of a space's assets as Dagster makes them, on a real database."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from dagster import AssetKey, DagsterInstance, ExecuteInProcessResult, TableMetadataValue

from kb_pipeline.orchestration.definitions import build_defs
from kb_pipeline.orchestration.partitions import SPACE
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.settings import Settings
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    severity: str
    partition: str | None
    description: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a person sees of a run: whether it succeeded, and what each asset says."""

    success: bool
    metadata: dict[str, dict[str, Any]]
    versions: dict[str, str]
    failures: dict[str, tuple[str, dict[str, Any]]]  # by asset: description and metadata
    logs: list[str]
    checks: list[Check]

    @property
    def red(self) -> dict[str, Check]:
        return {c.name: c for c in self.checks if not c.passed}


Materialise = Callable[..., Run]


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def kb(settings: Settings) -> KbResource:
    return KbResource(home=str(settings.home), database_url=settings.database_url)


@pytest.fixture
def materialise(kb: KbResource, instance: DagsterInstance) -> Materialise:
    """Run a job for one space, or only some of its assets."""

    def run(key: str, *only: str, job: str = "sync_space", **config: Any) -> Run:
        instance.add_dynamic_partitions(SPACE, [key])
        chosen = build_defs({"kb": kb}).resolve_job_def(job)
        selection = [AssetKey(name) for name in only] or None
        run_config = {"ops": {asset: {"config": values} for asset, values in config.items()}}
        done = chosen.execute_in_process(
            run_config, instance=instance, partition_key=key, raise_on_error=False, asset_selection=selection
        )
        return _seen(done, [e.user_message for e in instance.all_logs(done.run_id)])

    return run


def _seen(done: ExecuteInProcessResult, logs: Sequence[str]) -> Run:
    made = [e.materialization for e in done.get_asset_materialization_events()]
    failures = {}
    for event in done.get_step_failure_events():
        told = event.step_failure_data.user_failure_data
        failures[str(event.step_key)] = (told.description, {k: v.value for k, v in told.metadata.items()}) if told else ("", {})
    return Run(
        done.success,
        {m.asset_key.to_user_string(): {k: v.value for k, v in m.metadata.items()} for m in made},
        {m.asset_key.to_user_string(): str(m.tags["dagster/data_version"]) for m in made},
        failures,
        list(logs),
        [
            Check(
                e.check_name,
                e.passed,
                e.severity.value,
                e.partition,
                e.description or "",
                {k: v.records if isinstance(v, TableMetadataValue) else v.value for k, v in e.metadata.items()},
            )
            for e in done.get_asset_check_evaluations()
        ],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten documents, long enough for several chunks each. No other test has their texts: a text is embedded once."""
    own = uuid4().hex[:8]
    made = tmp_path / "docs"
    made.mkdir()
    for n in range(10):
        sections = [
            f"## Part {part}\n\n" + f"Reservation {n} of part {part} is confirmed by letter {n * part} of {own}. " * 25
            for part in range(1, 5)
        ]
        (made / f"guide-{n}.md").write_text(f"# Guide {n}\n\n" + "\n\n".join(sections), encoding="utf-8")
    return made


@pytest.fixture
def filled(app: FakedApp, space: Space, folder: Path) -> Space:
    """A space with the folder as its source, not synced yet."""
    app.add_source(space, "docs", "local_dir", {"path": str(folder)})
    return space
