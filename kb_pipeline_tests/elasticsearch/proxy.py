"""What lies between a client and a server, and loses answers."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Proxy:
    """Passes connections on to a server; while it is ``swallowing``, requests arrive and no answer comes back."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallowing = False
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Proxy":
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for s in self._open:
            shut(s)
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            self._run(self._pass, near, far, False)
            self._run(self._pass, far, near, True)

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self.swallowing):
                    target.sendall(data)
        shut(target)


def shut(s: socket.socket) -> None:
    with suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    s.close()
