"""All that Dagster loads: ``python -m dagster ... -m kb_pipeline.orchestration.definitions``."""

from collections.abc import Mapping
from typing import Any

from dagster import Definitions, in_process_executor

from kb_pipeline.orchestration.assets import FLOW_ASSETS
from kb_pipeline.orchestration.jobs import ingest_batch, sync_space
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.sensors import space_lifecycle


def build_defs(overrides: Mapping[str, Any] | None = None) -> Definitions:
    """``overrides`` replaces resources by name, for tests.

    The executor is set here and not on the jobs, because "Materialize" in the web UI uses neither of them. In process,
    because a process per step costs seconds and five connection pools.
    """
    return Definitions(
        assets=FLOW_ASSETS,
        jobs=[sync_space, ingest_batch],
        sensors=[space_lifecycle],
        resources={"kb": KbResource(), **(overrides or {})},
        executor=in_process_executor,
    )


defs = build_defs()
