"""The floor under a first load: read, chunk, embed, COPY of the same rows, and nothing else.

    python -m kb_pipeline_tests.benchmarks.floor DOCUMENTS DATABASE_URL

Prints seconds. No states, no fences, no cache, no resuming, no publishing: what remains is what any pipeline must do.
"""

import io
import sys
import time
from pathlib import Path

import psycopg

from kb_pipeline.embedders.hashing import Config as HashingConfig
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.indexes.pgvector import _as_halfvec
from kb_pipeline.model import ChunkParams
from kb_pipeline.parsers.markdown import Config, MarkdownParser
from kb_pipeline.stages.chunk import chunk_blocks
from kb_pipeline_tests.benchmarks.corpus import peak_rss_mb

DDL = """
DROP TABLE IF EXISTS floor_chunk, floor_vector;
CREATE TABLE floor_chunk (id bigint PRIMARY KEY, doc text, hash bytea, title_path text[], tokens int, prefix text, content text, display text);
CREATE TABLE floor_vector (id bigint PRIMARY KEY, v halfvec(256));
"""


def main() -> None:
    root, url = Path(sys.argv[1]), sys.argv[2]
    with psycopg.connect(url) as c:
        c.execute(DDL)
        c.commit()
        began = time.perf_counter()
        n = load(root, c)
        c.commit()
        print(f"floor_seconds={time.perf_counter() - began:.2f} floor_chunks={n} floor_rss_mb={peak_rss_mb()}")
        c.execute("DROP TABLE floor_chunk, floor_vector")


def load(root: Path, c: psycopg.Connection) -> int:
    parser, embedder, params = MarkdownParser(Config()), HashingEmbedder(HashingConfig()), ChunkParams()
    rows, texts = [], []
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        parsed = parser.parse(io.BytesIO(path.read_bytes()), path.name)
        for x in chunk_blocks(parsed.blocks, parsed.title, params):
            display = None if x.display == x.text else x.display
            rows.append((len(rows), str(path), x.content_hash, list(x.title_path), x.tokens, x.prefix, x.text, display))
            texts.append(x.embedded)
    with c.cursor().copy("COPY floor_chunk FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(("int8", "text", "bytea", "text[]", "int4", "text", "text", "text"))
        for row in rows:
            copy.write_row(row)
    with c.cursor().copy("COPY floor_vector FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(("int8", "bytea"))
        for start in range(0, len(texts), 512):
            for i, v in enumerate(embedder.embed_documents(texts[start : start + 512])):
                copy.write_row((start + i, _as_halfvec(v.astype("<f2").tobytes())))
    return len(rows)


if __name__ == "__main__":
    main()
