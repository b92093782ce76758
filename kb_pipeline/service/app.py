"""The Starlette application, made from route modules: each has ``routes(settings, database)``."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from kb_pipeline.service import health, metrics
from kb_pipeline.service.database import Database
from kb_pipeline.settings import Settings

ROUTES: tuple[Callable[[Settings, Database], Sequence[BaseRoute]], ...] = (health.routes, metrics.routes)


def make_app(settings: Settings, database: Database) -> Starlette:
    """The caller closes ``database`` when the application has ended."""
    return Starlette(routes=[route for routes in ROUTES for route in routes(settings, database)])
