"""First load and the pass without a change, against their floors, each in a process of its own.

python -m kb_pipeline_tests.benchmarks.first_load [CORPUS_FOLDER] [ROUNDS]
"""

import hashlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.benchmarks.corpus import corpus_folder, peak_rss_mb, scratch, unpack


def child(home: Path, documents: Path) -> None:
    """One first load, then passes without a change; prints figures."""
    with open_app(load_settings({}, home=home, embedder="hashing")) as app:
        space = app.add_space("bench")
        app.add_source(space, "docs", "local_dir", {"path": str(documents)})
        began = time.perf_counter()
        report = sync_space(app.engine, space)
        loaded = time.perf_counter() - began
        rss = peak_rss_mb()
        unchanged, read = [], []
        for _ in range(7):
            began = time.perf_counter()
            sync_space(app.engine, app.space("bench"))
            unchanged.append(time.perf_counter() - began)
            read.append(read_and_hash(documents))
        stages = " ".join(f"{n.value.lower()}={s:.2f}" for n, s in report.ingest.seconds.items())
        print(
            f"load_seconds={loaded:.2f} published={report.ingest.published} chunks={report.ingest.counts['chunks_written']} rss_mb={rss}"
        )
        print(f"  {stages}")
        print(f"  no_change_ms={1000 * statistics.median(unchanged):.1f} read_and_hash_ms={1000 * statistics.median(read):.1f}")


def read_and_hash(root: Path) -> float:
    began = time.perf_counter()
    for path in root.rglob("*"):
        if path.is_file():
            hashlib.sha256(path.read_bytes()).digest()
    return time.perf_counter() - began


def main() -> None:
    if sys.argv[1] == "--child" if len(sys.argv) > 1 else False:
        child(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    folder, rounds = corpus_folder(), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with scratch() as work:
        once, four = work / "once", work / "four"
        print(f"{unpack(folder, once)} files; four times: {unpack(folder, four, copies=4)}")
        with open_app(load_settings({}, home=work / "floor", embedder="hashing")) as app:
            url = app.pool.conninfo
            for i in range(rounds):
                run("floor", "-m", "kb_pipeline_tests.benchmarks.floor", str(once), url)
                run("load", "-m", __spec__.name, "--child", str(work / f"home{i}"), str(once))
        run("load x4", "-m", __spec__.name, "--child", str(work / "home-four"), str(four))


def run(label: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    print(f"{label}: {done.stdout.strip() or done.stderr[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
