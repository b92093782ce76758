"""The HTTP service beside Dagster: health and metrics. ``python -m kb_pipeline.service HOST`` runs it."""
