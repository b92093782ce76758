"""Samples of what each step has stored, as pandas frames: the newest rows of a space, one SQL statement a step."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kb_pipeline.engine import Engine
from kb_pipeline.store import frames, spaces
from kb_pipeline.store.database import Connection
from kb_pipeline.store.frames import Columns
from kb_pipeline.store.spaces import Space

if TYPE_CHECKING:
    from pandas import DataFrame

NEWEST = 20_000  # rows a step
SLICE = 2000  # ids a call of the index


def documents(c: Connection, engine: Engine, space: Space, shard: int) -> "DataFrame":
    return _frame(frames.documents(c, space.id, NEWEST))


def versions(c: Connection, engine: Engine, space: Space, shard: int) -> "DataFrame":
    """Published ones, current or retained."""
    return _frame(frames.versions(c, space.id, shard, NEWEST))


def chunks(c: Connection, engine: Engine, space: Space, shard: int) -> "DataFrame":
    """Current ones."""
    return _frame(frames.chunks(c, space.id, shard, NEWEST))


def embeddings(c: Connection, engine: Engine, space: Space, shard: int) -> "DataFrame":
    """One row a text, with what its vector says when it is read as one."""
    frame = _frame(frames.embeddings(c, space.id, shard, space.model_id, NEWEST))
    stored = [None if v is None else bytes(v) for v in frame.pop("vector")]
    vectors = [None if v is None else np.frombuffer(v[: len(v) // 2 * 2], "<f2").astype(np.float64) for v in stored]
    frame["has_vector"] = [v is not None for v in stored]
    frame["dimension"] = [None if v is None else len(v) / 2 for v in stored]
    frame["finite"] = [None if v is None else bool(np.isfinite(v).all()) for v in vectors]
    frame["norm"] = [None if v is None or not np.isfinite(v).all() else float(np.linalg.norm(v)) for v in vectors]
    frame["digest"] = [None if v is None else hashlib.sha256(v).hexdigest() for v in stored]
    return frame.drop(columns=["content_hash"])


def index(c: Connection, engine: Engine, space: Space, shard: int) -> "DataFrame":
    """Rows first, the index second: what is published in between is not looked at."""
    ref = spaces.serving_index(c, space.id)
    frame = _frame(frames.entries(c, space.id, shard, ref.index_id, NEWEST))
    ids = list(frame["vec_id"])
    held: dict[Any, int] = {}
    for start in range(0, len(ids), SLICE):
        held |= engine.index(ref).present(ref, ids[start : start + SLICE])
    frame["in_index"] = [i in held for i in ids]
    behind = [None if i not in held else seq - held[i] for i, seq in zip(ids, frame["acl_seq"], strict=True)]
    frame["acl_changes_behind"] = behind
    frame["vec_id"] = [str(i) for i in ids]
    return frame


FRAMES: Mapping[str, Callable[[Connection, Engine, Space, int], "DataFrame"]] = {
    "documents": documents,
    "versions": versions,
    "chunks": chunks,
    "embeddings": embeddings,
    "index": index,
}


def _frame(columns: Columns) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([tuple(row) for row in columns.rows], columns=columns.names)
