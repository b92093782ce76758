"""``kb alerts``: what needs a person, and whether a message about it would arrive."""

import typer

from kb_pipeline.cli.output import when
from kb_pipeline.cli.session import COULD_NOT, session_of

NAME = "alerts"
app = typer.Typer(help="What needs a person, and the channels that tell it.", invoke_without_command=True)


@app.callback()
def list_open(ctx: typer.Context) -> None:
    """What needs a person, and the channels that tell it. Without a command: all open alerts, as things are now."""
    if ctx.invoked_subcommand:
        return
    from kb_pipeline import notify
    from kb_pipeline.store import alerts
    from kb_pipeline.store.database import connection

    session = session_of(ctx)
    with session.app() as opened:
        notify.observe(opened.pool)
        with connection(opened.pool) as c:
            found = alerts.open_alerts(c)
        links = [notify.link(a, opened.settings) for a in found]
    named = [
        {"space": a.space, "kind": a.kind.value, "subject": a.subject, "message": a.message, "since": a.since, "link": link}
        for a, link in zip(found, links, strict=True)
    ]
    if session.out.document({"alerts": named}):
        return
    for a, link in zip(found, links, strict=True):  # as lines: their commands and links are copied
        session.out.line(f"{a.kind} {a.space or 'installation'}, since {when(a.since)}: {a.message}")
        session.out.line(f"  {link}")
    if not found:
        session.out.line("Nothing needs you")


@app.command()
def test(ctx: typer.Context) -> None:
    """Send a test message to every channel of KB_ALERT_URLS. Exit code 1: one of them did not accept it."""
    from kb_pipeline.notify import send_test

    session = session_of(ctx)
    sent = send_test(session.settings())
    if not session.out.document({"channels": [{"channel": d.channel, "ok": not d.problem, "reason": d.problem} for d in sent]}):
        for d in sent:
            session.out.line(f"{d.channel}: {d.problem or 'ok'}")
    if any(d.problem for d in sent):
        raise typer.Exit(COULD_NOT)
