"""What a person may change for one run, in the launchpad. Left alone, a run does what `kb sync` does."""

from typing import Any

from dagster import Config
from pydantic import Field


class SyncConfig(Config):
    """As `kb sync --source NAME --full`."""

    full: bool = Field(default=False, description="List everything, although the source could say what changed.")
    source: str = Field(default="", description="Only this source of the space; empty: all that are active.")


class ReparseConfig(Config):
    """As `kb sync --reparse`."""

    reparse: bool = Field(
        default=False,
        description="Parse the stored original of every document again, for a parser that has learned something since. "
        "Documents that are being worked on are left out and counted. Chunks that come out equal cost nothing.",
    )


class ReembedConfig(Config):
    """As `kb sync --reembed`."""

    reembed: bool = Field(
        default=False,
        description="Ask the embedder again for every current text, for an endpoint whose model changed behind its name. "
        "Only vectors that differ are stored and indexed again.",
    )
    reembed_after: int = Field(
        default=0, ge=0, description="Go on behind this chunk: `last_chunk` of a run that was interrupted. 0: everything."
    )


class RebuildConfig(Config):
    """As `kb space set`, `kb space back` and `kb space build`."""

    index: str = Field(default="", description="Kind of the next index, as `elasticsearch`; empty: as it is.")
    index_options: dict[str, Any] = Field(default={}, description="Its options; secrets as env:NAME or file:PATH.")
    embedder: str = Field(default="", description="Model of the next index; empty: as it is.")
    embedder_options: dict[str, Any] = Field(default={}, description="Options of the model; secrets as env:NAME or file:PATH.")
    back: bool = Field(default=False, description="Serve by the former index again. All left empty: go on with what was begun.")


class ReconcileConfig(Config):
    """As `kb reconcile --report-only`."""

    report_only: bool = Field(default=False, description="Compare and report; repair nothing.")
