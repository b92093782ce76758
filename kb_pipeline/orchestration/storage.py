"""Dagster's storage in PostgreSQL, over connections that stay open.

dagster-postgres opens a connection for every statement: over 200 for one sync, each with its password exchange, which was half
of the time of a small sync and most of what an idle daemon costs.
"""

from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import create_pg_engine, get_token_provider_from_config, pg_url_from_config

POOL_SIZE = 1  # kept open, by each of the three storages of a process
MAX_OVERFLOW = 20  # more for as long as threads need them
RECYCLE_SECONDS = 1800


class PooledPostgresStorage(DagsterPostgresStorage):
    """Configured in ``dagster.yaml`` under ``storage: custom:``, with the fields of ``storage: postgres: postgres_db:``."""

    @classmethod
    def from_config_value(cls, inst_data, config_value):
        tokens = get_token_provider_from_config(config_value)
        storage = cls(
            postgres_url=pg_url_from_config(config_value),
            should_autocreate_tables=config_value.get("should_autocreate_tables", True),
            inst_data=inst_data,
            token_provider=tokens,
        )
        for part in (storage._run_storage, storage._event_log_storage, storage._schedule_storage):
            part._engine = create_pg_engine(
                storage.postgres_url,
                tokens,
                isolation_level="AUTOCOMMIT",
                pool_size=POOL_SIZE,
                max_overflow=MAX_OVERFLOW,
                pool_recycle=RECYCLE_SECONDS,
                pool_pre_ping=True,  # a server that came back is not noticed
            )
        return storage
