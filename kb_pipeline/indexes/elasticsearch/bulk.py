"""Writes as the lines of bulk requests, cut by bytes."""

import json
from collections.abc import Iterable, Iterator
from functools import cache
from uuid import UUID

import numpy as np

from kb_pipeline.indexes.elasticsearch.layout import Place
from kb_pipeline.model import IndexRef, Json, VectorEntry

Operation = tuple[bytes, ...]  # its lines
MOST_OPERATIONS = 2000


def put(place: Place, ref: IndexRef, entry: VectorEntry) -> Operation:
    head = {"index": {"_id": place.key(ref, entry.vec_id), "version": entry.acl_seq, "version_type": "external_gte"}}
    fields: Json = {
        "index": ref.name, "chunk_id": entry.chunk_id, "doc_id": entry.doc_id, "acl": entry.acl, "acl_seq": entry.acl_seq,
        "ck": entry.checksum, "bucket": entry.bucket, "text": entry.text, "title": entry.title,
    }  # fmt: skip
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return json.dumps(head).encode(), body[:-1] + b',"vector":[' + _numbers(entry.vector) + b"]}"


def removal(place: Place, ref: IndexRef, vec_id: UUID) -> Operation:
    """Its version becomes one more than the entry's: what is under way with that or an older acl_seq comes too late.

    It must not name a version: a deletion by an external version makes an index that is not there, alias demanded or not.
    """
    return (json.dumps({"delete": {"_id": place.key(ref, vec_id)}}).encode(),)


def cut(operations: Iterable[Operation], max_bytes: int) -> Iterator[list[Operation]]:
    """Parts of at most ``max_bytes``; a larger operation goes alone."""
    part: list[Operation] = []
    held = 0
    for operation in operations:
        size = sum(map(len, operation)) + len(operation)
        if part and (held + size > max_bytes or len(part) == MOST_OPERATIONS):
            yield part
            part, held = [], 0
        part.append(operation)
        held += size
    if part:
        yield part


def _numbers(vector: bytes) -> bytes:
    return b",".join(map(_decimals().__getitem__, np.frombuffer(vector, "<u2").tolist()))


@cache
def _decimals() -> list[bytes]:
    """Every float16 in JSON, so that writing a vector is looking up: a tenth of the time of formatting it. 4 MB.

    What is no number becomes null, which the server refuses with the entry.
    """
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return [str(v).encode() if f else b"null" for v, f in zip(values, np.isfinite(values).tolist(), strict=True)]
