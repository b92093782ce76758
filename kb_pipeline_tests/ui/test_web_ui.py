"""The web UI as a data engineer sees it: the flow, its checks, what is broken and how to repair it."""

import re
from typing import Any

import psycopg
import pytest

from kb_pipeline.orchestration.definitions import defs
from kb_pipeline_tests.ui.browser import PATIENCE_MS, WIDE, Ui
from kb_pipeline_tests.ui.conftest import SPACES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FLOW = ("source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index")
REPORT_ONLY = "ops:\n  index_reconciliation:\n    config:\n      report_only: true\n"
DAMAGE = """
DELETE FROM kb_vector_m1 v USING kb_doc d JOIN kb_space s ON s.id = d.space_id
WHERE v.doc_id = d.id AND v.space_id = s.id AND s.key = 'handbook' AND d.external_id = 'guide-03.md'
"""


def test_the_flow_is_on_the_first_picture_and_each_step_is_green(ui: Ui, synced: None) -> None:
    ui.page.set_viewport_size({"width": 2600, "height": 760})
    ui.open("/asset-groups", *FLOW, "index_reconciliation", "data_quality", "1 / 1 Passed")
    assert ui.page.get_by_text("1 / 1 Passed").count() == len(FLOW)
    ui.picture("lineage")
    ui.page.set_viewport_size(WIDE)
    for asset in FLOW:
        ui.open(f"/assets/{asset}?view=checks", "Succeeded")
    ui.open("/assets/vector_index?view=partitions&partition=handbook", "Materialized", "published", "last_runs")
    ui.picture("vector_index_partition")
    ui.open("/assets/vector_index", "Plots")
    ui.page.get_by_text("Plots", exact=True).click()
    ui.sees("dagster/partition_row_count", "published")
    ui.picture("vector_index_plots")


def test_damage_is_a_red_check_that_names_document_and_command_and_a_run_repairs_it(
    ui: Ui, synced: None, database: "psycopg.Connection[Any]"
) -> None:
    assert database.execute(DAMAGE).rowcount > 0
    ui.open("/assets/index_reconciliation", "Description")
    ui.materialise("handbook", config=REPORT_ONLY)
    ui.follow()
    ui.open("/assets/index_reconciliation?view=checks", "index_equals_database", "kb reconcile handbook")
    assert "guide-03.md" in ui.shows("^handbook: .* missing")
    ui.picture("red_check")
    ui.page.get_by_text("[Show Markdown]").first.click()
    assert "guide-03.md" in ui.page.get_by_role("dialog").inner_text()
    ui.picture("red_check_documents")

    ui.open("/assets/index_reconciliation", "Description")
    ui.materialise("handbook")
    ui.follow()
    ui.open("/assets/index_reconciliation?view=checks")
    assert "repaired" in ui.shows("^handbook: .* missing")
    assert ui.page.get_by_text("Succeeded", exact=True).locator("visible=true").count() == 5


def test_everything_that_runs_by_itself_is_listed_and_on(ui: Ui) -> None:
    repository = defs.get_repository_def()
    names = [x.name for x in (*repository.sensor_defs, *repository.schedule_defs)]
    ui.page.set_viewport_size({"width": 1500, "height": 1250})
    ui.open("/automation", *names)
    on = ui.page.locator("label[class*=Switch] input:checked")
    on.nth(len(names) - 1).wait_for(state="attached")
    assert on.count() == len(names)
    ui.picture("automation")


def test_a_backfill_of_all_spaces_ends_well_and_stands_beside_the_runs(ui: Ui, synced: None) -> None:
    ui.open("/runs?tab=backfills", f"{len(SPACES)} partitions")
    row = ui.page.locator('xpath=//*[text()="Backfill"]/ancestor::*[contains(., "Manually launched")][1]').first
    row.get_by_text(re.compile("^(Success|Failed|Failure|Canceled)$")).first.wait_for(timeout=PATIENCE_MS * 4)
    assert "Success" in row.inner_text()
    ui.picture("backfills")
    ui.open("/overview/activity/timeline", "sync_space")
    ui.page.get_by_text("1hr", exact=True).click()
    ui.sees("Jobless asset materializations")
    ui.picture("timeline")
