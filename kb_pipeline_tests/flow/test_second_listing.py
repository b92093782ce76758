"""A source that cannot be asked for one item: only a second complete listing, long enough after the first, deletes."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from kb_pipeline.errors import Transient
from kb_pipeline.maintenance.deletion import confirm_hidden
from kb_pipeline.model import BadItem, Json, Page, Presence
from kb_pipeline.ports import Capabilities
from kb_pipeline_tests.fakes import MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article

NAMES = [f"{n}{n}" for n in "abcdefghij"]
ALL = {f"{n}.md" for n in NAMES}


class Silent(MemorySource):
    """It has no probe, and whoever asks it nevertheless is told something that is not to be believed."""

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        return [Presence.GONE] * len(external_ids)


class Killed(BaseException):
    """The process of a walk dies."""


class Unstable(Silent):
    """Pages by position; it may die before one."""

    dies_before: int | None = None

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        order = sorted(self.items)
        for number, at in enumerate(range((checkpoint or {}).get("at", 0), len(order), limit)):
            if number == self.dies_before:
                raise Killed
            yield Page(tuple(self.items[n][0] for n in order[at : at + limit]), checkpoint={"at": at + limit})


@pytest.fixture
def made(make_flow: Callable[..., Flow]) -> Callable[..., Flow]:
    def make(source: MemorySource | None = None, **changes: object) -> Flow:
        can = Capabilities(order_stable=True, probe=False, digest=True, snapshot_digest=True)
        flow = make_flow(memory=source or Silent(capabilities=can), index=MemoryIndex(), **changes)
        for name in NAMES:
            flow.memory.put(f"{name}.md", article(name, 1))
        flow.sync()
        return flow

    return make


def _later(flow: Flow, seconds: float = 3601) -> None:
    flow.execute(
        "UPDATE kb_doc SET hidden_at = hidden_at - %(ago)s * interval '1 second' WHERE source_id = %(source)s", ago=seconds
    )


def _deleted(flow: Flow, **options: object) -> int:
    report = flow.sync(**options)
    assert report.errors == {}
    return report.passes[0].counts["deleted"]


def _state(flow: Flow, name: str) -> str:
    document = flow.document(name)
    return "deleted" if document is None else "hidden" if document.hidden_at else "shown"


def test_the_first_listing_hides_and_a_second_one_an_hour_later_deletes(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    assert _deleted(flow) == 0
    assert _state(flow, "aa.md") == "hidden" and flow.showing("aaword0x5") == set()
    _later(flow)
    assert _deleted(flow) == 1  # although its digest says that nothing has changed since the first one
    assert _state(flow, "aa.md") == "deleted"
    assert {e for e, *_ in flow.chunks()} == ALL - {"aa.md"}
    flow.assert_whole()
    listings = flow.memory.listings
    assert _deleted(flow) == 0 and flow.memory.listings == listings  # unchanged again, and nothing to confirm


@pytest.mark.parametrize("full", [False, True])
def test_a_second_listing_that_comes_too_early_deletes_nothing(made: Callable[..., Flow], full: bool) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow, 3500)
    assert _deleted(flow, full=full) == 0
    assert _state(flow, "aa.md") == "hidden"


def test_what_counts_is_when_the_second_listing_began(made: Callable[..., Flow]) -> None:
    """The hour passes while it lists."""
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    flow.memory.gate.close()
    with flow.beside(lambda: flow.sync(full=True)) as ended:
        flow.memory.gate.await_caller()
        flow.execute(
            "UPDATE kb_doc SET hidden_at = (SELECT max(started_at) FROM sync_job WHERE source_id = %(source)s) - interval '3599 seconds' "
            "WHERE source_id = %(source)s AND hidden_at IS NOT NULL"
        )
        flow.memory.gate.open()
    assert ended[0].passes[0].counts["deleted"] == 0
    assert _state(flow, "aa.md") == "hidden"


def test_the_lag_of_the_listing_is_added_to_the_hour(made: Callable[..., Flow]) -> None:
    flow = made(Silent(capabilities=Capabilities(order_stable=True, probe=False, lag_seconds=600)))
    flow.execute("UPDATE kb_doc SET seen_at = seen_at - interval '1 day' WHERE source_id = %(source)s")
    flow.memory.remove("aa.md")
    flow.sync()
    assert _state(flow, "aa.md") == "hidden"
    _later(flow, 4000)
    assert _deleted(flow) == 0
    _later(flow, 300)
    assert _deleted(flow) == 1


def test_a_partial_second_listing_deletes_nothing(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    flow.memory.partial = {0}
    assert flow.sync(full=True).incomplete
    assert _state(flow, "aa.md") == "hidden"
    flow.memory.partial, flow.memory.page_errors = set(), {0: Transient("timeout", code="timeout")}
    assert flow.sync().errors
    assert _state(flow, "aa.md") == "hidden"


def test_an_untrusted_second_listing_deletes_nothing(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    flow.memory.remove("bb.md", "cc.md", "dd.md", "ee.md")
    assert flow.sync().waiting_deletions == 4
    assert _state(flow, "aa.md") == "hidden"


def test_a_second_listing_that_was_interrupted_in_an_unstable_order_deletes_nothing(made: Callable[..., Flow]) -> None:
    source = Unstable(capabilities=Capabilities(order_stable=False, probe=False))
    flow = made(source, page_size=2)
    source.remove("aa.md")
    flow.sync()
    assert _state(flow, "aa.md") == "hidden"
    _later(flow)
    source.dies_before = 2
    with pytest.raises(Killed):
        flow.sync()
    source.dies_before = None
    flow.expire_leases()
    assert _deleted(flow) == 0
    assert _state(flow, "aa.md") == "hidden"
    assert _deleted(flow) == 1  # the next one gets through


def test_what_appears_again_in_between_is_hidden_anew_and_not_deleted(made: Callable[..., Flow]) -> None:
    flow = made()
    item = flow.memory.items["aa.md"]
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    flow.memory.items["aa.md"] = item
    flow.sync()
    assert _state(flow, "aa.md") == "shown" and flow.document("aa.md").hidden_sync is None
    flow.memory.remove("aa.md")
    assert _deleted(flow) == 0
    assert _state(flow, "aa.md") == "hidden"


def test_a_note_of_an_earlier_hiding_confirms_no_later_one(made: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died between the second listing and the deletion; then the document was there again."""
    flow = made()
    item = flow.memory.items["aa.md"]
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    with monkeypatch.context() as m:
        m.setattr("kb_pipeline.sync.confirm_hidden", lambda *_: 0)
        flow.sync()
    assert flow.document("aa.md").missed_sync is not None
    flow.memory.items["aa.md"] = item
    flow.sync()
    flow.memory.remove("aa.md")
    assert _deleted(flow) == 0
    assert _state(flow, "aa.md") == "hidden"


def test_what_is_listed_but_cannot_be_read_is_not_missed(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    flow.memory.bad["aa.md"] = BadItem("aa.md", "forbidden", "may not be read")
    assert _deleted(flow, full=True) == 0
    assert _state(flow, "aa.md") != "deleted"


def test_deletions_beyond_the_guard_wait_for_an_approval_which_the_second_listing_spends(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md", "bb.md", "cc.md")
    assert flow.sync().waiting_deletions == 3
    assert _state(flow, "aa.md") == "shown"
    flow.approve(5)
    assert _deleted(flow) == 0
    assert _state(flow, "aa.md") == "hidden"
    assert _source(flow) == (5, 0)
    _later(flow)
    assert _deleted(flow) == 3
    assert _source(flow) == (2, 0)


def test_an_approval_that_was_taken_back_stops_the_deletion(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md", "bb.md", "cc.md")
    flow.sync()
    flow.approve(3)
    flow.sync()
    flow.approve(1)
    _later(flow)
    assert _deleted(flow) == 0
    assert _source(flow) == (1, 3)
    flow.memory.remove("dd.md")  # within the guard: it needs no approval, and takes none
    flow.sync()
    _later(flow)
    assert _deleted(flow) == 1
    assert _source(flow) == (1, 3)
    flow.approve(3)
    assert _deleted(flow) == 3
    assert _source(flow) == (0, 0)


def _source(flow: Flow) -> tuple[int, int]:
    (row,) = flow.execute("SELECT approved, waiting_deletions FROM kb_source WHERE id = %(source)s")
    return row.approved, row.waiting_deletions


def test_asked_alone_nothing_is_confirmed_that_one_listing_missed(made: Callable[..., Flow]) -> None:
    flow = made()
    flow.memory.remove("aa.md")
    flow.sync()
    _later(flow)
    assert confirm_hidden(flow.engine, flow.space, flow.source) == 0
