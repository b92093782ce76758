"""Memory does not grow with the number of documents that a source lists."""

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from kb_pipeline.model import Item, Json, Page
from kb_pipeline.ports import Capabilities
from kb_pipeline.walk import walk_source
from kb_pipeline_tests.fakes import MemorySource
from kb_pipeline_tests.flow.scenario import Flow


class Endless(MemorySource):
    """Lists ``count`` documents and holds none of them."""

    def __init__(self, count: int) -> None:
        super().__init__(capabilities=Capabilities(order_stable=True))
        self.count = count

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        first = (checkpoint or {}).get("next", 0)
        numbers = iter(range(first, self.count))
        while part := list(islice(numbers, limit)):
            items = tuple(Item(f"doc{n:09}.md", "r1", f"doc{n}", f"memory:{n}", 100) for n in part)
            yield Page(items, (), {"next": part[-1] + 1})


def peak(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_walk_over_eight_times_as_many_documents_needs_no_more_memory(make_flow: Callable[..., Flow]) -> None:
    peaks = []
    for count in (1000, 8000):
        flow = make_flow()
        source = flow.add_source(Endless(count), "endless")
        first = peak(lambda: walk_source(flow.engine, flow.space, source, full=True))  # noqa: B023
        again = peak(lambda: walk_source(flow.engine, flow.space, source, full=True))  # noqa: B023
        peaks.append((first, again))
    (small, small_again), (large, large_again) = peaks
    ids = 7000 * 30  # less than a set of the other ids would take
    assert large < small + ids
    assert large_again < small_again + ids
