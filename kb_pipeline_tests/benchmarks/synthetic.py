"""Millions of rows in the product's own schema, for benchmarks of statements: made inside the server, so memory stays flat.

    python -m kb_pipeline_tests.benchmarks.synthetic FOLDER_OR_URL [CHUNKS=10000000]

Every document has one version that is current. Texts are short (100 to 400 characters of hexadecimal digits) and all different;
hashes, vector ids and checksums are what the product would compute. Vectors are random, each joined from two halves of a small
pool. Objects (originals and parse results) do not exist. 10 M chunks without vectors take 9 GB; vectors add 2 bytes a
dimension and some 300 a chunk, twice: in the index and in the cache.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.embedders.hashing import Config, HashingEmbedder
from kb_pipeline.store import sources, spaces
from kb_pipeline.store.database import Connection, one, open_pool
from kb_pipeline.store.migrations import migrate
from kb_pipeline.store.spaces import Space

BATCH = 500_000  # chunks a transaction
HALVES = 2048  # of vectors: 4 M different ones

DOCUMENTS = """
INSERT INTO kb_doc (space_id, source_id, external_id, title, uri, current_ver, last_ver, status, published_at)
SELECT x.space, x.source, 'd' || to_char(n, 'FM00000000') || '.md', 'Document ' || n, 'synthetic:' || n, 1, 1, 'AVAILABLE', clock_timestamp()
FROM unnest(%(spaces)s::int[], %(sources)s::int[]) x (space, source) CROSS JOIN generate_series(1, %(documents)s::int) n ORDER BY n, x.space
"""
VERSIONS = """
INSERT INTO kb_doc_version (doc_id, version, space_id, status, revision, raw_sha256, raw_bytes, text_sha256, chunk_ids, recipe)
SELECT d.id, 1, d.space_id, 'READY', 'r1', sha256(convert_to('raw ' || d.id, 'UTF8')), 2000, sha256(convert_to('text ' || d.id, 'UTF8')),
       ARRAY(SELECT generate_series(%(base)s::bigint + (d.id - %(first)s::bigint) * %(per)s::int, %(base)s::bigint + (d.id - %(first)s::bigint + 1) * %(per)s::int - 1)),
       'synthetic'
FROM kb_doc d WHERE d.id BETWEEN %(low)s::bigint AND %(high)s::bigint ORDER BY d.id
"""
PUBLICATIONS = """
INSERT INTO kb_publication (space_id, doc_id, version, from_at, from_xid)
SELECT d.space_id, d.id, 1, d.published_at, pg_current_xact_id() FROM kb_doc d WHERE d.id BETWEEN %(low)s::bigint AND %(high)s::bigint ORDER BY d.id
"""
TASKS = """
INSERT INTO ingestion_task (space_id, doc_id, version, status, current_node, attempt, size_bytes)
SELECT d.space_id, d.id, 1, 'SUCCESS', 'INDEXER', 1, 2000 FROM kb_doc d WHERE d.id BETWEEN %(low)s::bigint AND %(high)s::bigint ORDER BY d.id
"""
TEXTS = """
INSERT INTO kb_chunk (shard, id, space_id, doc_id, content_hash, occurrence, tokens, title_path, content)
SELECT %(shard)s::int, x.id, d.space_id, d.id, sha256(convert_to(x.content, 'UTF8')), 0, length(x.content) / 4, ARRAY['Section ' || n], x.content
FROM kb_doc d CROSS JOIN generate_series(0, %(per)s::int - 1) n
CROSS JOIN LATERAL (SELECT %(base)s::bigint + (d.id - %(first)s::bigint) * %(per)s::int + n AS id,
                           substr(repeat(md5(d.id || '.' || n), 13), 1, 100 + ((d.id * 7 + n * 13) %% 300)::int) AS content) x
WHERE d.id BETWEEN %(low)s::bigint AND %(high)s::bigint
"""
STATES = """
INSERT INTO kb_chunk_state (shard, id, space_id, doc_id, hash, occurrence, vec_id, ck, bucket, payload, vec_status, in_current)
SELECT c.shard, c.id, c.space_id, c.doc_id, h.hash, 0, v.vec_id, kb_checksum(v.vec_id, '{}'), kb_bucket(v.vec_id), 0, 1, true
FROM kb_chunk c CROSS JOIN LATERAL (SELECT encode(substring(c.content_hash FROM 1 FOR 16), 'hex')::uuid AS hash OFFSET 0) h
CROSS JOIN LATERAL (SELECT kb_vec_id(c.id, h.hash, 0) AS vec_id OFFSET 0) v
WHERE c.shard = %(shard)s::int AND c.id BETWEEN %(from)s::bigint AND %(to)s::bigint ORDER BY c.id
"""
VECTORS = """
INSERT INTO {table} (shard, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v)
SELECT s.shard, s.vec_id, s.space_id, i.id, s.id, s.doc_id, s.acl_seq, s.ck, s.bucket, s.acl, a.v || b.v FROM kb_chunk_state s
JOIN kb_index i ON i.space_id = s.space_id AND i.status = 'SERVING'
JOIN synthetic_half a ON a.n = s.id %% {halves} JOIN synthetic_half b ON b.n = s.id / {halves} %% {halves}
WHERE s.shard = %(shard)s::int AND s.id BETWEEN %(from)s::bigint AND %(to)s::bigint
"""
CACHE = """
INSERT INTO kb_embedding (model_id, content_hash, vector)
SELECT %(model)s::int, c.content_hash, a.raw || b.raw FROM kb_chunk c
JOIN synthetic_half a ON a.n = c.id %% {halves} JOIN synthetic_half b ON b.n = c.id / {halves} %% {halves}
WHERE c.shard = %(shard)s::int AND c.id BETWEEN %(from)s::bigint AND %(to)s::bigint ON CONFLICT DO NOTHING
"""


@dataclass(frozen=True)
class SpaceSpec:
    """``own_shard``: as after a promotion, its rows alone in their leaves; else in the emptiest shared shard. Zeros are fine."""

    key: str
    documents: int
    chunks_per_document: int = 20
    own_shard: bool = False
    vectors: bool = False  # in the index (pgvector), and in the cache
    dimensions: int = 256

    @property
    def chunks(self) -> int:
        return self.documents * self.chunks_per_document


@dataclass(frozen=True)
class Filled:
    """What was made of a spec. The space opens in the application with the hashing embedder."""

    spec: SpaceSpec
    space: Space
    source_id: int
    shard: int


@contextmanager
def database(target: str) -> Iterator[str]:
    """URL of a new, migrated database: of a server of its own below a folder, or on the server of a URL. Gone afterwards."""
    if "://" in target:
        with _on_server(target) as url:
            yield url
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and its files go then too
    home = Path(target) / f"kb-bench-{uuid4().hex[:8]}"
    server = EmbeddedPostgres(home)
    try:
        url = server.start()
        _migrate(url)
        yield url
    finally:
        server.stop(mode="immediate")
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _on_server(target: str) -> Iterator[str]:
    name = f"kb_bench_{uuid4().hex[:8]}"
    with psycopg.connect(target, autocommit=True) as c:
        c.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            url = f"{target.rpartition('/')[0]}/{name}"
            _migrate(url)
            yield url
        finally:
            c.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _migrate(url: str) -> None:
    pool = open_pool(url, max_size=1)
    try:
        migrate(pool)
    finally:
        pool.close()


def connect(url: str) -> Connection:
    """As the product connects, and outside of a transaction block: named tuples, nothing prepared."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=None, row_factory=namedtuple_row)


def fill(c: Connection, specs: Sequence[SpaceSpec]) -> list[Filled]:
    """Make the spaces with everything in them, then vacuum and analyze. ``c`` comes from ``connect`` and works alone.

    Documents of spaces that share a shard and a shape lie mixed, as they would after weeks.
    """
    c.execute("SET synchronous_commit = off")
    filled = [_space(c, spec) for spec in specs]
    groups: dict[Any, list[Filled]] = {}
    for x in filled:
        s = x.spec
        groups.setdefault((x.shard, x.space.model_id, s.documents, s.chunks_per_document, s.vectors), []).append(x)
    for group in groups.values():
        _fill_group(c, group)
    c.execute("RESET synchronous_commit")
    c.execute("VACUUM (ANALYZE) kb_doc, kb_doc_version, kb_publication, ingestion_task, kb_chunk, kb_chunk_state, kb_embedding")
    for model in {x.space.model_id for x in filled if x.spec.vectors}:
        c.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(f"kb_vector_m{model}")))
    c.execute("CHECKPOINT")
    return filled


def _space(c: Connection, spec: SpaceSpec) -> Filled:
    fingerprint = HashingEmbedder(Config(dimension=spec.dimensions)).fingerprint
    with c.transaction():
        values = {
            "key": spec.key, "name": spec.key, "model_id": spaces.ensure_model(c, fingerprint, spec.dimensions),
            "embedder": "hashing", "embedder_options": {"dimension": spec.dimensions}, "index_kind": "pgvector", "index_options": {},
            "chunking": {}, "retained_versions": 5, "schedule": "", "time_zone": "UTC", "audience": None,
        }  # fmt: skip
        space = spaces.create_space(c, values)
        spaces.serve_index(c, space.id)
        source = sources.add_source(c, space.id, "docs", "local_dir", {"path": "/nonexistent"})
        if spec.own_shard:
            spaces.promote(c, space)
            spaces.clear_left(c, space.id, before=datetime.now(UTC) + timedelta(hours=1), limit=1)
        shard = one(c.execute("SELECT shard FROM kb_space WHERE id = %s", [space.id])).shard
    return Filled(spec, space, source.id, shard)


def _fill_group(c: Connection, group: Sequence[Filled]) -> None:
    spec, per = group[0].spec, group[0].spec.chunks_per_document
    values = {"shard": group[0].shard, "per": per, "model": group[0].space.model_id}
    before = one(c.execute("SELECT coalesce(max(id), 0) AS id FROM kb_doc")).id
    made = {"spaces": [x.space.id for x in group], "sources": [x.source_id for x in group], "documents": spec.documents}
    c.execute(DOCUMENTS, made)
    first, last = one(c.execute("SELECT min(id), max(id) FROM kb_doc WHERE id > %s", [before]))
    if first is None:  # a space without documents
        return
    base = one(c.execute("SELECT nextval('kb_chunk_id') AS id")).id
    c.execute("SELECT setval('kb_chunk_id', %s)", [base + (last - first + 1) * per])
    statements: list[sql.SQL | sql.Composed] = [sql.SQL(x) for x in (TEXTS, STATES, VERSIONS, PUBLICATIONS, TASKS)]
    if spec.vectors:
        statements += _vector_statements(c, group[0].space)
    step = max(1, BATCH // max(per, 1))
    for low in range(first, last + 1, step):
        high = min(last, low + step - 1)
        chunks = {"from": base + (low - first) * per, "to": base + (high - first + 1) * per - 1}
        with c.transaction():
            for statement in statements:
                c.execute(statement, {**values, "first": first, "base": base, "low": low, "high": high, **chunks})


def _vector_statements(c: Connection, space: Space) -> list[sql.Composed]:
    c.execute("CREATE EXTENSION IF NOT EXISTS vector")
    c.execute("SELECT kb_ensure_vector_table(%s, %s)", [space.model_id, space.dimension])
    _halves(c, space.dimension)
    names = {"table": sql.Identifier(f"kb_vector_m{space.model_id}"), "halves": sql.Literal(HALVES)}
    return [sql.SQL(VECTORS).format(**names), sql.SQL(CACHE).format(**names)]


def _halves(c: Connection, dimension: int) -> None:
    """Halves of length sqrt(1/2): any two of them make a vector of length 1, in the index's form and in the cache's."""
    c.execute("DROP TABLE IF EXISTS synthetic_half")
    c.execute("CREATE TEMP TABLE synthetic_half (n bigint PRIMARY KEY, v halfvec, raw bytea)")
    made = np.random.default_rng(1).standard_normal((HALVES, dimension // 2), np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True) * np.float32(np.sqrt(2))
    with c.cursor().copy("COPY synthetic_half FROM STDIN") as copy:
        for n, half in enumerate(made.astype("<f2")):
            copy.write_row((n, "[" + ",".join(f"{x:.8g}" for x in half) + "]", half.tobytes()))
    c.execute("ANALYZE synthetic_half")


def library(chunks: int = 10_000_000) -> list[SpaceSpec]:
    """A large installation: a fifth in one space of its own shard, more large ones, and a fifth in small spaces of shared shards."""
    scale = chunks / 10_000_000
    large = {"large-2m": 100_000, "large-4m": 200_000, "large-1m": 50_000, "large-1m-b": 50_000}
    made = [SpaceSpec(key, max(1, int(n * scale)), own_shard=True) for key, n in large.items()]
    return made + [SpaceSpec(f"small-{n:04}", 25) for n in range(int(4000 * scale))]


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * percent / 100))]


def load_average() -> str:
    """Figures of a machine that others use too are read with it."""
    return f"load average at the start: {os.getloadavg()[0]:.2f} {os.getloadavg()[1]:.2f}"


def arguments(*defaults: int) -> tuple[str, list[int]]:
    """Of the command line: the folder or URL, and the numbers behind it."""
    given = [int(x) for x in sys.argv[2:]]
    return sys.argv[1], given + list(defaults[len(given) :])


def main() -> None:
    target, (chunks,) = arguments(10_000_000)
    print(load_average())
    with database(target) as url, connect(url) as c:
        began = time.perf_counter()
        filled = fill(c, library(chunks))
        seconds = time.perf_counter() - began
        n = sum(x.spec.chunks for x in filled)
        size = one(c.execute("SELECT pg_database_size(current_database()) AS n")).n
        print(f"{len(filled)} spaces, {n} chunks in {seconds:.0f} s: {n / seconds:.0f} chunks/s; {size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
