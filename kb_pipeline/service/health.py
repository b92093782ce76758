"""``/livez``: this process answers. ``/healthz``: everything that must work does; 503 with the reasons otherwise."""

from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kb_pipeline.errors import KbError
from kb_pipeline.service import condition
from kb_pipeline.service.database import Database
from kb_pipeline.settings import Settings
from kb_pipeline.store import requirements
from kb_pipeline.store.migrations import migrations


def routes(settings: Settings, database: Database) -> Sequence[BaseRoute]:
    def livez(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def healthz(_: Request) -> Response:
        reasons = [*_of_database(database), *_of_children(settings)]
        return JSONResponse({"status": "failing" if reasons else "ok", "reasons": reasons}, 503 if reasons else 200)

    return [Route("/livez", livez), Route("/healthz", healthz)]


def _of_database(database: Database) -> Iterator[str]:
    try:
        with database.transaction() as c:
            theirs, ours = requirements.schema_version(c), migrations()[-1].version
    except KbError as e:
        yield e.message
        return
    if theirs != ours:
        yield f"the database has schema {theirs}, this program {ours}: restart kb up with the newer version"


def _of_children(settings: Settings) -> Iterator[str]:
    children = condition.read(settings.home)
    if children is None:
        yield f"kb up has not written {condition.NAME} for {condition.STALE_SECONDS:g} s: it has ended, or it hangs"
        return
    for name, child in children.items():
        if child.state != "ready":
            yield f"{name} is {child.state}" + (f": {child.reason}" if child.reason else "")
