"""The default database, in the data folder."""

from kb_pipeline.embedded_postgres.server import EmbeddedPostgres, Progress

__all__ = ["EmbeddedPostgres", "Progress"]
