"""The real local embedder on a hundred documents: texts a second, CPU use, what the rest of a sync adds, and what is found.

The bundled samples lie among pages of the corpus; questions that were written from the samples' section titles are asked.

python -m kb_pipeline_tests.benchmarks.local_model [CORPUS_FOLDER] [DOCUMENTS]
"""

import csv
import shutil
import sys
import time
from pathlib import Path

import kb_pipeline
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import age, corpus_folder, peak_rss_mb, scratch, unpack

SAMPLES = Path(kb_pipeline.__file__).parent / "samples"
QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "sample_questions.tsv"


def main() -> None:
    folder, wanted = corpus_folder(), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with scratch() as work:
        root = work / "docs"
        unpack(folder, root)
        files = sorted((p for p in root.rglob("*.md")), key=lambda p: p.stat().st_size)
        keep = set(files[:: max(1, len(files) // (wanted - 16))][: wanted - 16])
        for path in files:
            if path not in keep and path.stat().st_size:
                path.unlink()
        shutil.copytree(SAMPLES, root / "samples")
        age(root)
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
            for language in ("en", "zh"):
                questions = [
                    q for q in csv.DictReader(QUESTIONS.open(encoding="utf-8"), delimiter="\t") if q["language"] == language
                ]
                ranks = [rank(app, q["question"], q["file"], q["phrase"]) for q in questions]
                found = sum(r is not None for r in ranks)
                print(f"  {language}: {found} of {len(ranks)} in the first 5, {ranks.count(1)} first")


def rank(app: App, question: str, file: str, phrase: str) -> int | None:
    """Where among the first five hits the section with the answer stands."""
    hits = search(app.engine, app.space("bench"), question, k=5).hits
    return next((i for i, h in enumerate(hits, 1) if h.external_id == f"samples/{file}" and phrase in h.text), None)


if __name__ == "__main__":
    main()
