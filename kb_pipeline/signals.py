"""SIGTERM and Ctrl-C as a request that is met between two units of work."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUESTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def orderly_stop(stop: threading.Event) -> Iterator[None]:
    """The first signal sets ``stop``, which the work within looks at; a second one acts at once, as if we were not there.

    When the work has ended the first signal is delivered after all, to whoever handled it before: a command exits with its
    number, a run of an orchestrator is known as interrupted. A signal that was ignored before stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # which is the only one that gets signals
        yield
        return
    before = {n: h for n in REQUESTS if (h := signal.getsignal(n)) not in (None, signal.SIG_IGN)}
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            restore()
            signal.raise_signal(number)
        stop.set()

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        if len(received) < 2:
            restore()
            if received:
                signal.raise_signal(received[0])
