"""What a person may change for one run, in the launchpad. Left alone, a run does what `kb sync` does."""

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


class ReconcileConfig(Config):
    """As `kb reconcile --report-only`."""

    report_only: bool = Field(default=False, description="Compare and report; repair nothing.")
