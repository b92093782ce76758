"""PgBouncer in transaction mode before a database, for whoever wants to work through it."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from kb_pipeline_tests.faults.test_pooler import CONFIGURATION, PROGRAM, _await


@contextmanager
def pooled(direct: str, folder: Path, server_connections: int) -> Iterator[str]:
    """The URL that leads through it. ``direct`` is a URL of the server itself, ``folder`` one that its account may read."""
    parts = urlsplit(direct)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    users, ini = folder / "users.txt", folder / "pgbouncer.ini"
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    account = "user = nobody" if os.geteuid() == 0 else ""  # it refuses to run as root
    ini.write_text(
        CONFIGURATION.format(server_port=parts.port, port=port, users=users, size=server_connections, account=account)
    )
    process = subprocess.Popen([str(PROGRAM), "-q", str(ini)], stderr=subprocess.DEVNULL)
    try:
        url = direct.replace(f":{parts.port}/", f":{port}/")
        _await(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()
