"""A TCP proxy before PostgreSQL that cuts a connection at a COMMIT: before the server has it, or once it is carried out."""

import contextlib
import socket
import threading
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"  # a simple query, alone in its packet: the client waits for every answer


class CommitCutter:
    """``cut_at``: number of the COMMIT to cut, from now. ``fate``: what the client, who gets no answer, cannot know."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or 5432)
        self._socket = socket.create_server(("127.0.0.1", 0))
        port = self._socket.getsockname()[1]
        user = (parts.netloc.rpartition("@")[0] + "@") if "@" in parts.netloc else ""
        query = "sslmode=disable&gssencmode=disable"
        self.url = urlunsplit((parts.scheme, f"{user}127.0.0.1:{port}", parts.path, query, ""))
        self._lock = threading.Lock()
        self._cut_at: int | None = None
        self._fate: Literal["done", "undone"] = "done"
        self.commits = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, at: int, fate: Literal["done", "undone"]) -> None:
        with self._lock:
            self.commits, self._cut_at, self._fate = 0, at, fate

    @property
    def has_cut(self) -> bool:
        return self._cut_at is not None and self.commits > self._cut_at

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                _Relay(self, client, socket.create_connection(self._server)).start()

    def is_next_to_cut(self) -> bool:
        with self._lock:
            self.commits += 1
            return self.commits - 1 == self._cut_at

    @property
    def fate(self) -> str:
        return self._fate


class _Relay:
    """One connection."""

    def __init__(self, cutter: CommitCutter, client: socket.socket, server: socket.socket) -> None:
        self._cutter, self._client, self._server = cutter, client, server
        self._swallow = False

    def start(self) -> None:
        for work in (self._upstream, self._downstream):
            threading.Thread(target=self._until_closed, args=(work,), daemon=True).start()

    def _until_closed(self, work) -> None:  # type: ignore[no-untyped-def]
        with contextlib.suppress(OSError):
            while work():
                pass
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _upstream(self) -> bool:
        data = self._client.recv(1 << 16)
        if data == _COMMIT and self._cutter.is_next_to_cut():
            if self._cutter.fate == "undone":
                return False
            self._swallow = True
        self._server.sendall(data)
        return bool(data)

    def _downstream(self) -> bool:
        data = self._server.recv(1 << 16)
        if self._swallow:  # the answer: it is durable now, and nobody is told
            return False
        self._client.sendall(data)
        return bool(data)
