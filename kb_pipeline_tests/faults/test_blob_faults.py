"""An object store that is full at any moment, or loses what it had accepted: nothing is lost for good, nothing is left over."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kb_pipeline.maintenance.sweep import sweep_objects
from kb_pipeline.states import Node
from kb_pipeline.versions import rollback
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.faults.faulty import FailingBlobs, assert_true, unfinished
from kb_pipeline_tests.flow.scenario import Flow, article


@pytest.fixture
def make(make_flow: Callable[..., Flow]) -> Callable[..., Flow]:
    """Six documents, worked on in twos; nothing is loaded yet."""

    def made(**changes: object) -> Flow:
        return make_flow({f"{n}.md": article(n, 2) for n in "abcdef"}, index=MemoryIndex(), batch_size=2, **changes)

    return made


def referenced(flow: Flow) -> set[str]:
    rows = flow.execute("SELECT unnest(ARRAY[raw_path, parsed_path]) AS path FROM kb_doc_version WHERE space_id = %(space)s")
    return {r.path for r in rows if r.path}


# --- full -------------------------------------------------------------------------------------------------------------


def test_the_store_may_be_full_at_any_put(make: Callable[..., Flow]) -> None:
    n, reached = 0, True
    while reached:
        flow = make()
        flow.app.blobs = blobs = FailingBlobs()
        flow.engine = replace(flow.engine, blobs=blobs)
        blobs.failing = n
        report = flow.sync()
        reached, blobs.failing = blobs.puts > n, None
        if reached:
            assert report.ingest.stopped is not None and report.ingest.stopped.code == "blob_store_full"
            assert "space" in report.ingest.stopped.message
        flow.due()
        assert flow.sync().ingest.failed == 0
        assert len(flow.memory.fetched) <= 6 + 2  # the batch that did not fit, once more
        assert_true(flow)
        left_over = set(blobs.objects) - referenced(flow)
        assert sweep_objects(flow.engine, flow.space) == len(left_over)
        assert set(blobs.objects) == referenced(flow)
        n += 1
    assert n == 7  # three batches, two puts each


# --- lost -------------------------------------------------------------------------------------------------------------


def _lose(flow: Flow, *kinds: str) -> int:
    lost = [key for key in flow.blobs.objects if key.rpartition("/")[2].startswith(kinds)]
    flow.blobs.delete_many(lost)
    return len(lost)


@pytest.mark.parametrize(("done", "lost", "back_at"), [
    ((Node.FETCHER,), ("fetcher",), Node.FETCHER),
    ((Node.FETCHER, Node.PARSER), ("parser",), Node.PARSER),
    ((Node.FETCHER, Node.PARSER), ("fetcher", "parser"), Node.PARSER),
])  # fmt: skip
def test_an_object_lost_between_two_nodes_is_made_again(
    make: Callable[..., Flow], done: tuple[Node, ...], lost: tuple[str, ...], back_at: Node
) -> None:
    flow = make(retry_base_seconds=3600.0)
    flow.walk()
    flow.ingest(nodes=done)
    assert _lose(flow, *lost) == 6 * len(lost)
    assert flow.sync().ingest.failed == 6
    task = flow.task("a.md")
    assert (task.status, task.error_code, task.current_node) == ("FAILED", "blob_missing", back_at)
    assert "a.md" in task.error_message and "made again" in task.error_message
    for _ in lost:
        flow.due()
        report = flow.sync()
    assert (report.ingest.failed, unfinished(flow)) == (0, [])
    assert_true(flow)


def test_a_lost_object_does_not_touch_the_version_that_is_shown(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=3600.0)
    flow.sync()
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "novelty"))
    flow.walk()
    flow.ingest(nodes=(Node.FETCHER, Node.PARSER))
    _lose(flow, "fetcher", "parser")
    flow.sync()
    assert flow.showing("aword1x7") == {"a.md"} and flow.showing("novelty") == set()
    for _ in range(2):
        flow.due()
        flow.sync()
    assert flow.showing("novelty") == {"a.md"} and flow.showing("aword1x7") == set()
    assert_true(flow)


def test_a_document_that_left_the_source_meanwhile_is_not_made_again(make: Callable[..., Flow]) -> None:
    flow = make(retry_base_seconds=3600.0)
    flow.walk()
    flow.ingest(nodes=(Node.FETCHER,))
    _lose(flow, "fetcher")
    flow.ingest()
    flow.memory.remove("a.md")
    flow.approve(1)
    flow.due()
    flow.sync()
    assert_true(flow)


def test_a_rollback_whose_blocks_are_lost_parses_the_original_again(make: Callable[..., Flow]) -> None:
    flow = _rolled_back(make, "parser")
    flow.due()
    flow.sync()
    assert flow.showing("aword1x7") == {"a.md"} and flow.showing("novelty") == set()
    assert unfinished(flow) == []


def test_a_rollback_whose_original_is_lost_never_shows_what_the_source_says_today(make: Callable[..., Flow]) -> None:
    """The source has the new text only: made again from there, the old version would show it."""
    flow = _rolled_back(make, "fetcher", "parser")
    flow.due()
    flow.sync()
    assert unfinished(flow) == [("DEAD", "blob_missing")]
    assert flow.showing("novelty") == {"a.md"} and flow.showing("aword1x7") == set()
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "surprise"))
    flow.sync()
    assert flow.showing("surprise") == {"a.md"}
    assert_true(flow)


def _rolled_back(make: Callable[..., Flow], *lost: str) -> Flow:
    """A second version is shown; a rollback to the first waits, and what it was made of is gone."""
    flow = make(retry_base_seconds=3600.0)
    flow.sync()
    first = set(flow.blobs.objects)
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "novelty"))
    flow.sync()
    rollback(flow.engine, flow.space, flow.document("a.md").id, 1)
    for key in first:
        if key.rpartition("/")[2].startswith(lost):
            flow.blobs.delete_many([key])
    assert flow.ingest().failed == 1
    return flow
