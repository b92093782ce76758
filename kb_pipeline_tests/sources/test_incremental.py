"""Passes that ask a source for its changes: what they find, what they leave to a full listing, where they go on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kb_pipeline.errors import Fatal, Transient
from kb_pipeline.model import Json, Page, Presence, Verdict
from kb_pipeline.stages.window import lower_bound
from kb_pipeline.states import SyncStatus, WalkKind
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow
from kb_pipeline_tests.sources.simulated import Killed, Nature, SimulatedSource, failing
from kb_pipeline_tests.sources.test_schedules import visible

NAMES = "abcdefghij"


@pytest.fixture
def make_loaded(make_flow: Callable[..., Flow]) -> Callable[..., Flow]:
    """Ten items of a simulated source, published long ago in its clock."""

    def make(nature: Nature = Nature(), names: Sequence[str] = NAMES, **settings: Any) -> Flow:
        source = SimulatedSource(nature)
        for name in names:
            source.put(name)
        source.wait(10_000)
        flow = make_flow(memory=source, index=MemoryIndex(), **{"page_size": 3, **settings})
        flow.sync()
        source.wait(10_000)
        return flow

    return make


@pytest.fixture
def loaded(make_loaded: Callable[..., Flow]) -> Flow:
    return make_loaded()


def job_of(flow: Flow) -> Any:
    return flow.execute("SELECT * FROM sync_job WHERE source_id = %(source)s ORDER BY id DESC LIMIT 1")[0]


def watermark_of(flow: Flow) -> Any:
    return flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark


def content_of(source: SimulatedSource) -> dict[str, int]:
    return {n: s.content for n, s in source.shown.items()}


def die(flow: Flow, page: int, **options: Any) -> None:
    flow.memory.before_page = failing(Killed(), page)
    with pytest.raises(Killed):
        flow.walk(**options)
    flow.memory.before_page = None
    flow.expire_leases()


# --- what a pass asks for ---------------------------------------------------------------------------------------------


def test_after_a_full_listing_only_changes_are_asked_for(loaded: Flow) -> None:
    source, watermark = loaded.memory, watermark_of(loaded)["*"]
    assert source.windows == []
    source.put("c")
    source.put("new")
    began, source.fetched[:] = source.now, []
    report = loaded.sync()
    counts = report.passes[0].counts
    assert (report.passes[0].kind, counts["seen"], counts["changed"], counts["new"]) == (WalkKind.INCREMENTAL, 2, 1, 1)
    assert source.windows == [lower_bound(watermark, source.capabilities)]
    assert source.fetched == ["c", "new"]
    assert watermark_of(loaded) == {"*": began}
    assert visible(loaded) == content_of(source)
    assert job_of(loaded).window_from == {"*": source.windows[0]}


def test_what_lies_in_the_overlap_costs_no_fetch_and_no_row(loaded: Flow) -> None:
    loaded.memory.put("c")
    loaded.sync()
    fetched, untouched = len(loaded.memory.fetched), loaded.untouched()
    loaded.memory.wait(1)
    report = loaded.sync()
    assert (report.passes[0].counts["seen"], report.passes[0].counts["unchanged"]) == (1, 1)
    assert len(loaded.memory.fetched) == fetched
    after = loaded.untouched()
    assert {t for t in after if after[t] != untouched[t]} == {"sync_job", "kb_source"}


@pytest.mark.parametrize("ahead", [-900.0, 900.0])
def test_a_clock_a_quarter_of_an_hour_off_loses_nothing(make_loaded: Callable[..., Flow], ahead: float) -> None:
    flow = make_loaded(Nature(ahead=ahead))
    source = flow.memory
    for seconds in (0.0, 30.0, 200.0, 899.0, 901.0):
        source.put("c")
        source.wait(seconds)
        flow.sync()
        assert visible(flow) == content_of(source)
        assert set(watermark_of(flow).values()) == {source.now}


def test_a_commit_that_shows_late_is_found_by_the_next_pass(make_loaded: Callable[..., Flow]) -> None:
    flow = make_loaded(Nature(skew=300.0))
    source = flow.memory
    source.put("c", delay=300.0)
    source.wait(299)
    assert flow.sync().passes[0].counts["changed"] == 0
    source.wait(2)
    assert flow.sync().passes[0].counts["changed"] == 1
    assert visible(flow) == content_of(source)


@pytest.mark.parametrize("digest", [True, False])
def test_a_second_edit_within_the_same_minute_is_found_and_equal_content_is_not_embedded(
    make_loaded: Callable[..., Flow], digest: bool
) -> None:
    flow = make_loaded(Nature(resolution=60.0, digest=digest))
    source = flow.memory
    source.now = source.now // 60 * 60 + 5
    source.put("c")
    flow.sync()
    source.wait(10)
    source.put("c")
    assert flow.sync().passes[0].kind is WalkKind.INCREMENTAL
    assert visible(flow) == content_of(source)
    embedded, versions = len(flow.embedder.texts), flow.rows()["kb_doc_version"]
    source.wait(120)
    flow.sync()  # once more, now that nobody can write the same stamp
    fetched = len(source.fetched)
    source.wait(1)
    flow.sync()
    assert (len(flow.embedder.texts), len(source.fetched)) == (embedded, fetched)
    assert flow.rows()["kb_doc_version"] == versions + (not digest)


def test_content_read_at_a_later_revision_than_the_listed_one_is_read_again(make_loaded: Callable[..., Flow]) -> None:
    """Two edits of one minute: the first after the listing and before the fetch, the second after that."""
    flow = make_loaded(Nature(resolution=60.0))
    source = flow.memory
    source.put("c")
    source.wait(120)
    flow.walk()
    source.put("c")
    flow.ingest()
    source.put("c")
    source.wait(120)
    flow.sync()
    assert visible(flow) == content_of(source)


def test_an_item_hidden_by_mistake_is_shown_again_by_its_next_change(loaded: Flow) -> None:
    loaded.execute("UPDATE kb_doc SET hidden_sync = 1, hidden_at = now() WHERE space_id = %(space)s AND external_id = 'c'")
    assert "c" not in visible(loaded)
    loaded.memory.put("c", content=loaded.memory.shown["c"].content)
    loaded.sync()
    assert visible(loaded) == content_of(loaded.memory)


# --- what is left to a full listing -----------------------------------------------------------------------------------


def test_an_incremental_pass_hides_nothing_and_a_full_one_does(loaded: Flow) -> None:
    loaded.memory.remove("c")
    report = loaded.sync()
    assert (report.passes[0].kind, report.passes[0].counts["hidden"]) == (WalkKind.INCREMENTAL, 0)
    assert "c" in visible(loaded)
    report = loaded.sync(full=True)
    assert (report.passes[0].kind, report.passes[0].counts["deleted"]) == (WalkKind.FULL, 1)
    assert visible(loaded) == content_of(loaded.memory)


def test_a_day_after_the_last_listing_everything_is_listed(loaded: Flow) -> None:
    loaded.memory.remove("c")
    loaded.execute("UPDATE kb_source SET listing_at = clock_timestamp() - interval '23 hours' WHERE id = %(source)s")
    assert loaded.sync().passes[0].kind is WalkKind.INCREMENTAL
    loaded.execute("UPDATE kb_source SET listing_at = clock_timestamp() - interval '25 hours' WHERE id = %(source)s")
    assert loaded.sync().passes[0].kind is WalkKind.FULL
    assert visible(loaded) == content_of(loaded.memory)
    assert loaded.sync().passes[0].kind is WalkKind.INCREMENTAL


def test_approved_deletions_do_not_wait_for_the_next_day(loaded: Flow) -> None:
    for name in "abc":
        loaded.memory.remove(name)
    assert loaded.sync(full=True).waiting_deletions == 3
    assert loaded.sync().passes[0].kind is WalkKind.INCREMENTAL
    assert loaded.execute("SELECT waiting_deletions AS n FROM kb_source WHERE id = %(source)s")[0].n == 3
    loaded.approve(3)
    report = loaded.sync()
    assert (report.passes[0].kind, report.passes[0].counts["deleted"]) == (WalkKind.FULL, 3)


def test_a_full_pass_gives_up_an_open_incremental_one(loaded: Flow) -> None:
    loaded.memory.put("c")
    die(loaded, 0)
    loaded.memory.remove("d")
    report = loaded.sync(full=True)
    assert (report.passes[0].kind, report.passes[0].resumed, report.passes[0].counts["deleted"]) == (WalkKind.FULL, False, 1)
    jobs = loaded.execute("SELECT kind, status FROM sync_job WHERE source_id = %(source)s ORDER BY id DESC LIMIT 2")
    assert [(j.kind, j.status) for j in jobs] == [("FULL", SyncStatus.GC_CLEAN), ("INCREMENTAL", SyncStatus.ROLLBACK)]


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 1, 2])
def test_what_changes_while_a_walk_lies_dead_is_found_by_the_next_one(loaded: Flow, page: int) -> None:
    source = loaded.memory
    for name in NAMES:
        source.put(name)
    die(loaded, page)
    for name in "aj":
        source.wait(500)
        source.put(name)
    source.wait(500)
    loaded.sync()
    loaded.sync()
    assert visible(loaded) == content_of(source)


def test_a_walk_resumed_in_an_unstable_order_leaves_the_watermark(make_loaded: Callable[..., Flow]) -> None:
    flow = make_loaded(Nature(stable=False))
    source, watermark = flow.memory, watermark_of(flow)
    for name in NAMES:
        source.put(name)
    die(flow, 2)
    source.move("j", 0)  # behind the checkpoint: the resumed walk cannot see it
    report = flow.sync()
    assert report.passes[0].resumed
    assert visible(flow)["j"] != source.shown["j"].content
    assert watermark_of(flow) == watermark
    flow.sync()
    assert visible(flow) == content_of(source)
    assert watermark_of(flow) == {"*": source.now}


def test_a_walk_interrupted_after_its_last_page_counts_as_whole(
    make_loaded: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_loaded(Nature(stable=False))
    source = flow.memory
    source.remove("c")
    with monkeypatch.context() as m:
        m.setattr("kb_pipeline.walk.missing.Missing.judge", failing_method)
        with pytest.raises(Killed):
            flow.walk(full=True)
    flow.expire_leases()
    report = flow.sync()
    assert report.passes[0].counts["deleted"] == 1
    assert not job_of(flow).resumed
    assert watermark_of(flow) == {"*": source.now}


def failing_method(*_: object) -> None:
    raise Killed


class Shifting(SimulatedSource):
    """Pages by position in a list that users re-order: what jumps to the front is not listed by a walk that is past it."""

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        at = 0
        while at < len(self.order):
            self._comes_empty()
            yield Page(tuple(self.item(n) for n in self.order[at : at + limit]), checkpoint={"at": at + limit})
            at += limit


def test_an_item_that_a_listing_omits_is_not_hidden_while_it_is_there(make_flow: Callable[..., Flow]) -> None:
    source = Shifting(Nature(stable=False))
    for name in NAMES:
        source.put(name)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=3)
    flow.sync()
    source.wait(10_000)
    watermark, jumps = watermark_of(flow), iter([False, False, True])
    source.put("j")
    source.remove("c")
    source.wait(10_000)
    source.before_page = lambda: source.move("j", 0) if next(jumps, False) else None
    report = flow.sync(full=True)
    assert (report.passes[0].counts["hidden"], report.passes[0].counts["deleted"]) == (1, 1)
    assert "were not listed" in report.passes[0].reasons[0]
    assert set(visible(flow)) == set(NAMES) - {"c"}
    assert watermark_of(flow) == watermark  # what was edited before this listing is still to be asked for
    source.before_page = None
    assert flow.sync().passes[0].kind is WalkKind.INCREMENTAL
    assert visible(flow) == content_of(source)


class Lagging(SimulatedSource):
    """A listing out of an index that has lost an item for a while."""

    lost: str | None = None

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        return self._pages(checkpoint, limit, lambda n: n != self.lost, by_stamp=False)


def test_an_item_that_a_stable_listing_omits_is_not_hidden_for_a_day(make_flow: Callable[..., Flow]) -> None:
    source = Lagging(Nature())
    for name in NAMES:
        source.put(name)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=3)
    flow.sync()
    source.wait(10_000)
    watermark, source.lost = watermark_of(flow), "c"
    assert flow.sync(full=True).passes[0].counts["hidden"] == 0
    assert visible(flow) == content_of(source)
    assert watermark_of(flow) == watermark


def test_an_item_that_is_listed_twice_is_taken_once(make_flow: Callable[..., Flow]) -> None:
    """The very first listing, too: nothing about it is left to be listed again."""
    source = SimulatedSource(Nature(stable=False))
    for name in NAMES:
        source.put(name)
    source.order[5:5] = ["a"]
    source.order[1:1] = ["a"]
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=3)
    report = flow.sync()
    assert (report.passes[0].counts["new"], report.ingest.published) == (len(NAMES), len(NAMES))
    assert watermark_of(flow) == {"*": source.now}
    assert len(source.fetched) == len(NAMES)
    counted = flow.execute("SELECT listing_count FROM kb_source WHERE id = %(source)s")
    assert counted[0].listing_count == len(NAMES)  # the next listing is not said to have shrunk


def test_an_empty_page_does_not_end_a_listing(loaded: Flow) -> None:
    empty = iter([True, False, True, True])
    loaded.memory.empty_page = lambda: next(empty, False)
    for name in NAMES[5:]:
        loaded.memory.put(name)
    assert loaded.sync(full=True).passes[0].counts["seen"] == len(NAMES)
    assert visible(loaded) == content_of(loaded.memory)


# --- children and parents ---------------------------------------------------------------------------------------------


def test_a_child_that_changes_without_its_parent_is_found(make_loaded: Callable[..., Flow]) -> None:
    flow = make_loaded(names=["p", "p/1", "p/2", "p/3", "q", "q/1"])
    flow.memory.put("p/2")
    flow.memory.remove("q/1")
    assert flow.sync().passes[0].counts["changed"] == 1
    assert visible(flow)["p/2"] == flow.memory.shown["p/2"].content
    flow.sync(full=True)
    assert visible(flow) == content_of(flow.memory)


# --- scopes -----------------------------------------------------------------------------------------------------------


SCOPED = [f"{scope}/{n}" for scope in ("s1", "s2", "s3") for n in range(4)]


@pytest.fixture
def scoped(make_loaded: Callable[..., Flow]) -> Flow:
    return make_loaded(Nature(scopes=("s1", "s2", "s3")), SCOPED, page_size=2)


def test_each_scope_has_a_watermark_and_a_window(scoped: Flow) -> None:
    assert set(watermark_of(scoped)) == {"s1", "s2", "s3"}
    scoped.memory.put("s2/1")
    report = scoped.sync()
    assert (report.passes[0].kind, report.passes[0].counts["seen"]) == (WalkKind.INCREMENTAL, 1)
    assert set(job_of(scoped).window_from) == {"s1", "s2", "s3"}
    assert len(scoped.memory.windows) == 3
    assert visible(scoped) == content_of(scoped.memory)


def test_a_new_scope_is_listed_as_a_whole_by_an_incremental_pass(scoped: Flow) -> None:
    source = scoped.memory
    source.nature = replace(source.nature, scopes=("s1", "s2", "s3", "s4"))
    source.now -= 5000
    source.put("s4/old")  # stamped before any window
    source.wait(5000)
    report = scoped.sync()
    assert (report.passes[0].kind, report.passes[0].counts["new"]) == (WalkKind.INCREMENTAL, 1)
    assert job_of(scoped).window_from["s4"] is None
    assert set(watermark_of(scoped)) == {"s1", "s2", "s3", "s4"}


def test_a_scope_that_is_no_longer_there_loses_its_watermark_and_a_full_pass_its_documents(scoped: Flow) -> None:
    source = scoped.memory
    source.nature = replace(source.nature, scopes=("s1", "s2"))
    for name in SCOPED[8:]:
        source.remove(name)
    scoped.sync()
    assert set(watermark_of(scoped)) == {"s1", "s2"}
    scoped.approve(4)
    assert scoped.sync(full=True).passes[0].counts["deleted"] == 4


@pytest.mark.parametrize("full", [True, False])
def test_a_killed_walk_goes_on_in_each_scope_where_it_stopped(scoped: Flow, full: bool) -> None:
    source, pages, written = scoped.memory, [], []
    for name in SCOPED:
        source.put(name)

    def before_page() -> None:
        pages.append(1)
        if len(pages) == 5:
            raise Killed

    source.before_page = before_page
    with pytest.raises(Killed):
        scoped.walk(full=full)
    source.before_page = None
    checkpoint = scoped.execute("SELECT checkpoint FROM kb_source WHERE id = %(source)s")[0].checkpoint
    written += scoped.execute("SELECT d.external_id FROM kb_doc d WHERE d.space_id = %(space)s AND d.last_ver = 2")
    assert 0 < len(written) < len(SCOPED) and checkpoint
    scoped.expire_leases()
    versions = scoped.rows()["kb_doc_version"]
    report = scoped.walk()
    assert report.passes[0].resumed
    assert scoped.rows()["kb_doc_version"] == versions + len(SCOPED) - len(written)  # none a second time
    assert report.passes[0].counts["changed"] == len(SCOPED)
    scoped.ingest()
    assert visible(scoped) == content_of(source)
    assert scoped.execute("SELECT checkpoint FROM kb_source WHERE id = %(source)s")[0].checkpoint is None


class OneClosed(SimulatedSource):
    """One scope cannot be listed."""

    error: Exception = Transient("s2 does not answer", code="timeout")

    def scope_pages(self, scope: str, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        for page in super().scope_pages(scope, checkpoint, limit):
            if scope == "s2" and self.windows:
                raise self.error
            yield page


@pytest.fixture
def one_closed(make_flow: Callable[..., Flow]) -> Flow:
    """``windows`` opens and closes it."""
    source = OneClosed(Nature(scopes=("s1", "s2", "s3")))
    for name in SCOPED:
        source.put(name)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=2)
    flow.sync()
    source.wait(10_000)
    source.windows = [1.0]
    return flow


def test_a_scope_that_fails_makes_the_walk_partial_and_keeps_no_other_from_being_read(one_closed: Flow) -> None:
    source, watermark = one_closed.memory, watermark_of(one_closed)
    for name in SCOPED:
        source.put(name)
    source.remove("s1/0")
    report = one_closed.sync(full=True)
    assert (report.passes[0].verdict, report.errors) == (Verdict.PARTIAL, {})
    assert report.passes[0].reasons == ["scope s2: s2 does not answer"]
    seen = visible(one_closed)
    assert {n for n, s in source.shown.items() if seen[n] == s.content} == set(SCOPED[1:4] + SCOPED[8:])
    assert "s1/0" in seen
    assert watermark_of(one_closed) == watermark
    source.windows = []
    one_closed.sync(full=True)
    assert visible(one_closed) == content_of(source)


def test_what_stops_the_source_as_a_whole_ends_every_scope(one_closed: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneClosed, "error", Fatal("the key was revoked", code="unauthorized"))
    report = one_closed.sync(full=True)
    assert report.errors["memory"].code == "unauthorized"
    assert job_of(one_closed).status == SyncStatus.ROLLBACK


def test_a_presence_that_is_unknown_hides_in_a_whole_walk_and_nothing_in_a_resumed_one(
    make_loaded: Callable[..., Flow],
) -> None:
    flow = make_loaded(Nature(stable=False))
    source = flow.memory
    source.remove("c")
    source.presence = lambda names: [Presence.UNKNOWN] * len(names)  # type: ignore[method-assign]
    die(flow, 1, full=True)
    flow.sync()
    assert "c" in visible(flow)
    flow.sync(full=True)
    assert "c" not in visible(flow)
    assert flow.document("c") is not None
