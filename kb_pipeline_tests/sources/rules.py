"""The rules of an incremental walk without a database: window, classify and provisional, over a simulated source.

Each rule can be taken away, so that a test sees that it is needed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kb_pipeline.model import Json, Known, Page, Presence
from kb_pipeline.ports import WHOLE
from kb_pipeline.stages import snapshot, window
from kb_pipeline.states import WalkKind
from kb_pipeline_tests.sources.simulated import Killed, Nature, SimulatedSource, edit_any, failing

RULES = {
    "overlap": "the overlap is subtracted from the watermark",
    "inclusive": "the source is asked for stamps that equal the lower bound",
    "source_clock": "the watermark is in the source's clock",
    "at_start": "it is the clock when the walk began",
    "complete_only": "it is stored by a walk that completed",
    "same_window": "a resumed walk keeps window and clock",
    "unstable": "a walk resumed in an unstable order stores no watermark",
    "provisional": "what was listed within its own tick is read again",
    "read_revision": "what was read at another revision than the listed one is read again",
    "probe": "behind a resumed walk only what a probe calls gone is hidden",
    "full_only": "an incremental walk hides nothing",
}
NATURES = [
    Nature(resolution, skew, stable, ahead)
    for resolution in (0.0, 1.0, 60.0, 86400.0)
    for skew in (0.0, 5.0, 90.0)
    for stable in (True, False)
    for ahead in (-900.0, 0.0, 900.0)
]
ITEMS = ("a", "b", "c", "d", "e")


def known_as(external_id: str, revision: str) -> Known:
    return Known(0, external_id, None, 1, None, revision, None, False, 0, external_id, external_id, None, None)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class OpenWalk:
    kind: WalkKind
    since: float | None
    clock: float
    at: Json | None = None
    resumed: bool = False
    seen: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Replica:
    """What we have of a source. ``off``: the rule that is taken away."""

    source: SimulatedSource
    off: str = ""
    known: dict[str, Known] = field(default_factory=dict)
    content: dict[str, int] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)  # to be fetched
    watermark: dict[str, float] = field(default_factory=dict)
    listed_at: float | None = None  # in our clock
    open: OpenWalk | None = None
    stored: int = 0  # contents that differed from the one before

    def our_clock(self) -> float:
        return self.source.now - self.source.nature.ahead

    def walk(self, *, full: bool = False) -> OpenWalk | None:
        """None where it was killed or failed."""
        caps = self.source.capabilities
        walk = self._begin(full)
        try:
            for page in self._pages(walk):
                taken = page if self.off == "provisional" else window.provisional(page, walk.clock, caps)
                self._take(walk, taken)
                walk.at = page.checkpoint
        except Killed:
            if self.off == "complete_only":
                self.watermark = {WHOLE: walk.clock}
            return None
        self.open = None
        self._end(walk)
        return walk

    def _begin(self, full: bool) -> OpenWalk:
        source, caps = self.source, self.source.capabilities
        clock = self.our_clock() if self.off == "source_clock" else source.clock()
        if self.open is not None and not full:
            walk = self.open
            walk.resumed = walk.resumed or (walk.at is not None and not caps.order_stable)
            if self.off == "same_window":
                walk.clock = clock
            return walk
        ago = None if self.listed_at is None else self.our_clock() - self.listed_at
        kind, windows = window.choose(caps, [WHOLE], window.Past(clock, self.watermark, ago, False), full=full)
        since = windows[WHOLE]
        if since is not None and self.off == "overlap":
            since = self.watermark[WHOLE]
        self.open = OpenWalk(kind, since, clock)
        return self.open

    def _pages(self, walk: OpenWalk) -> Iterator[Page]:
        if walk.since is None:
            return self.source.pages(walk.at, 2)
        return self.source.changed_since(walk.since, walk.at, 2, WHOLE)

    def _take(self, walk: OpenWalk, page: Page) -> None:
        found = snapshot.classify(page.items, self.known)
        walk.seen.update(i.external_id for i in page.items)
        for item in (*found.new, *(i for i, _ in found.changed)):
            self.known[item.external_id] = known_as(item.external_id, snapshot.stored_revision(item))
            self.waiting.add(item.external_id)

    def _end(self, walk: OpenWalk) -> None:
        caps = self.source.capabilities
        if walk.kind is WalkKind.FULL or self.off == "full_only":
            self._hide(walk)
            self.listed_at = self.our_clock()
        if walk.resumed and self.off != "unstable":
            return
        at_end = self.our_clock() if self.off == "source_clock" else self.source.clock()
        self.watermark = {WHOLE: at_end if self.off == "at_start" else walk.clock}
        assert caps.changes

    def _hide(self, walk: OpenWalk) -> None:
        missing = sorted(self.known.keys() - walk.seen)
        answers = dict(zip(missing, self.source.presence(missing), strict=True))
        for name in missing:
            if walk.resumed and self.off != "probe" and answers[name] is not Presence.GONE:
                continue
            state = self.source.shown.get(name)
            if state is not None and state.born < walk.clock:
                raise Broken(f"{name} is hidden, and was there all the time")
            del self.known[name]
            self.content.pop(name, None)
            self.waiting.discard(name)

    def fetch(self) -> None:
        for name in sorted(self.waiting):
            listed = self.known[name].revision or ""
            found = self.source.read(name)
            if found is None:
                continue
            revision, content = found
            if self.off != "read_revision":
                revision = snapshot.fetched_revision(listed, revision)
            elif listed.endswith(snapshot.PROVISIONAL):
                revision += snapshot.PROVISIONAL
            self.known[name] = known_as(name, revision)
            self.stored += self.content.get(name) != content
            self.content[name] = content
        self.waiting.clear()

    def check(self, walk: OpenWalk) -> None:
        """After a walk that stored its watermark, and the fetches: what was shown when it began is what we have."""
        for name, state in self.source.shown.items():
            if state.since < walk.clock and self.content.get(name) != state.content:
                raise Broken(
                    f"{name} says {state.content} since {state.since}, we have {self.content.get(name)} at {walk.clock}"
                )
        if walk.kind is WalkKind.FULL and not walk.resumed:
            for name in self.content.keys() - self.source.shown.keys():
                if name not in walk.seen:
                    raise Broken(f"{name} is gone, and we still show it")


class Schedule:
    """One life of a source and its replica, from a seed."""

    def __init__(self, seed: int, off: str = "") -> None:
        self.rng = rng = random.Random(seed)
        self.source = SimulatedSource(rng.choice(NATURES))
        self.replica = Replica(self.source, off)
        self.source.exclusive = off == "inclusive"
        self.reads: int | None = None

    def run(self, rounds: int = 5) -> None:
        for _ in range(rounds):
            for _ in range(self.rng.randrange(4)):
                self.edit()
            self.pause()
            self.pass_(full=self.rng.random() < 0.15)
        self.quiet()

    def edit(self) -> None:
        edit_any(self.source, self.rng, ITEMS)
        if self.rng.random() < 0.5:
            self.pause()

    def pause(self) -> None:
        skew, resolution = self.source.nature.skew, self.source.nature.resolution
        self.source.now += self.rng.choice((0.0, 0.0, 0.25, 1.0, skew, 30.0, 61.0, 600.0, resolution))
        self.source.commit(lambda: self.rng.random() < 0.5)

    def pass_(self, *, full: bool) -> None:
        rng, source, replica = self.rng, self.source, self.replica
        fate = rng.random()
        dies = failing(Killed(), rng.randrange(3)) if fate < 0.25 else None
        busy = rng.random() < 0.5

        def before_page() -> None:
            if busy:
                self.edit()
            if dies:
                dies()

        source.before_page = before_page
        source.empty_page = (lambda: rng.random() < 0.2) if rng.random() < 0.3 else None
        walk = replica.walk(full=full)
        source.before_page = None
        if walk is None and rng.random() < 0.3:
            replica.open = None  # it failed, and is rolled back; otherwise the next pass resumes it
        if rng.random() < 0.3:
            self.edit()
        if walk is not None or rng.random() < 0.7:
            replica.fetch()
            if walk is not None and (not walk.resumed or replica.off == "unstable"):
                replica.check(walk)

    def quiet(self) -> None:
        """Nobody writes any more. Two passes later everything is as in the source; then nothing is read again."""
        source, replica = self.source, self.replica
        source.before_page = source.empty_page = None
        replica.open = None
        for full in (False, True):
            source.wait(1 + source.nature.skew + source.nature.resolution)
            walk = replica.walk(full=full)
            assert walk is not None
            replica.fetch()
            replica.check(walk)
        if replica.content != {n: s.content for n, s in source.shown.items()}:
            raise Broken("after two quiet passes we have something else than the source")
        reads, stored = len(source.fetched), replica.stored
        for full in (False, True):
            source.wait(1)
            replica.walk(full=full)
            replica.fetch()
        if (len(source.fetched), replica.stored) != (reads, stored):
            raise Broken("what nobody has changed is read again")
