"""Walks that are killed, resumed or overtaken: what they may hide, and what they may no longer write."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kb_pipeline.model import Json, Page, Presence
from kb_pipeline.ports import Capabilities
from kb_pipeline_tests.fakes import MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article

DOCUMENTS = {f"{n}{n}.md": article(f"{n}{n}", 1) for n in "abcdefghij"}


class Killed(BaseException):
    """The process of a walk dies."""


class WatchedSource(MemorySource):
    """Records what each page listed, and may die before one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.listed: list[str] = []
        self.dies_before: int | None = None

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        for number, page in enumerate(super().pages(checkpoint, limit)):
            if number == self.dies_before:
                raise Killed
            self.listed += [i.external_id for i in page.items]
            yield page


def _killed(flow: Flow, source: WatchedSource, page: int) -> None:
    source.dies_before = page
    with pytest.raises(Killed):
        flow.sync(full=True)
    source.dies_before = None
    flow.expire_leases()


def _jobs(flow: Flow) -> list[Any]:
    return flow.execute("SELECT walk_id, status, resumed, verdict FROM sync_job WHERE source_id = %(source)s ORDER BY id")


def test_a_killed_walk_goes_on_at_its_checkpoint_under_its_own_id(make_flow: Callable[..., Flow]) -> None:
    source = WatchedSource(DOCUMENTS)
    flow = make_flow(memory=source, page_size=2, index=MemoryIndex())
    _killed(flow, source, 1)
    (open_job,) = _jobs(flow)
    assert open_job.status == "RUNNING"
    _killed(flow, source, 2)
    report = flow.sync()
    assert report.passes[0].resumed
    assert source.listed == sorted(DOCUMENTS)
    assert sorted(source.fetched) == sorted(DOCUMENTS)
    (job,) = _jobs(flow)
    assert (job.walk_id, job.status, job.verdict) == (open_job.walk_id, "GC_CLEAN", "COMPLETE")
    assert {d.external_id for d in flow.execute("SELECT external_id FROM kb_doc WHERE space_id = %(space)s")} == set(DOCUMENTS)
    assert flow.execute("SELECT 1 FROM sync_seen WHERE walk_id = %(walk)s", walk=job.walk_id) == []
    flow.assert_whole()


@pytest.mark.parametrize("page", [1, 2, 4])
def test_a_resumed_walk_deletes_what_is_gone_and_nothing_else(make_flow: Callable[..., Flow], page: int) -> None:
    source = WatchedSource(DOCUMENTS)
    flow = make_flow(memory=source, page_size=2, index=MemoryIndex())
    flow.sync()
    source.remove("jj.md")
    _killed(flow, source, page)
    report = flow.sync()
    assert report.passes[0].counts["deleted"] == 1
    assert {e for e, *_ in flow.chunks()} == set(DOCUMENTS) - {"jj.md"}
    flow.assert_whole()


def test_a_walk_that_died_after_a_partial_page_removes_nothing(make_flow: Callable[..., Flow]) -> None:
    source = WatchedSource(DOCUMENTS)
    flow = make_flow(memory=source, page_size=2, index=MemoryIndex())
    flow.sync()
    source.remove("jj.md")
    source.partial = {0}
    _killed(flow, source, 2)
    source.partial = set()
    report = flow.sync()
    assert report.incomplete
    assert {e for e, *_ in flow.chunks()} == set(DOCUMENTS)


class OffsetSource(WatchedSource):
    """Pages by position: what moves to the front of a listing is not seen by a walk that goes on behind it."""

    def __init__(self, documents: dict[str, str], *, probe: bool = True) -> None:
        super().__init__(documents, Capabilities(order_stable=False, probe=probe, digest=True))
        self.order = sorted(documents)

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        for number, at in enumerate(range((checkpoint or {}).get("at", 0), len(self.order), limit)):
            if number == self.dies_before:
                raise Killed
            yield Page(tuple(self.items[n][0] for n in self.order[at : at + limit]), checkpoint={"at": at + limit})


@pytest.mark.parametrize("probe", [True, False])
def test_a_resumed_walk_hides_nothing_that_only_moved_in_the_listing(make_flow: Callable[..., Flow], probe: bool) -> None:
    source = OffsetSource(DOCUMENTS, probe=probe)
    if not probe:
        source.answers["jj.md"] = Presence.GONE  # it cannot tell, and is not to be believed
    flow = make_flow(memory=source, page_size=2, index=MemoryIndex())
    flow.sync()
    watermark = flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark
    _killed(flow, source, 1)
    source.order.remove("jj.md")
    source.order.insert(0, "jj.md")
    untouched = flow.document("jj.md")
    report = flow.sync()
    assert report.passes[0].resumed
    assert report.passes[0].counts["hidden"] == 0
    assert flow.document("jj.md") == untouched
    assert {e for e, *_ in flow.chunks()} == set(DOCUMENTS)
    assert flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark == watermark


def test_a_resumed_walk_still_deletes_what_a_probe_says_is_gone(make_flow: Callable[..., Flow]) -> None:
    source = OffsetSource(DOCUMENTS)
    flow = make_flow(memory=source, page_size=2, index=MemoryIndex())
    flow.sync()
    source.remove("ee.md")
    source.order.remove("ee.md")
    source.answers["jj.md"] = Presence.UNKNOWN  # moved, and not to be asked about: it stays as it is
    _killed(flow, source, 1)
    source.order.remove("jj.md")
    source.order.insert(0, "jj.md")
    assert flow.sync().passes[0].counts["deleted"] == 1
    assert {e for e, *_ in flow.chunks()} == set(DOCUMENTS) - {"ee.md"}


def test_a_walk_that_lost_its_lease_writes_nothing(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(DOCUMENTS, page_size=4, index=MemoryIndex())
    flow.sync()
    old = flow.memory
    old.remove("jj.md")
    old.put("aa.md", article("stale", 1))
    old.gate.close()
    with flow.beside(flow.walk) as ended:
        old.gate.await_caller()
        flow.expire_leases()
        flow.app.connectors[flow.source.id] = MemorySource({**DOCUMENTS, "new.md": article("new", 1)})  # another process's
        report = flow.sync(full=True)
        assert report.errors == {}
        before = flow.untouched()
        old.gate.open()
    assert ended[0].errors["memory"].code == "lease_lost"
    assert flow.untouched() == before
    assert flow.showing("jjword0x5") == {"jj.md"}
    assert flow.showing("newword0x5") == {"new.md"}
    assert len({j.walk_id for j in _jobs(flow)}) == len(_jobs(flow))


def test_a_source_is_walked_by_one_at_a_time(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(DOCUMENTS, index=MemoryIndex())
    flow.memory.gate.close()
    with flow.beside(flow.walk) as ended:
        flow.memory.gate.await_caller()
        assert flow.walk().errors["memory"].code == "source_busy"
        flow.memory.gate.open()
    assert ended[0].errors == {}
    assert flow.walk(full=True).errors == {}
