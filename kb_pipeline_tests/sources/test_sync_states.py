"""The life of a walk's row: the table, and the rows that it leads to."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from kb_pipeline.errors import KbError, Transient
from kb_pipeline.model import Presence
from kb_pipeline.states import OPEN, SYNC_TRANSITIONS, SyncEvent, SyncStatus, WalkKind, sync_change
from kb_pipeline.store.migrations import migrations
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.sources.simulated import Killed, Nature, SimulatedSource, failing

DDL = "\n".join(m.text for m in migrations())


def names_in(pattern: str) -> set[str]:
    found = re.search(pattern, DDL)
    assert found is not None, pattern
    return set(re.findall(r"'([A-Z_]+)'", found[1]))


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", sorted(SyncEvent))
def test_an_event_leads_to_one_status_from_exactly_those_of_the_table(event: SyncEvent) -> None:
    after, before = sync_change(event)
    assert before == sorted(s.value for s, e in SYNC_TRANSITIONS if e is event)
    assert {t for (_, e), t in SYNC_TRANSITIONS.items() if e is event} == {after}


def test_every_status_is_reached_from_pending_and_only_two_are_final() -> None:
    reached = {SyncStatus.PENDING}
    for _ in SyncStatus:
        reached |= {after for (before, _), after in SYNC_TRANSITIONS.items() if before in reached}
    assert reached == set(SyncStatus)
    assert set(SyncStatus) - {s for s, _ in SYNC_TRANSITIONS} == {SyncStatus.GC_CLEAN, SyncStatus.ROLLBACK}


def test_the_database_knows_the_same_statuses_kinds_and_open_walks() -> None:
    assert names_in(r"sync_job_status\s+CHECK \(status IN \(([^)]*)\)") == {s.value for s in SyncStatus}
    assert names_in(r"sync_job_kind CHECK \(kind IN \(([^)]*)\)") == {k.value for k in WalkKind}
    assert names_in(r"sync_job_one_open ON sync_job \(source_id\) WHERE status IN \(([^)]*)\)") == {s.value for s in OPEN}


# --- rows -------------------------------------------------------------------------------------------------------------


def source_of(flow: Flow) -> tuple[Any, Any]:
    row = flow.execute("SELECT watermark, checkpoint FROM kb_source WHERE id = %(source)s")[0]
    return row.watermark, row.checkpoint


def last_job(flow: Flow) -> Any:
    return flow.execute("SELECT * FROM sync_job WHERE source_id = %(source)s ORDER BY id DESC LIMIT 1")[0]


@pytest.fixture
def loaded(make_flow: Callable[..., Flow]) -> Flow:
    """Six items of a simulated source, published. ``flow.memory`` is that source."""
    source = SimulatedSource(Nature())
    for name in "abcdef":
        source.put(name)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=2)  # type: ignore[arg-type]
    flow.sync()
    source.wait(1000)
    return flow


def test_a_pass_that_hid_nothing_leaves_nothing_behind(loaded: Flow) -> None:
    assert last_job(loaded).status == SyncStatus.GC_CLEAN


@pytest.mark.parametrize("page", [0, 2])
@pytest.mark.parametrize("full", [True, False])
def test_a_failed_pass_is_rolled_back_and_what_it_published_stays(loaded: Flow, full: bool, page: int) -> None:
    before = source_of(loaded)
    for name in "abcdef":
        loaded.memory.put(name)
    loaded.memory.before_page = failing(Transient("timeout", code="timeout"), page)
    report = loaded.sync(full=full)
    assert report.errors["memory"].code == "timeout"
    job = last_job(loaded)
    assert (job.kind, job.status, job.verdict) == ("FULL" if full else "INCREMENTAL", SyncStatus.ROLLBACK, "PARTIAL")
    assert "timeout" in job.error and job.finished_at is not None
    assert source_of(loaded) == before
    assert len([c for c in loaded.chunks() if re.search(r"says (7|8|9|10)\.", c[3])]) == 2 * page
    loaded.memory.before_page = None
    loaded.sync()
    assert len([c for c in loaded.chunks() if re.search(r"says (7|8|9|1\d)\.", c[3])]) == 6


def test_failed_is_never_seen_without_its_roll_back(loaded: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.memory.before_page = failing(Transient("timeout"), 1)

    def dies(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr("kb_pipeline.walk.walker.walks.release_lease", dies)
    with pytest.raises(Killed):
        loaded.walk()
    assert last_job(loaded).status == SyncStatus.RUNNING


@pytest.mark.parametrize(("page", "status"), [(0, SyncStatus.PENDING), (1, SyncStatus.RUNNING), (2, SyncStatus.RUNNING)])
def test_a_pass_whose_process_died_stays_open_with_its_window_and_clock(loaded: Flow, page: int, status: SyncStatus) -> None:
    watermark = source_of(loaded)[0]
    for name in "abcdef":
        loaded.memory.put(name)
    began = loaded.memory.now
    loaded.memory.before_page = failing(Killed(), page)
    with pytest.raises(Killed):
        loaded.walk()
    died = last_job(loaded)
    assert (died.status, died.source_started) == (status, began)
    assert source_of(loaded)[0] == watermark
    loaded.memory.before_page = None
    loaded.memory.wait(5000)
    loaded.expire_leases()
    report = loaded.sync()
    assert report.passes[0].resumed == (page > 0)
    job = last_job(loaded)
    assert (job.id, job.window_from, job.source_started, job.status) == (died.id, died.window_from, began, SyncStatus.GC_CLEAN)
    assert loaded.memory.windows[-1] == died.window_from["*"]
    assert source_of(loaded) == ({"*": began}, None)


def test_a_pass_is_clean_once_what_it_hid_is_erased_with_its_vectors(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n}.md": article(n, 1) for n in "abcdefgh"}, index=MemoryIndex())
    flow.sync()
    flow.memory.remove("a.md")
    flow.index.drops_deletes = True
    flow.sync()
    assert last_job(flow).status == SyncStatus.SUCCESS
    flow.index.drops_deletes = False
    hid = last_job(flow).id
    flow.sync()
    assert flow.execute("SELECT status FROM sync_job WHERE id = %(id)s", id=hid)[0].status == SyncStatus.GC_CLEAN
    assert flow.rows()["vector_tombstone"] == 0


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_pass_is_not_clean_while_something_it_hid_is_unconfirmed(make_flow: Callable[..., Flow], comes_back: bool) -> None:
    flow = make_flow({f"{n}.md": article(n, 1) for n in "abcdefgh"}, index=MemoryIndex())
    flow.sync()
    item = flow.memory.items["a.md"]
    flow.memory.remove("a.md")
    flow.memory.answers["a.md"] = Presence.FORBIDDEN
    flow.sync()
    hid = last_job(flow).id
    flow.sync()
    assert flow.execute("SELECT status FROM sync_job WHERE id = %(id)s", id=hid)[0].status == SyncStatus.SUCCESS
    assert last_job(flow).status == SyncStatus.GC_CLEAN
    if comes_back:
        flow.memory.items["a.md"] = item
    else:
        flow.memory.answers["a.md"] = Presence.GONE
    flow.sync()
    assert flow.execute("SELECT status FROM sync_job WHERE id = %(id)s", id=hid)[0].status == SyncStatus.GC_CLEAN


def test_a_listing_that_removes_nothing_is_rolled_back(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n}.md": article(n, 1) for n in "abcdefgh"}, index=MemoryIndex())
    flow.sync()
    before = source_of(flow)
    flow.memory.remove("a.md", "b.md", "c.md")
    assert flow.sync().waiting_deletions == 3
    job = last_job(flow)
    assert (job.status, job.verdict) == (SyncStatus.ROLLBACK, "UNTRUSTED")
    assert "--up-to 3" in job.error
    assert source_of(flow) == before


def test_the_digest_of_an_earlier_listing_says_nothing_while_a_walk_is_open(make_flow: Callable[..., Flow]) -> None:
    """An edit that is taken in by a walk that dies, and taken back in the source before the next pass."""
    flow = make_flow({"a.md": article("ash", 1), "b.md": article("birch", 1)}, index=MemoryIndex(), page_size=1)
    flow.sync()
    kept = dict(flow.memory.items)
    flow.memory.put("a.md", article("alder", 1))
    flow.memory.page_errors[1] = Killed()  # type: ignore[assignment]
    with pytest.raises(Killed):
        flow.sync()
    flow.ingest()
    assert flow.showing("alderword0x5") == {"a.md"}
    flow.memory.page_errors.clear()
    flow.memory.items = kept
    flow.expire_leases()
    for _ in range(2):
        flow.sync()
    assert flow.showing("ashword0x5") == {"a.md"}
    assert flow.showing("alderword0x5") == set()


def test_an_error_before_the_walk_began_is_a_pass_that_failed_and_changes_nothing_else(
    loaded: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_: object) -> float:
        raise Transient("no answer", code="unreachable")

    job, before = last_job(loaded), loaded.untouched()
    monkeypatch.setattr(SimulatedSource, "clock", unreachable)
    error: KbError = loaded.walk().errors["memory"]
    assert error.code == "unreachable"
    failed = last_job(loaded)
    assert failed.id > job.id
    assert (failed.status, failed.error) == ("ROLLBACK", "unreachable: no answer")
    after = loaded.untouched()
    assert {t for t in after if after[t] != before[t]} == {"sync_job"}


def test_a_source_that_another_process_walks_has_not_failed(loaded: Flow) -> None:
    job = last_job(loaded)
    loaded.execute("UPDATE sync_lease SET until = 'infinity', owner = 'elsewhere' WHERE source_id = %(source)s")
    assert loaded.walk(full=True).errors["memory"].code == "source_busy"
    assert last_job(loaded) == job
