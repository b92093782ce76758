"""S3 servers for tests: moto knows most of the protocol, nanio checks signatures and keeps data; a proxy that makes trouble.

What nanio 0.1.7 cannot do: conditions, versions, checksums, keys that hold a newline.
"""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ACCESS_KEY, SECRET_KEY = "test-access", "test-secret-of-some-length"
_number = count()


@cache
def client(endpoint: str) -> Any:
    import boto3

    return boto3.session.Session(ACCESS_KEY, SECRET_KEY).client("s3", endpoint_url=endpoint, region_name="us-east-1")


def new_bucket(endpoint: str, *, versioned: bool = False) -> str:
    name = f"bucket-{os.getpid()}-{next(_number)}"
    client(endpoint).create_bucket(Bucket=name)
    if versioned:
        client(endpoint).put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    return name


@contextmanager
def environment() -> Iterator[None]:
    """The keys where boto3's own chain finds them."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        variables.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield


def options(endpoint: str, bucket: str, **more: Any) -> dict[str, Any]:
    """Of a connector."""
    return {"bucket": bucket, "endpoint": endpoint, "access_key": ACCESS_KEY, "secret_key": SECRET_KEY, **more}


@contextmanager
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def nanio(folder: Path) -> Iterator[str]:
    """Starts anew on what an earlier one left in ``folder``."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    keys = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
    process = subprocess.Popen([*command, "--no-access-log", "--log-level", "error"], env={**os.environ, **keys})
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)  # nothing tells when it listens
        assert process.poll() is None, "nanio did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@dataclass
class Seen:
    method: str
    path: str  # unquoted, bucket included
    query: str
    headers: dict[str, str]


@dataclass
class Trouble:
    """What the proxy answers instead (``status``), or how it spoils the answer."""

    status: int = 0
    code: str = ""
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None  # bytes of the body, then the connection is closed
    before: Callable[[], None] = lambda: None


@dataclass
class Proxy:
    endpoint: str
    rule: Callable[[Seen], Trouble | None] = lambda seen: None
    ahead_seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Between a client and a server that does not check signatures."""
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen = Seen(self.command, unquote(parts.path), parts.query, {k.lower(): v for k, v in self.headers.items()})
            between.seen.append(seen)
            trouble = between.rule(seen) or Trouble()
            trouble.before()
            if trouble.status:
                xml = b"" if self.command == "HEAD" else f"<Error><Code>{trouble.code}</Code></Error>".encode()
                headers = [("Content-Type", "application/xml"), *trouble.headers]
                return self.send(trouble.status, headers, trouble.body or xml)
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in _OWN]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send(answer.status, headers, answer.read(), trouble.cut_after, length)
            connection.close()

        def send(
            self, status: int, headers: list[tuple[str, str]], body: bytes, cut: int | None = None, length: str | None = None
        ) -> None:
            self.send_response_only(status)
            for pair in headers:
                self.send_header(*pair)
            self.send_header("Date", formatdate(time.time() + between.ahead_seconds, usegmt=True))
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    between = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield between
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_OWN = {"date", "content-length", "transfer-encoding", "connection"}
