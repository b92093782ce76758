"""Searching by words, and by words and meaning together: fused by rank, and judged by the same join."""

import re
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest

from kb_pipeline.as_of import read_answer, replay
from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Candidate, IndexRef, Mode
from kb_pipeline.ports import IndexCapabilities
from kb_pipeline.search import fused, search
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class WordedIndex(MemoryIndex):
    """Finds by whole words of text and title."""

    capabilities = IndexCapabilities(named=True, keyword=True)

    def keyword(self, ref: IndexRef, text: str, k: int, acl: Sequence[int] | None) -> list[Candidate]:
        asked = words(text)
        shared = [(len(asked & words(f"{e.title} {e.text}")), e) for e in self._rows(ref).values()]
        best = sorted(((n, e) for n, e in shared if n), key=lambda x: (-x[0], x[1].vec_id))[:k]
        return [Candidate(e.vec_id, e.chunk_id, e.doc_id, float(n)) for n, e in best]


@pytest.fixture(params=["memory", "pgvector"])
def worded(make_flow: Callable[..., Flow], request: pytest.FixtureRequest) -> Flow:
    flow = make_flow(index=WordedIndex()) if request.param == "memory" else make_flow(index_options={"keyword": True})
    flow.memory.put("a.md", "# Backup\n\nErrors are told as KB-4711 there.")
    flow.memory.put("b.md", "# Restore\n\nThe backup of a table is restored.")
    flow.memory.put("c.md", "# Lunch\n\nSoup on Tuesdays.")
    flow.sync()
    return flow


def names(flow: Flow, question: str, mode: Mode, k: int = 3) -> list[str]:
    return [h.external_id for h in search(flow.engine, flow.space, question, k=k, mode=mode).hits]


def test_words_find_an_exact_term_and_nothing_that_lacks_it(worded: Flow) -> None:
    assert names(worded, "KB-4711", Mode.KEYWORD) == ["a.md"]
    assert names(worded, "unheard", Mode.KEYWORD) == []


def test_an_entry_has_the_text_of_its_chunk_and_its_headings(worded: Flow) -> None:
    filler = " ".join(f"word{n}" for n in range(300))
    worded.memory.put("d.md", f"# Archive\n\n{filler}\n\n## Codes\n\nKB-5000 {filler}")
    worded.sync()
    hits = search(worded.engine, worded.space, "codes", mode=Mode.KEYWORD).hits
    below = [h for h in hits if "Codes" not in h.text]
    assert below and all("Codes" in h.title_path for h in below)
    assert set(names(worded, "archive", Mode.KEYWORD)) == {"d.md"}


def test_both_together_find_what_either_finds(worded: Flow) -> None:
    answer = search(worded.engine, worded.space, "KB-4711", k=3, mode=Mode.HYBRID)
    assert answer.hits[0].external_id == "a.md"
    assert {h.external_id for h in answer.hits} == {"a.md", "b.md", "c.md"}
    assert answer.mode is Mode.HYBRID
    assert answer.hits[0].score == pytest.approx(2 / 61, abs=1e-6)  # the first by both


def test_an_old_version_is_not_found_by_its_words(worded: Flow) -> None:
    worded.memory.put("a.md", "# Backup\n\nErrors are told as KB-9999 there.")
    worded.sync()
    assert names(worded, "4711", Mode.KEYWORD) == []
    assert names(worded, "KB-9999", Mode.KEYWORD) == ["a.md"]


def test_what_is_revoked_hidden_or_deleted_is_not_found_by_its_words(worded: Flow) -> None:
    worded.memory.put("d.md", "# Plans\n\nThe codename is zanzibar.", acl=(("team",),))
    worded.memory.put("e.md", "# Dinner\n\nNone.")
    worded.sync()
    both = [Mode.KEYWORD, Mode.HYBRID]

    def found(*principals: str) -> list[bool]:
        answers = [search(worded.engine, worded.space, "zanzibar", mode=m, principals=principals) for m in both]
        return ["d.md" in [h.external_id for h in a.hits] for a in answers]

    assert (found("team"), found()) == ([True, True], [False, False])
    worded.memory.put("d.md", "# Plans\n\nThe codename is zanzibar.", acl=(("board",),))
    worded.walk()
    assert (found("team"), found("board")) == ([False, False], [True, True])
    worded.memory.remove("d.md")
    worded.walk()
    assert found("board") == [False, False]
    worded.sync()
    assert found("board") == [False, False]


def test_an_index_without_words_says_so(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(index=MemoryIndex())
    with pytest.raises(Misconfigured, match="does not search by words") as e:
        names(flow, "anything", Mode.KEYWORD)
    assert e.value.code == "no_keyword_search"


def test_the_way_to_words_is_named(flow: Flow) -> None:
    flow.sync()
    with pytest.raises(Misconfigured, match="kb space set SPACE index.keyword=true"):
        names(flow, "anything", Mode.KEYWORD)


def test_an_answer_by_words_is_shown_again_and_not_ranked_again(worded: Flow) -> None:
    given = search(worded.engine, worded.space, "KB-4711", mode=Mode.KEYWORD)
    assert given.answer_id is not None
    space, logged, shown = read_answer(worded.engine, given.answer_id)
    assert (shown.mode, [h.external_id for h in shown.hits]) == (Mode.KEYWORD, ["a.md"])
    with pytest.raises(Misconfigured, match="found by keyword search"):
        replay(worded.engine, space, logged, shown)


def test_fusion_adds_what_each_rank_is_worth() -> None:
    a, b, c = (Candidate(UUID(int=n), n, 1, 0.5) for n in (1, 2, 3))
    found = fused([[a, b], [b, c]])
    assert [x.chunk_id for x in found] == [2, 1, 3]
    assert found[0].score == pytest.approx(1 / 62 + 1 / 61)
    assert found[1].score == pytest.approx(1 / 61)
