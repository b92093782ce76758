"""kb_doc and kb_doc_version as a walk writes them, page by page, and as people read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Item, Known
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one
from kb_pipeline.store.publications import close_publications

SQL = load_statements(__package__, "documents.sql")


@dataclass(frozen=True, slots=True)
class Document:
    id: int
    space_id: int
    source: str
    external_id: str
    title: str
    uri: str
    status: str
    current_ver: int
    last_ver: int
    hidden_at: datetime | None
    published_at: datetime | None


def known_documents(c: Connection, source_id: int, external_ids: Sequence[str]) -> dict[str, Known]:
    rows = c.execute(SQL.known, {"source": source_id, "ids": list(external_ids)})
    return {row.external_id: _known(row) for row in rows}


def candidates_by_identity(c: Connection, source_id: int, identities: Sequence[str]) -> list[Known]:
    """Living documents that a new item may be after a move: the same identity in the source."""
    return [_known(row) for row in c.execute(SQL.by_identity, {"source": source_id, "identities": list(identities)})]


def candidates_by_content(c: Connection, source_id: int, space_id: int, digests: Sequence[bytes]) -> list[Known]:
    """Living documents whose newest version has one of these raw sha256."""
    return [
        _known(row) for row in c.execute(SQL.by_content, {"source": source_id, "space": space_id, "digests": list(digests)})
    ]


def has_documents(c: Connection, source_id: int) -> bool:
    return bool(one(c.execute(SQL.any_living, {"source": source_id})).yes)


def lock_documents(c: Connection, doc_ids: Sequence[int]) -> dict[int, int]:
    """Lock living documents by ascending id, in a statement of its own. Returns their seen_seq."""
    rows = c.execute(SQL.lock, {"docs": list(doc_ids)})
    return {row.id: row.seen_seq for row in rows}


def lock_deleted(c: Connection, doc_ids: Sequence[int]) -> None:
    """Lock documents whatever their status, before ERASE."""
    c.execute(SQL.lock_any, {"docs": list(doc_ids)})


def insert_documents(c: Connection, space_id: int, source_id: int, items: Sequence[Item]) -> dict[str, int]:
    """New documents by external id. One that somebody else made meanwhile is left out."""
    rows = c.execute(SQL.insert, {"space": space_id, "source": source_id, **_columns(items)})
    return {row.external_id: row.id for row in rows}


def restate_documents(c: Connection, doc_ids: Sequence[int], items: Sequence[Item]) -> None:
    """Seen again under this name: a move, a new title, a document shown again. Draws seen_seq and unhides."""
    c.execute(SQL.restate, {"docs": list(doc_ids), **_columns(items)})


def restate_revisions(c: Connection, rows: Sequence[tuple[int, int, str]]) -> None:
    """(doc, version, revision): the content is the same, the source's revision moved."""
    docs, versions, revisions = _transposed(rows, 3)
    c.execute(SQL.restate_revision, {"docs": docs, "versions": versions, "revisions": revisions})


def unhide(c: Connection, doc_ids: Sequence[int]) -> None:
    c.execute(SQL.unhide, {"docs": list(doc_ids)})


def new_versions(c: Connection, space_id: int, rows: Sequence[tuple[int, str, int]], *, max_retries: int) -> int:
    """(doc, revision, size): a version and its task each, older unfinished tasks superseded. The caller has locked them."""
    docs, revisions, sizes = _transposed(rows, 3)
    c.execute(SQL.supersede, {"docs": docs})
    return c.execute(
        SQL.new_versions, {"space": space_id, "docs": docs, "revisions": revisions, "sizes": sizes, "max_retries": max_retries}
    ).rowcount


def record_bad(c: Connection, space_id: int, rows: Sequence[tuple[int, str, str]]) -> None:
    """(doc, code, message): the ledger of items that were listed but cannot be read. A version without a revision is looked
    at again by every walk; its DEAD task says why."""
    docs, codes, messages = _transposed(rows, 3)
    c.execute(SQL.supersede, {"docs": docs})
    c.execute(SQL.record_bad, {"space": space_id, "docs": docs, "codes": codes, "messages": messages})


def delete_documents(c: Connection, space_id: int, shard: int, doc_ids: Sequence[int]) -> None:
    """DELETED, invisible, tasks fenced off, versions archived. Documents are locked by the caller; ERASE comes after it."""
    values = {"space": space_id, "shard": shard, "docs": list(doc_ids)}
    for statement in (SQL.delete, SQL.delete_flags):
        c.execute(statement, values)
    close_publications(c, doc_ids)
    for statement in (SQL.delete_tasks, SQL.delete_versions):
        c.execute(statement, values)


def still_hidden(c: Connection, doc_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Of these, the ones whose hide token is the one that was read before the probe. Locks them."""
    rows = c.execute(SQL.still_hidden, {"docs": list(doc_ids), "tokens": list(tokens)})
    return [row.id for row in rows]


def lock_of_source(c: Connection, source_id: int, limit: int) -> list[int]:
    """Some living documents of a source, locked by ascending id."""
    return [row.id for row in c.execute(SQL.lock_of_source, {"source": source_id, "limit": limit})]


def documents(c: Connection, space_id: int, *, after: int = 0, limit: int = 100, status: str | None = None) -> list[Any]:
    return c.execute(SQL.list_all, {"space": space_id, "after": after, "limit": limit, "status": status}).fetchall()


def get_document(c: Connection, doc_id: int) -> Document:
    """Raises Misconfigured if there is none."""
    row = c.execute(SQL.get, {"doc": doc_id}).fetchone()
    if row is None:
        raise Misconfigured(f"no document {doc_id}: kb doc list SPACE shows them", code="no_document")
    return Document(*row)


def document_versions(c: Connection, doc_id: int) -> list[Any]:
    return c.execute(SQL.versions, {"doc": doc_id}).fetchall()


def get_version(c: Connection, doc_id: int, version: int) -> Any:
    """Raises Misconfigured if there is none."""
    row = c.execute(SQL.version, {"doc": doc_id, "version": version}).fetchone()
    if row is None:
        raise Misconfigured(
            f"document {doc_id} has no version {version}: kb doc versions {doc_id} shows them", code="no_version"
        )
    return row


def copy_version(c: Connection, doc_id: int, version: int, recipe: str) -> int:
    """A new version with an older READY one's chunks and the newest source fingerprint. It is locked by the caller.

    Made with today's ``recipe`` its blocks give the same chunks: CHUNKER restates their links and paths as they were then.
    """
    c.execute(SQL.supersede, {"docs": [doc_id]})
    row = c.execute(SQL.copy_version, {"doc": doc_id, "version": version, "recipe": recipe}).fetchone()
    if row is None:
        raise Misconfigured(
            f"document {doc_id} version {version} was never published or is archived: kb doc versions {doc_id}",
            code="no_version",
        )
    return int(row.version)


def _known(row: Any) -> Known:
    acl = None if row.acl is None else tuple(tuple(clause) for clause in row.acl)
    return Known(*row[:12], acl)  # type: ignore[call-arg]


def _columns(items: Sequence[Item]) -> dict[str, list[Any]]:
    return {
        "ids": [i.external_id for i in items],
        "identities": [i.identity for i in items],
        "titles": [i.title for i in items],
        "uris": [i.uri for i in items],
        "acls": [None if i.acl is None else Jsonb([list(x) for x in i.acl]) for i in items],
    }


def _transposed(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(width)]
