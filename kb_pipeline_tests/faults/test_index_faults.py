"""A vector index that lies, loses, is late or holds what it should not: the next pass, reconciliation and GC make it true."""

import random
from collections.abc import Callable

import pytest

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.faults.faulty import (
    ChaoticIndex,
    FailingIndex,
    LateIndex,
    assert_true,
    lose,
    plant,
    quietly,
    recover,
    tombstones,
    unfinished,
)
from kb_pipeline_tests.flow.scenario import Flow, article

TREES = ("ash", "birch", "cedar", "durian")


@pytest.fixture
def make(make_flow: Callable[..., Flow]) -> Callable[..., Flow]:
    """Four published documents of three chunks over the index that is passed; what fails is due again at once."""

    def made(index: MemoryIndex, **changes: object) -> Flow:
        flow = make_flow({f"{n}.md": article(n) for n in TREES}, index=index, max_retries=100, **changes)
        flow.sync()
        return flow

    return made


def reword(flow: Flow, name: str, word: str) -> None:
    """One word of one chunk."""
    text = flow.memory.items[f"{name}.md"][1].decode()
    flow.memory.put(f"{name}.md", text.replace(f"{name}word1x7", word, 1))


# --- lies and losses --------------------------------------------------------------------------------------------------


def test_a_document_of_which_the_index_dropped_one_item_is_not_published(make: Callable[..., Flow]) -> None:
    class DropsOne(MemoryIndex):
        dropping = False

        def upsert(self, ref, entries):  # type: ignore[no-untyped-def]
            super().upsert(ref, entries[1:] if self.dropping else entries)

    flow = make(DropsOne(), retry_base_seconds=3600.0)
    asked = len(flow.embedder.texts)
    reword(flow, "ash", "novelty")
    reword(flow, "birch", "surprise")
    flow.index.dropping = True  # type: ignore[attr-defined]
    report = flow.sync()
    assert (report.ingest.published, unfinished(flow)) == (1, [("FAILED", "index_incomplete")])
    assert len(flow.showing("novelty") | flow.showing("surprise")) == 1
    flow.index.dropping = False  # type: ignore[attr-defined]
    recover(flow)
    assert flow.showing("novelty") == {"ash.md"} and flow.showing("surprise") == {"birch.md"}
    assert len(flow.embedder.texts) == asked + 2
    assert_true(flow)


@pytest.mark.parametrize("after_effect", [False, True])
def test_the_index_may_fail_at_any_call(make: Callable[..., Flow], after_effect: bool) -> None:
    index = FailingIndex()
    flow = make(index)
    index.after_effect = after_effect
    n, reached = 0, True
    while reached:
        reword(flow, "ash", f"new{n}")
        flow.memory.put("ash.md", flow.memory.items["ash.md"][1].decode().replace(f"new{n - 1} ", f"new{n} "))
        first = index.calls
        index.failing = first + n
        flow.sync()
        reached, index.failing = index.calls > first + n, None
        recover(flow)
        assert flow.showing(f"new{n}") == {"ash.md"} and flow.showing(f"new{n - 1}") == set()
        n += 1
    assert n > 5  # look, write, look; the GC's look, write, look
    assert_true(flow)


def test_an_index_that_loses_a_tenth_of_what_it_held_is_repaired_without_embedding(make: Callable[..., Flow]) -> None:
    flow = make(MemoryIndex())
    calls, rng = len(flow.embedder.calls), random.Random(5)
    for _ in range(3):
        lost = lose(flow.index, 0.1, rng)
        assert not flow.current_ids() <= flow.indexed_ids()
        found = reconcile(flow.engine, flow.space)
        assert (found.missing, found.orphaned, found.repaired) == (lost, 0, lost)
        assert_true(flow)
    assert len(flow.embedder.calls) == calls


def test_foreign_entries_are_never_shown_and_go_with_the_next_gc(make: Callable[..., Flow]) -> None:
    flow = make(MemoryIndex())
    before = flow.hits("ashword1x7", 20)
    foreign = plant(flow, "ashword1x7", 40)
    assert [h.chunk_id for h in flow.hits("ashword1x7", 12)] == [h.chunk_id for h in before[:12]]
    assert reconcile(flow.engine, flow.space).orphaned == 40
    assert foreign <= flow.indexed_ids()  # reconciliation decides, only the GC deletes
    assert collect_vectors(flow.engine, flow.space) == 40
    assert_true(flow)


def test_an_index_that_was_emptied_behind_our_back_is_filled_from_the_cache(make: Callable[..., Flow]) -> None:
    flow = make(MemoryIndex())
    calls = len(flow.embedder.calls)
    for rows in flow.index.indexes.values():
        rows.clear()
    assert flow.hits("ashword1x7") == ()
    assert reconcile(flow.engine, flow.space).repaired == 12
    assert flow.showing("ashword1x7") == {"ash.md"}
    assert len(flow.embedder.calls) == calls


# --- slow -------------------------------------------------------------------------------------------------------------


def test_while_the_index_is_slow_the_old_version_is_found_and_the_worker_keeps_its_task(make: Callable[..., Flow]) -> None:
    flow = make(MemoryIndex(), lease_seconds=2)
    reword(flow, "ash", "novelty")
    flow.index.gate.close()
    with flow.beside(flow.sync) as ended:
        flow.index.gate.await_caller()
        (lease,) = (t.lease_until for t in flow.execute("SELECT lease_until FROM ingestion_task WHERE status = 'PROCESSING'"))
        assert flow.showing("ashword1x7") == {"ash.md"} and flow.showing("novelty") == set()
        _until(flow, "SELECT 1 FROM ingestion_task WHERE status = 'PROCESSING' AND lease_until > %(lease)s", lease=lease)
        assert flow.ingest().tasks == 0
        flow.index.gate.open()
    assert ended[0].ingest.published == 1
    assert flow.showing("novelty") == {"ash.md"} and flow.showing("ashword1x7") == set()
    assert_true(flow)


def _until(flow: Flow, question: str, **values: object) -> None:
    for _ in range(50_000):
        if flow.execute(question, **values):
            return
    raise AssertionError(f"never: {question}")


# --- writes that land after they failed -------------------------------------------------------------------------------


def test_an_upsert_that_lands_after_its_retry_changes_nothing(make: Callable[..., Flow]) -> None:
    index = LateIndex()
    flow = make(index, retry_base_seconds=3600.0)
    reword(flow, "ash", "novelty")
    index.late = {"upsert"}
    flow.sync()
    assert unfinished(flow) == [("FAILED", "index_timeout")]
    index.late = set()
    recover(flow)
    held = flow.indexed_ids()
    assert index.land() > 0
    assert flow.indexed_ids() == held
    assert_true(flow)


def test_an_upsert_of_a_version_that_was_given_up_lands_as_a_ghost_that_nobody_sees(make: Callable[..., Flow]) -> None:
    index = LateIndex()
    flow = make(index, retry_base_seconds=3600.0)
    reword(flow, "ash", "novelty")
    index.late = {"upsert"}
    flow.sync()
    assert flow.cancel(flow.task("ash.md").id)
    index.late = set()
    flow.sync(full=True)
    assert tombstones(flow) == 0  # all of it is cleaned up and forgotten: nothing but a comparison can know
    index.land()
    assert flow.indexed_ids() > flow.current_ids()
    assert flow.showing("novelty") == set()
    assert reconcile(flow.engine, flow.space).orphaned == 1
    collect_vectors(flow.engine, flow.space)
    flow.assert_whole()


def test_an_upsert_that_lands_after_its_document_was_deleted_is_removed(make: Callable[..., Flow]) -> None:
    index = LateIndex()
    flow = make(index, retry_base_seconds=3600.0)
    reword(flow, "ash", "novelty")
    index.late = {"upsert"}
    flow.sync()
    index.late = set()
    flow.memory.remove("ash.md")
    flow.approve(1)
    flow.sync()
    assert flow.document("ash.md") is None
    index.land()
    assert flow.showing("novelty") == set()
    recover(flow)
    assert_true(flow)


def test_an_upsert_that_lands_after_its_space_was_deleted_finds_no_index(make: Callable[..., Flow]) -> None:
    index = LateIndex()
    flow = make(index, retry_base_seconds=3600.0)
    reword(flow, "ash", "novelty")
    index.late = {"upsert"}
    flow.sync()
    assert set(delete_space(flow.engine, flow.space).values()) == {0}
    assert (index.land(), index.indexes) == (0, {})


@pytest.mark.parametrize("back", ["before", "after"])
def test_a_delete_that_lands_late_hits_nothing_that_lives(make: Callable[..., Flow], back: str) -> None:
    """The text that is erased comes back, before or after the GC has given up asking for it."""
    index = LateIndex()
    flow = make(index)
    old = flow.memory.items["ash.md"][1]
    reword(flow, "ash", "novelty")
    index.late = {"delete"}
    flow.sync()
    assert tombstones(flow) == 1 and index.kept
    index.late = set()
    if back == "after":
        collect_vectors(flow.engine, flow.space)
    flow.memory.put("ash.md", old)
    flow.sync()
    assert index.land() > 0
    assert flow.showing("ashword1x7") == {"ash.md"} and flow.showing("novelty") == set()
    assert flow.current_ids() <= flow.indexed_ids()
    recover(flow)
    assert_true(flow)


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_after_any_weather_one_pass_one_reconciliation_and_one_gc_make_it_true(make: Callable[..., Flow], seed: int) -> None:
    index = ChaoticIndex(seed)
    flow = make(index, batch_size=3)
    rng, shelf = random.Random(seed), {}
    for n in range(9):
        name = rng.choice(TREES)
        if rng.random() < 0.2 and f"{name}.md" in flow.memory.items and len(flow.memory.items) > 2:
            shelf[name] = flow.memory.items[f"{name}.md"][1]
            flow.memory.remove(f"{name}.md")
            flow.approve(9)
        elif f"{name}.md" not in flow.memory.items:
            flow.memory.put(f"{name}.md", shelf[name])
        else:
            flow.memory.put(f"{name}.md", article(name, rng.randint(1, 4), tag=rng.choice(["", "a", "b"])))
        index.trouble = 0.5
        quietly(flow.sync)
        if n % 4 == 0:
            quietly(lambda: reconcile(flow.engine, flow.space))
            quietly(lambda: collect_vectors(flow.engine, flow.space))
    index.trouble = 0.0
    index.land()
    recover(flow)
    assert_true(flow)
