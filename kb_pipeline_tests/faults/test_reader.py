"""A document that is updated again and again never blinks: every answer is exactly one of its versions, old or new.

``python -m kb_pipeline_tests.benchmarks.reader`` runs more updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kb_pipeline import as_of as past
from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.model import Candidate, Hit, IndexRef, VectorEntry
from kb_pipeline.settings import Settings
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.faults.reading import Readers
from kb_pipeline_tests.faults.weather import SharedIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.history.past import shift


@pytest.mark.parametrize(("index", "updates"), [(None, 50), (SharedIndex, 30)], ids=["in_the_database", "outside"])
def test_every_answer_during_updates_is_one_whole_version(
    settings: Settings, database_url: str, index: type[MemoryIndex] | None, updates: int
) -> None:
    tally = Readers(settings, database_url, f"readers-{updates}", index() if index else None).run(updates)
    print(tally.line())
    assert tally.seen == []
    assert (tally.updates, tally.gaps, tally.mixes, tally.back) == (updates, 0, 0, 0)
    assert tally.answers["search"] and tally.answers["search_too"] and len(tally.versions) > 1


class HalfwayIndex(MemoryIndex):
    """The answer to the next search is what it was in the middle of an upsert that ``meanwhile`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None
        self._ask: Callable[[], list[Candidate]] | None = None
        self._halfway: list[Candidate] = []

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        super().upsert(ref, entries[: len(entries) // 2])
        if self._ask is not None:
            self._halfway, self._ask = self._ask(), None
        super().upsert(ref, entries[len(entries) // 2 :])

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        if self.meanwhile is None:
            return super().search(ref, vector, k, acl)
        meanwhile, self.meanwhile = self.meanwhile, None
        self._ask = lambda: MemoryIndex.search(self, ref, vector, k, acl)
        meanwhile()
        return self._halfway


def test_a_search_in_the_middle_of_the_upsert_of_a_document_that_only_grew_is_asked_again(
    make_flow: Callable[..., Flow],
) -> None:
    """Nothing that it found fell out: the old chunks are current, and so is the half of the new ones that was there."""
    index = HalfwayIndex()
    flow = make_flow({"a.md": article("a", 1)}, index=index)
    flow.sync()
    flow.memory.put("a.md", article("a", 3))
    index.meanwhile = flow.sync
    shown = "".join(h.text for h in flow.hits("aword0x1", 20))
    assert flow.document("a.md").current_ver == 2
    assert [f"aword{n}x9" in shown for n in range(3)] in ([True, False, False], [True, True, True])


def test_a_purge_during_a_question_to_the_past_is_told_and_tears_nothing(
    make_flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the version that was current then, the purge leaves the chunk that the newer one shares."""
    flow = make_flow({"a.md": article("a", 2)})
    flow.sync()
    flow.memory.put("a.md", article("a", 2).replace("aword1x7", "novelty"))
    flow.sync()
    shift(flow, flow.document("a.md").id, -60)
    (old,) = flow.execute("SELECT from_at AS at FROM kb_publication WHERE space_id = %(space)s AND version = 1")
    read = past._hits

    def purge_first(*args: Any) -> tuple[Hit, ...]:
        purge(flow.engine, replace(flow.space, retained_versions=1), keep=timedelta(0))
        return read(*args)

    monkeypatch.setattr(past, "_hits", purge_first)
    with pytest.raises(Rejected) as told:
        past.as_of(flow.engine, flow.space, "aword1x7", old.at, k=20)
    assert told.value.code == "purged"
