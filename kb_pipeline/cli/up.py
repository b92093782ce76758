"""``kb up``: database, daemon, web server and health service in the foreground; stopped in the reverse order."""

import getpass
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from kb_pipeline.cli.notify import tell_manager
from kb_pipeline.cli.output import Output
from kb_pipeline.cli.preflight import Finding, examine, refusal
from kb_pipeline.cli.processes import Child
from kb_pipeline.cli.session import COULD_NOT, DONE, session_of
from kb_pipeline.cli.supervisor import Spec, Supervisor
from kb_pipeline.errors import Fatal, KbError, Misconfigured, MissingExtra

if TYPE_CHECKING:
    from kb_pipeline.settings import Settings

NAME = "up"
HOST = "127.0.0.1"
PYTHON = (sys.executable, "-m")
DEFINITIONS = "kb_pipeline.orchestration.definitions"
CODE_READY = "Started Dagster code server"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MIB = 2**20
LOCK = "up.lock"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def command(
    ctx: typer.Context,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of the web UI; KB_WEB_PORT when left out.")] = None,
    service_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of health and metrics; KB_SERVICE_PORT when left out.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at. The web UI lets everybody do everything.")] = HOST,
    check: Annotated[bool, typer.Option("--check", help="Only look for what would keep it from working.")] = False,
) -> None:
    """Run the database, the Dagster web UI, its daemon and the health service until Ctrl-C."""
    session = session_of(ctx)
    given = session.settings()
    settings = replace(given, web_port=port or given.web_port, service_port=service_port or given.service_port)
    if find_spec("dagster_webserver") is None:
        raise MissingExtra("kb up needs Dagster's web server: pip install dagster-webserver")
    findings = examine(settings, host, {"--port": settings.web_port, "--service-port": settings.service_port})
    if check:
        raise typer.Exit(_tell_findings(session.out, findings))
    _refuse_or_warn(session.out, settings.home, findings)
    if host not in (HOST, "localhost", "::1"):
        session.out.hint(
            f"warning: {host} is open to the network, and the web UI asks nobody who they are: let only a proxy reach it"
        )
    with _alone(settings.home) as lock:
        with session.app() as app:
            session.out.hint(f"database   ready: {app.database}, schema {app.schema_version}")
            _run(session.out, settings, host, lock)
        session.out.hint("database   left")


def _run(out: Output, settings: "Settings", host: str, lock: int) -> None:
    """All children until a signal, or until restarting one does not help. Raises Fatal then."""
    shown = _EVERYWHERE.get(host, host)
    base = f"http://[{shown}]" if ":" in shown else f"http://{shown}"
    url, service = f"{base}:{settings.web_port}", f"{base}:{settings.service_port}"
    environment = dagster_environment(settings, dagster_home(settings.home))
    with _signals() as asked, TemporaryDirectory(prefix="kb-") as folder:
        supervisor = Supervisor(
            settings.home,
            environment,
            keep=lock,
            say=out.hint,
            asked=asked,
            memory_bytes=settings.child_memory_mb * MIB,
            drain_seconds=settings.drain_seconds,
        )
        try:
            if supervisor.start(_specs(settings, host, url, service, Path(folder)), lambda children: _remember(lock, children)):
                _tell_ready(out, settings.home, url, service, supervisor.children)
                supervisor.watch(lambda children: _remember(lock, children))
        finally:
            tell_manager("STOPPING=1")
            supervisor.stop()


def _specs(settings: "Settings", host: str, url: str, service: str, folder: Path) -> list[Spec]:
    code, where = code_server(folder)
    daemon = (*PYTHON, "dagster._daemon", "run", *where)
    web = (*PYTHON, "dagster_webserver", "-h", host, "-p", str(settings.web_port), *where)
    return [
        Spec("code", code, CODE_READY, limited=True, works=True, first=True),
        Spec("daemon", daemon, "Instance is configured with the following daemons", limited=True),
        Spec("webserver", web, f"{url}/server_info", limited=True),
        Spec("service", (*PYTHON, "kb_pipeline.service", host), f"{service}/livez"),
    ]


def code_server(folder: Path) -> tuple[Sequence[str], Sequence[str]]:
    """The command of Dagster's code server, and the options by which others find it; ``folder``: with a short path, for its
    socket."""
    socket, workspace = folder / "code.sock", folder / "workspace.yaml"
    server = {"host": "localhost", "socket": str(socket), "location_name": DEFINITIONS}
    workspace.write_text(json.dumps({"load_from": [{"grpc_server": server}]}), encoding="utf-8")  # JSON is YAML
    return (*PYTHON, "kb_pipeline.orchestration.code_server", str(socket)), ("-w", str(workspace))


def _tell_ready(out: Output, home: Path, url: str, service: str, children: Sequence[Child]) -> None:
    found = {"url": url, "service": service, "home": home, "logs": [c.log for c in children]}
    if not out.document(found):
        out.line(f"Web UI: {url}   health: {service}/healthz   metrics: {service}/metrics   (Ctrl-C stops everything)")
    sys.stdout.flush()
    tell_manager("READY=1")


def _tell_findings(out: Output, findings: Sequence[Finding]) -> int:
    ok = all(f.warning for f in findings)
    if not out.document({"ok": ok, "findings": [f.document() for f in findings]}):
        for found in findings:
            out.line(f"{'warning' if found.warning else 'error'}: {found.error.message}")
        if ok:
            out.line("kb up can start")
    return DONE if ok else COULD_NOT


def _refuse_or_warn(out: Output, home: Path, findings: Sequence[Finding]) -> None:
    """Raises one error for all. Where ``kb up`` runs already, that is the reason for the ports that are taken."""
    errors: list[KbError] = [f.error for f in findings if not f.warning]
    if any(e.code == "port_taken" for e in errors) and (home / LOCK).exists():
        try:
            with _alone(home):
                pass
        except Misconfigured as e:
            errors = [e, *(x for x in errors if x.code != "port_taken")]
    for found in findings:
        if found.warning:
            out.hint(f"warning: {found.error.message}")
    if errors:
        raise refusal(errors)


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


def dagster_environment(settings: "Settings", folder: Path) -> dict[str, str]:
    from kb_pipeline.settings import as_environment, child_environment

    own = as_environment(settings) | dagster_database(settings)
    return child_environment(**own, DAGSTER_HOME=str(folder), DAGSTER_DISABLE_TELEMETRY="1", PYTHONUNBUFFERED="1")


@contextmanager
def _alone(home: Path) -> Iterator[int]:
    """One ``kb up`` per data folder. The children inherit the lock, so that one that outlived its ``kb up`` is found out."""
    from kb_pipeline.embedded_postgres.locks import flock, open_lock

    home.mkdir(parents=True, exist_ok=True)
    path = home / LOCK
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


def _remember(lock: int, children: Sequence[Child]) -> None:
    """For the message of the next ``kb up``."""
    processes = ", ".join([f"kb up {os.getpid()}", *(f"{c.name} {c.process.pid}" for c in children)])
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"processes: {processes}\n".encode("ascii"), 0)


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Ctrl-C, SIGTERM and a closed terminal ask for the same orderly end. How often they have asked."""
    received: list[int] = []
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in STOPS}
    try:
        yield lambda: len(received)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
