"""``kb up``: database, Dagster's web server and daemon in the foreground; stopped in the reverse order."""

import getpass
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.output import Output
from kb_pipeline.cli.processes import Child, died, start, stop, wait_until_ready
from kb_pipeline.cli.session import session_of
from kb_pipeline.errors import Fatal, Misconfigured, MissingExtra

if TYPE_CHECKING:
    from kb_pipeline.settings import Settings

NAME = "up"
HOST = "127.0.0.1"
DEFINITIONS = "kb_pipeline.orchestration.definitions"
POLL_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(
    ctx: typer.Context,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of the web UI; KB_WEB_PORT when left out.")] = None,
) -> None:
    """Run the database, the Dagster web UI and its daemon until Ctrl-C."""
    session = session_of(ctx)
    settings = session.settings()
    port = port or settings.web_port
    if find_spec("dagster_webserver") is None:
        raise MissingExtra("kb up needs Dagster's web server: pip install dagster-webserver")
    _require_free(port)
    with _alone(settings.home) as lock:
        with session.app() as app:
            session.out.hint(f"database   ready: {app.database}, schema {app.schema_version}")
            _run(session.out, settings, port, lock)
        session.out.hint("database   left")


def _run(out: Output, settings: "Settings", port: int, lock: int) -> None:
    """Both children until a signal, or until one of them dies. Raises Fatal then."""
    url, home = f"http://{HOST}:{port}", settings.home
    stopped = threading.Event()
    children: list[Child] = []
    with _signals_to(stopped):
        try:
            environment = _environment(settings, dagster_home(home))
            web = ("dagster_webserver", "-h", HOST, "-p", str(port), "-m", DEFINITIONS)
            daemon = ("dagster._daemon", "run", "-m", DEFINITIONS)
            for name, arguments in (("daemon", daemon), ("webserver", web)):
                children.append(
                    start(name, [sys.executable, "-m", *arguments], home / "logs" / f"{name}.log", environment, keep=lock)
                )
            _remember(lock, children)
            for child, sign in zip(
                children, ("Instance is configured with the following daemons", f"{url}/server_info"), strict=True
            ):
                if wait_until_ready(child, children, sign, stopped):
                    out.hint(f"{child.name.ljust(10)} ready, log in {child.log}")
            if not stopped.is_set() and not out.document({"url": url, "home": home, "logs": [c.log for c in children]}):
                out.line(f"Web UI: {url}   (Ctrl-C stops everything)")
            sys.stdout.flush()
            while not stopped.wait(POLL_SECONDS):
                if dead := next((c for c in children if c.process.poll() is not None), None):
                    raise died(dead)
        finally:
            for child in reversed(children):
                stop(child)
                out.hint(f"{child.name.ljust(10)} stopped")


def dagster_home(home: Path) -> Path:
    """KB_HOME/dagster with the packaged dagster.yaml. Raises Fatal where the package lacks it."""
    installed = Path(__file__).parents[1] / "orchestration" / "dagster.yaml"
    source = installed if installed.is_file() else Path(__file__).parents[2] / "dagster.yaml"
    if not source.is_file():
        raise Fatal(f"{installed} is missing: install kb-pipeline again", code="broken_installation")
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    (home / "logs").mkdir(exist_ok=True)
    target = folder / "dagster.yaml"
    if not target.is_file() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)
    return folder


def dagster_database(settings: "Settings") -> dict[str, str]:
    """Where Dagster keeps its runs: a database of its own in the embedded server, else the database of KB_DATABASE_URL."""
    from psycopg.conninfo import conninfo_to_dict

    from kb_pipeline.embedded_postgres import EmbeddedPostgres

    found = conninfo_to_dict(settings.database_url or EmbeddedPostgres(settings.home).dagster_url())
    parts = {
        "HOST": ("host", "localhost"),
        "PORT": ("port", "5432"),
        "USER": ("user", getpass.getuser()),  # what libpq takes where none is named
        "PASSWORD": ("password", ""),
        "DB": ("dbname", found.get("user") or getpass.getuser()),
    }
    return {f"DAGSTER_PG_{name}": str(found.get(key) or default) for name, (key, default) in parts.items()}


def _environment(settings: "Settings", folder: Path) -> dict[str, str]:
    from kb_pipeline.settings import as_environment, child_environment

    own = as_environment(settings) | dagster_database(settings)
    return child_environment(**own, DAGSTER_HOME=str(folder), DAGSTER_DISABLE_TELEMETRY="1", PYTHONUNBUFFERED="1")


def _require_free(port: int) -> None:
    """Before anything starts. Raises Misconfigured."""
    with socket.socket() as s:
        s.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the web server does: connections of the last one may linger
        try:
            s.bind((HOST, port))
        except OSError as e:
            raise Misconfigured(
                f"port {port} is not free ({e.strerror}): kb up --port N, or end what uses it", code="port_taken"
            ) from e


@contextmanager
def _alone(home: Path) -> Iterator[int]:
    """One ``kb up`` per data folder. The children inherit the lock, so that one that outlived its ``kb up`` is found out."""
    from kb_pipeline.embedded_postgres.locks import flock, open_lock

    home.mkdir(parents=True, exist_ok=True)
    path = home / "up.lock"
    lock = open_lock(path)
    try:
        if not flock(lock, exclusive=True):
            who = path.read_text(encoding="ascii", errors="replace").strip() or "starting"
            raise Misconfigured(
                f"kb up runs already for {home} ({who}): use that one, or stop it with Ctrl-C or kill", code="up_runs"
            )
        os.ftruncate(lock, 0)
        yield lock
    finally:
        os.close(lock)  # not unlocked: a child that would not end keeps it


def _remember(lock: int, children: list[Child]) -> None:
    """For the message of the next ``kb up``."""
    processes = ", ".join([f"kb up {os.getpid()}", *(f"{c.name} {c.process.pid}" for c in children)])
    os.pwrite(lock, f"processes: {processes}\n".encode("ascii"), 0)


@contextmanager
def _signals_to(stopped: threading.Event) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal ask for the same orderly end."""
    before = {s: signal.signal(s, lambda *_: stopped.set()) for s in STOPS}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
