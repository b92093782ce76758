"""A real HTTP server on a free local port that speaks /embeddings, and misbehaves as told."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DIMENSION = 8


@dataclass
class Said:
    """What the server answers: ``cut`` bytes of the announced length are never sent."""

    status: int = 200
    body: Any = None  # bytes as they are, everything else as JSON
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0


Behaviour = Callable[[dict[str, Any]], Said]


def vector_of(text: str) -> list[float]:
    """Not normalised, and never zero."""
    return [b + 1.0 for b in hashlib.sha256(text.encode()).digest()[:DIMENSION]]


def entries_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": vector_of(t)} for i, t in enumerate(body["input"])]


def well_behaved(body: dict[str, Any]) -> Said:
    return Said(body={"object": "list", "data": entries_of(body)})


class EmbeddingServer:
    """``behaviour`` is called for each request with its JSON body ({} for GET); ``requests`` keeps those bodies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.behaviour: Behaviour = well_behaved
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    @property
    def sizes(self) -> list[int]:
        return [len(r["input"]) for r in self.requests]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is what some tests are about."""


@contextmanager
def embedding_server() -> Iterator[EmbeddingServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes, and would wait for each other

        def do_GET(self) -> None:
            self.do_POST()

        def do_PUT(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            body = json.loads(raw) if raw else {}
            with server.lock:
                server.requests.append(body)
                server.headers.append({k.lower(): v for k, v in self.headers.items()})
            said = server.behaviour(body)
            data = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) + said.cut))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = said.cut > 0

        def log_message(self, *_: Any) -> None:
            pass

    with _Server(("127.0.0.1", 0), Handler) as httpd:
        server = EmbeddingServer(f"http://127.0.0.1:{httpd.server_port}/v1")
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            httpd.shutdown()
            thread.join()
