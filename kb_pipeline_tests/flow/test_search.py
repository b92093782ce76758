"""What a search may show, and that it shows old or new: never neither, never both."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from numpy.typing import NDArray

from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance.promotion import clear_left_shard, promote_if_large
from kb_pipeline.model import Candidate, IndexRef
from kb_pipeline.search import search
from kb_pipeline.states import FLOW
from kb_pipeline.store import answers
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article


def _restrict(flow: Flow, external_id: str, clauses: Sequence[Sequence[str]] | None) -> None:
    doc_id = flow.document(external_id).id
    with transaction(flow.app.pool) as c:
        lock_documents(c, [doc_id])
        answers.set_acl(c, [doc_id], clauses)


class HookedIndex(MemoryIndex):
    """Lets something happen between the look into the index and the join."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[Callable[[], object]] = []
        self.searches = 0

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        found = super().search(ref, vector, k, acl)
        self.searches += 1
        if self.behind:
            self.behind.pop(0)()
        return found


# --- who may read what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clauses", "principals", "shown"), [
    (None, [], True),
    ([], [], True),  # no clause, no restriction
    ([["ann"]], [], False),
    ([["ann"]], ["ann"], True),
    ([["ann"]], ["bob"], False),
    ([["ann", "bob"]], ["bob"], True),  # one of a clause
    ([["ann", "bob"], ["staff"]], ["bob"], False),  # every clause
    ([["ann", "bob"], ["staff"]], ["staff", "bob"], True),
    ([[]], ["ann"], False),  # an empty clause lets nobody in
    ([["ann"], []], ["ann"], False),
])  # fmt: skip
def test_every_clause_must_be_met(flow: Flow, clauses: list[list[str]] | None, principals: list[str], shown: bool) -> None:
    flow.memory.put("a.md", article("a", 1))
    flow.memory.put("public.md", article("public", 1))
    flow.sync()
    _restrict(flow, "a.md", clauses)
    assert flow.found("aword0x5", 50, principals) == ({"a.md", "public.md"} if shown else {"public.md"})


@pytest.mark.parametrize(("own", "principals", "shown"), [
    (None, [], False),
    (None, ["staff"], True),
    ([["ann"]], ["staff"], False),
    ([["ann"]], ["ann"], False),
    ([["ann"]], ["ann", "staff"], True),
    ([], ["ann"], False),  # a document cannot open what its space closes
])  # fmt: skip
def test_audience_and_own_clauses_hold_together(
    make_flow: Callable[..., Flow], own: list[list[str]] | None, principals: list[str], shown: bool
) -> None:
    flow = make_flow({"a.md": article("a", 1)}, index=MemoryIndex(), audience=[["staff"]])
    flow.sync()
    _restrict(flow, "a.md", own)
    assert flow.found("aword0x5", 50, principals) == ({"a.md"} if shown else set())


def test_a_revoked_permission_holds_at_once_and_costs_nothing(flow: Flow) -> None:
    flow.memory.put("a.md", article("a", 1))
    flow.sync()
    _restrict(flow, "a.md", [["ann", "bob"]])
    assert flow.found("aword0x5", principals=["ann"]) == {"a.md"}
    calls = len(flow.embedder.calls)
    _restrict(flow, "a.md", [["bob"]])
    assert flow.found("aword0x5", principals=["ann"]) == set()
    flow.sync(full=True)
    assert len(flow.embedder.calls) == calls


def test_an_acl_follows_the_source_and_embeds_nothing(flow: Flow) -> None:
    flow.memory.put("a.md", article("a", 1), acl=(("ann",),))
    flow.memory.put("b.md", article("b", 1))
    flow.sync()
    assert (flow.found("aword0x5", 50), flow.found("aword0x5", 50, ["ann"])) == ({"b.md"}, {"a.md", "b.md"})
    calls, version = len(flow.embedder.calls), flow.document("a.md").current_ver
    item, raw = flow.memory.items["a.md"]
    flow.memory.items["a.md"] = (replace(item, acl=(("bob",),)), raw)  # its revision does not tell
    flow.sync(full=True)
    assert (flow.found("aword0x5", 50, ["ann"]), flow.found("aword0x5", 50, ["bob"])) == ({"b.md"}, {"a.md", "b.md"})
    flow.memory.put("a.md", article("a", 1))  # open to everybody again
    flow.sync()
    assert flow.found("aword0x5", 50) == {"a.md", "b.md"}
    assert len(flow.embedder.calls) == calls
    assert flow.document("a.md").current_ver == version


def test_a_permission_revoked_while_a_version_is_published_holds(lying: Flow) -> None:
    lying.memory.put("a.md", article("maple"))
    lying.sync()
    lying.memory.put("a.md", article("maple").replace("mapleword1x7", "novelty"))
    lying.walk()
    lying.index.gate.close()
    with lying.beside(lying.ingest) as ended:
        lying.index.gate.await_caller()
        _restrict(lying, "a.md", [["ann"]])
        lying.index.gate.open()
    assert (ended[0].published, ended[0].tasks) == (1, 2)  # what was verified before the change is verified again
    assert lying.found("novelty", 50) == set()
    assert lying.showing("novelty", ["ann"]) == {"a.md"}


def test_hidden_and_deleted_documents_are_never_shown(lying: Flow) -> None:
    for name in ("a", "b", "c"):
        lying.memory.put(f"{name}.md", article("same", 1, tag=name))
    lying.sync()
    lying.execute("UPDATE kb_doc SET hidden_at = now(), hidden_sync = 1 WHERE space_id = %(space)s AND external_id = 'a.md'")
    lying.execute("UPDATE kb_doc SET status = 'DELETED' WHERE space_id = %(space)s AND external_id = 'b.md'")
    assert lying.found("sameword0x5", 50) == {"c.md"}


@pytest.mark.parametrize("kind", ["pgvector", "memory"])
def test_k_results_come_although_most_candidates_are_filtered_out(make_flow: Callable[..., Flow], kind: str) -> None:
    flow = make_flow(index=MemoryIndex() if kind == "memory" else None)
    for n in range(200):
        flow.memory.put(f"closed{n:03}.md", f"# quarterly figures\n\nquarterly figures of unit {n}\n")
    for n in range(5):
        flow.memory.put(f"open{n}.md", f"# canteen\n\nthe menu of day {n} has little to do with the question\n")
    flow.sync()
    flow.execute("UPDATE kb_doc SET acl = '[[\"board\"]]' WHERE space_id = %(space)s AND external_id LIKE 'closed%%'")
    assert flow.found("quarterly figures of unit", 5) == {f"open{n}.md" for n in range(5)}
    assert len(flow.hits("quarterly figures of unit", 5, ["board"])) == 5


def test_an_empty_question_is_refused(flow: Flow) -> None:
    with pytest.raises(Rejected, match="empty"):
        flow.hits("  \n ")


# --- while it is being published --------------------------------------------------------------------------------------


def test_until_it_is_published_a_new_version_is_not_shown_and_the_old_one_is(lying: Flow) -> None:
    lying.memory.put("a.md", article("maple"))
    lying.sync()
    lying.memory.put("a.md", article("maple").replace("mapleword1x7", "novelty"))
    lying.walk()
    lying.ingest(nodes=FLOW[:-1])
    lying.index.gate.close()
    with lying.beside(lying.ingest):
        lying.index.gate.await_caller()
        assert (lying.showing("mapleword1x7"), lying.showing("novelty")) == ({"a.md"}, set())
        lying.index.gate.open()
    assert (lying.showing("mapleword1x7"), lying.showing("novelty")) == (set(), {"a.md"})


@pytest.mark.parametrize("neighbours", [0, 60])
def test_a_publish_between_index_and_join_is_asked_again(make_flow: Callable[..., Flow], neighbours: int) -> None:
    index = HookedIndex()
    flow = make_flow(index=index)
    for n in range(neighbours):
        flow.memory.put(f"other{n:02}.md", f"# harvest\n\nthe harvest of field {n}\n")
    flow.memory.put("a.md", "# harvest\n\nthe harvest of old orchards\n")
    flow.sync()

    def publish() -> None:
        flow.memory.put("a.md", "# harvest\n\nthe harvest of new orchards\n")
        assert flow.sync().ingest.published == 1

    index.behind = [publish]
    assert flow.found("the harvest of old orchards", 3) >= {"a.md"}
    assert index.searches == 2


def test_a_space_that_moves_to_its_own_shard_during_a_search_is_asked_again(make_flow: Callable[..., Flow]) -> None:
    index = HookedIndex()
    flow = make_flow({f"{n}.md": article(f"w{n}", 2) for n in range(4)}, index=index)
    flow.sync()
    small = replace(flow.engine, limits=replace(flow.engine.limits, own_shard_chunks=2))
    moved: list[int | None] = []
    index.behind = [lambda: moved.append(promote_if_large(small, flow.space))]
    assert flow.found("w1word0x5", 50) == {f"{n}.md" for n in range(4)}
    assert moved[0] is not None
    assert index.searches == 2


def test_a_space_that_moved_to_its_own_shard_is_whole_before_and_after_the_old_rows_go(flow: Flow) -> None:
    for n in range(4):
        flow.memory.put(f"{n}.md", article(f"w{n}", 2))
    flow.sync()
    shown = flow.chunks()
    small = replace(flow.engine, limits=replace(flow.engine.limits, own_shard_chunks=2))
    old = flow.execute("SELECT shard FROM kb_space WHERE id = %(space)s")[0].shard
    assert promote_if_large(small, flow.space) is not None
    assert promote_if_large(small, flow.space) is None  # a space moves once
    assert flow.found("w1word0x5", 50) == {f"{n}.md" for n in range(4)}
    flow.memory.put("0.md", article("w0", 2).replace("w0word0x3", "novelty"))
    flow.sync()
    assert flow.showing("novelty") == {"0.md"}
    assert clear_left_shard(flow.engine, flow.space) == 0  # readers may still be there
    assert clear_left_shard(flow.engine, flow.space, now=datetime.now(UTC) + timedelta(hours=1)) > 0
    assert flow.execute("SELECT 1 FROM kb_chunk WHERE shard = %(old)s AND space_id = %(space)s", old=old) == []
    assert flow.execute("SELECT left_shard FROM kb_space WHERE id = %(space)s")[0].left_shard is None
    assert flow.found("w1word0x5", 50) == {f"{n}.md" for n in range(4)}
    assert len(flow.chunks() & shown) == len(shown) - 1
    flow.assert_whole()


# --- the answer log ---------------------------------------------------------------------------------------------------


def test_an_answer_is_logged_with_what_it_showed_and_to_whom(flow: Flow) -> None:
    flow.memory.put("a.md", article("a"))
    flow.sync()
    answer = search(flow.engine, flow.space, "aword1x5", k=2, principals=["ann"])
    (row,) = flow.execute("SELECT * FROM kb_answer WHERE id = %(answer)s", answer=answer.answer_id)
    assert (row.question, row.principals, row.k, row.space_id) == ("aword1x5", ["ann"], 2, flow.space.id)
    assert row.chunk_ids == [h.chunk_id for h in answer.hits]
    assert row.scores == pytest.approx([h.score for h in answer.hits], abs=1e-5)


def test_no_answer_is_logged_where_the_log_is_off(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({"a.md": article("a")}, index=MemoryIndex(), answer_log=False)
    flow.sync()
    answer = search(flow.engine, flow.space, "aword1x5")
    assert answer.answer_id is None
    assert answer.hits
    assert flow.execute("SELECT 1 FROM kb_answer WHERE space_id = %(space)s") == []
