"""A gate behind each of the five steps: cheap, and it stops the run where the next step would make nonsense visible.

Each looks at what its step has just left for the next one, by keys and within bounds. The exact comparison of everything is
index_reconciliation's work, the quality of what is stored data_quality's.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from dagster import AssetCheckResult, AssetCheckSpec

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Rejected
from kb_pipeline.model import Verdict
from kb_pipeline.orchestration.checks import result, spec
from kb_pipeline.store import gates, spaces
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import SyncReport

T = TypeVar("T")
LISTED, PARSED, CHUNKED, EMBEDDED, INDEXED = (
    "listing_did_not_shrink",
    "parsed_documents_have_text",
    "versions_have_their_chunks",
    "vectors_are_sound",
    "published_vectors_are_in_the_index",
)
MANY = 3  # documents without text are one parser's fault rather than their own, if they are also more than half of all

SPECS: Mapping[str, AssetCheckSpec] = {
    "source_snapshot": spec(
        LISTED,
        "source_snapshot",
        "A listing that lost more documents than the guard allows stops the run before anything of it is published: a wrong "
        "folder or an expired permission looks like this. A listing that could not be read to its end is a warning.",
        blocking=True,
    ),
    "parsed_documents": spec(
        PARSED,
        "parsed_documents",
        "A single document that parses to nothing is a warning, and fails by itself. If most of the documents of a run do, a "
        "parser is broken, and the run stops.",
        blocking=True,
    ),
    "chunks": spec(
        CHUNKED,
        "chunks",
        "Every version that waits for its vectors lists at least one chunk, and each chunk it lists has its rows.",
        blocking=True,
    ),
    "embeddings": spec(
        EMBEDDED,
        "embeddings",
        "Every new text of a version that waits for the index has a vector of the model's length, of numbers, and not zero.",
        blocking=True,
    ),
    "vector_index": spec(
        INDEXED,
        "vector_index",
        "The index holds every vector of what this run has published. It looks at the newest documents; "
        "`index_reconciliation` compares everything.",
        blocking=True,
    ),
}


def listed(space: Space, found: SyncReport) -> AssetCheckResult:
    doubtful = [p for p in found.passes if p.verdict is not Verdict.COMPLETE]
    shrunk = [p for p in doubtful if p.verdict is Verdict.UNTRUSTED]
    says = f"{len(found.passes)} listings complete"
    if doubtful:
        what = "lost more documents than the guard allows" if shrunk else "could not be listed to their end"
        says = f"{what}: {', '.join(p.source for p in shrunk or doubtful)}"
    approvals = [f"kb source approve {space.key} {p.source} --up-to {p.waiting_deletions}" for p in shrunk]
    tests = [f"kb source test {space.key} {p.source}" for p in doubtful]
    return result(
        LISTED,
        space,
        passed=not doubtful,
        warn=not shrunk,
        says=says,
        repair="; ".join(tests) + (f"; if the documents really are gone: {'; '.join(approvals)}" if shrunk else ""),
        columns=("source", "listing", "seen", "not listed, and kept", "reason"),
        rows=[(p.source, p.verdict.value, p.counts["seen"], p.waiting_deletions, "; ".join(p.reasons[:3])) for p in doubtful],
        counts={"waiting_deletions": found.waiting_deletions},
    )


def parsed(engine: Engine, space: Space) -> AssetCheckResult:
    with transaction(engine.pool) as c:
        rows = gates.parsed(c, space.id)
    empty = [r for r in rows if r.raw_bytes and r.text_sha256 and bytes(r.text_sha256) == _no_text(r.title)]
    most = len(empty) >= MANY and 2 * len(empty) > len(rows)
    return result(
        PARSED,
        space,
        passed=not empty,
        warn=not most,
        says=f"{len(empty)} of {len(rows)} parsed documents have no text"
        if empty
        else f"{len(rows)} parsed documents have text",
        repair=f"look into the originals; once the parser is right: kb sync {space.key} --reparse" if empty else "",
        columns=("document", "id", "task", "bytes of the original"),
        rows=[(r.external_id, r.doc_id, r.task_id, r.raw_bytes) for r in empty],
        counts={"looked_at": len(rows), "without_text": len(empty)},
    )


def _no_text(title: str | None) -> bytes:
    """The sha256 of a parse result without blocks (stages/parse.py)."""
    return hashlib.sha256(json.dumps(title).encode()).digest()


def chunked(engine: Engine, space: Space) -> AssetCheckResult:
    rows = _rows(engine, space, lambda c, shard: gates.unchunked(c, space.id, shard))
    n = rows[0].total if rows else 0
    return result(
        CHUNKED,
        space,
        passed=not rows,
        says=f"{n} documents list no chunks, or chunks that are not there" if rows else "all versions have their chunks",
        repair=f"kb doc delete ID, then kb sync {space.key} --full takes it in again" if rows else "",
        columns=("document", "id", "task", "chunks listed", "without a row"),
        rows=[(r.external_id, r.doc_id, r.task_id, r.chunks, r.missing) for r in rows],
        counts={"damaged": n},
    )


def embedded(engine: Engine, space: Space) -> AssetCheckResult:
    rows = _rows(engine, space, lambda c, shard: gates.unsound(c, space.id, shard, space.model_id, space.dimension))
    n = rows[0].total if rows else 0
    return result(
        EMBEDDED,
        space,
        passed=not rows,
        says=f"{n} documents have texts without a sound vector" if rows else "all new vectors are sound",
        repair=f"kb sync {space.key} --reembed asks for them again" if rows else "",
        columns=("document", "id", "task", "missing", "of another length", "not of numbers", "zero"),
        rows=[(r.external_id, r.doc_id, r.task_id, r.missing, r.length, r.number, r.zero) for r in rows],
        counts={"damaged": n},
    )


def indexed(engine: Engine, space: Space, since: datetime) -> AssetCheckResult:
    """Two looks: what a second one no longer misses was published anew in between."""
    absent, looked = _absent(engine, space, since)
    if absent:
        again, _ = _absent(engine, space, since)
        absent = {i: r for i, r in again.items() if i in absent}
    documents: dict[tuple[str, int], int] = {}
    for r in absent.values():
        documents[r.external_id, r.doc_id] = documents.get((r.external_id, r.doc_id), 0) + 1
    return result(
        INDEXED,
        space,
        passed=not absent,
        says=f"{len(absent)} of {looked} published vectors are not in the index"
        if absent
        else f"{looked} vectors are in the index",
        repair=f"kb reconcile {space.key}" if absent else "",
        columns=("document", "id", "vectors missing"),
        rows=[(name, doc_id, n) for (name, doc_id), n in documents.items()],
        counts={"looked_at": looked, "missing": len(absent)},
    )


def _absent(engine: Engine, space: Space, since: datetime) -> tuple[dict[Any, Any], int]:
    rows = _rows(engine, space, lambda c, shard: gates.published(c, space.id, shard, since))
    with transaction(engine.pool) as c:
        ref = spaces.serving_index(c, space.id)
    held: set[Any] = set()
    for start in range(0, len(rows), 2000):
        held |= set(engine.index(ref).present(ref, [r.vec_id for r in rows[start : start + 2000]]))
    return {r.vec_id: r for r in rows if r.vec_id not in held}, len(rows)


def _rows(engine: Engine, space: Space, read: Callable[[Connection, int], T]) -> T:
    """One read of the space's partitioned rows, behind its shared lock. Raises Rejected without the space."""
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            raise Rejected(f"space {space.key!r} is being removed", code="no_space")
        return read(c, shard)
