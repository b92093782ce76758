"""``kb status``: what the spaces hold, how their sources stand, and what needs a person."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import tally, when
from kb_pipeline.cli.session import session_of
from kb_pipeline.model import Json

if TYPE_CHECKING:
    from kb_pipeline.store.alerts import Alert
    from kb_pipeline.store.spaces import Space
    from kb_pipeline.wiring import App

NAME = "status"


def command(ctx: typer.Context, space: Annotated[str | None, typer.Argument(metavar="[SPACE]")] = None) -> None:
    """Documents, tasks, chunks and vectors by status; sources with their last and next pass; open alerts."""
    session = session_of(ctx)
    with session.app() as opened:
        chosen = [opened.space(space)] if space else opened.spaces()
        found = [
            {"key": s.key, "name": s.name, "status": s.status, "schedule": s.schedule, **contents(opened, s)} for s in chosen
        ]
        alerts = open_alerts(opened, chosen[0] if space else None)
    if session.out.document({"spaces": found, "alerts": [_alert_document(a) for a in alerts]}):
        return
    columns = ("space", "status", "documents", "tasks", "chunks", "vectors")
    rows = [[s["key"], s["status"], *(tally(s[k]) for k in columns[2:])] for s in found]
    session.out.table(columns, rows, "No space yet: kb demo, or kb space add KEY")
    headings = ("space", "source", "kind", "status", "last pass", "verdict", "next pass", "waiting deletions")
    rows = [_source_row(s["key"], r) for s in found for r in s["sources"]]
    if found:
        session.out.table(headings, rows, "No source yet: kb source add SPACE docs local_dir path=FOLDER")
    for alert in alerts:  # as lines: their commands are copied
        session.out.line(f"{alert.kind} {alert.space or 'installation'}, since {when(alert.since)}: {alert.message}")


def _source_row(key: str, source: Json) -> list[object]:
    last = source["last_pass"] or {}
    named = [key, source["name"], source["kind"], source["status"]]
    return [*named, last.get("finished_at"), last.get("verdict"), source["next_pass"], source["waiting_deletions"] or ""]


def open_alerts(app: "App", space: "Space | None") -> "list[Alert]":
    """As things are now: whoever asks is shown nothing that has been put right since."""
    from kb_pipeline.store import alerts
    from kb_pipeline.store.database import retried, transaction

    def look() -> "list[Alert]":
        with transaction(app.pool) as c:
            alerts.observe(c)
            return alerts.open_alerts(c, space.id if space else None)

    return retried(look, idempotent=True)


def _alert_document(a: "Alert") -> Json:
    return {"space": a.space, "kind": a.kind.value, "subject": a.subject, "message": a.message, "since": a.since}


def contents(app: "App", space: "Space") -> Json:
    """Counts by status, and the sources."""
    from kb_pipeline.cli.source import pass_document
    from kb_pipeline.store import sources, status
    from kb_pipeline.store.database import connection

    with connection(app.pool) as c:
        counts, jobs, found = status.counts(c, space.id), status.last_jobs(c, space.id), sources.list_sources(c, space.id)
    upcoming = _next_pass(space)
    return counts | {
        "sources": [
            {
                "name": s.name,
                "kind": s.kind,
                "status": s.status,
                "watermark": s.watermark,
                "last_pass": pass_document(jobs.get(s.id)),
                "next_pass": upcoming if s.status == "ACTIVE" else None,
                "waiting_deletions": s.waiting_deletions,
            }
            for s in found
        ]
    }


def _next_pass(space: "Space") -> datetime | None:
    """When the schedule comes up next; `kb up` must be running then."""
    from kb_pipeline.cron import next_time

    return (
        next_time(space.schedule, datetime.now(UTC), space.time_zone) if space.schedule and space.status == "ACTIVE" else None
    )
