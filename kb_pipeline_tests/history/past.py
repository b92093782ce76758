"""What happened to a space, and when: edits that are published at once, and the database's time between them."""

from collections.abc import Sequence
from datetime import datetime

from kb_pipeline.as_of import as_of
from kb_pipeline.maintenance.deletion import delete_document
from kb_pipeline.model import Answer
from kb_pipeline.store import answers
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.versions import rollback
from kb_pipeline_tests.flow.scenario import Flow

ALL = 100  # more than any of these spaces has chunks


def now(flow: Flow) -> datetime:
    """The clock that stamps publications."""
    at: datetime = flow.execute("SELECT clock_timestamp() AS at")[0].at
    return at


def write(flow: Flow, external_id: str, text: str) -> int:
    """Published, with what left erased from the index. The document's id."""
    flow.memory.put(external_id, text)
    flow.sync()
    return int(flow.document(external_id).id)


def back_to(flow: Flow, doc_id: int, version: int) -> int:
    number = rollback(flow.engine, flow.space, doc_id, version)
    flow.ingest()
    return number


def delete(flow: Flow, external_id: str) -> None:
    """By an operator, and from the source."""
    doc_id = flow.document(external_id).id
    flow.memory.remove(external_id)
    delete_document(flow.engine, flow.space, flow.source.id, doc_id)


def hide(flow: Flow, external_id: str) -> None:
    flow.execute(
        "UPDATE kb_doc SET hidden_at = clock_timestamp(), hidden_sync = 1 WHERE id = %(doc)s", doc=flow.document(external_id).id
    )


def restrict(flow: Flow, external_id: str, clauses: Sequence[Sequence[str]] | None) -> None:
    doc_id = flow.document(external_id).id
    with transaction(flow.app.pool) as c:
        lock_documents(c, [doc_id])
        answers.set_acl(c, [doc_id], clauses)


def ask(flow: Flow, question: str, at: datetime, k: int = ALL, principals: Sequence[str] = ()) -> Answer:
    return as_of(flow.engine, flow.space, question, at, k=k, principals=principals)


def showing(flow: Flow, word: str, at: datetime, principals: Sequence[str] = ()) -> dict[str, int]:
    """Documents in which ``word`` was found then, with their version."""
    return {h.external_id: h.version for h in ask(flow, word, at, principals=principals).hits if word in h.text}


def shift(flow: Flow, doc_id: int, seconds: float) -> None:
    """Move what is known about a document's past."""
    for column in ("from_at", "to_at"):
        flow.execute(
            f"UPDATE kb_publication SET {column} = {column} + %(by)s * interval '1 second' WHERE doc_id = %(doc)s",
            doc=doc_id,
            by=seconds,
        )
