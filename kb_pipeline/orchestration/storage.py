"""Dagster's storage in PostgreSQL, over connections that stay open.

dagster-postgres opens a connection for every statement, over 200 for one sync, asks for the list of tables before most of them,
and does all of it anew in every tick of a sensor: that was most of what an idle instance costs.
"""

import os
from collections.abc import Callable
from typing import Any

from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import create_pg_engine, get_token_provider_from_config, pg_url_from_config

POOL_SIZE = 3  # connections kept open by a process
MAX_OVERFLOW = 20  # more for as long as threads need them
RECYCLE_SECONDS = 1800

# What a storage asks again and again about tables that, once there, stay.
STANDING = {
    "_schedule_storage": ("has_instigators_table", "_has_instigators_table", "has_secondary_index_table", "has_built_index"),
    "_run_storage": ("has_run_stats_index_cols",),
    "_event_log_storage": ("has_table",),
}

_engines: dict[tuple[int, str], Any] = {}  # by process, which may be a fork, and URL
_standing: set[tuple[str, ...]] = set()


class PooledPostgresStorage(DagsterPostgresStorage):
    """Configured in ``dagster.yaml`` under ``storage: custom:``, with the fields of ``storage: postgres: postgres_db:``."""

    @classmethod
    def from_config_value(cls, inst_data, config_value):
        tokens, url = get_token_provider_from_config(config_value), pg_url_from_config(config_value)
        known = (os.getpid(), url) in _engines
        storage = cls(
            postgres_url=url,
            should_autocreate_tables=not known and config_value.get("should_autocreate_tables", True),
            inst_data=inst_data,
            token_provider=tokens,
        )
        if not known:
            _engines[os.getpid(), url] = create_pg_engine(
                url,
                tokens,
                isolation_level="AUTOCOMMIT",
                pool_size=POOL_SIZE,
                max_overflow=MAX_OVERFLOW,
                pool_recycle=RECYCLE_SECONDS,
                pool_pre_ping=True,  # a server that came back is not noticed
            )
        for name, questions in STANDING.items():
            part = getattr(storage, name)
            part._engine = _engines[os.getpid(), url]
            for question in questions:
                setattr(part, question, _remembered(url, question, getattr(part, question)))
        return storage


def _remembered(url: str, question: str, ask: Callable[..., bool]) -> Callable[..., bool]:
    """A yes is never asked for again."""

    def answer(*of: Any) -> bool:
        key = (url, question, *(x for x in of if isinstance(x, str)))
        if key not in _standing and ask(*of):
            _standing.add(key)
        return key in _standing

    return answer
