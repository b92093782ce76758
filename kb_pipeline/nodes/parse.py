"""PARSER: the original to a stream of blocks."""

from collections.abc import Sequence
from datetime import datetime
from typing import BinaryIO

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, StateError
from kb_pipeline.model import Json
from kb_pipeline.nodes.outcome import Outcome, commit, each, object_key, open_output
from kb_pipeline.stages.parse import encode_blocks, parse_document
from kb_pipeline.states import Node
from kb_pipeline.store import versions
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    with transaction(engine.pool) as c:
        stored = versions.read_versions(c, [(x.doc_id, x.version) for x in claims])
    rows: dict[int, versions.ParsedVersion] = {}
    files: list[tuple[str, BinaryIO]] = []

    def parse(claim: Claim) -> None:
        path = stored[claim.doc_id].raw_path
        if path is None:
            raise StateError(f"version {claim.version} has no original")
        with open_output(engine, space, claim, path, Node.FETCHER) as raw:
            parsed = encode_blocks(parse_document(raw, claim.external_id, engine.parser))
        key = object_key(space, claim)
        rows[claim.doc_id] = versions.ParsedVersion(
            claim.doc_id, claim.version, key, parsed.text_sha256, parsed.title, dict(parsed.meta)
        )
        files.append((key, parsed.data))

    errors = each(claims, parse)
    try:
        engine.blobs.put_many(files)
    except KbError as e:
        errors += [(x, e) for x in claims if x.doc_id in rows]
    finally:
        for _, data in files:
            data.close()

    def save(c: Connection, fence: Fence) -> dict[int, Json]:
        versions.save_parsed(c, [rows[x.doc_id] for x in fence.claims])
        return {x.task_id: {"title": rows[x.doc_id].title, **rows[x.doc_id].parse_result} for x in fence.claims}

    return commit(engine, space, started, claims, errors, save)
