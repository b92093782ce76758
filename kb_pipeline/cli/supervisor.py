"""Keeps the children of ``kb up`` alive: ready once, started again when they die or grow too large, ended in order."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kb_pipeline.cli import processes
from kb_pipeline.cli.processes import Child, died, rotate
from kb_pipeline.errors import Fatal
from kb_pipeline.service import condition
from kb_pipeline.service.condition import Condition

READY_SECONDS = 180.0
POLL_SECONDS = 0.5
RENEW_SECONDS = 5.0  # of the condition file
SHORT_STOP_SECONDS = 10.0  # for a child that has no work to finish
MAX_RESTARTS, WINDOW_SECONDS = 5, 600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Spec:
    """A child as it should be. ``sign`` of readiness: a URL that answers, or words of its log. ``works``: runs are its own.

    ``first``: it is ready before those behind it are started.
    """

    name: str
    command: Sequence[str]
    sign: str
    limited: bool = False  # in memory
    works: bool = False
    first: bool = False


class Restarts:
    """How long to wait before the next start, by what happened lately."""

    def __init__(self) -> None:
        self.total = 0
        self._at: deque[float] = deque()

    def after_death(self, now: float) -> float | None:
        """Seconds: 1, 2, 4 ... 60. None: five restarts within ten minutes did not help."""
        while self._at and now - self._at[0] > WINDOW_SECONDS:
            self._at.popleft()
        if len(self._at) >= MAX_RESTARTS:
            return None
        self._at.append(now)
        self.total += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (len(self._at) - 1))


@dataclass(slots=True)
class _Kept:
    """A spec with what has become of it. ``due``: when it is started again; ``until``: when it must be ready."""

    spec: Spec
    child: Child
    state: str = "starting"
    due: float = 0.0
    until: float = 0.0
    reason: str = ""
    restarts: Restarts = field(default_factory=Restarts)


class Supervisor:
    """``asked``: how many stop signals have come. One thread, no locks: a signal handler only counts."""

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str],
        *,
        keep: int,
        say: Callable[[str], None],
        asked: Callable[[], int],
        memory_bytes: int,
        drain_seconds: float,
    ) -> None:
        self.home, self._environment, self._keep, self._say, self._asked = home, environment, keep, say, asked
        self._memory_bytes, self._drain_seconds = memory_bytes, drain_seconds
        self._kept: list[_Kept] = []
        self._renewed = 0.0
        self._written: dict[str, Condition] | None = None

    @property
    def children(self) -> list[Child]:
        return [k.child for k in self._kept]

    def start(self, specs: Sequence[Spec], started: Callable[[list[Child]], None]) -> bool:
        """Those that others need first, then all at once. False if we were asked to stop. Raises Fatal: nothing is tried twice
        before it has worked once."""
        for together in ([s for s in specs if s.first], [s for s in specs if not s.first]):
            new = [_Kept(spec, self._launch(spec)) for spec in together]
            self._kept += new
            started(self.children)
            if not all(self._awaited(kept) for kept in new):
                return False
        return True

    def _awaited(self, kept: _Kept) -> bool:
        until = time.monotonic() + READY_SECONDS
        while not _is_ready(kept):
            if dead := next((k for k in self._kept if k.child.ended()), None):
                raise died(dead.child)
            if time.monotonic() > until:
                raise _never_ready(kept)
            if self._paused():
                return False
        self._ready(kept)
        return True

    def watch(self, started: Callable[[list[Child]], None]) -> None:
        """Until we are asked to stop. Raises Fatal when restarts do not help."""
        while not self._paused():
            for kept in self._kept:
                pid = kept.child.process.pid
                self._look_at(kept, time.monotonic())
                if kept.child.process.pid != pid:
                    started(self.children)

    def stop(self) -> None:
        """None begins anything new; those without work end first, then the daemon, whose runs have the rest of the time."""
        deadline = time.monotonic() + self._drain_seconds
        for kept in self._kept:
            kept.state = "stopping"
            processes.tell(kept.child)
        for kept in reversed(self._kept):
            left = max(1.0, deadline - time.monotonic())
            seconds = left if kept.spec.works else min(SHORT_STOP_SECONDS, left)
            processes.stop(kept.child, seconds, self._hurried)
            self._say(f"{kept.spec.name.ljust(10)} stopped")
        condition.clear(self.home)

    # --- one child --------------------------------------------------------------------------------------------------

    def _look_at(self, kept: _Kept, now: float) -> None:
        if rotate(kept.child.log):
            kept.child.begin = 0
        if kept.state == "restarting":
            if now >= kept.due:
                kept.child = self._launch(kept.spec)
                kept.state, kept.until = "starting", now + READY_SECONDS
            return
        if kept.child.ended():
            return self._died(kept, now, f"ended with exit code {kept.child.process.returncode}")
        if kept.state == "starting":
            if _is_ready(kept):
                self._ready(kept)
            elif now > kept.until:
                self._died(kept, now, f"was not ready after {READY_SECONDS:g} s")
        elif kept.spec.limited and 0 < self._memory_bytes < kept.child.rss_bytes():
            grown = kept.child.rss_bytes() // _MIB
            self._say(f"{kept.spec.name.ljust(10)} has grown to {grown} MB: it is started again")
            kept.reason = f"grew to {grown} MB"
            self._end(kept)
            kept.restarts.total += 1
            kept.state, kept.due = "restarting", now

    def _died(self, kept: _Kept, now: float, how: str) -> None:
        """What it has started may outlive it, and would be in the way of its successor."""
        pause = kept.restarts.after_death(now)
        if pause is None:
            raise died(kept.child, f", after {MAX_RESTARTS} restarts in {WINDOW_SECONDS / 60:g} minutes")
        self._end(kept)
        self._say(f"{kept.spec.name.ljust(10)} {how}: it is started again in {pause:g} s, log in {kept.child.log}")
        kept.state, kept.due, kept.reason = "restarting", now + pause, how

    def _end(self, kept: _Kept) -> None:
        kept.state = "restarting"
        self._renew(force=True)
        processes.stop(kept.child, self._drain_seconds, self._hurried)

    def _ready(self, kept: _Kept) -> None:
        kept.state = "ready"
        self._say(f"{kept.spec.name.ljust(10)} ready, log in {kept.child.log}")

    def _launch(self, spec: Spec) -> Child:
        log = self.home / "logs" / f"{spec.name}.log"
        return processes.start(spec.name, spec.command, log, self._environment, keep=self._keep)

    def _hurried(self) -> bool:
        """Asked while a child is being stopped, which may take long."""
        self._renew()
        return self._asked() > 1

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _paused(self) -> bool:
        """After a moment: have we been asked to stop?"""
        self._renew()
        if not self._asked():
            time.sleep(POLL_SECONDS)
        return self._asked() > 0

    def _renew(self, *, force: bool = False) -> None:
        if force or time.monotonic() - self._renewed > RENEW_SECONDS or self._changed():
            condition.write(self.home, self._conditions())
            self._renewed = time.monotonic()
            self._written = self._conditions()

    def _changed(self) -> bool:
        return self._written != self._conditions()

    def _conditions(self) -> dict[str, Condition]:
        return {k.spec.name: Condition(k.state, k.child.process.pid, k.restarts.total, k.reason) for k in self._kept}


def _is_ready(kept: _Kept) -> bool:
    sign = kept.spec.sign
    return _answers(sign) if sign.startswith("http://") else sign in kept.child.said()


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _never_ready(kept: _Kept) -> Fatal:
    said = "\n".join(f"  {line}" for line in kept.child.said().splitlines()[-processes.LAST_LINES :])
    return Fatal(
        f"{kept.spec.name} was not ready after {READY_SECONDS:g} s; the end of {kept.child.log}:\n{said}", code="not_ready"
    )
