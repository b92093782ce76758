"""Child processes of ``kb up``: started, known to be ready, ended with everything that they started."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kb_pipeline.errors import Fatal

READY_SECONDS = 180.0
STOP_SECONDS = 20.0
GROUP_SECONDS = 5.0
POLL_SECONDS = 0.2
LAST_LINES = 15
MAX_LOG_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class Child:
    """``start``: where in ``log`` its own words begin."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    start: int


def start(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, keep: int) -> Child:
    """In a session of its own: Ctrl-C reaches us only, and we end the children in order. It inherits descriptor ``keep``."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_name(log.name + ".1"))
    with log.open("ab") as out:
        begin = out.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environment),
            cwd=log.parent,
            start_new_session=True,
            pass_fds=(keep,),
        )
    return Child(name, process, log, begin)


def wait_until_ready(child: Child, children: Sequence[Child], sign: str, stopped: threading.Event) -> bool:
    """``sign``: a URL that answers, or words of its log. False if we were asked to stop. Raises Fatal when a child ends."""
    ready = _answers if sign.startswith("http://") else lambda words: words in _said(child)
    for _ in range(round(READY_SECONDS / POLL_SECONDS)):
        if ready(sign):
            return True
        if dead := next((c for c in children if c.process.poll() is not None), None):
            raise died(dead)
        if stopped.wait(POLL_SECONDS):
            return False
    raise Fatal(
        f"{child.name} was not ready after {READY_SECONDS:g} s; the end of {child.log}:\n{_last_lines(child)}", code="not_ready"
    )


def died(child: Child) -> Fatal:
    return Fatal(
        f"{child.name} ended with exit code {child.process.poll()}; the end of {child.log}:\n{_last_lines(child)}",
        code="child_ended",
    )


def stop(child: Child) -> None:
    """SIGTERM to it, then to what it started (code servers, runs); SIGKILL to what is left after 20 and 5 seconds."""
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(STOP_SECONDS)
    if _signal_group(child, signal.SIGTERM):
        for _ in range(round(GROUP_SECONDS / POLL_SECONDS)):
            if not _signal_group(child, 0):
                break
            time.sleep(POLL_SECONDS)
    _signal_group(child, signal.SIGKILL)
    child.process.wait()


def _signal_group(child: Child, number: int) -> bool:
    """False when nothing of its session is left. A process that nobody reaps counts as left."""
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _said(child: Child) -> str:
    with child.log.open("rb") as f:
        f.seek(child.start)
        return f.read().decode("utf-8", "replace")


def _last_lines(child: Child) -> str:
    return "\n".join(f"  {line}" for line in _said(child).splitlines()[-LAST_LINES:])
