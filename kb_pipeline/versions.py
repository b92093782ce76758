"""Retained versions of a document: what they say, and how an older one becomes current again."""

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Misconfigured
from kb_pipeline.nodes.chunk import recipe
from kb_pipeline.stages.parse import decode_blocks
from kb_pipeline.store import documents, spaces
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.spaces import Space


def rollback(engine: Engine, space: Space, doc_id: int, version: int) -> int:
    """A *new* version with ``version``'s chunks: nothing is embedded. Returns its number.

    It stands until the source changes again. Raises Misconfigured where the version was never published or is archived.
    """

    def copy() -> int:
        with transaction(engine.pool) as c:
            if spaces.lock_shared(c, space) is None or doc_id not in documents.lock_documents(c, [doc_id]):
                raise Misconfigured(f"document {doc_id} is deleted", code="no_document")
            return documents.copy_version(c, doc_id, version, recipe(space))

    return retried(copy)


def version_text(engine: Engine, doc_id: int, version: int | None = None) -> str:
    """The text of a version (the current one by default) as Markdown with its links, from the stored blocks."""
    with transaction(engine.pool) as c:
        document = documents.get_document(c, doc_id)
        number = version or document.current_ver or document.last_ver
        row = documents.get_version(c, doc_id, number)
    if row.parsed_path is None:
        raise Misconfigured(
            f"document {doc_id} version {number} was never parsed: kb doc show {doc_id} says why", code="not_parsed"
        )
    with engine.blobs.open(row.parsed_path) as raw:
        return "\n\n".join(block.text for block in decode_blocks(raw).blocks)
