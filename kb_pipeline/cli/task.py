"""``kb task``: the ingestion of single versions, and what became of it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb_pipeline.cli.output import rows, when
from kb_pipeline.cli.session import session_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json
from kb_pipeline.states import TaskStatus

if TYPE_CHECKING:
    from kb_pipeline.store.database import Connection
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

NAME = "task"
app = typer.Typer(help="Tasks: the ingestion of one version each.", no_args_is_help=True)
Id = Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1)]


@app.command("list")
def list_(
    ctx: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE")],
    status: Annotated[TaskStatus | None, typer.Option(case_sensitive=False, help="Only these.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest first.")] = 100,
    before: Annotated[int | None, typer.Option(metavar="ID", help="Go on behind this task.")] = None,
) -> None:
    """Tasks of a space, the newest first."""
    from kb_pipeline.store import tasks
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened:
        owner = opened.space(space)
        with connection(opened.pool) as c:
            found = rows(tasks.list_tasks(c, owner.id, status.value if status else None, limit, before))
    if not session.out.document({"space": space, "tasks": found}):
        columns = ("task", "document", "version", "status", "node", "retries", "updated", "error")
        shown = [
            [
                *(t["task_id"], f"{t['document_id']} {t['external_id']}", t["version"], t["status"], t["current_node"]),
                *(t["retry_count"], t["updated_at"], f"{t['error_code']}: {t['error_message']}" if t["error_code"] else ""),
            ]
            for t in found
        ]
        session.out.table(columns, shown, f"No such task in space {space}")


@app.command("show")
def show(ctx: typer.Context, task_id: Id) -> None:
    """A task, and every try of each node."""
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened, connection(opened.pool) as c:
        found, _ = _task(c, task_id)
    if not session.out.document(found):
        session.out.pairs({k: v for k, v in found.items() if k not in ("nodes", "space_id", "trace_id")})
        columns = ("node", "status", "try", "finished", "ms", "output or error")
        shown = [
            [n["node"], n["status"], n["attempt"], when(n["finished_at"]), n["duration_ms"], n["error"] or n["output"]]
            for n in found["nodes"]
        ]
        session.out.table(columns, shown, "It has not been worked on yet")


@app.command("retry")
def retry(ctx: typer.Context, task_id: Id) -> None:
    """Put a FAILED or DEAD task back into the queue, where it stopped."""
    from kb_pipeline.store import spaces, tasks
    from kb_pipeline.store.database import retried, transaction
    from kb_pipeline.store.documents import lock_documents

    session = session_of(ctx)
    with session.app() as opened:

        def back() -> tuple[Json, "Space"]:
            with transaction(opened.pool) as c:
                found, space = _task(c, task_id)
                living = spaces.lock_shared(c, space) is not None and found["document_id"] in lock_documents(
                    c, [found["document_id"]]
                )
                if not living or not tasks.retry(c, task_id):
                    why = "only FAILED and DEAD tasks can be tried again" if living else "its document is deleted"
                    raise Misconfigured(f"task {task_id} is {found['status']}: {why}", code="bad_transition")
                return _task(c, task_id)

        found, space = retried(back)
    if not session.out.document(found):
        session.out.line(f"Task {task_id} waits at {found['current_node']} again. Next: kb sync {space.key}")


@app.command("cancel")
def cancel(
    ctx: typer.Context,
    task_id: Annotated[int | None, typer.Argument(metavar="[ID]", min=1, max=2**63 - 1)] = None,
    document: Annotated[int | None, typer.Option(metavar="ID", help="Everything unfinished of this document.")] = None,
    space: Annotated[str | None, typer.Option(metavar="KEY", help="Everything unfinished of this space.")] = None,
    reason: Annotated[str, typer.Option(help="Kept with the task.")] = "cancelled with kb task cancel",
) -> None:
    """Give a version up, or all that waits of a document or space: what is published already stays as it is."""
    session = session_of(ctx)
    if sum(x is not None for x in (task_id, document, space)) != 1:
        raise Misconfigured("name one of: a task ID, --document ID, --space KEY", code="bad_argument")
    with session.app() as opened:
        if task_id is None:
            key, n = _cancel_all(opened, space, document, reason)
            if not session.out.document({"space": key, "document_id": document, "cancelled": n}):
                session.out.line(f"{n} tasks are cancelled; kb sync {key} cleans up behind them")
            return
        found, owner = _cancel_one(opened, task_id, reason)
    if not session.out.document(found):
        session.out.line(f"Task {task_id} is cancelled; kb sync {owner.key} cleans up behind it")


def _cancel_one(opened: "App", task_id: int, reason: str) -> "tuple[Json, Space]":
    from kb_pipeline.store import spaces, tasks
    from kb_pipeline.store.database import retried, transaction

    def give_up() -> "tuple[Json, Space]":
        with transaction(opened.pool) as c:
            found, space = _task(c, task_id)
            if spaces.lock_shared(c, space) is None or not tasks.cancel(c, task_id, reason):
                raise Misconfigured(
                    f"task {task_id} is {found['status']}: only unfinished tasks can be cancelled", code="bad_transition"
                )
            return _task(c, task_id)

    return retried(give_up)


def _cancel_all(opened: "App", key: str | None, document: int | None, reason: str) -> tuple[str, int]:
    """The space's key, and how many tasks were cancelled: 1,000 a transaction."""
    from kb_pipeline.store import documents, spaces, tasks
    from kb_pipeline.store.database import connection, retried, transaction

    if document is None:
        owner = opened.space(key or "")
    else:
        with connection(opened.pool) as c:
            found = spaces.space_by_id(c, documents.get_document(c, document).space_id)
        if found is None:
            raise Misconfigured(f"document {document} belongs to a space that is gone", code="no_document")
        owner = found

    def some() -> int:
        with transaction(opened.pool) as c:
            living = spaces.lock_shared(c, owner) is not None
            return tasks.cancel_unfinished(c, owner.id, document, reason) if living else 0

    total = 0
    while n := retried(some):
        total += n
    return owner.key, total


def _task(c: "Connection", task_id: int) -> "tuple[Json, Space]":
    from kb_pipeline.store import spaces, tasks

    row, log = tasks.get_task(c, task_id)
    space = spaces.space_by_id(c, row.space_id)
    if space is None:
        raise Misconfigured(f"task {task_id} belongs to a space that is gone", code="no_task")
    found: dict[str, Any] = row._asdict()
    return found | {"space": space.key, "nodes": rows(log)}, space
