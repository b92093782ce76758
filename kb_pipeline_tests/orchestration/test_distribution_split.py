"""The flow in three parts, each taken by runs of its own kind, as a daemon asks for them."""

from pathlib import Path

import pytest

from kb_pipeline.store.database import Pool, run_of
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.orchestration.cluster import ROOT, cluster, until

EMBEDDING = """
SELECT DISTINCT claimed_by FROM ingestion_task
WHERE space_id = %(space)s AND status = 'PROCESSING' AND current_node = 'EMBEDDING'
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_split_flow_is_taken_by_runs_of_three_kinds_each_for_its_part(
    embedded_server: Server, pool: Pool, database_url: str, tmp_path: Path
) -> None:
    with cluster(embedded_server, pool, database_url, tmp_path, ROOT / "dagster.yaml", split=True) as made:
        made.start_here()
        made.doors.close("parts")
        space = made.add_space("parts", 10)
        until("a run is at the endpoint", lambda: made.doors.came("parts"))
        embedding = {run_of(row.claimed_by) for row in made.rows(EMBEDDING, space)}
        assert {run.job_name for run in made.runs(space) if run.run_id in embedding} == {"embed_batch"}
        made.doors.open("parts")
        until("every document is published", lambda: made.published(space) == 10)
        until("every run has ended", lambda: all(r.is_finished for r in made.runs(space)))
        made.check(space, 10)
        assert {run.job_name for run in made.runs(space)} == {"ingest_batch", "embed_batch", "index_batch"}
