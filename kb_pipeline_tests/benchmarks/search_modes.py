"""Recall at ten and mean reciprocal rank of searching by vectors, by words and by both, on questions made from the corpus itself.

    python -m kb_pipeline_tests.benchmarks.search_modes [CORPUS_FOLDER] [--kinds pgvector elasticsearch] [--embedders hashing local]
                                                        [--questions 200] [--documents N]

``term``: an identifier that one document alone has (``tidb-lightning.toml``), with up to twelve characters on each side, as a user
who has seen it asks. ``sentence``: a Chinese sentence of 20 to 80 characters that stood in one document alone and was taken out
before anything was indexed: what is left of the document must be found. One of each a document at most, in the order of a hash, so
every run asks the same. A document is found if one of its chunks is among the ten; its rank is that of the first of them.
"""

import argparse
import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kb_pipeline.model import Mode
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import age, corpus_folder, scratch, unpack
from kb_pipeline_tests.benchmarks.engines import served
from kb_pipeline_tests.benchmarks.synthetic import load_average, percentile_ms

BEST, BESIDE = 10, 12
SENTENCE = re.compile(r"(?<=[。\n])[^。\n|<>`#\[\]()*]{20,80}。")
TERM = re.compile(r"(?<![\w./-])[A-Za-z][A-Za-z0-9]*(?:[-._][A-Za-z0-9]+)+(?![\w/-])")


@dataclass(frozen=True)
class Question:
    text: str
    document: str


def order(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def take_sentences(texts: dict[str, str], count: int) -> list[Question]:
    """And out of the texts."""
    seen = Counter(s for text in texts.values() for s in SENTENCE.findall(text))
    asked = []
    for name in sorted(texts, key=order):
        alone = [s for s in SENTENCE.findall(texts[name]) if seen[s] == 1 and len(re.findall(r"[一-鿿]", s)) >= 12]
        if alone and len(asked) < count:
            sentence = min(alone, key=order)
            texts[name] = texts[name].replace(sentence, "")
            asked.append(Question(sentence, name))
    return asked


def terms(texts: Mapping[str, str], count: int) -> list[Question]:
    found = {name: {m[0].lower(): m for m in TERM.finditer(text)} for name, text in texts.items()}
    having = Counter(t for names in found.values() for t in names)
    whole = "\0".join(texts.values()).lower()
    asked = []
    for name in sorted(texts, key=order):
        for term in sorted((t for t in found[name] if having[t] == 1), key=order):
            if whole.count(term) == texts[name].lower().count(term):  # not part of a longer one elsewhere
                m, text = found[name][term], texts[name]
                around = text[max(0, m.start() - BESIDE) : m.start()].rpartition("\n")[2], text[m.end() : m.end() + BESIDE]
                asked.append(Question(f"{around[0]}{m[0]}{around[1].partition(chr(10))[0]}", name))
                break
        if len(asked) == count:
            break
    return asked


def questions(root: Path, count: int, documents: int | None) -> Iterator[tuple[str, list[Question]]]:
    """The files below ``root`` are changed: less documents, without the sentences that are asked."""
    paths = sorted((p for p in root.rglob("*") if p.is_file()), key=lambda p: order(str(p.relative_to(root))))
    for path in paths[documents:] if documents else ():
        path.unlink()
    texts = {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in paths if p.exists() and p.suffix == ".md"}
    sentences = take_sentences(texts, count)
    for question in sentences:
        (root / question.document).write_text(texts[question.document], encoding="utf-8")
    age(root)
    yield "term", terms(texts, count)
    yield "sentence", sentences


def measure(app: App, label: str, root: Path, kind: str, options: dict[str, object], asked: dict[str, list[Question]]) -> None:
    space = app.add_space(label.replace(" ", "-"), index=kind, index_options=options)
    app.add_source(space, "docs", "local_dir", {"path": str(root)})
    began = time.perf_counter()
    report = sync_space(app.engine, space)
    chunks = report.ingest.counts.get("chunks_written", 0)
    print(
        f"{label}: {report.ingest.published} documents, {chunks} chunks in {time.perf_counter() - began:.0f} s; {load_average()}"
    )
    for name, given in asked.items():
        for mode in Mode:
            found, ranks, taken = 0, 0.0, []
            for question in given:
                began = time.perf_counter()
                hits = [h.external_id for h in search(app.engine, space, question.text, k=BEST, mode=mode).hits]
                taken.append(time.perf_counter() - began)
                if question.document in hits:
                    found, ranks = found + 1, ranks + 1 / (1 + hits.index(question.document))
            print(
                f"   {name:8} {mode:7} recall@{BEST} {found / len(given):.3f}  MRR {ranks / len(given):.3f}  "
                f"p50 {percentile_ms(taken, 50):.0f} ms, p95 {percentile_ms(taken, 95):.0f} ms",
                flush=True,
            )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", nargs="?")
    arguments.add_argument("--kinds", nargs="+", default=["pgvector"])
    arguments.add_argument("--embedders", nargs="+", default=["hashing"])
    arguments.add_argument("--questions", type=int, default=200)
    arguments.add_argument("--documents", type=int)
    options = arguments.parse_args()
    sys.argv[1:] = [options.folder] if options.folder else []
    folder = corpus_folder()
    with scratch() as work:
        unpack(folder, work / "documents")
        asked = dict(questions(work / "documents", options.questions, options.documents))
        for name, given in asked.items():
            print(f"{len(given)} questions '{name}', such as: {' | '.join(q.text for q in given[:3])}")
        for kind in options.kinds:
            with served(kind, work) as opened:
                own = {"keyword": True} if kind == "pgvector" else dict(opened)
                for embedder in options.embedders:
                    with open_app(load_settings({}, home=work / "home", embedder=embedder)) as app:
                        measure(app, f"{kind} {embedder}", work / "documents", kind, own, asked)


if __name__ == "__main__":
    main()
