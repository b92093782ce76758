"""A space over a source in memory, with a counting embedder: what most tests of the core begin with."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kb_pipeline.settings import Settings
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemoryBlobs, MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow

_number = count(1)


@pytest.fixture
def make_flow(settings: Settings, pool: Pool) -> Callable[..., Flow]:
    """A flow over ``documents``; other keywords are settings. The cache is emptied: tests of a file share a database."""
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_embedding")

    def make(
        documents: dict[str, Any] | None = None, *, index: MemoryIndex | None = None, memory: MemorySource | None = None,
        audience: list[list[str]] | None = None, index_options: dict[str, Any] | None = None, **changes: Any,
    ) -> Flow:  # fmt: skip
        app = FakedApp(
            replace(settings, **changes),
            pool,
            migrations()[-1].version,
            index=index,
            embedder=CountingEmbedder(),
            blobs=MemoryBlobs(),
        )
        space = app.add_space(f"flow-{next(_number)}", audience=audience, index_options=index_options)
        memory = memory or MemorySource(documents)
        return Flow(app, space, memory, app.add_fake_source(space, memory))

    return make


@pytest.fixture
def flow(make_flow: Callable[..., Flow]) -> Flow:
    """With the index that people get by default."""
    return make_flow()


@pytest.fixture
def lying(make_flow: Callable[..., Flow]) -> Flow:
    """With an index that can be down, or lie."""
    return make_flow(index=MemoryIndex())
