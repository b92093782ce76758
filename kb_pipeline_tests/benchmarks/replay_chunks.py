"""How many chunks stay when documents are edited: a corpus and its edits, in order, through the parser and the chunker.

    python -m kb_pipeline_tests.benchmarks.replay_chunks CORPUS_FOLDER [MAX_TOKENS MIN_TOKENS]

The folder holds ``base.tar.gz`` (the pages) and ``edits.jsonl.gz`` (one edit a line: ``op``, ``path``, ``content``, and
``from`` where the page had another path). Goals at 448/96, context none, on the corpus the sizes were chosen on: 1.66
changed chunks and 433 embedded tokens an update, at most 0.3 % of chunks under 32 tokens, a median of 220 to 250.
"""

import gzip
import json
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from kb_pipeline.canonical import canonical, milli_tokens
from kb_pipeline.model import Block, ChunkParams, Parsed
from kb_pipeline.parsers.markdown import Config, MarkdownParser
from kb_pipeline.stages.chunk import chunk_blocks

PARSER = MarkdownParser(Config())
Chunks = Counter[str]  # what is embedded -> how often


def main(folder: Path, sizes: Sequence[int]) -> None:
    pages, edits = load(folder)
    size = dict(zip(("max_tokens", "min_tokens"), sizes, strict=False))
    for context in ("none", "title", "path"):
        show(f"context {context}", replay(pages, edits, ChunkParams(context=context, **size)))
    show("speed", speed(list(pages.values()), ChunkParams(**size)))


def load(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    pages = {}
    with tarfile.open(folder / "base.tar.gz") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                pages[member.name] = file.read().decode()
    with gzip.open(folder / "edits.jsonl.gz", "rt", encoding="utf-8") as lines:
        return pages, [json.loads(line) for line in lines]


def replay(pages: dict[str, str], edits: list[dict[str, Any]], params: ChunkParams) -> dict[str, object]:
    @cache
    def cut(text: str) -> Chunks:
        parsed = parse(text)
        return Counter(c.embedded for c in chunk_blocks(parsed.blocks, parsed.title, params))

    state = {path: cut(text) for path, text in pages.items()}
    sizes = sorted(milli_tokens(c) // 1000 for chunks in state.values() for c in chunks.elements())
    changed, embedded, total = [], [], 0
    for edit in edits:
        old = state.pop(edit.get("from", edit["path"]), None)
        if edit["op"] == "delete":
            continue
        new = state[edit["path"]] = cut(edit["content"])
        if old is not None:
            fresh = new - old
            changed.append(fresh.total())
            embedded.append(sum(milli_tokens(c) * n for c, n in fresh.items()) / 1000)
            total += new.total()
    return {
        "chunks": len(sizes),
        "p5/p50/p95": "/".join(str(quantile(sizes, q)) for q in (0.05, 0.5, 0.95)),
        "max": sizes[-1],
        "under 32 tokens %": round(100 * sum(s < 32 for s in sizes) / len(sizes), 2),
        "updates": len(changed),
        "changed an update: mean": round(sum(changed) / len(changed), 3),
        "p95": quantile(sorted(changed), 0.95),
        "worst": max(changed),
        "tokens embedded an update": round(sum(embedded) / len(embedded)),
        "reuse %": round(100 * (1 - sum(changed) / total), 2),
    }


def speed(texts: list[str], params: ChunkParams) -> dict[str, object]:
    blocks: list[tuple[list[Block], str | None]] = []
    for text in texts:
        parsed = parse(text)
        blocks.append((list(parsed.blocks), parsed.title))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def rate(work: Any) -> float:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
        return round(megabytes / min(seconds), 1)

    return {
        "MB": round(megabytes, 1),
        "MB a CPU-second: parse": rate(lambda: [list(parse(t).blocks) for t in texts]),
        "canonical": rate(lambda: [canonical(b.text, b.kind) for bs, _ in blocks for b in bs]),
        "canonical and chunk": rate(lambda: [list(chunk_blocks(bs, title, params)) for bs, title in blocks]),
    }


def parse(text: str) -> Parsed:
    return PARSER.parse(BytesIO(text.encode()), "page.md")


def quantile(ordered: Sequence[int], q: float) -> int:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def show(name: str, figures: dict[str, object]) -> None:
    print(f"{name:14}", "  ".join(f"{k} {v}" for k, v in figures.items()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(x) for x in sys.argv[2:]])
