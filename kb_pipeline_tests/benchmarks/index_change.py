"""A space changes its model or its index, and goes back, while a reader never stops: failed, empty and mixed searches, and how
long it takes.

    python -m kb_pipeline_tests.benchmarks.index_change FOLDER_OR_URL [CHUNKS=100000] [FROM=256] [TO=64] [KIND=pgvector]

With KIND=elasticsearch a node is started, and with TO=FROM the model stays: nothing may be embedded. Vectors of the first model
are random (see ``synthetic``), those of another are made by the hashing embedder. A search is mixed
where its scores were not all made by one of the two models: each hit is compared with both cached vectors. Ends with 1 where a
search failed, was empty or mixed.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.rebuild import BuildReport
from kb_pipeline.model import Answer, Json
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.store import embeddings, indexes, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.indexes import Index
from kb_pipeline.store.spaces import Space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import scratch
from kb_pipeline_tests.benchmarks.synthetic import (
    SpaceSpec,
    arguments,
    connect,
    database,
    fill,
    load_average,
    percentile_ms,
)
from kb_pipeline_tests.elasticsearch.node import Node, build

KEEP_SECONDS, PER_DOCUMENT, BEST = 86_400.0, 20, 10
SAME = 2e-3  # scores come from vectors and questions rounded to float16


@dataclass
class Reader:
    """Searches until it is told to stop. Answers are judged afterwards, so that it is never held up."""

    engine: Engine
    space: Space
    over: Event = field(default_factory=Event)
    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def run(self) -> None:
        chance = np.random.default_rng(0)
        while not self.over.is_set():
            question = "".join(f"{x:x}" for x in chance.integers(0, 16, 60))
            began = time.perf_counter()
            try:
                self.answers.append(search(self.engine, self.space, question, k=BEST))
            except KbError as e:
                self.failed.append(f"{e.code}: {e.message}")
            self.seconds.append(time.perf_counter() - began)


def scores(engine: Engine, space: Space, index: Index, answer: Answer) -> NDArray[np.float64]:
    """Of its hits, by the model of an index; nan without a cached vector."""
    chunks = [h.chunk_id for h in answer.hits]
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        rows = embeddings.vectors_of(c, space.id, shard or 0, index.ref.model_id, chunks)
    question = np.asarray(engine.embedder(index).embed_query(answer.question), np.float32)
    found = {r.chunk_id: np.frombuffer(r.vector, "<f2").astype(np.float32) for r in rows}
    nothing = np.full(index.ref.dimension, np.nan, np.float32)
    vectors = np.stack([found.get(x, nothing) for x in chunks])
    return np.asarray(vectors @ question / np.linalg.norm(vectors, axis=1) / np.linalg.norm(question), np.float64)


def mixed(engine: Engine, space: Space, living: list[Index], answer: Answer) -> bool:
    given = np.array([h.score for h in answer.hits])
    return not any(np.allclose(scores(engine, space, i, answer), given, atol=SAME) for i in living)


def timed(label: str, app: App, space: Space) -> BuildReport:
    began = time.perf_counter()
    report = rebuild.build(app.engine, space, keep_seconds=KEEP_SECONDS)
    seconds = time.perf_counter() - began
    print(
        f"{label}: {seconds:.1f} s, given {report.chunks} ({report.chunks / seconds:.0f} chunks/s), embedded {report.embedded}",
        flush=True,
    )
    return report


@contextmanager
def server_of(kind: str, folder: Path) -> Iterator[Json]:
    """Options of an index; the server of one that is outside of the database is started."""
    if kind != "elasticsearch":
        yield {}
        return
    build()
    node = Node(folder / "node")
    node.start()
    try:
        yield {"url": node.url, "replicas": 0}
    finally:
        node.stop()


def main() -> None:
    kind = sys.argv.pop(5) if len(sys.argv) > 5 else "pgvector"
    target, (chunks, first, second) = arguments(100_000, 256, 64)
    print(load_average())
    with database(target) as url, scratch() as work, server_of(kind, Path(work)) as options:
        with connect(url) as c:
            spec = SpaceSpec("changing", chunks // PER_DOCUMENT, PER_DOCUMENT, own_shard=True, vectors=True, dimensions=first)
            space = fill(c, [spec])[0].space
        with open_app(load_settings({}, home=Path(work), database_url=url, embedder="hashing")) as app:
            with transaction(app.pool) as c:
                serving = indexes.serving(c, space.id)
            app.engine.index(serving.ref).settle(serving.ref)
            reader = Reader(app.engine, space)
            thread = Thread(target=reader.run)
            thread.start()
            try:
                app.change_index(space, index=kind, index_options=options, embedder_options={"dimension": second})
                timed(f"to {kind} with {second} dimensions", app, space)
                rebuild.back(app.engine, space)
                timed("back", app, space)
            finally:
                reader.over.set()
                thread.join()
            with transaction(app.pool) as c:
                living = indexes.living(c, space.id)
            empty = sum(not a.hits for a in reader.answers)
            torn = sum(mixed(app.engine, space, living, a) for a in reader.answers if a.hits)
    taken = reader.seconds
    print(f"searches={len(taken)} failed={len(reader.failed)} empty={empty} mixed={torn}", end=" ")
    print(f"p50={percentile_ms(taken, 50):.1f} ms p95={percentile_ms(taken, 95):.1f} ms slowest={max(taken) * 1000:.0f} ms")
    print("\n".join(reader.failed[:5]))
    sys.exit(1 if reader.failed or empty or torn else 0)


if __name__ == "__main__":
    main()
