"""``kb init``: folder, database, migrations. Every other command does the same when it is needed."""

import typer

from kb_pipeline.cli.session import session_of

NAME = "init"


def command(ctx: typer.Context) -> None:
    """Make the data folder and the database, or bring them up to date."""
    session = session_of(ctx)
    with session.app() as app:
        settings = app.settings
        found = {
            "home": settings.home,
            "database": app.database,
            "schema_version": app.schema_version,
            "objects": settings.blobs_url,
        }
    if not session.out.document(found):
        session.out.pairs(found)
        session.out.line("Next: kb demo, or kb space add KEY")
