"""The two jobs. Their runs have the tag ``dagster/partition``, by which the run queue keeps the runs of a space apart."""

from dagster import AssetSelection, define_asset_job

from kb_pipeline.orchestration.assets import FLOW_ASSETS

sync_space = define_asset_job(
    "sync_space",
    selection=AssetSelection.assets(*FLOW_ASSETS),
    description="Brings one space up to date: walks its sources, then takes every new and changed document to the vector "
    "index. The same as `kb sync`. Nothing is done twice: an unchanged space costs one listing.",
    tags={"kb/job": "sync_space"},
)

ingest_batch = define_asset_job(
    "ingest_batch",
    selection=AssetSelection.assets(*FLOW_ASSETS[1:]),
    description="Takes what already waits in one space's queue to the vector index, without asking its sources. For tasks "
    "that were due again, retried by hand, or left by a run that died.",
    tags={"kb/job": "ingest_batch"},
)
