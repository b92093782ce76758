"""Loading and asking Elasticsearch through the adapter, beside the official client's own bulk helper on the same node.

    python -m kb_pipeline_tests.benchmarks.elasticsearch_load [URL] [ENTRIES] [DIMENSION]

Without a URL a node is started. Each load goes into a new index of the same form; the first is not counted.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
from elasticsearch import Elasticsearch, helpers

from kb_pipeline.indexes.elasticsearch.adapter import ElasticsearchIndex
from kb_pipeline.indexes.elasticsearch.layout import Config
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline_tests.elasticsearch.node import Node, build

BATCH = 2000


def made(number: int, dimension: int) -> list[VectorEntry]:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((number, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = [UUID(int=int.from_bytes(rng.bytes(16), "big")) for _ in range(number)]
    text = "a passage of some words that is as long as a chunk may well be " * 20
    return [
        VectorEntry(i, n, n // 10, vectors[n].astype("<f2").tobytes(), (), 0, n, i.int >> 116, text) for n, i in enumerate(ids)
    ]


def by_adapter(index: ElasticsearchIndex, ref: IndexRef, entries: list[VectorEntry]) -> None:
    for first in range(0, len(entries), BATCH):
        index.upsert(ref, entries[first : first + BATCH])


def by_helper(client: Elasticsearch, alias: str, entries: list[VectorEntry]) -> None:
    """As its documentation shows it, with a refresh for each batch as the adapter does."""
    for first in range(0, len(entries), BATCH):
        actions = [
            {
                "_index": alias, "_id": str(e.vec_id), "index": "x", "chunk_id": e.chunk_id, "doc_id": e.doc_id, "acl": e.acl,
                "acl_seq": 0, "ck": e.checksum, "bucket": e.bucket, "text": e.text, "title": "",
                "vector": np.frombuffer(e.vector, "<f2").astype(np.float32).tolist(),
            }
            for e in entries[first : first + BATCH]
        ]  # fmt: skip
        helpers.bulk(client, actions, chunk_size=500)
        client.indices.refresh(index=alias)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(url: str, number: int, dimension: int) -> None:
    prefix = f"b{uuid4().hex[:8]}-"
    index = ElasticsearchIndex(Config(url=url, prefix=prefix, replicas=0, timeout=300))
    client = Elasticsearch(url, request_timeout=300)
    entries = made(number, dimension)
    refs = [IndexRef(n, 1, 1, f"kb_1_{n}", dimension, "elasticsearch") for n in range(4)]
    for ref in refs:
        index.ensure(ref)
    loads: dict[str, list[float]] = {"adapter": [], "helper": []}
    by_adapter(index, refs[3], entries[: number // 4])
    for kind, ref in zip(("helper", "adapter", "helper"), refs, strict=False):
        work = {
            "adapter": lambda r=ref: by_adapter(index, r, entries),
            "helper": lambda r=ref: by_helper(client, f"{prefix}{r.name}", entries),
        }[kind]
        loads[kind].append(seconds(work))
        print(f"{kind:8} {loads[kind][-1]:7.1f} s  {number / loads[kind][-1]:7.0f} entries/s", flush=True)
    print(f"ratio    {min(loads['adapter']) / min(loads['helper']):7.2f}")
    ref = refs[1]
    queries = np.random.default_rng(2).standard_normal((60, dimension)).astype(np.float32)
    for what, ask in (
        ("search", lambda q: index.search(ref, q, 32, None)),
        ("filtered", lambda q: index.search(ref, q, 32, [1, 2])),
    ):
        times = sorted(seconds(lambda q=q: ask(q)) for q in queries)
        print(f"{what:8} p50 {1000 * statistics.median(times):6.1f} ms  p95 {1000 * times[57]:6.1f} ms")
    print(f"digest   {1000 * seconds(lambda: index.digest(ref)):7.1f} ms")
    print(f"present  {1000 * seconds(lambda: index.present(ref, [e.vec_id for e in entries[:BATCH]])):7.1f} ms of {BATCH}")
    for ref in refs:
        index.drop(ref)


if __name__ == "__main__":
    number, dimension = (int(x) for x in [*sys.argv[2:], *("20000", "512")[len(sys.argv[2:]) :]])
    if len(sys.argv) > 1 and sys.argv[1]:
        measure(sys.argv[1], number, dimension)
    else:
        build()
        with tempfile.TemporaryDirectory() as folder:
            node = Node(Path(folder))
            node.start()
            try:
                measure(node.url, number, dimension)
            finally:
                node.stop()
