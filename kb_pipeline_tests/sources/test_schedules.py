"""Random lives of a source: edits under a walk, late commits, equal stamps, clocks that are off, processes that die.

First by the rules alone, very often; then through the walk, the database and ingestion.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from kb_pipeline.errors import RateLimited, Transient
from kb_pipeline.model import Verdict
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow
from kb_pipeline_tests.sources.rules import ITEMS, NATURES, RULES, Broken, Schedule
from kb_pipeline_tests.sources.simulated import Killed, Nature, SimulatedSource, edit_any, failing

SCHEDULES, PARTS = 100_000, 10
ENOUGH = 10_000  # schedules in which a rule that is missing is found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_loses_a_change_or_invents_a_deletion(part: int) -> None:
    for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
        try:
            Schedule(seed).run()
        except Broken as e:
            raise AssertionError(f"seed {seed}: {e}") from e


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_a_rule_some_schedule_goes_wrong(rule: str) -> None:
    for seed in range(ENOUGH):
        try:
            Schedule(seed, rule).run()
        except Broken:
            return
    raise AssertionError(f"{RULES[rule]}: nothing goes wrong without that")


# --- through the database ---------------------------------------------------------------------------------------------


class Life:
    """A source with its space, edited, walked and ingested round by round."""

    def __init__(self, flow: Flow, source: SimulatedSource, rng: random.Random) -> None:
        self.flow, self.source, self.rng = flow, source, rng
        scopes = source.nature.scopes
        self.names = [f"{s}/{n}" for s in scopes for n in ITEMS[:3]] if scopes else [*ITEMS, "a/child", "b/child"]

    def edit(self) -> None:
        edit_any(self.source, self.rng, self.names)
        if self.rng.random() < 0.5:
            self.pause()

    def pause(self) -> None:
        nature = self.source.nature
        self.source.now += self.rng.choice((0.0, 0.25, 1.0, nature.skew, 30.0, 61.0, 600.0, nature.resolution))
        self.source.commit(lambda: self.rng.random() < 0.5)

    def round(self) -> None:
        rng, source = self.rng, self.source
        for _ in range(rng.randrange(4)):
            self.edit()
        self.pause()
        fate, page, busy = rng.random(), rng.randrange(3), rng.random() < 0.5
        trouble = failing(Killed() if fate < 0.15 else rng.choice((Transient("timeout"), RateLimited("slow"))), page)

        def before_page() -> None:
            if busy:
                self.edit()
            if fate < 0.4:
                trouble()

        source.before_page = before_page
        source.empty_page = (lambda: rng.random() < 0.2) if rng.random() < 0.3 else None
        try:
            report = self.flow.walk(full=rng.random() < 0.2)
        except Killed:
            report = None
            self.flow.expire_leases()
        source.before_page = source.empty_page = None
        if rng.random() < 0.3:
            self.edit()
        if report is None and rng.random() < 0.5:
            return
        self.flow.ingest()
        if report and report.passes and report.passes[0].verdict is Verdict.COMPLETE:
            self.check()

    def check(self) -> None:
        """What was shown when the last walk began is what a reader sees."""
        job = self.flow.execute("SELECT * FROM sync_job WHERE source_id = %(source)s ORDER BY id DESC LIMIT 1")[0]
        if job.resumed and not self.source.nature.stable:
            return
        seen = visible(self.flow)
        for name, state in self.source.shown.items():
            if state.since < job.source_started:
                assert seen.get(name) == state.content, (name, state, job)

    def quiet(self) -> None:
        """Nobody writes any more: two passes later we have what the source has, and the next two read nothing."""
        nature = self.source.nature
        for full in (True, False, True):
            self.source.wait(1 + nature.skew + nature.resolution)
            report = self.flow.sync(full=full)
            assert (report.errors, report.incomplete, report.failed) == ({}, False, 0)
        assert visible(self.flow) == {n: s.content for n, s in self.source.shown.items()}
        self.flow.assert_whole()
        fetched = len(self.source.fetched)
        for full in (False, True):
            self.source.wait(1)
            self.flow.sync(full=full)
        assert len(self.source.fetched) == fetched
        texts = self.flow.embedder.texts
        assert len(texts) == len(set(texts))


def visible(flow: Flow) -> dict[str, int]:
    """The content of each document as it is found."""
    return {name: int(re.search(r"says (\d+)", text)[1]) for name, _, _, text, _ in flow.chunks()}  # type: ignore[index]


def _live(make_flow: Callable[..., Flow], nature: Nature, seed: int, rounds: int) -> Any:
    rng = random.Random(seed)
    source = SimulatedSource(nature)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=2, shrink_guard=0.0, max_retries=50)  # type: ignore[arg-type]
    life = Life(flow, source, rng)
    for _ in range(rounds):
        life.round()
    life.quiet()
    return flow.execute("SELECT kind, status, resumed FROM sync_job WHERE source_id = %(source)s")


ROUNDS = 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_space_follows_its_source_through_any_schedule(make_flow: Callable[..., Flow], seed: int) -> None:
    nature = NATURES[random.Random(seed).randrange(len(NATURES))]
    jobs = _live(make_flow, nature, seed, ROUNDS)
    assert {"FULL", "INCREMENTAL"} == {j.kind for j in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("stable", [True, False])
def test_a_space_follows_a_source_of_several_scopes(make_flow: Callable[..., Flow], stable: bool) -> None:
    nature = Nature(resolution=60.0, skew=90.0, stable=stable, ahead=-900.0, scopes=("s1", "s2", "s3"))
    _live(make_flow, nature, 1, ROUNDS)
