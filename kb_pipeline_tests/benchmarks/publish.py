"""What the database costs a version on its way: its task, its chunks, its publication. First load, and one chunk in ten edited.

    python -m kb_pipeline_tests.benchmarks.publish FOLDER_OR_URL [DOCUMENTS=20000] [ROUNDS=2]

One worker, batches of 200 documents of 10 chunks of 400 characters, through the store's own functions and with its fences, each
transaction committed durably. No files, parsing, embedding or vector index: a step that only moves a task is not counted in the
goal's figure and stands beside it. Texts are made outside of the measured time.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from kb_pipeline.model import Chunk, Item
from kb_pipeline.states import FLOW, Node, next_node
from kb_pipeline.store import chunks, documents, publications, spaces, tasks
from kb_pipeline.store.chunks import VersionChunks
from kb_pipeline.store.database import Connection, Pool, one, open_pool, transaction
from kb_pipeline.store.tasks import Claim, Fence
from kb_pipeline_tests.benchmarks.synthetic import (
    Filled,
    SpaceSpec,
    arguments,
    connect,
    database,
    fill,
    load_average,
    percentile_ms,
)

BATCH, CHUNKS, CHANGED = 200, 10, 3
COUNTED = ("task", "chunks", "premises", "publish")
GOALS = {"first load": (1500, "14"), "one chunk in ten edited": (1000, "3.4")}  # documents a second, kB of WAL a document
SHOWN = "SELECT count(*) AS n, count(*) FILTER (WHERE in_current) AS now FROM kb_chunk_state WHERE shard = %s AND space_id = %s"
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS n"


@dataclass
class Meter:
    """Seconds and bytes of WAL by step, a batch at a time."""

    c: Connection
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wal: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        before, began = one(self.c.execute(WAL)).n, time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.wal[name] = self.wal.get(name, 0) + one(self.c.execute(WAL)).n - before


def main() -> None:
    target, (count, rounds) = arguments(20_000, 2)
    print(f"{count} documents, {count * CHUNKS} chunks, batches of {BATCH}, {rounds} rounds", flush=True)
    with database(target) as url, connect(url) as c:
        pool = open_pool(url, max_size=1)
        with transaction(pool) as log:
            tasks.ensure_log(log)
        for number in range(rounds):
            (x,) = fill(c, [SpaceSpec(f"round{number}", 0, own_shard=True)])
            ids = add_documents(pool, x, count)
            c.execute("CHECKPOINT")  # none within a round: the WAL is that of changes, hardly any of whole pages
            for version, label in enumerate(GOALS, 1):
                load, meter = load_average(), Meter(c)
                for start in range(0, count, BATCH):
                    batch(pool, x, ids[start : start + BATCH], version, meter)
                    if start == 0:  # as the pipeline does
                        with transaction(pool) as learning:
                            chunks.learn(learning, x.shard)
                report(f"round {number + 1}, {label}; {load}", label, meter, count)
            check(c, x, count)
        pool.close()


def add_documents(pool: Pool, x: Filled, count: int) -> list[int]:
    ids: list[int] = []
    for start in range(0, count, 5000):
        names = [f"d{n:08}.md" for n in range(start, min(count, start + 5000))]
        with transaction(pool) as c:
            items = [Item(n, "r1", n, f"synthetic:{n}", 4000) for n in names]
            ids += documents.insert_documents(c, x.space.id, x.source_id, items).values()
    return sorted(ids)


def batch(pool: Pool, x: Filled, ids: Sequence[int], version: int, meter: Meter) -> None:
    """One batch from seen to current."""
    cut = {i: texts(i, version) for i in ids}
    with meter.step("task"), transaction(pool) as c:
        documents.lock_documents(c, ids)
        documents.new_versions(c, x.space.id, [(i, f"r{version}", 4000) for i in ids], max_retries=3)
    with meter.step("claim"), transaction(pool) as c:
        claims = tasks.claim(c, x.space, BATCH, 120, FLOW)
    assert [a.doc_id for a in claims] == list(ids)
    claims = moved(pool, x, claims, Node.CHUNKER, meter)
    with meter.step("chunks"), transaction(pool) as c:
        held = tasks.fence(c, x.space, claims, documents=True)
        rows = [VersionChunks(a.doc_id, a.version, "recipe", cut[a.doc_id]) for a in held.claims]
        stored = chunks.store_chunks(c, x.space.id, held.shard, rows)
        claims = advanced(c, held, {a.task_id: {"chunks": CHUNKS, "new": stored[a.doc_id][0]} for a in held.claims})
    claims = moved(pool, x, claims, Node.INDEXER, meter)
    docs = {a.doc_id: a.version for a in claims}
    with meter.step("premises"), transaction(pool) as c:
        held = tasks.fence(c, x.space, claims, documents=True)
        ref = spaces.serving_index(c, x.space.id)
        wanted = publications.revive(c, x.space.id, held.shard, list(docs), list(docs.values()))
        publications.publishable(c, docs)
    with meter.step("publish"), transaction(pool) as c:
        held = tasks.fence(c, x.space, claims, documents=True)
        assert spaces.lock_serving_index(c, x.space.id) == ref.index_id
        tasks.supersede(c, [])
        publications.publishable(c, docs)
        published = publications.publish(c, x.space.id, held.shard, docs)
        advanced(c, held, {a.task_id: {"published": a.version} for a in held.claims})
    assert (published.documents, len(wanted)) == (len(ids), len(ids) * CHUNKS)


def moved(pool: Pool, x: Filled, claims: list[Claim], node: Node, meter: Meter) -> list[Claim]:
    """Through the nodes before ``node``, each with its transaction, as if their work had been done."""
    while claims[0].node is not node:
        with meter.step(claims[0].node.value.lower()), transaction(pool) as c:
            held = tasks.fence(c, x.space, claims, documents=True)
            claims = advanced(c, held, {a.task_id: {} for a in held.claims})
    return claims


def advanced(c: Connection, held: Fence, outputs: dict[int, dict[str, object]]) -> list[Claim]:
    tasks.advance(c, held.claims, datetime.now(UTC), outputs)
    return [replace(a, node=next_node(a.node) or a.node) for a in held.claims]


def texts(doc_id: int, version: int) -> list[Chunk]:
    """Ten chunks of 400 characters; one of them is another one in each version."""
    made = []
    for n in range(CHUNKS):
        text = (hashlib.sha256(f"{doc_id}.{n}.{version if n == CHANGED else 1}".encode()).hexdigest() * 7)[:400]
        made.append(Chunk(text, text, title_path=("Section",), tokens=100))
    return made


def report(label: str, goal: str, meter: Meter, count: int) -> None:
    counted = sum(sum(meter.seconds[s]) for s in COUNTED)
    whole = sum(sum(v) for v in meter.seconds.values())
    publish = sum(meter.seconds["publish"])
    wal, all_wal = sum(meter.wal[s] for s in COUNTED), sum(meter.wal.values())
    rate, size = GOALS[goal]
    print(f"{label}: {count / counted:.0f} documents/s (goal {rate}); WAL {wal / count / 1000:.1f} kB a document (split layout alone: {size}). "
          f"The publishing transaction alone {count / publish:.0f}/s; with every node's transaction {count / whole:.0f}/s, {all_wal / count / 1000:.1f} kB")  # fmt: skip
    times = {s: f"{percentile_ms(v, 50):.0f} ({percentile_ms(v, 99):.0f}) ms" for s, v in meter.seconds.items()}
    steps = (f"{s} {times[s]} {meter.wal[s] / count / 1000:.1f} kB" for s in times)
    print(f"  a batch, p50 (p99), and WAL a document: {', '.join(steps)}", flush=True)


def check(c: Connection, x: Filled, count: int) -> None:
    """Every document shows its second version, ten chunks of it."""
    row = one(c.execute(SHOWN, [x.shard, x.space.id]))
    assert (row.n, row.now) == (count * (CHUNKS + 1), count * CHUNKS)


if __name__ == "__main__":
    main()
