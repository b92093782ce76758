"""Where the tests find a server of each vector index. One line of SERVERS for each adapter of the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from kb_pipeline.model import Json


@dataclass(frozen=True)
class IndexServer:
    """What opens the adapter: its options, and what its class takes besides."""

    options: Json
    dependencies: tuple[Any, ...] = ()


def _pgvector(request: pytest.FixtureRequest) -> IndexServer:
    return IndexServer({}, (request.getfixturevalue("pool"),))


def _elasticsearch(request: pytest.FixtureRequest) -> IndexServer:
    """One node for the whole run: names of indexes begin anew with each database, so each caller has a prefix of its own."""
    return IndexServer({"url": request.getfixturevalue("elasticsearch_url"), "prefix": f"t{uuid4().hex[:8]}-", "replicas": 0})


def _qdrant(request: pytest.FixtureRequest) -> IndexServer:
    """Local mode in memory, one for the whole run: in a folder each point is a commit of its own."""
    return IndexServer({"path": ":memory:", "prefix": f"t{uuid4().hex[:8]}-"})


def _milvus(request: pytest.FixtureRequest) -> IndexServer:
    """Milvus Lite, one file for the whole run: this process serves each file that it has opened until it ends."""
    path = request.getfixturevalue("tmp_path_factory").getbasetemp() / "milvus.db"
    return IndexServer({"path": str(path), "prefix": f"t{uuid4().hex[:8]}_"})


# An adapter whose server cannot be had here calls pytest.skip with the reason.
SERVERS: Mapping[str, Callable[[pytest.FixtureRequest], IndexServer]] = {
    "pgvector": _pgvector,
    "qdrant": _qdrant,
    "milvus": _milvus,
    "elasticsearch": _elasticsearch,
}
