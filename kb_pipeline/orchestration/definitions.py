"""All that Dagster loads: ``python -m dagster ... -m kb_pipeline.orchestration.definitions``."""

from collections.abc import Mapping
from typing import Any

from dagster import Definitions, in_process_executor

from kb_pipeline.orchestration.assets import FLOW_ASSETS
from kb_pipeline.orchestration.checks.quality import data_quality
from kb_pipeline.orchestration.jobs import JOBS
from kb_pipeline.orchestration.lineage import EXTERNAL_ASSETS
from kb_pipeline.orchestration.reconciliation import index_reconciliation
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.schedules import build_schedules
from kb_pipeline.orchestration.sensors import SENSORS
from kb_pipeline.settings import load_settings

ASSETS = [*FLOW_ASSETS, index_reconciliation, data_quality, *EXTERNAL_ASSETS]


def build_defs(overrides: Mapping[str, Any] | None = None) -> Definitions:
    """``overrides`` replaces resources by name, for tests.

    The executor is set here and not on the jobs, because "Materialize" in the web UI uses neither of them. In process,
    because a process per step costs seconds and five connection pools.
    """
    return Definitions(
        assets=ASSETS,
        jobs=JOBS,
        schedules=build_schedules(load_settings().time_zone),
        sensors=SENSORS,
        resources={"kb": KbResource(), **(overrides or {})},
        executor=in_process_executor,
    )


defs = build_defs()
