"""Child processes of ``kb up``: started, known to be ready, measured, ended with everything that they started.

A child writes to its log file itself, in append mode; when the file has grown, we copy it away and empty it. With pipes that
we drain, a child would hang as soon as we do, and its last words would be lost with us. What is written between the copy and
the emptying is lost: some lines in ten megabytes, at worst.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kb_pipeline.errors import Fatal

POLL_SECONDS = 0.2
HARD_SECONDS = 5.0  # before the deadline: what still runs is told a second time, and ends without finishing its unit of work
LEAD_SECONDS = 3.0  # for a child to begin nothing new, before what it has started is told
LAST_LINES = 15
LAST_BYTES = 64 * 1024
MAX_LOG_BYTES = 10 * 2**20
LOGS = 5
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Child:
    """``begin``: where in ``log`` its own words begin."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    begin: int
    told: float | None = None  # when it was asked to end

    def ended(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        """The end of what it has written."""
        with self.log.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(size - LAST_BYTES, self.begin if self.begin <= size else 0))
            return f.read().decode("utf-8", "replace")

    def rss_bytes(self) -> int:
        """Memory of the process itself, without what it started; 0 where nobody knows."""
        try:
            return int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0


def start(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, keep: int) -> Child:
    """In a session of its own: Ctrl-C reaches us only, and we end the children in order. It inherits descriptor ``keep``."""
    rotate(log)
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


def rotate(log: Path) -> bool:
    """Beyond 10 MB: log -> log.1 -> ... -> log.4. Whoever has the file open goes on at its new beginning."""
    if not log.exists() or log.stat().st_size <= MAX_LOG_BYTES:
        return False
    for n in range(LOGS - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            log.with_name(f"{log.name}.{n - 1}").replace(log.with_name(f"{log.name}.{n}"))
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)
    return True


def died(child: Child, why: str = "") -> Fatal:
    lines = "\n".join(f"  {line}" for line in child.said().splitlines()[-LAST_LINES:])
    said = f"the end of {child.log}:\n{lines}"
    return Fatal(f"{child.name} ended with exit code {child.process.poll()}{why}; {said}", code="child_ended")


def tell(child: Child) -> None:
    """SIGTERM to the process itself: it begins nothing new."""
    child.told = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(signal.SIGTERM)


def stop(child: Child, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to it, then to what it started (code servers, runs), which may finish what they are at; SIGKILL to what is left.

    Once ``hurry`` says so everything is killed at once.
    """
    deadline = time.monotonic() + seconds
    if child.told is None:
        tell(child)
    _wait(child.ended, (child.told or 0.0) + min(LEAD_SECONDS, seconds / 4), hurry)
    for until in (deadline - min(HARD_SECONDS, seconds / 4), deadline):
        if _signal_group(child, signal.SIGTERM):
            _wait(lambda: not _has_living(child), until, hurry)
    _signal_group(child, signal.SIGKILL)
    child.process.wait()


def _wait(done: Callable[[], bool], until: float, hurry: Callable[[], bool]) -> None:
    while not (done() or hurry()) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _signal_group(child: Child, number: int) -> bool:
    """False when nothing of its session lives any more."""
    if not _has_living(child):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)
    return True


def _has_living(child: Child) -> bool:
    """Is anything of its session left that is no zombie? Those of a container without an init process are never reaped."""
    child.process.poll()  # reaps the child itself, where it has ended
    try:
        os.killpg(child.process.pid, 0)
    except ProcessLookupError:
        return False
    return any(_lives_in(child.process.pid, p) for p in Path("/proc").iterdir() if p.name.isdigit())


def _lives_in(session: int, process: Path) -> bool:
    try:
        state, _, group, *_ = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return False  # it has ended
    return int(group) == session and state not in "ZX"
