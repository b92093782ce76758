"""An index of a space of its own, and entries whose best answers are known."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from uuid import UUID

import numpy as np
import pytest
from numpy.typing import NDArray

from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.ports import VectorIndex
from kb_pipeline.registry import open_adapter
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex
from kb_pipeline_tests.index_servers import SERVERS

DIMENSION = 16
_number = count(1)


@dataclass
class Bench:
    """An index of its own space, ready for writing."""

    app: FakedApp
    space: Space
    index: VectorIndex
    ref: IndexRef

    def drop(self) -> int:
        """As a space's deletion does it: the row first, then the index."""
        with transaction(self.app.pool) as c:
            c.execute("UPDATE kb_index SET status = 'DROPPING' WHERE id = %s", [self.ref.index_id])
        return self.index.drop(self.ref)


def bench_maker(kind: str, app: FakedApp, request: pytest.FixtureRequest, **options: object) -> Callable[[], Bench]:
    """Makes benches of one adapter of the registry, or of the fake ``memory``; ``options`` on top of its server's."""
    if kind == "memory":
        index: VectorIndex = MemoryIndex()
        opened = {}
    else:
        server = SERVERS[kind](request)
        opened = {**server.options, **options}
        index = open_adapter("index", kind, opened, *server.dependencies)

    def make() -> Bench:
        space = app.add_space(f"bench-{next(_number)}", embedder_options={"dimension": DIMENSION})
        with transaction(app.pool) as c:
            ref = replace(spaces.serving_index(c, space.id), kind=kind, options=opened)
        index.ensure(ref)
        bench = Bench(app, space, index, ref)
        request.addfinalizer(bench.drop)  # the next test writes the same ids
        return bench

    return make


def vectors(n: int, seed: int = 0) -> NDArray[np.float32]:
    made = np.random.default_rng(seed).standard_normal((n, DIMENSION)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def vec_id(n: int) -> UUID:
    return UUID(bytes=hashlib.sha256(str(n).encode()).digest()[:16])


def entries(made: NDArray[np.float32], acl: Callable[[int], tuple[int, ...]] = lambda _: ()) -> list[VectorEntry]:
    """Chunk n has vector n and belongs to document n // 10."""
    ids = [vec_id(n) for n in range(len(made))]
    return [
        VectorEntry(v, n, n // 10, made[n].astype("<f2").tobytes(), acl(n), 0, n - 1000, int(v.hex[:3], 16))
        for n, v in enumerate(ids)
    ]


def best(made: NDArray[np.float32], query: NDArray[np.float32], k: int, among: Sequence[int] | None = None) -> list[int]:
    """The exact answer over what is stored: float16 on both sides."""
    scores = made.astype("<f2").astype(np.float64) @ query.astype("<f2").astype(np.float64)
    scores /= np.linalg.norm(made.astype("<f2").astype(np.float64), axis=1)
    rows = np.arange(len(made)) if among is None else np.asarray(among)
    return [int(i) for i in rows[np.argsort(-scores[rows])][:k]]
