"""A question to the past finds what was current then: each time a version was current, and never what may not be read now."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kb_pipeline.errors import KbError, Misconfigured, Rejected, Transient
from kb_pipeline.model import Candidate, Hit, IndexRef
from kb_pipeline.search import served
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import delete_documents, lock_documents
from kb_pipeline_tests.fakes import LONGEST_WAIT, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.history.past import ALL, ask, back_to, delete, hide, now, restrict, shift, showing, write

OLD = article("maple")
NEW = OLD.replace("mapleword1x7", "novelty")
OTHER = article("birch")

# --- versions -----------------------------------------------------------------------------------------------------------


def test_each_time_finds_the_version_that_was_current(flow: Flow) -> None:
    before = now(flow)
    write(flow, "a.md", OLD)
    first = now(flow)
    write(flow, "a.md", NEW)
    second = now(flow)
    assert ask(flow, "maple", before).hits == ()
    assert (showing(flow, "mapleword1x7", first), showing(flow, "novelty", first)) == ({"a.md": 1}, {})
    assert (showing(flow, "mapleword1x7", second), showing(flow, "novelty", second)) == ({}, {"a.md": 2})
    assert [ask(flow, "maple", at).withheld for at in (before, first, second)] == [0, 0, 0]


def test_a_version_that_was_current_twice_is_found_at_both_times(flow: Flow) -> None:
    doc_id = write(flow, "a.md", OLD)
    times = [now(flow)]
    write(flow, "a.md", NEW)
    times.append(now(flow))
    assert back_to(flow, doc_id, 1) == 3
    times.append(now(flow))
    write(flow, "a.md", OLD.replace("mapleword1x7", "latest"))
    assert [showing(flow, "mapleword1x7", at) for at in times] == [{"a.md": 1}, {}, {"a.md": 3}]
    assert [showing(flow, "novelty", at) for at in times] == [{}, {"a.md": 2}, {}]
    assert [len(ask(flow, "maple", at).hits) for at in times] == [len(flow.hits("maple", ALL))] * 3


def test_chunks_that_stayed_are_found_with_the_version_of_then(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    first = now(flow)
    write(flow, "a.md", NEW)
    assert {h.version for h in ask(flow, "maple", first).hits} == {1}
    assert {h.version for h in flow.hits("maple", ALL)} == {2}


def test_best_first_whether_a_chunk_comes_from_the_index_or_from_the_cache(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    recorded, at = flow.hits("birchword1x3 mapleword1x7", 3), now(flow)
    write(flow, "a.md", NEW)
    found = ask(flow, "birchword1x3 mapleword1x7", at, k=3).hits
    assert [h.chunk_id for h in found] == [h.chunk_id for h in recorded]
    assert [h.score for h in found] == pytest.approx([h.score for h in recorded], abs=1e-5)
    assert [h.text for h in found] == [h.text for h in recorded]
    assert ask(flow, "mapleword1x7", at, k=1).hits[0].chunk_id not in {h.chunk_id for h in flow.hits("maple", ALL)}


def test_only_the_question_is_embedded(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    at = now(flow)
    write(flow, "a.md", NEW)
    calls = len(flow.embedder.calls)
    assert showing(flow, "mapleword1x7", at) == {"a.md": 1}
    assert len(flow.embedder.calls) == calls


def test_it_is_not_logged_as_an_answer(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    assert ask(flow, "maple", now(flow)).answer_id is None
    assert flow.execute("SELECT id FROM kb_answer WHERE space_id = %(space)s") == []


def test_between_the_end_of_a_version_and_the_beginning_of_the_next_the_old_one_counts(flow: Flow) -> None:
    """Both stamps are of one transaction: nobody has ever seen the document without a version."""
    doc_id = write(flow, "a.md", OLD)
    write(flow, "a.md", NEW)
    shift(flow, doc_id, -3600)
    moved = "UPDATE kb_publication SET from_at = from_at + %(by)s * interval '1 minute' WHERE doc_id = %(doc)s AND version = %(version)s"
    flow.execute(moved, doc=doc_id, version=1, by=-10)
    flow.execute(moved, doc=doc_id, version=2, by=1)
    (end,) = flow.execute("SELECT to_at FROM kb_publication WHERE doc_id = %(doc)s AND to_at IS NOT NULL", doc=doc_id)
    for seconds, version in ((-1, 1), (0, 1), (59, 1), (61, 2)):
        found = ask(flow, "maple", end.to_at + timedelta(seconds=seconds)).hits
        assert ({h.version for h in found}, len(found)) == ({version}, len(flow.hits("maple", ALL)))


def test_what_came_later_takes_no_place_among_the_candidates(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are asked for until k are found; where the widest look is not wide enough, everything of then is ranked exactly."""
    write(flow, "a.md", article("birch", 1))
    at = now(flow)
    for n in range(3):
        flow.memory.put(f"b{n}.md", article("maple", 15, tag=f"t{n}"))
    flow.sync()
    asked = _widths(monkeypatch, flow)
    assert {h.external_id for h in ask(flow, "maplet1word3x4", at, k=1).hits} == {"a.md"}
    assert len(asked) > 1
    monkeypatch.setattr("kb_pipeline.as_of.WIDEST", 1)
    monkeypatch.setattr("kb_pipeline.as_of.DOCUMENTS", 2)
    asked.clear()
    assert {h.external_id for h in ask(flow, "maplet1word3x4", at, k=1).hits} == {"a.md"}
    assert len(asked) == 1


def _widths(monkeypatch: pytest.MonkeyPatch, flow: Flow) -> list[int]:
    index, asked = flow.engine.index(served(flow.engine, flow.space).ref), []
    search = index.search

    def counted(ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        asked.append(k)
        return search(ref, vector, k, acl)

    monkeypatch.setattr(index, "search", counted)
    return asked


def test_small_batches_find_the_same(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        flow.memory.put(f"{n}.md", article(f"maple{n}"))
    flow.sync()
    at = now(flow)
    for n in range(5):
        flow.memory.put(f"{n}.md", article(f"maple{n}", tag="new"))
    flow.sync()
    whole = ask(flow, "maple Section 1", at)
    assert len(whole.hits) >= 15
    for name in ("DOCUMENTS", "OPENED", "COMPARED", "VECTORS"):
        monkeypatch.setattr(f"kb_pipeline.as_of.{name}", 2)
    again = ask(flow, "maple Section 1", at)
    assert [h.chunk_id for h in again.hits] == [h.chunk_id for h in whole.hits]
    assert [h.score for h in again.hits] == pytest.approx([h.score for h in whole.hits], abs=1e-6)  # by the order of adding


# --- deleted, hidden, revoked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, ALL])
def test_a_deleted_document_is_withheld_and_counted(flow: Flow, k: int) -> None:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    at = now(flow)
    delete(flow, "a.md")
    after = now(flow)
    found = ask(flow, "mapleword1x7", at, k=k)
    assert {h.external_id for h in found.hits} == {"b.md"} and found.withheld == 1
    assert ask(flow, "mapleword1x7", after, k=k).withheld == 0


def test_a_deleted_document_counts_once_also_before_its_chunks_are_erased(flow: Flow) -> None:
    doc_id = write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    at = now(flow)
    with transaction(flow.app.pool) as c:
        shard = spaces.lock_shared(c, flow.space)
        assert shard is not None and lock_documents(c, [doc_id])
        delete_documents(c, flow.space.id, shard, [doc_id])
    for k in (1, ALL):
        found = ask(flow, "mapleword1x7", at, k)
        assert {h.external_id for h in found.hits} == {"b.md"} and found.withheld == 1


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_hidden_since_is_withheld_and_counted(flow: Flow, edited: bool) -> None:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    recorded, at = flow.hits("mapleword1x7", 3), now(flow)
    if edited:
        write(flow, "a.md", NEW)
    hide(flow, "a.md")
    after = now(flow)
    found = ask(flow, "mapleword1x7", at, k=3)
    assert {h.external_id for h in found.hits} == {"b.md"}
    assert found.withheld == sum(h.external_id == "a.md" for h in recorded) > 0
    assert ask(flow, "mapleword1x7", after, k=3).withheld == 0


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_not_permitted_any_more_is_withheld_and_counted(flow: Flow, edited: bool) -> None:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    restrict(flow, "a.md", [["ann", "bob"]])
    recorded, at = flow.hits("mapleword1x7", 3, ["bob"]), now(flow)
    if edited:
        write(flow, "a.md", NEW)
    restrict(flow, "a.md", [["ann"]])
    bob, ann = (ask(flow, "mapleword1x7", at, k=3, principals=[who]) for who in ("bob", "ann"))
    assert {h.external_id for h in bob.hits} == {"b.md"}
    assert bob.withheld == sum(h.external_id == "a.md" for h in recorded) > 0
    assert (len(ann.hits), ann.withheld, ann.hits[0].external_id) == (3, 0, "a.md")


def test_what_was_never_permitted_is_not_even_counted(make_flow: Callable[..., Flow]) -> None:
    """A number that depends on the question would tell what is written in it."""
    flow = make_flow()
    flow.memory.put("secret.md", OLD, acl=(("ann",),))
    flow.memory.put("gone.md", article("cedar"), acl=(("ann",),))
    write(flow, "b.md", OTHER)
    at = now(flow)
    delete(flow, "gone.md")
    flow.memory.put("secret.md", NEW, acl=(("ann",),))
    flow.sync()
    assert (found := ask(flow, "mapleword1x7", at)).withheld == 0 and {h.external_id for h in found.hits} == {"b.md"}
    closed = make_flow(audience=[["staff"]])
    write(closed, "a.md", OLD)
    at = now(closed)
    write(closed, "a.md", NEW)
    assert (ask(closed, "maple", at).hits, ask(closed, "maple", at).withheld) == ((), 0)
    assert showing(closed, "mapleword1x7", at, ["staff"]) == {"a.md": 1}


# --- refusals -----------------------------------------------------------------------------------------------------------


def _refused(flow: Flow, at: datetime) -> KbError:
    with pytest.raises(KbError) as refused:
        ask(flow, "maple", at)
    return refused.value


def test_a_time_before_the_horizon_is_refused(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    first = now(flow)
    write(flow, "a.md", NEW)
    horizon = now(flow)
    flow.execute("UPDATE kb_space SET as_of_horizon = %(horizon)s WHERE id = %(space)s", horizon=horizon)
    error = _refused(flow, first)
    assert isinstance(error, Rejected) and error.code == "purged" and "retain" in error.message
    assert f"{horizon:%Y-%m-%d}" in error.message
    assert showing(flow, "novelty", horizon) == {"a.md": 2}


def test_a_purge_during_the_search_is_noticed(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(index=Hooked())
    write(flow, "a.md", OLD)
    first = now(flow)
    write(flow, "a.md", NEW)
    assert isinstance(flow.index, Hooked)
    flow.index.behind = lambda: flow.execute("UPDATE kb_space SET as_of_horizon = clock_timestamp() WHERE id = %(space)s")
    assert _refused(flow, first).code == "purged"


def test_the_future_and_what_is_not_settled_are_refused(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    write(flow, "a.md", OLD)
    error = _refused(flow, now(flow) + timedelta(hours=1))
    assert isinstance(error, Misconfigured) and error.code == "time_in_future"
    assert _refused(flow, datetime(2024, 5, 1)).code == "bad_time"
    monkeypatch.setattr("kb_pipeline.as_of.SETTLED_SECONDS", 3600.0)
    error = _refused(flow, now(flow))
    assert isinstance(error, Transient) and error.code == "not_settled" and error.retry_after == 3600.0
    assert ask(flow, "maple", now(flow) - timedelta(hours=2)).hits == ()


def test_by_default_the_limit_of_a_publish_has_to_be_over(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert _refused(flow, now(flow)).code == "not_settled"
    assert _refused(flow, now(flow) - timedelta(seconds=5)).code == "not_settled"
    assert ask(flow, "maple", now(flow) - timedelta(seconds=7)).hits == ()


def test_a_publish_that_is_still_open_makes_its_time_unsettled(flow: Flow) -> None:
    """It may have taken its stamp already, and would appear at a time that has been answered for."""
    write(flow, "a.md", OLD)
    with transaction(flow.app.pool) as c:
        spaces.lock_shared(c, flow.space)
        at = now(flow)
        assert _refused(flow, at).code == "not_settled"
    assert ask(flow, "maple", at).hits


def test_a_deletion_that_waits_for_the_space_does_not(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    with transaction(flow.app.pool) as c:
        spaces.lock_exclusive(c, flow.space.id)
        assert ask(flow, "maple", now(flow)).hits


def test_a_lost_cache_is_told_and_not_passed_over(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    at = now(flow)
    write(flow, "a.md", NEW)
    flow.execute("DELETE FROM kb_embedding")
    assert _refused(flow, at).code == "vectors_missing"
    with pytest.raises(Rejected, match="vectors of 1 of its chunks"):  # the index has the others
        ask(flow, "maple", at, 1)


def test_no_question_is_refused(flow: Flow) -> None:
    with pytest.raises(Rejected, match="empty"):
        ask(flow, " ", now(flow))


def test_an_approximate_index_that_gives_up_early_is_not_believed(make_flow: Callable[..., Flow]) -> None:
    class Tired(MemoryIndex):
        def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
            return super().search(ref, vector, 2, acl)

    flow = make_flow(index=Tired())
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    assert len(flow.hits("maple", 4)) == 2
    assert len(ask(flow, "maple", now(flow), 4).hits) == 4


# --- what happens meanwhile ---------------------------------------------------------------------------------------------


class Hooked(MemoryIndex):
    """Lets something happen once, right behind the look into the index."""

    behind: Callable[[], object] | None = None

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        found = super().search(ref, vector, k, acl)
        if (behind := self.behind) is not None:
            self.behind = None
            behind()
        return found


@pytest.fixture
def hooked(make_flow: Callable[..., Flow]) -> Flow:
    return make_flow(index=Hooked())


def _behind(flow: Flow, work: Callable[[], object]) -> None:
    assert isinstance(flow.index, Hooked)
    flow.index.behind = work


def test_what_becomes_current_again_during_the_search_is_found(hooked: Flow) -> None:
    """The index did not hold it yet, and it is current now: neither side would have it."""
    doc_id = write(hooked, "a.md", OLD)
    at = now(hooked)
    write(hooked, "a.md", NEW)
    _behind(hooked, lambda: back_to(hooked, doc_id, 1))
    assert showing(hooked, "mapleword1x7", at) == {"a.md": 1}


def test_what_stops_being_current_during_the_search_is_found(hooked: Flow) -> None:
    write(hooked, "a.md", OLD)
    at = now(hooked)
    _behind(hooked, lambda: write(hooked, "a.md", NEW))
    assert showing(hooked, "mapleword1x7", at) == {"a.md": 1}


def test_what_is_revoked_during_the_search_is_not_shown(hooked: Flow) -> None:
    write(hooked, "a.md", OLD)
    write(hooked, "b.md", OTHER)
    at = now(hooked)
    _behind(hooked, lambda: restrict(hooked, "a.md", [["ann"]]))
    assert {h.external_id for h in ask(hooked, "maple", at).hits} == {"b.md"}


def test_a_space_that_moves_to_its_own_shard_during_the_search_is_asked_again(hooked: Flow) -> None:
    write(hooked, "a.md", OLD)
    at = now(hooked)
    write(hooked, "a.md", NEW)

    def promote() -> None:
        hooked.execute("UPDATE kb_space SET left_shard = NULL WHERE id = %(space)s")
        with transaction(hooked.app.pool) as c:
            assert spaces.promote(c, hooked.space) is not None
        hooked.execute(
            "DELETE FROM kb_chunk_state t USING kb_space s WHERE s.id = %(space)s AND t.space_id = s.id AND t.shard = s.left_shard"
        )
        hooked.execute(
            "DELETE FROM kb_chunk t USING kb_space s WHERE s.id = %(space)s AND t.space_id = s.id AND t.shard = s.left_shard"
        )

    _behind(hooked, promote)
    assert showing(hooked, "mapleword1x7", at) == {"a.md": 1}


# --- stamps (44) --------------------------------------------------------------------------------------------------------


def test_stamps_are_taken_behind_the_lock_and_not_at_the_begin_of_the_transaction(hooked: Flow) -> None:
    """A publish that waited for its document must not claim that it was current meanwhile."""
    doc_id = write(hooked, "a.md", OLD)
    hooked.memory.put("a.md", NEW)
    hooked.walk()
    hooked.index.gate.close()
    with ExitStack() as waiting:
        waiting.callback(hooked.index.gate.open)
        waiting.enter_context(hooked.beside(hooked.ingest))
        hooked.index.gate.await_caller()
        with transaction(hooked.app.pool) as c:
            lock_documents(c, [doc_id])
            hooked.index.gate.open()
            _await_waiter(hooked)
            at = now(hooked)
    assert hooked.document("a.md").current_ver == 2
    assert (showing(hooked, "mapleword1x7", at), showing(hooked, "novelty", at)) == ({"a.md": 1}, {})
    old, new = hooked.execute("SELECT * FROM kb_publication WHERE space_id = %(space)s ORDER BY id")
    assert at < old.to_at <= new.from_at and old.to_xid == new.from_xid


def _await_waiter(flow: Flow) -> None:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + LONGEST_WAIT
    while not flow.execute(waiting):
        assert time.monotonic() < deadline, "nobody waits for the lock"


# --- everything at once -------------------------------------------------------------------------------------------------

POOL = [article(f"{name}{n}", 1) for name in ("maple", "birch") for n in range(3)]
EDITS = st.tuples(st.just("write"), st.integers(0, 2), st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=3))
BACK = st.tuples(st.just("back"), st.integers(0, 2), st.integers(1, 9))
GONE = st.tuples(st.just("delete"), st.integers(0, 2), st.just(0))


@given(
    history=st.lists(EDITS | EDITS | BACK | GONE, min_size=2, max_size=6),
    question=st.sampled_from(["maple1word0x3 birch", "Section 0 of maple2"]),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happened_every_time_is_answered_as_it_was_then(
    make_flow: Callable[..., Flow], history: list[Any], question: str
) -> None:
    """A search recorded at that time, without the documents that were deleted since."""
    flow = make_flow()
    recorded: list[tuple[datetime, tuple[Hit, ...]]] = []
    for what, number, how in history:
        name = f"{number}.md"
        document = flow.document(name)
        if what == "write":
            write(flow, name, "\n\n".join(POOL[i] for i in how))
        elif document is not None and what == "back":
            back_to(flow, document.id, 1 + how % document.current_ver)
        elif document is not None:
            delete(flow, name)
        recorded.append((now(flow), flow.hits(question, ALL)))
    calls = len(flow.embedder.calls)
    living = {r.id for r in flow.execute("SELECT id FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED'")}
    for at, hits in recorded:
        left = [h for h in hits if h.document_id in living]
        for k in (1, 2, ALL):
            found = ask(flow, question, at, k)
            assert [h.score for h in found.hits] == pytest.approx([h.score for h in left[:k]], abs=1e-5)
            assert found.withheld == len({h.document_id for h in hits} - living)
        assert {(h.chunk_id, h.version) for h in found.hits} == {(h.chunk_id, h.version) for h in left}
    assert len(flow.embedder.calls) == calls
