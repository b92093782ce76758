"""What small changes cost: rows, embeddings and statements.

python -m kb_pipeline_tests.benchmarks.updates [CORPUS_FOLDER]
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import age, corpus_folder, scratch, unpack

WRITTEN = """
SELECT CASE WHEN c.relispartition THEN regexp_replace(s.relname, '_m?[0-9]+(_[0-9]+)?$', '') ELSE s.relname END AS name,
       sum(n_tup_ins)::bigint AS ins, sum(n_tup_upd)::bigint AS upd, sum(n_tup_del)::bigint AS gone
FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid GROUP BY 1
"""


def written(app: App) -> dict[str, tuple[int, int, int]]:
    with app.pool.connection() as c:
        c.execute("SELECT pg_stat_force_next_flush()")
        c.commit()
        c.execute("SELECT pg_stat_clear_snapshot()")
        return {r.name: (r.ins, r.upd, r.gone) for r in c.execute(WRITTEN)}


def measured(app: App, key: str, label: str, change: Callable[[], Any]) -> None:
    change()
    app.pool.drain()  # idle backends flush their counters when they end
    before = written(app)
    with app.pool.connection() as c:
        c.execute("SELECT pg_stat_statements_reset()")
    report = sync_space(app.engine, app.space(key))
    with app.pool.connection() as c:
        calls = c.execute(
            "SELECT sum(calls)::bigint AS n FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        statements = calls.fetchone().n
    app.pool.drain()
    after = written(app)
    rows = {k: tuple(a - b for a, b in zip(after[k], before.get(k, (0, 0, 0)), strict=True)) for k in after}
    shown = {k: f"+{v[0]} ~{v[1]} -{v[2]}" for k, v in rows.items() if any(v) and k != "pg_stat_statements"}
    found = {k: v for p in report.passes for k, v in p.counts.items() if v and k not in ("seen", "unchanged")}
    print(
        f"== {label}: {found} embedded={report.ingest.counts.get('embedded', 0)} statements={statements} seconds={report.seconds:.2f}"
    )
    print(f"   rows (+inserted ~updated -deleted): {shown}", flush=True)


def edit(paths: list[Path], old: str, new: str) -> int:
    """Replace the first ``old`` in the middle of each file."""
    n = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        at = text.find(old, len(text) // 2)
        if at >= 0:
            path.write_text(text[:at] + new + text[at + len(old) :], encoding="utf-8")
            n += 1
    return n


def rename_headings(paths: list[Path]) -> int:
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        i = next(i for i, line in enumerate(lines) if line.startswith("## "))
        lines[i] += "（修订）"
        path.write_text("\n".join(lines), encoding="utf-8")
    return len(paths)


def main() -> None:
    folder = corpus_folder()
    with scratch() as work:
        root = work / "docs"
        unpack(folder, root)
        with open_app(load_settings({}, home=work / "home", embedder="hashing")) as app:
            space = app.add_space("bench")
            app.add_source(space, "docs", "local_dir", {"path": str(root)})
            measured(app, "bench", "first load", lambda: None)
            files = sorted((p for p in root.rglob("*.md") if p.stat().st_size > 3000), key=lambda p: p.stat().st_size)
            largest, small = files[-1], files[10]
            sections = [p for p in files if "\n## " in p.read_text(encoding="utf-8")]

            def aged(work_: Callable[[], Any]) -> Callable[[], Any]:
                return lambda: (work_(), age(root))

            measured(app, "bench", "no change", lambda: None)
            measured(
                app,
                "bench",
                f"one word in a small file ({small.stat().st_size} bytes)",
                aged(lambda: edit([small], "的", "之")),
            )
            measured(
                app,
                "bench",
                f"one word in the largest file ({largest.stat().st_size} bytes)",
                aged(lambda: edit([largest], "的", "之")),
            )
            measured(
                app, "bench", "12 files moved", aged(lambda: [p.rename(p.with_name("moved-" + p.name)) for p in files[100:112]])
            )
            measured(
                app,
                "bench",
                "12 headings renamed",
                aged(lambda: rename_headings([p for p in sections[200:] if p.exists()][:12])),
            )
            measured(
                app, "bench", "100 documents changed", aged(lambda: edit([p for p in files if p.exists()][300:400], "的", "之"))
            )
            measured(app, "bench", "all documents changed", aged(lambda: edit(sorted(root.rglob("*.md")), "，", ",")))


if __name__ == "__main__":
    main()
