"""The same vectors in each vector index, through its adapter: load, small changes, search, recall, digest.

    python -m kb_pipeline_tests.benchmarks.engines FOLDER KIND [KIND ...] [--entries 100000] [--dimension 512] [--searches 100]

KIND: pgvector, elasticsearch, qdrant, milvus. Qdrant and Milvus are the clients' local modes, which are no servers: their search
compares every vector in Python. Vectors are drawn around 1,000 centres, so that recall means something; the exact answer is
computed with numpy. One entry in 40 is permitted to the asker of the filtered searches. Goals: recall 0.95 at ten, always ten.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.model import IndexRef, Json, VectorEntry
from kb_pipeline.ports import VectorIndex
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import connection
from kb_pipeline.store.spaces import serving_index
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.benchmarks.synthetic import database, load_average, percentile_ms
from kb_pipeline_tests.elasticsearch.node import Node, build

BATCH, CENTRES, BEST, ONE_IN = 2000, 1000, 10, 40
FAST_JVM = "-XX:TieredStopAtLevel=4 --add-modules=jdk.incubator.vector"


def vectors(entries: int, dimension: int, seed: int) -> NDArray[np.float32]:
    centres = np.random.default_rng(0).standard_normal((CENTRES, dimension)).astype(np.float32)
    rng = np.random.default_rng(seed)
    made = centres[rng.integers(0, CENTRES, entries)] + rng.standard_normal((entries, dimension)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def entries_of(made: NDArray[np.float32]) -> list[VectorEntry]:
    rng = np.random.default_rng(1)
    ids = [UUID(bytes=rng.bytes(16)) for _ in made]
    rows = made.astype("<f2")
    return [
        VectorEntry(
            i, n, n // 10, rows[n].tobytes(), (1,) if n % ONE_IN == 7 else (2,), 0, n, i.int >> 116, "a passage", "a title"
        )
        for n, i in enumerate(ids)
    ]


@contextmanager
def served(kind: str, folder: Path) -> Iterator[Json]:
    """Options that open the adapter."""
    match kind:
        case "elasticsearch":
            build()
            node = Node(folder / "elasticsearch")
            node.start()
            try:
                yield {"url": node.url, "replicas": 0}
            finally:
                node.stop()
        case "qdrant":
            yield {"path": ":memory:"}
        case "milvus":
            yield {"path": str(folder / "milvus.db")}
        case _:
            yield {}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(kind: str, index: VectorIndex, ref: IndexRef, made: NDArray[np.float32], asked: NDArray[np.float32]) -> None:
    entries = entries_of(made)
    some = entries[::100]

    def load(given: list[VectorEntry]) -> None:
        for first in range(0, len(given), BATCH):
            index.upsert(ref, given[first : first + BATCH])

    print(f"== {kind}: {len(entries)} entries of {made.shape[1]}; {load_average()}", flush=True)
    seconds = timed(lambda: load(entries))
    print(
        f"   load {seconds:.1f} s, {len(entries) / seconds:.0f}/s; settle {timed(lambda: index.settle(ref)):.1f} s", flush=True
    )
    print(f"   upsert of 1 %: {timed(lambda: load([replace(e, acl_seq=1) for e in some])):.2f} s", flush=True)
    stored = made.astype("<f2").astype(np.float32)
    for label, acl, among in (("search", None, np.arange(len(made))), ("filter 1/40", [1], np.arange(7, len(made), ONE_IN))):
        taken, right, least = [], 0, BEST
        for question in asked:
            began = time.perf_counter()
            found = index.search(ref, question, BEST, acl)
            taken.append(time.perf_counter() - began)
            least = min(least, len(found))
            scores = stored[among] @ question
            right += len({x.chunk_id for x in found} & set(among[np.argpartition(-scores, BEST)[:BEST]].tolist()))
        recall = right / (BEST * len(asked))
        print(
            f"   {label}: p50 {percentile_ms(taken, 50):.1f} ms, p95 {percentile_ms(taken, 95):.1f} ms, recall@10 {recall:.3f}, "
            f"at least {least} of {BEST}",
            flush=True,
        )
    digest = timed(lambda: index.digest(ref))
    buckets = sorted(index.digest(ref))[:100]
    ids = timed(lambda: [index.ids(ref, b) for b in buckets])
    scaled = 1e6 / len(entries)
    print(f"   digest {digest:.2f} s ({digest * scaled:.1f} s a million); ids of 100 buckets {ids:.2f} s", flush=True)
    print(f"   delete of 1 %: {timed(lambda: index.delete(ref, [e.vec_id for e in some])):.2f} s", flush=True)
    assert index.present(ref, [e.vec_id for e in some]) == {}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("kinds", nargs="+")
    arguments.add_argument("--entries", type=int, default=100_000)
    arguments.add_argument("--dimension", type=int, default=512)
    arguments.add_argument("--searches", type=int, default=100)
    options = arguments.parse_args()
    made, asked = (vectors(n, options.dimension, seed) for n, seed in ((options.entries, 2), (options.searches, 3)))
    with database(str(options.folder / "database")) as url:
        settings = load_settings({}, home=options.folder / "home", database_url=url, embedder="hashing", own_shard_chunks=10)
        with open_app(settings) as app:
            for kind in options.kinds:
                with served(kind, options.folder) as opened:
                    space = app.add_space(
                        kind, index=kind, index_options=opened, embedder_options={"dimension": options.dimension}
                    )
                    promote_if_large(app.engine, space, promised_chunks=options.entries)
                    with connection(app.pool) as c:
                        ref = serving_index(c, space.id)
                    measure(kind, app.engine.index(ref), ref, made, asked)


if __name__ == "__main__":
    main()
