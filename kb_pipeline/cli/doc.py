"""``kb doc``: documents and their versions."""

from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import rows
from kb_pipeline.cli.session import COULD_NOT, session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.documents import Document
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

NAME = "doc"
app = typer.Typer(help="Documents and their versions.", no_args_is_help=True)
Id = Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1)]


@app.command("list")
def list_(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    status: Annotated[str | None, typer.Option(help="UPLOADED, INDEXING, AVAILABLE or FAILED.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, by id.")] = 100,
    after: Annotated[int, typer.Option(metavar="ID", help="Go on behind this document.")] = 0,
) -> None:
    """Documents of a space."""
    from kb_pipeline.store import documents
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened:
        owner = opened.space(space)
        with connection(opened.pool) as c:
            found = rows(documents.documents(c, owner.id, after=after, limit=limit, status=status.upper() if status else None))
    more = found[-1]["document_id"] if len(found) == limit else None
    if session.out.document({"space": space, "documents": found, "next": more}):
        return
    columns = ("id", "document", "status", "version", "published", "chunks", "source", "error")
    shown = [
        [
            *(d["document_id"], d["external_id"], "HIDDEN" if d["hidden"] else d["status"], d["version"] or ""),
            *(
                d["published_at"],
                d["chunks"],
                d["source"],
                f"{d['error_code']}: {d['error_message']}" if d["error_code"] else "",
            ),
        ]
        for d in found
    ]
    session.out.table(columns, shown, f"No such document in space {space}. Next: kb sync {space}")
    if more:
        session.out.hint(f"There may be more: kb doc list {space} --after {more}")


@app.command("show")
def show(ctx: typer.Context, doc_id: Id) -> None:
    """A document as it is now."""
    session = session_of(ctx)
    with session.app() as opened:
        found = _document(opened, doc_id)
    if not session.out.document(found):
        session.out.pairs(found)


@app.command("versions")
def versions(ctx: typer.Context, doc_id: Id) -> None:
    """What it was, and when. `reused`: chunks that the version before had too."""
    from kb_pipeline.store import documents
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened, connection(opened.pool) as c:
        document = documents.get_document(c, doc_id)
        found = rows(documents.document_versions(c, doc_id))
    if not session.out.document({"document_id": doc_id, "external_id": document.external_id, "versions": found}):
        columns = ("version", "status", "current", "published", "until", "bytes", "chunks", "reused")
        keys = ("published_at", "superseded_at", "raw_bytes", "chunks", "reused")
        shown = [[v["version"], v["status"], "*" if v["current"] else "", *(v[k] for k in keys)] for v in found]
        session.out.table(columns, shown, "It has no version")


@app.command("text")
def text(
    ctx: typer.Context,
    doc_id: Id,
    version: Annotated[int | None, typer.Option(min=1, help="The current one when left out.")] = None,
) -> None:
    """The text of a version, as Markdown with its links."""
    from kb_pipeline.store import documents
    from kb_pipeline.store.database import connection
    from kb_pipeline.versions import version_text

    session = session_of(ctx)
    with session.app() as opened:
        with connection(opened.pool) as c:
            document = documents.get_document(c, doc_id)
        number = version or document.current_ver or document.last_ver
        found = version_text(opened.engine, doc_id, number)
    if not session.out.document({"document_id": doc_id, "external_id": document.external_id, "version": number, "text": found}):
        session.out.line(found)


@app.command("rollback")
def rollback(ctx: typer.Context, doc_id: Id, version: Annotated[int, typer.Argument(metavar="VERSION", min=1)]) -> None:
    """Make an older version current again, as a new version. Nothing is embedded; the next change in the source replaces it."""
    from kb_pipeline import versions as core
    from kb_pipeline.pipeline import ingest

    session = session_of(ctx)
    with session.app() as opened:
        space, document = _owner(opened, doc_id)
        if version == document.current_ver:
            raise Misconfigured(f"document {doc_id}: version {version} is the current one already", code="version_current")
        new = core.rollback(opened.engine, space, doc_id, version)
        ingest(opened.engine, space, progress=session.progress)
        found = _document(opened, doc_id) | {"rolled_back_to": version}
    if not session.out.document(found):
        session.out.line(f"{document.external_id}: version {new} has the content of version {version}")
    if found["version"] < new:
        session.out.hint(f"It is not current yet, as another process works on this document. Next: kb sync {space.key}")
        raise typer.Exit(COULD_NOT)


@app.command("delete")
def delete(ctx: typer.Context, doc_id: Id) -> None:
    """Delete a document from its space. If its source still has it, the next sync brings it back as a new one."""
    from kb_pipeline.maintenance.deletion import delete_document
    from kb_pipeline.maintenance.vector_gc import collect_vectors
    from kb_pipeline.store import sources
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened:
        space, document = _owner(opened, doc_id)
        with connection(opened.pool) as c:
            source = sources.get_source(c, space.id, document.source)
        delete_document(opened.engine, space, source.id, doc_id)
        vectors = collect_vectors(opened.engine, space)
        found = _document(opened, doc_id) | {"vectors_deleted": vectors}
    if not session.out.document(found):
        session.out.line(f"{document.external_id} is deleted, with {vectors} vectors")
        session.out.hint(f"If source {source.name} still has it, the next kb sync {space.key} brings it back")


def _owner(app: "App", doc_id: int) -> "tuple[Space, Document]":
    """The space of a living document. Raises Misconfigured."""
    from kb_pipeline.store import documents, spaces
    from kb_pipeline.store.database import connection

    with connection(app.pool) as c:
        document = documents.get_document(c, doc_id)
        space = spaces.space_by_id(c, document.space_id)
    if space is None or document.status == "DELETED":
        raise Misconfigured(f"document {doc_id} is deleted: kb doc list SPACE shows what there is", code="no_document")
    return space, document


def _document(app: "App", doc_id: int) -> Json:
    from kb_pipeline.store import documents, spaces
    from kb_pipeline.store.database import connection

    with connection(app.pool) as c:
        d = documents.get_document(c, doc_id)
        space = spaces.space_by_id(c, d.space_id)
        known = {v.version: v for v in documents.document_versions(c, doc_id)}
    current = known.get(d.current_ver)
    return {
        "document_id": d.id,
        "external_id": d.external_id,
        "title": d.title,
        "uri": d.uri,
        "space": space.key if space else None,
        "source": d.source,
        "status": d.status,
        "hidden_at": d.hidden_at,
        "version": d.current_ver,
        "newest_version": d.last_ver,
        "published_at": d.published_at,
        "chunks": current.chunks if current else 0,
        "reused": current.reused if current else 0,
    }
