"""kb_chunk, kb_chunk_state, kb_chunk_restated: a version's chunks are stored in one transaction with its ``chunk_ids``.

Hashes go first, text only for what is not there: in an update most chunks have not changed.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from psycopg import sql

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Chunk
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, copy_rows, one

SQL = load_statements(__package__, "chunks.sql")


@dataclass(frozen=True, slots=True)
class VersionChunks:
    """All chunks of one version, in reading order."""

    doc_id: int
    version: int
    recipe: str
    chunks: Sequence[Chunk]


def store_chunks(c: Connection, space_id: int, shard: int, versions: Sequence[VersionChunks]) -> dict[int, tuple[int, int]]:
    """Rows for the chunks that are new, and ``chunk_ids`` of each version. Returns doc -> (new, reused)."""
    c.execute(SQL.stage)
    where = {"space": space_id, "shard": shard}
    keys = [
        (v.doc_id, v.version, seq, x.content_hash, x.occurrence, _payload(x))
        for v in versions
        for seq, x in enumerate(v.chunks)
    ]
    copy_rows(c, SQL.copy_keys, ("int8", "int4", "int4", "bytea", "int4", "int4"), keys)
    chunks = {v.doc_id: v.chunks for v in versions}
    fresh = [(r.doc_id, r.seq) for r in c.execute(SQL.fresh, where)]
    if fresh:
        copy_rows(c, SQL.copy_texts, _TEXT_TYPES, (_text_row(d, s, chunks[d][s]) for d, s in fresh))
        c.execute(SQL.insert, where)
    restated = c.execute(SQL.restated, where).fetchall()
    if restated:
        rows = [_restated_row(r, space_id, chunks[r.doc_id][r.seq]) for r in restated]
        copy_rows(c, SQL.copy_restated, ("int8", "int4", "int8", "int4", "int4", "int4", "int4", "text[]", "text"), rows)
    recipes = {
        "docs": [v.doc_id for v in versions],
        "versions": [v.version for v in versions],
        "recipes": [v.recipe for v in versions],
    }
    c.execute(SQL.reference, {**where, **recipes})
    new: dict[int, int] = {}
    for doc_id, _ in fresh:
        new[doc_id] = new.get(doc_id, 0) + 1
    return {v.doc_id: (new.get(v.doc_id, 0), len(v.chunks) - new.get(v.doc_id, 0)) for v in versions}


_TEXT_TYPES = ("int8", "int4", "int4", "int4", "int4", "text[]", "text", "text", "text")


def _text_row(doc_id: int, seq: int, x: Chunk) -> tuple[Any, ...]:
    _check_storable(x)
    return (doc_id, seq, x.tokens, x.page_from, x.page_to, list(x.title_path), x.prefix, x.text, _display(x))


def _restated_row(r: Any, space_id: int, x: Chunk) -> tuple[Any, ...]:
    _check_storable(x)
    return (r.doc_id, r.version, r.chunk_id, space_id, _payload(x), x.page_from, x.page_to, list(x.title_path), _display(x))


def _check_storable(x: Chunk) -> None:
    if any("\0" in text for text in (x.text, x.display, x.prefix, *x.title_path)):
        raise Rejected("a chunk holds NUL, which PostgreSQL cannot store", code="nul_in_text")


def _display(x: Chunk) -> str | None:
    return None if x.display == x.text else x.display


def _payload(x: Chunk) -> int:
    """What may change although the embedded text did not, as a signed 32-bit checksum."""
    text = json.dumps([x.display, x.title_path, x.page_from, x.page_to], ensure_ascii=False)
    return crc32(text.encode("utf-8")) - 2**31


def learn(c: Connection, shard: int) -> bool:
    """Statistics for a leaf without any: until autovacuum comes by, half of its statements would read all of it."""
    if not one(c.execute(SQL.unknown, {"shard": shard})).yes:
        return False
    c.execute(sql.SQL(SQL.learn).format(leaf=sql.Identifier(f"kb_chunk_state_{shard}")))
    return True


def texts_of(c: Connection, space_id: int, shard: int, chunk_ids: Iterable[int]) -> list[Any]:
    """Rows id, prefix, content, display, title_path in the order of ``chunk_ids``."""
    return c.execute(SQL.texts, {"space": space_id, "shard": shard, "ids": list(chunk_ids)}).fetchall()
