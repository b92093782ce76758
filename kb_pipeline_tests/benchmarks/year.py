"""A year of real edits, one sync a commit; at the end the index must equal a fresh load of the final state.

    python -m kb_pipeline_tests.benchmarks.year [CORPUS_FOLDER]

Prints changed chunks and embedded tokens an update, chunk sizes, and the comparison of both end states chunk by chunk.
"""

import shutil
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kb_pipeline.settings import load_settings
from kb_pipeline.sync import SyncReport, sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import age, corpus_folder, edits_by_commit, peak_rss_mb, scratch, unpack

CURRENT = """
SELECT d.external_id, c.content_hash, c.occurrence, c.tokens, coalesce(c.display, c.content) AS display, c.title_path
FROM kb_space s JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id AND t.in_current
JOIN kb_chunk c ON c.shard = s.shard AND c.id = t.id JOIN kb_doc d ON d.id = t.doc_id WHERE s.key = %s AND d.hidden_at IS NULL
"""
CHANGED = """
SELECT count(*) AS updates, sum(x.chunks)::float8 / count(*) AS chunks, sum(x.tokens)::float8 / count(*) AS tokens, max(x.chunks) AS worst
FROM kb_space s JOIN kb_doc_version n ON n.space_id = s.id AND n.status = 'READY'
JOIN kb_doc_version o ON o.doc_id = n.doc_id AND o.version = n.version - 1 AND o.status = 'READY'
CROSS JOIN LATERAL (SELECT count(*) AS chunks, coalesce(sum(c.tokens), 0) AS tokens FROM unnest(n.chunk_ids) u (id)
                    JOIN kb_chunk c ON c.shard = s.shard AND c.id = u.id WHERE NOT u.id = ANY(o.chunk_ids)) x
WHERE s.key = 'year'
"""
INDEXED = "SELECT s.key, count(*) AS n FROM kb_vector_m{} v JOIN kb_space s ON s.id = v.space_id GROUP BY 1"


def apply(root: Path, edits: list[dict[str, Any]]) -> int:
    """Write one commit's edits to disk. How many of them update a document that was there."""
    updates = 0
    for e in edits:
        path = root / e["path"]
        if e["op"] == "delete":
            path.unlink(missing_ok=True)
            continue
        if "from" in e and (root / e["from"]).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            (root / e["from"]).rename(path)
        updates += path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(e["content"], encoding="utf-8", newline="")
    age(root)
    return updates


def current(app: App, key: str) -> list[Any]:
    with app.pool.connection() as c:
        return c.execute(CURRENT, (key,)).fetchall()


def new_space(app: App, key: str, root: Path) -> SyncReport:
    space = app.add_space(key, chunking={"context": "none"})
    app.add_source(space, "docs", "local_dir", {"path": str(root)})
    return sync_space(app.engine, space)


def main() -> None:
    folder = corpus_folder()
    with scratch() as work:
        root = work / "docs"
        unpack(folder, root)
        with open_app(load_settings({}, home=work / "home", embedder="hashing", shrink_guard=0.5)) as app:
            new_space(app, "year", root)
            totals: Counter[str] = Counter()
            seconds = []
            space = app.space("year")
            for _, edits in edits_by_commit(folder):
                totals["updates"] += apply(root, edits)
                began = time.perf_counter()
                report = sync_space(app.engine, space)
                seconds.append(time.perf_counter() - began)
                totals["syncs"] += 1
                for p in report.passes:
                    totals.update({k: p.counts[k] for k in ("new", "changed", "moved", "deleted", "failed")})
                totals.update({k: report.ingest.counts.get(k, 0) for k in ("chunks_written", "chunks_reused", "embedded")})
            print({**totals, "seconds_p50": round(statistics.median(seconds), 3), "rss_mb": peak_rss_mb()})
            with app.pool.connection() as c:
                row = c.execute(CHANGED).fetchone()
            print(
                f"an update ({row.updates} of them): {row.chunks:.2f} changed chunks (worst {row.worst}), {row.tokens:.0f} tokens in them"
            )
            compare(app, folder, root, work)


def compare(app: App, folder: Path, root: Path, work: Path) -> None:
    fresh_root = work / "fresh"
    shutil.copytree(root, fresh_root)
    age(fresh_root)
    new_space(app, "fresh", fresh_root)
    year, fresh = (Counter(tuple(map(str, row)) for row in current(app, key)) for key in ("year", "fresh"))
    tokens = sorted(row.tokens for row in current(app, "fresh"))
    p5, p50, p95 = (tokens[int(len(tokens) * q)] for q in (0.05, 0.5, 0.95))
    print(
        f"end state: {year.total()} chunks, fresh load {fresh.total()}; only after the year {(year - fresh).total()}, only fresh {(fresh - year).total()}"
    )
    print(f"tokens a chunk: p5 {p5} p50 {p50} p95 {p95}")
    with app.pool.connection() as c:
        model = c.execute("SELECT model_id FROM kb_space WHERE key = 'year'").fetchone().model_id
        print("vectors:", {r.key: r.n for r in c.execute(INDEXED.format(model))})


if __name__ == "__main__":
    main()
