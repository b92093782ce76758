"""What every command begins with: the global options, the settings, the opened application."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kb_pipeline.cli.output import Output

if TYPE_CHECKING:
    from kb_pipeline.engine import Progress
    from kb_pipeline.settings import Settings
    from kb_pipeline.wiring import App

DONE, COULD_NOT, USAGE, SOME_FAILED, DELETIONS_WAIT = 0, 1, 2, 3, 4  # exit codes


def _quiet(_: object) -> None:
    """Before an application is opened there is nobody to tell."""


@dataclass(slots=True)
class Session:
    """``progress`` takes what long work tells, while the application is open. Print after it is closed."""

    home: Path | None = None
    debug: bool = False
    out: Output = field(default_factory=lambda: Output(as_json=False))
    progress: "Callable[[Progress], None]" = _quiet

    def settings(self) -> "Settings":
        """Raises Misconfigured."""
        from kb_pipeline.settings import load_settings

        settings = load_settings(home=self.home, log_level="DEBUG" if self.debug else None)
        _log_to_stderr(settings.log_level)
        return settings

    @contextmanager
    def app(self) -> "Iterator[App]":
        from kb_pipeline.wiring import open_app

        with self.out.progress() as progress, open_app(self.settings(), progress) as app:
            self.progress = progress
            yield app


def session_of(ctx: typer.Context) -> Session:
    session = ctx.obj
    assert isinstance(session, Session), "the application's callback makes it"
    return session


def _log_to_stderr(level: str) -> None:
    import logging

    from kb_pipeline.errors import Misconfigured

    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise Misconfigured(f"KB_LOG_LEVEL={level}: choose DEBUG, INFO, WARNING or ERROR", code="bad_setting")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if number > logging.DEBUG:
        logging.getLogger("elastic_transport").setLevel(logging.ERROR)  # it says what the error that follows says again
    logging.getLogger("kb_pipeline").setLevel(number)
