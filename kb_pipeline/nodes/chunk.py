"""CHUNKER: blocks to chunks, and the version's list of them, in one transaction."""

from collections.abc import Sequence
from datetime import datetime

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Rejected, StateError
from kb_pipeline.model import Chunk, Json
from kb_pipeline.nodes.outcome import Outcome, commit, each, open_output
from kb_pipeline.stages.chunk import CHUNKER_VERSION, chunk_blocks
from kb_pipeline.stages.parse import decode_blocks
from kb_pipeline.states import Node
from kb_pipeline.store import chunks, versions
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Fence


def recipe(space: Space) -> str:
    """What a version was made with: a difference means that everything behind it would come out otherwise."""
    p = space.chunk_params
    cut = f"chunker {CHUNKER_VERSION} {p.max_tokens}/{p.min_tokens} sections={p.sections} context={p.context}"
    return f"{cut}; {space.fingerprint}"


def run(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime) -> Outcome:
    with transaction(engine.pool) as c:
        stored = versions.read_versions(c, [(x.doc_id, x.version) for x in claims])
    cut: dict[int, list[Chunk]] = {}
    params, made_with = space.chunk_params, recipe(space)

    def chunk(claim: Claim) -> None:
        path = stored[claim.doc_id].parsed_path
        if path is None:
            raise StateError(f"version {claim.version} has no parsed blocks")
        with open_output(engine, space, claim, path, Node.PARSER) as raw:
            parsed = decode_blocks(raw)
            cut[claim.doc_id] = list(chunk_blocks(parsed.blocks, parsed.title, params))
        if not cut[claim.doc_id]:
            raise Rejected("it has no text: nothing can be found in it", code="empty")

    errors = each(claims, chunk)
    counted: dict[int, tuple[int, int]] = {}

    def save(c: Connection, fence: Fence) -> dict[int, Json]:
        rows = [chunks.VersionChunks(x.doc_id, x.version, made_with, cut[x.doc_id]) for x in fence.claims]
        counted.update(chunks.store_chunks(c, space.id, fence.shard, rows))
        return {x.task_id: {"chunks": len(cut[x.doc_id]), "new": counted[x.doc_id][0]} for x in fence.claims}

    outcome = commit(engine, space, started, claims, errors, save)
    done = [counted[x.doc_id] for x in outcome.done]
    outcome.add(chunks_written=sum(n for n, _ in done), chunks_reused=sum(r for _, r in done))
    return outcome
