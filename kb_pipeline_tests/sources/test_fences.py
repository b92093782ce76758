"""What others write between the moment a page is asked for and the moment it is stored stays as they wrote it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kb_pipeline.maintenance.deletion import confirm_hidden, delete_document
from kb_pipeline.model import Page
from kb_pipeline.states import WalkKind
from kb_pipeline.store import documents, walks
from kb_pipeline.store.database import transaction
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow
from kb_pipeline_tests.sources.simulated import Killed, Nature, SimulatedSource
from kb_pipeline_tests.sources.test_incremental import NAMES, content_of, job_of, watermark_of
from kb_pipeline_tests.sources.test_schedules import visible


class Slow(SimulatedSource):
    """``after_page`` runs once, when a page has been read and is not handed over yet."""

    after_page: Callable[[], Any] | None = None

    def _pages(self, *args: Any, **options: Any) -> Iterator[Page]:
        for page in super()._pages(*args, **options):
            after, self.after_page = self.after_page, None
            if after is not None:
                after()
            yield page


@pytest.fixture
def slow(make_flow: Callable[..., Flow]) -> Flow:
    source = Slow(Nature())
    for name in NAMES:
        source.put(name)
    flow = make_flow(memory=source, index=MemoryIndex(), page_size=20)
    flow.sync()
    source.wait(10_000)
    return flow


def hide(flow: Flow, name: str) -> None:
    """As somebody does who has been told by the source that it is gone."""
    walk = job_of(flow)
    with transaction(flow.app.pool) as c:
        found = walks.Walk(walk.id, 10**9, flow.source.id, 0, WalkKind.FULL, {}, 0.0, walk.started_at)
        assert walks.hide_unseen(c, found, -(10**9), [flow.document(name).id]) == 1


@pytest.mark.parametrize("full", [True, False])
def test_what_was_hidden_while_a_page_was_read_is_not_shown_by_that_page(slow: Flow, full: bool) -> None:
    source = slow.memory
    source.put("c")
    watermark = watermark_of(slow)

    def goes() -> None:
        source.remove("c")
        hide(slow, "c")

    source.after_page = goes
    slow.sync(full=full)
    assert "c" not in visible(slow)
    assert job_of(slow).counts["overtaken"] == 1
    # An incremental pass asks for the same changes again; behind a full one only another is sure to show it.
    assert watermark_of(slow) == ({} if full else watermark)
    assert slow.sync().passes[0].kind is (WalkKind.FULL if full else WalkKind.INCREMENTAL)
    assert watermark_of(slow) == {"*": source.now}


@pytest.mark.parametrize("full", [True, False])
def test_what_comes_back_under_a_fenced_page_is_shown_by_the_next_one(slow: Flow, full: bool) -> None:
    source = slow.memory
    source.put("c")
    source.after_page = lambda: hide(slow, "c")
    slow.sync(full=full)
    assert "c" not in visible(slow)
    slow.sync()
    assert visible(slow) == content_of(source)


def test_content_that_somebody_wrote_while_a_page_was_read_is_not_superseded_by_it(slow: Flow) -> None:
    source = slow.memory
    source.put("c")

    def writes() -> None:
        source.put("c")
        with transaction(slow.app.pool) as c:
            doc = slow.document("c").id
            documents.lock_documents(c, [doc])
            documents.new_versions(c, slow.space.id, [(doc, source.item("c").revision, 1)], max_retries=3)

    source.after_page = writes
    slow.walk()
    assert slow.document("c").last_ver == 2
    slow.ingest()
    assert visible(slow) == content_of(source)
    fetched = len(source.fetched)
    slow.sync()
    assert (len(source.fetched), slow.document("c").last_ver) == (fetched, 2)


def test_a_write_that_commits_only_after_the_page_is_looked_up_is_seen(slow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place in the order of writes was drawn before the page was asked for: only the row itself tells."""
    source = slow.memory
    source.put("c")
    doc = slow.document("c").id
    plan_decides = "kb_pipeline.walk.plan.Plan.decide"
    with slow.app.pool.connection() as c:
        documents.lock_documents(c, [doc])
        documents.new_versions(c, slow.space.id, [(doc, "by another", 1)], max_retries=3)
        from kb_pipeline.walk.plan import Plan

        decide = Plan.decide

        def then_commits(plan: Plan, page: Page, first: bool) -> None:
            decide(plan, page, first)
            c.commit()

        monkeypatch.setattr(plan_decides, then_commits)
        slow.walk()
    assert slow.version("c", 2).revision == "by another"
    assert slow.document("c").last_ver == 2


@pytest.mark.parametrize("full", [True, False])
def test_a_document_deleted_while_its_page_was_read_is_not_made_again_by_that_page(slow: Flow, full: bool) -> None:
    source = slow.memory
    source.put("c")

    def goes() -> None:
        kept = source.shown.pop("c")
        hide(slow, "c")
        assert confirm_hidden(slow.engine, slow.space, slow.source) == 1
        source.shown["c"] = kept

    source.after_page = goes
    report = slow.walk(full=full)
    assert slow.document("c") is None
    assert report.passes[0].counts["hidden"] == 0
    slow.sync()
    slow.sync()
    assert visible(slow) == content_of(source)


def test_what_an_operator_deleted_before_the_page_was_asked_for_comes_back(slow: Flow) -> None:
    delete_document(slow.engine, slow.space, slow.source.id, slow.document("c").id)
    slow.memory.put("c")
    slow.sync()
    assert visible(slow) == content_of(slow.memory)


def test_a_page_its_checkpoint_and_what_it_saw_are_one_transaction(slow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.memory.put("c")
    slow.memory.put("new")
    before = slow.rows()

    def dies(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as m:
        m.setattr("kb_pipeline.walk.walker.walks.save_progress", dies)
        with pytest.raises(Killed):
            slow.walk(full=True)
    after = slow.rows()
    assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == {"sync_job": 1}
    assert slow.execute("SELECT 1 FROM sync_seen WHERE walk_id = %(walk)s", walk=job_of(slow).walk_id) == []
    slow.expire_leases()
    assert slow.sync().passes[0].counts["hidden"] == 0
    assert visible(slow) == content_of(slow.memory)


def test_hiding_decides_after_it_has_waited_for_the_document(slow: Flow) -> None:
    """The statement that waits for a row lock still has its old snapshot of everything else."""
    doc = slow.document("c").id
    row = job_of(slow)
    walk = walks.Walk(row.id, row.walk_id + 10**6, slow.source.id, 0, WalkKind.FULL, {}, 0.0, row.started_at)

    def hides() -> int:
        with transaction(slow.app.pool) as c:
            return walks.hide_unseen(c, walk, -(10**9), [doc])

    with slow.app.pool.connection() as c:
        documents.lock_documents(c, [doc])
        with slow.beside(hides) as ended:
            _until_blocked(slow)
            walks.mark_seen(c, walk.walk_id, [doc])
            c.commit()
    assert ended == [0]
    assert slow.document("c").hidden_at is None


def _until_blocked(flow: Flow) -> None:
    """Somebody waits for a row lock in this database."""
    for _ in range(20_000):
        if flow.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"):
            return
    raise AssertionError("nobody waits for the document's lock")


def test_a_hidden_document_has_a_place_behind_every_page_that_was_asked_for_before(slow: Flow) -> None:
    with transaction(slow.app.pool) as c:
        mark = walks.seen_watermark(c)
    hide(slow, "c")
    assert slow.document("c").seen_seq > mark
