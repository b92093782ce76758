"""FETCHER: the original, as the source has it now, into the object store."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import BinaryIO

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected, Transient
from kb_pipeline.model import Json
from kb_pipeline.nodes.outcome import Outcome, commit, each, object_key
from kb_pipeline.stages.snapshot import fetched_revision
from kb_pipeline.store import sources, versions
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence

_PIECE = 1 << 20


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    with transaction(engine.pool) as c:
        known = {s.id: s for s in sources.list_sources(c, space.id)}
        old = versions.read_versions(c, [(x.doc_id, x.version) for x in claims])
    rows: dict[int, versions.Fetched] = {}
    files: list[tuple[str, BinaryIO]] = []

    def fetch(claim: Claim) -> None:
        source = known.get(claim.source_id)
        if source is None:
            raise Rejected("its source was removed", code="source_removed")
        row, data = _fetch(engine, space, source, claim, old[claim.doc_id].revision)
        rows[claim.doc_id] = row
        files.append((row.raw_path, data))

    errors = each(claims, fetch)
    try:
        engine.blobs.put_many(files)
    except (Transient, KbError) as e:
        errors += [(x, e) for x in claims if x.doc_id in rows]
    finally:
        for _, data in files:
            data.close()

    if lost := sorted({claim.source_id for claim, e in errors if e.code == "gone"}):
        _list_again(engine, lost)

    def save(c: Connection, fence: Fence) -> dict[int, Json]:
        kept = [rows[x.doc_id] for x in fence.claims]
        versions.save_fetched(c, kept)
        return {x.task_id: {"bytes": rows[x.doc_id].raw_bytes, "sha256": rows[x.doc_id].raw_sha256.hex()} for x in fence.claims}

    return commit(engine, space, started, claims, errors, save)


def _list_again(engine: Engine, source_ids: Sequence[int]) -> None:
    """What vanished before it was read may come back as it was: an equal listing does not say any more that nothing changed."""
    with transaction(engine.pool) as c:
        for source_id in source_ids:
            sources.forget_digest(c, source_id)


def _fetch(engine: Engine, space: Space, source: Source, claim: Claim, listed: str) -> tuple[versions.Fetched, BinaryIO]:
    content = engine.connector(source).fetch(claim.external_id, engine.limits.max_file_bytes)
    digest = hashlib.sha256()
    while piece := content.data.read(_PIECE):
        digest.update(piece)
    content.data.seek(0)
    revision = fetched_revision(listed, content.revision)
    key = object_key(space, claim)
    return versions.Fetched(claim.doc_id, claim.version, revision, key, digest.digest(), content.size_bytes), content.data
