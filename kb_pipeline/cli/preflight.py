"""What would keep ``kb up`` from working, found before anything of it starts, and told all at once."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kb_pipeline.errors import Fatal, KbError, Misconfigured

if TYPE_CHECKING:
    from kb_pipeline.model import Json
    from kb_pipeline.settings import Settings

GIB = 2**30
LEAST_FREE_BYTES, LOW_FREE_BYTES = 1 * GIB, 5 * GIB
_PROBE = "preflight/"  # a prefix that no object has


@dataclass(frozen=True, slots=True)
class Finding:
    """``error``: names the thing, the cause and the way out. A warning does not keep anything from starting."""

    error: KbError
    warning: bool = False

    def document(self) -> "Json":
        level = "warning" if self.warning else "error"
        return {"level": level, "code": self.error.code, "message": self.error.message}


def examine(settings: "Settings", host: str, ports: Mapping[str, int]) -> list[Finding]:
    """Everything. The embedded database is started for it, where the disk allows, and stopped again if nobody uses it.

    ``ports`` by the option that changes each.
    """
    found = [*_ports(host, ports), *_home(settings.home)]
    usable = not any(f.error.code in ("home_not_writable", "disk_full") for f in found)
    if usable or settings.database_url:
        found += _database(settings)
    if usable or settings.blobs:
        found += _blobs(settings)
    return [*found, *_channels(settings)]


def refusal(errors: Sequence[KbError]) -> KbError:
    """One error for all: the first one's code, every one's words."""
    kind = Misconfigured if all(isinstance(e, Misconfigured) for e in errors) else Fatal
    return kind("\n    ".join(e.message for e in errors), code=errors[0].code)


def _ports(host: str, ports: Mapping[str, int]) -> Iterator[Finding]:
    seen: dict[int, str] = {}
    for option, port in ports.items():
        if other := seen.get(port):
            yield Finding(
                Misconfigured(f"port {port} is given twice: choose others with {other} and {option}", code="port_taken")
            )
        elif why := _taken(host, port):
            yield Finding(
                Misconfigured(f"port {port} is not free ({why}): kb up {option} N, or end what uses it", code="port_taken")
            )
        seen[port] = option


def _taken(host: str, port: int) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as s:
            # As the servers do: connections of the last one may linger.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _home(home: Path) -> Iterator[Finding]:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as e:
        message = f"KB_HOME={home} is not writable ({e.strerror}): let this user write there, or choose another with --home"
        yield Finding(Misconfigured(message, code="home_not_writable"))
        return
    free = shutil.disk_usage(home).free
    if free < LOW_FREE_BYTES:
        message = f"{free / GIB:.1f} GiB are free below KB_HOME={home}: free some space, or move the folder to a larger disk"
        yield Finding(Fatal(message, code="disk_full"), warning=free >= LEAST_FREE_BYTES)


def _database(settings: "Settings") -> Iterator[Finding]:
    from kb_pipeline.embedded_postgres import EmbeddedPostgres

    server = None if settings.database_url else EmbeddedPostgres(settings.home)
    try:
        yield from _of_database(server.start() if server else settings.database_url, vector=settings.index == "pgvector")
    except KbError as e:
        yield Finding(e)
    finally:
        if server is not None:
            server.stop_if_unused()


def _of_database(url: str, *, vector: bool) -> Iterator[Finding]:
    from kb_pipeline.settings import secret
    from kb_pipeline.store import requirements
    from kb_pipeline.store.database import connection, open_pool

    pool = open_pool(url, max_size=1)
    try:
        with connection(pool) as c:
            yield from map(Finding, requirements.unmet(c, vector=vector))
            wanted = requirements.secret_references(c)
    finally:
        pool.close()
    for owner, reference in wanted:
        try:
            secret(reference)
        except Misconfigured as e:
            message = f"{owner}: {e.message}. Give it before its next run, or pause the source"
            yield Finding(Misconfigured(message, code=e.code), warning=True)


def _blobs(settings: "Settings") -> Iterator[Finding]:
    """A bucket must exist and be readable; a folder is made when it is needed, so its place must be writable."""
    from kb_pipeline.wiring import open_blobs

    scheme, _, rest = settings.blobs_url.partition(":")
    if scheme == "file":
        place = next(p for p in (Path(rest), *Path(rest).parents) if p.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            message = (
                f"object store {settings.blobs_url}: {place} is no folder that this user may write to: change it, or KB_BLOBS"
            )
            yield Finding(Misconfigured(message, code="blob_store_missing"))
        return
    try:
        next(open_blobs(settings).keys(_PROBE), None)
    except KbError as e:
        yield Finding(e)


def _channels(settings: "Settings") -> Iterator[Finding]:
    """Whether each can be reached at all is for ``kb alerts test``: nobody is written to for a look."""
    from kb_pipeline.notify import channels

    for channel in channels(settings) if settings.alert_urls else ():
        if channel.problem:
            message = f"KB_ALERT_URLS, {channel.name}: {channel.problem}. Until then nobody is told there"
            yield Finding(Misconfigured(message, code="bad_channel"), warning=True)
