"""A search as of a week ago, in a large space of which a part has changed since, beside a search of now.

    python -m kb_pipeline_tests.benchmarks.past_million FOLDER_OR_URL [--chunks 1000000] [--dimensions 32] [--changed 0.01]

First whole documents have changed, then one chunk each of many more. Prints milliseconds of both searches. Goal: the search of
then takes up to twice as long as the one of now and a second.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import sql

from kb_pipeline.as_of import as_of
from kb_pipeline.model import Answer
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import Connection
from kb_pipeline.store.spaces import Space, serving_index
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.benchmarks.corpus import peak_rss_mb, scratch
from kb_pipeline_tests.benchmarks.synthetic import Filled, SpaceSpec, connect, database, fill, load_average, percentile_ms

PER = 20  # chunks a document
LONG_AGO = "UPDATE kb_publication SET from_at = from_at - interval '30 days' WHERE space_id = %(space)s"
# The first %(per)s chunks of each document get a successor: what a publish leaves, and the vector GC after it.
CHANGE = (
    "CREATE TEMP TABLE change ON COMMIT DROP AS SELECT v.doc_id, v.version, u.id AS old, nextval('kb_chunk_id') AS new, u.n "
    "FROM kb_doc d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver "
    "CROSS JOIN LATERAL unnest(v.chunk_ids[1:%(per)s::int]) WITH ORDINALITY u (id, n) "
    "WHERE d.space_id = %(space)s AND d.last_ver = 1 AND d.id %% %(every)s::int = %(rest)s::int",
    "ANALYZE change",
    "INSERT INTO kb_chunk (shard, id, space_id, doc_id, content_hash, occurrence, tokens, title_path, content) "
    "SELECT c.shard, x.new, c.space_id, c.doc_id, sha256(convert_to(x.new || c.content, 'UTF8')), 0, c.tokens, c.title_path, x.new || c.content "
    "FROM change x JOIN kb_chunk c ON c.shard = %(shard)s AND c.id = x.old",
    "INSERT INTO kb_chunk_state (shard, id, space_id, doc_id, hash, occurrence, vec_id, ck, bucket, payload, vec_status, in_current) "
    "SELECT c.shard, c.id, c.space_id, c.doc_id, h.hash, 0, h.vec_id, kb_checksum(h.vec_id, '{}'), kb_bucket(h.vec_id), 0, 1, true "
    "FROM change x JOIN kb_chunk c ON c.shard = %(shard)s AND c.id = x.new "
    "CROSS JOIN LATERAL (SELECT md5(c.id::text)::uuid AS vec_id, encode(substring(c.content_hash FROM 1 FOR 16), 'hex')::uuid AS hash) h",
    "INSERT INTO kb_embedding (model_id, content_hash, vector) SELECT e.model_id, n.content_hash, e.vector FROM change x "
    "JOIN kb_chunk o ON o.shard = %(shard)s AND o.id = x.old JOIN kb_embedding e ON e.model_id = %(model)s AND e.content_hash = o.content_hash "
    "JOIN kb_chunk n ON n.shard = %(shard)s AND n.id = x.new",
    "INSERT INTO {vectors} (shard, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v) "
    "SELECT v.shard, s.vec_id, v.space_id, v.index_id, s.id, s.doc_id, 0, s.ck, s.bucket, '{{}}', v.v FROM change x "
    "JOIN kb_chunk_state o ON o.shard = %(shard)s AND o.id = x.old JOIN {vectors} v ON v.shard = %(shard)s AND v.vec_id = o.vec_id "
    "JOIN kb_chunk_state s ON s.shard = %(shard)s AND s.id = x.new",
    "DELETE FROM {vectors} v USING change x JOIN kb_chunk_state o ON o.shard = %(shard)s AND o.id = x.old "
    "WHERE v.shard = %(shard)s AND v.vec_id = o.vec_id",
    "UPDATE kb_chunk_state s SET in_current = false, vec_status = 0, vec_id = gen_random_uuid() FROM change x WHERE s.shard = %(shard)s AND s.id = x.old",
    "INSERT INTO kb_doc_version (doc_id, version, space_id, status, revision, chunk_ids, recipe) "
    "SELECT v.doc_id, 2, v.space_id, 'READY', 'r2', x.ids || v.chunk_ids[%(per)s::int + 1:], v.recipe FROM kb_doc_version v "
    "JOIN (SELECT doc_id, array_agg(new ORDER BY n) AS ids FROM change GROUP BY doc_id) x ON x.doc_id = v.doc_id AND v.version = 1",
    "UPDATE kb_publication p SET to_at = clock_timestamp() - interval '3 days', to_xid = pg_current_xact_id() "
    "FROM (SELECT DISTINCT doc_id FROM change) x WHERE p.doc_id = x.doc_id AND p.to_at IS NULL",
    "INSERT INTO kb_publication (space_id, doc_id, version, from_at, from_xid) "
    "SELECT %(space)s, doc_id, 2, clock_timestamp() - interval '3 days', pg_current_xact_id() FROM (SELECT DISTINCT doc_id FROM change) x",
    "UPDATE kb_doc d SET current_ver = 2, last_ver = 2, published_at = clock_timestamp() - interval '3 days' "
    "FROM (SELECT DISTINCT doc_id FROM change) x WHERE d.id = x.doc_id",
)


def change(c: Connection, filled: Filled, documents: int, chunks_each: int, rest: int) -> None:
    """Documents spread over the whole space; ``rest`` tells one round from another."""
    vectors = sql.Identifier(f"kb_vector_m{filled.space.model_id}")
    values = {
        "space": filled.space.id, "shard": filled.shard, "model": filled.space.model_id,
        "per": chunks_each, "every": filled.spec.documents // documents, "rest": rest,
    }  # fmt: skip
    with c.transaction():
        for statement in CHANGE:
            named = sql.SQL(statement).format(vectors=vectors) if "{vectors}" in statement else sql.SQL(statement)
            c.execute(named, values)
    tables = [sql.Identifier(x) for x in ("kb_doc", "kb_doc_version", "kb_publication", f"kb_chunk_state_{filled.shard}")]
    c.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.SQL(", ").join(tables)))


def timed(work: Callable[[], Answer], times: int) -> tuple[list[float], Answer]:
    work()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        answer = work()
        seconds.append(time.perf_counter() - began)
    return seconds, answer


def measured(engine: Any, space: Space, label: str, times: int) -> None:
    at = datetime.now(UTC) - timedelta(days=7)
    now, _ = timed(lambda: search(engine, space, "what has been changed since then", k=10), times)
    then, answer = timed(lambda: as_of(engine, space, "what has been changed since then", at, k=10), times)
    goal = 2 * statistics.median(now) + 1
    print(
        f"== {label}\n   now p50 {percentile_ms(now, 50):.1f} ms, worst {max(now) * 1e3:.1f}; a week ago p50 {percentile_ms(then, 50):.1f} ms, "
        f"worst {max(then) * 1e3:.1f} (goal: up to {goal * 1e3:.0f}) of {times}; hits {len(answer.hits)}, of version 1: "
        f"{sum(h.version == 1 for h in answer.hits)}, withheld {answer.withheld}",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("target", metavar="FOLDER_OR_URL")
    arguments.add_argument("--chunks", type=int, default=1_000_000)
    arguments.add_argument("--dimensions", type=int, default=32)
    arguments.add_argument("--changed", type=float, default=0.01, help="share of the chunks")
    arguments.add_argument("--times", type=int, default=15)
    options = arguments.parse_args()
    print(f"{options}, {load_average()}", flush=True)
    spec = SpaceSpec("million", options.chunks // PER, PER, own_shard=True, vectors=True, dimensions=options.dimensions)
    changed = int(options.chunks * options.changed)
    with database(options.target) as url, connect(url) as c, scratch() as home:
        (filled,) = fill(c, [spec])
        c.execute(LONG_AGO, {"space": filled.space.id})
        settings = load_settings({}, home=home, database_url=url, embedder="hashing", answer_log=False)
        with open_app(settings) as app:
            began = time.perf_counter()
            ref = serving_index(c, filled.space.id)
            app.engine.index(ref).settle(ref)
            print(f"   HNSW built in {time.perf_counter() - began:.0f} s", flush=True)
            measured(app.engine, filled.space, "nothing changed", options.times)
            change(c, filled, changed // PER, PER, 0)
            measured(app.engine, filled.space, f"{changed} chunks changed: {changed // PER} whole documents", options.times)
            change(c, filled, changed, 1, 1)
            label = f"{changed} more changed: one each of {changed} documents"
            measured(app.engine, filled.space, label, options.times)
    print(f"peak memory {peak_rss_mb()} MB")


if __name__ == "__main__":
    main()
