"""How ``kb up`` treats its children: real processes that die, grow, chatter, and will not go."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kb_pipeline.cli import processes, supervisor
from kb_pipeline.cli.processes import Child, rotate, start, stop
from kb_pipeline.cli.supervisor import Restarts, Spec, Supervisor
from kb_pipeline.errors import Fatal
from kb_pipeline.service import condition

STAYS = "import signal\nprint('here', flush=True)\nsignal.pause()"


@pytest.fixture
def child_of(tmp_path: Path) -> Callable[[str], Child]:
    def make(code: str) -> Child:
        keep = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            return start("child", [sys.executable, "-c", code], tmp_path / "child.log", dict(os.environ), keep=keep)
        finally:
            os.close(keep)

    return make


class Bench:
    """A supervisor whose waiting is the test's: ``during`` is called instead of every pause, until it asks for the end."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        (home / "logs").mkdir(parents=True)
        self.asked, self.said, self.home = 0, [], home
        self.during: Callable[[], None] = lambda: None
        self.lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
        options = {"memory_bytes": 0, "drain_seconds": 5.0, **limits}
        self.supervisor = Supervisor(
            home, dict(os.environ), keep=self.lock, say=self.said.append, asked=lambda: self.asked, **options
        )
        monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)
        monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
        paused = self.supervisor._paused

        def pause() -> bool:
            self.during()
            return paused()

        monkeypatch.setattr(self.supervisor, "_paused", pause)

    @property
    def child(self) -> Child:
        return self.supervisor.children[0]

    def run(self, code: str, **spec: Any) -> None:
        self.supervisor.start([Spec("child", [sys.executable, "-c", code], "here", **spec)], lambda _: None)
        self.supervisor.watch(lambda _: None)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**limits: Any) -> Bench:
        made.append(Bench(tmp_path / "home", monkeypatch, **limits))
        return made[-1]

    yield make
    for each in made:
        each.asked = 2
        each.supervisor.stop()
        os.close(each.lock)


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_pauses_double_and_the_sixth_death_within_ten_minutes_is_one_too_many() -> None:
    restarts = Restarts()
    assert [restarts.after_death(float(t)) for t in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert restarts.total == 5


def test_deaths_that_are_ten_minutes_old_are_forgotten_and_no_pause_is_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarts = Restarts()
    assert [restarts.after_death(t * 601.0) for t in range(20)] == [1.0] * 20
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 100)
    assert max(Restarts.after_death(r, 0.0) or 0.0 for r in [Restarts()] for _ in range(20)) == 60.0


def test_a_child_that_dies_is_started_again_and_the_message_says_what_happened(bench: Callable[..., Bench]) -> None:
    b = bench()
    first: list[int] = []

    def during() -> None:
        if not first and "here" in b.child.said():
            first.append(b.child.process.pid)
            b.child.process.kill()
        elif first and b.child.process.pid != first[0] and any("ready" in s for s in b.said[1:]):
            b.asked = 1

    b.during = during
    b.run(STAYS)
    assert any("ended with exit code -9: it is started again" in s and "child.log" in s for s in b.said)
    found = condition.read(b.home)
    assert found and found["child"].restarts == 1 and found["child"].state == "ready" and "-9" in found["child"].reason


def test_when_restarts_do_not_help_the_end_of_the_log_says_why(bench: Callable[..., Bench]) -> None:
    b = bench()
    once = b.home / "was-here"
    code = f"import pathlib\np = pathlib.Path({str(once)!r})\nprint('cannot go on' if p.exists() else 'here', flush=True)\n"
    b.during = lambda: None
    with pytest.raises(Fatal) as e:
        b.run(code + "import signal\np.exists() or (p.touch(), signal.sigtimedwait([], 0.5))\nraise SystemExit(7)")
    assert "exit code 7, after 5 restarts in 10 minutes" in e.value.message and "cannot go on" in e.value.message
    assert sum("started again" in s for s in b.said) == 5


def test_a_child_that_never_worked_is_not_tried_again(bench: Callable[..., Bench], tmp_path: Path) -> None:
    b = bench()
    (b.home / "logs" / "child.log").write_text("what an earlier one said: here\n")
    with pytest.raises(Fatal) as e:
        b.run("print('no'); raise SystemExit(7)")
    assert "exit code 7" in e.value.message and "earlier" not in e.value.message and "started again" not in "".join(b.said)


def test_a_child_that_grew_beyond_the_limit_is_ended_in_order_and_started_again(bench: Callable[..., Bench]) -> None:
    b = bench(memory_bytes=1)
    pids: list[int] = []

    def during() -> None:
        pids.append(b.child.process.pid)
        if len(set(pids)) > 1:
            b.asked = 1

    b.during = during
    b.run("import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('in order', flush=True), sys.exit()))\n" + STAYS, limited=True)  # fmt: skip
    assert any("has grown to" in s for s in b.said) and "in order" in (b.home / "logs" / "child.log").read_text()


def test_only_those_that_are_known_to_grow_are_limited(bench: Callable[..., Bench]) -> None:
    b = bench(memory_bytes=1)
    rounds: list[int] = []

    def during() -> None:
        rounds.append(b.child.process.pid)
        b.asked = int(len(rounds) > 10)

    b.during = during
    b.run(STAYS)
    assert len(set(rounds)) == 1


def test_the_condition_file_is_gone_when_all_have_ended(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.during = lambda: setattr(b, "asked", 1) if "here" in b.child.said() else None
    b.run(STAYS)
    assert (b.home / condition.NAME).is_file()
    b.supervisor.stop()
    assert not (b.home / condition.NAME).exists() and "child      stopped" in b.said


# --- the end ----------------------------------------------------------------------------------------------------------


def wait_for(child: Child, words: str) -> None:
    while words not in child.said():
        assert child.process.poll() is None, child.said()


def deaf(pipe: Path) -> str:
    """A child and a grandchild that ignore SIGTERM. The pipe ends when the last process that has it is dead."""
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    grandchild = f"{ignore}f = open({str(pipe)!r}, 'w')\nprint('both', flush=True)\nsignal.pause()"
    return f"{ignore}import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {grandchild!r}])\nsignal.pause()"


@pytest.mark.parametrize(("seconds", "hurry"), [(0.4, False), (600.0, True)])
def test_what_will_not_end_is_killed_with_what_it_started(
    tmp_path: Path, child_of: Callable[[str], Child], seconds: float, hurry: bool
) -> None:
    """When the time is over; or at once, when a second signal came."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = child_of(deaf(pipe))
    with pipe.open() as end:
        wait_for(child, "both")
        stop(child, seconds, lambda: hurry)
        assert end.read() == ""
    assert child.process.returncode == -signal.SIGKILL


def test_what_a_child_started_may_finish_after_the_child_itself_has_gone(
    child_of: Callable[[str], Child], tmp_path: Path
) -> None:
    """As a run outlives the daemon: it is told, and has its time."""
    grandchild = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('gave back', flush=True), sys.exit()))\n" + STAYS
    )
    child = child_of(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {grandchild!r}])\nimport signal\nsignal.pause()"
    )
    wait_for(child, "here")
    stop(child, 60.0)
    assert "gave back" in child.said() and not processes._has_living(child)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_rotated_while_its_writer_runs_and_five_files_are_kept(
    child_of: Callable[[str], Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 100)
    child = child_of(
        "import signal\nn = 0\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "while True:\n    print(f'line {n} ' + 'x' * 120, flush=True)\n    n += 1\n    signal.pause()"
    )
    try:
        for n in range(7):
            wait_for(child, f"line {n} ")
            assert rotate(child.log) and not rotate(child.log)
            child.begin = 0
            child.process.send_signal(signal.SIGUSR1)
        wait_for(child, "line 7 ")
    finally:
        stop(child, 5.0)
    names = sorted(p.name for p in tmp_path.glob("child.log*"))
    assert names == ["child.log", *(f"child.log.{n}" for n in (1, 2, 3, 4))]
    assert [p.read_text().split()[1] for p in map(tmp_path.joinpath, names)] == ["7", "6", "5", "4", "3"]


def test_a_child_writes_on_when_nobody_reads(child_of: Callable[[str], Child]) -> None:
    """More than a pipe holds: its log needs no supervisor that is alive."""
    child = child_of("import sys\nfor _ in range(3000): print('x' * 99)\nprint('done', flush=True)")
    assert child.process.wait(60) == 0 and child.said().endswith("done\n")


def test_what_others_need_is_ready_before_they_are_started(bench: Callable[..., Bench]) -> None:
    b = bench()
    seen: list[list[str]] = []
    code = "import signal, time\nprint('here', flush=True)\nsignal.pause()"
    specs = [
        Spec("second", [sys.executable, "-c", code], "here"),
        Spec("first", [sys.executable, "-c", code], "here", first=True),
    ]
    b.supervisor.start(specs, lambda children: seen.append([c.name for c in children]))
    assert seen == [["first"], ["first", "second"]]
    assert [s.split()[:2] for s in b.said] == [["first", "ready,"], ["second", "ready,"]]
