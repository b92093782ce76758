"""Many at once on one space: workers, syncs, searches, rollbacks, purges, and a deletion under all of them."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from kb_pipeline.cli.sync import exit_code
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.store.database import Pool, open_pool
from kb_pipeline.versions import rollback
from kb_pipeline_tests.faults.faulty import assert_true, hand_lease_to_another_process, quietly, recover, unfinished
from kb_pipeline_tests.flow.scenario import Flow, article

NAMES = [f"w{n:02}" for n in range(24)]


@pytest.fixture(scope="module")
def pool(database_url: str) -> Iterator[Pool]:
    """Enough connections for everybody."""
    pool = open_pool(database_url, max_size=30, application="kb-crowd")
    yield pool
    pool.close()


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_share_the_work_and_do_none_of_it_twice(make_flow: Callable[..., Flow], workers: int) -> None:
    flow = make_flow({f"{n}.md": article(n, 2) for n in NAMES}, batch_size=2)
    flow.walk()
    with ExitStack() as crowd:
        ends = [crowd.enter_context(flow.beside(flow.ingest)) for _ in range(workers)]
    reports = [end[0] for end in ends]
    assert [r for r in reports if isinstance(r, BaseException)] == []
    assert sum(r.published for r in reports) == len(NAMES) and sum(r.failed for r in reports) == 0
    assert sorted(flow.memory.fetched) == sorted(flow.memory.items)
    assert_true(flow)


def test_the_second_sync_of_a_source_is_told_who_is_at_it(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n}.md": article(n, 1) for n in NAMES[:3]})
    flow.memory.gate.close()
    with flow.beside(flow.sync) as ended:
        flow.memory.gate.await_caller()
        hand_lease_to_another_process(flow)
        report = flow.sync()
        error = report.errors["memory"]
        assert (error.code, exit_code(report)) == ("source_busy", 1)
        assert "memory" in error.message and "wait for it to end" in error.message
        assert flow.rows()["kb_doc"] == 0
        flow.memory.gate.open()
    assert ended[0].errors == {} and ended[0].ingest.published == 3
    assert_true(flow)


def test_two_syncs_at_once_of_two_sources_end_as_one_after_the_other(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n}.md": article(n, 2) for n in NAMES[:8]}, batch_size=3)
    other = type(flow.memory)({f"{n}.md": article(n, 2) for n in NAMES[8:16]})
    flow.add_source(other, "other")
    with flow.beside(lambda: flow.sync(source="memory")) as first, flow.beside(lambda: flow.sync(source="other")) as second:
        pass
    assert first[0].errors == second[0].errors == {}
    assert first[0].ingest.published + second[0].ingest.published == 16
    assert {e for e, *_ in flow.chunks()} == {*flow.memory.items, *other.items}
    assert len(flow.embedder.texts) == len(set(flow.embedder.texts))
    flow.assert_whole()


@pytest.mark.parametrize("place", ["embedder", "memory"])
def test_a_rollback_during_a_sync_stands_until_newer_content_is_published(make_flow: Callable[..., Flow], place: str) -> None:
    """Whatever its turn, each version is shown whole; in the end the last one that was made."""
    flow = make_flow({"a.md": article("a", 2)})
    flow.sync()
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "second"))
    flow.sync()
    doc = flow.document("a.md").id
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "third"))
    gate = getattr(flow.app, place).gate if place == "embedder" else flow.memory.gate
    gate.close()
    with flow.beside(flow.sync) as ended:
        gate.await_caller()
        made = rollback(flow.engine, flow.space, doc, 1)
        assert flow.showing("second") == {"a.md"}
        gate.open()
    assert not isinstance(ended[0], BaseException)
    flow.sync()
    newest = "third" if place == "memory" else "aword1x7"  # before the page was read: the source's change is the newer one
    assert flow.showing(newest) == {"a.md"}
    assert made == (4 if place == "embedder" else 3)
    assert [flow.showing(w) for w in ("aword1x7", "second", "third") if w != newest] == [set(), set()]
    assert unfinished(flow) == []
    flow.assert_whole()


def test_purge_and_gc_beside_searches_never_take_what_is_shown(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({f"{n}.md": article(n, 2) for n in NAMES[:6]})
    flow.sync()
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            for n in NAMES[:6]:
                found = flow.hits(f"{n}word0x3", 30)
                assert f"{n}.md" in {h.external_id for h in found if f"{n}word0x3" in h.text}, n
                looks += 1
        return looks

    def clean() -> None:
        while not stop.is_set():
            purge(flow.engine, flow.space, keep=timedelta(0))
            collect_vectors(flow.engine, flow.space)
            reconcile(flow.engine, flow.space)

    with flow.beside(look) as looked, flow.beside(clean) as cleaned:
        try:
            for n in range(6):
                for name in NAMES[:6]:
                    flow.memory.put(f"{name}.md", article(name, 2).replace(f"{name}word1x7", f"{name}new{n}"))
                flow.sync()
        finally:
            stop.set()
    assert cleaned == [None]
    assert isinstance(looked[0], int) and looked[0] > 6, looked[0]
    recover(flow)
    flow.assert_whole()
    assert {e for e, *_ in flow.chunks()} == set(flow.memory.items)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_space_that_is_deleted_under_everybody_leaves_nothing(make_flow: Callable[..., Flow], seed: int) -> None:
    flow = make_flow({f"{n}.md": article(n, 2) for n in NAMES}, batch_size=3, page_size=4)
    flow.sync()
    rng, stop, started = random.Random(seed), threading.Event(), threading.Barrier(9)
    for n in rng.sample(NAMES, 12):
        flow.memory.put(f"{n}.md", article(n, 2, tag="t"))

    def again(work: Callable[[], Any]) -> Callable[[], int]:
        def run() -> int:
            started.wait()
            done = 0
            while not stop.is_set():
                quietly(work)  # the space is gone: said in words
                done += 1
            return done

        return run

    doc = flow.document(f"{NAMES[0]}.md").id
    crowd_of = [
        flow.sync, flow.ingest, flow.ingest, flow.walk, lambda: flow.hits(f"{rng.choice(NAMES)}word0x1"),
        lambda: rollback(flow.engine, flow.space, doc, 1), lambda: reconcile(flow.engine, flow.space),
        lambda: purge(flow.engine, flow.space, keep=timedelta(0)),
    ]  # fmt: skip
    with ExitStack() as crowd:
        ends = [crowd.enter_context(flow.beside(again(work))) for work in crowd_of]
        try:
            started.wait()
            for _ in range(200):
                if flow.rows()["kb_publication"] > len(NAMES):
                    break
            residue = delete_space(flow.engine, flow.space)
        finally:
            stop.set()
    assert [end[0] for end in ends if not isinstance(end[0], int)] == []
    assert set(residue.values()) == {0}
    again_residue = delete_space(flow.engine, flow.space)  # all have left: nothing came after the count
    assert set(again_residue.values()) == {0}
    left = {k: n for k, n in flow.rows().items() if n and k != "kb_embedding"}
    assert left == {}
    assert flow.indexed_ids() == set() and flow.blobs.objects == {}
    assert flow.execute("SELECT status FROM kb_space WHERE id = %(space)s")[0].status == "DELETED"
