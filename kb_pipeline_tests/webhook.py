"""A real HTTP server that takes what is posted to it, as a chat or a webhook would: the other end of a channel."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kb_pipeline_tests.fakes import Gate


class Webhook:
    """``status`` is its answer; only what it accepted counts as received. ``gate`` holds a request back on its way."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.status = 200
        self.gate = Gate()
        self.accepted: list[str] = []  # bodies as they came
        self.refused = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.port}/hook"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.accepted]

    def take(self) -> list[dict[str, Any]]:
        """What came since it was last asked."""
        with self._lock:
            taken, self.accepted = self.messages, []
        return taken

    def answer(self, body: str) -> int:
        self.gate.pass_through()
        with self._lock:
            if self.status == 200:
                self.accepted.append(body)
            else:
                self.refused += 1
        return self.status


@contextmanager
def listening(port: int = 0) -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = hook.answer(self.rfile.read(int(self.headers["Content-Length"])).decode("utf-8"))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing: the output of a test run is for failures."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        hook = Webhook(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hook
        finally:
            hook.gate.open()
            server.shutdown()
            thread.join()
