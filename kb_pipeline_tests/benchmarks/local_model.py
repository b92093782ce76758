"""The real local embedder on a hundred documents: texts a second, CPU use, and what the rest of a sync adds to it.

python -m kb_pipeline_tests.benchmarks.local_model [CORPUS_FOLDER] [DOCUMENTS]
"""

import sys
import time

from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import open_app
from kb_pipeline_tests.benchmarks.corpus import corpus_folder, peak_rss_mb, scratch, unpack


def main() -> None:
    folder, wanted = corpus_folder(), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with scratch() as work:
        root = work / "docs"
        unpack(folder, root)
        files = sorted((p for p in root.rglob("*.md")), key=lambda p: p.stat().st_size)
        keep = set(files[:: max(1, len(files) // wanted)][:wanted])
        for path in files:
            if path not in keep and path.stat().st_size:
                path.unlink()
        with open_app(load_settings({}, home=work / "home", embedder="local")) as app:
            space = app.add_space("bench")
            app.add_source(space, "docs", "local_dir", {"path": str(root)})
            began, cpu = time.perf_counter(), time.process_time()
            report = sync_space(app.engine, space)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            texts = report.ingest.counts["embedded"]
            stages = " ".join(f"{n.value.lower()}={s:.1f}" for n, s in report.ingest.seconds.items())
            print(
                f"documents={report.ingest.published} texts={texts} wall={wall:.1f}s cpu={cpu:.1f}s ({cpu / wall:.2f} cores) rss_mb={peak_rss_mb()}"
            )
            print(f"  {texts / wall:.2f} texts a second, {texts / cpu:.2f} a CPU-second; {stages}")


if __name__ == "__main__":
    main()
