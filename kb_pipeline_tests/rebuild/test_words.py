"""Words for a space that had none, and without them again: built beside, complete before they are offered, nothing embedded."""

from collections.abc import Callable
from typing import Any

import pytest

from kb_pipeline.errors import Misconfigured, Transient
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Json, Mode
from kb_pipeline.search import search
from kb_pipeline.store.indexes import Index
from kb_pipeline_tests.flow.scenario import article
from kb_pipeline_tests.rebuild.conftest import OTHER, Change

WORDS: Json = {"keyword": True}
TREES = ("alder", "birch", "cedar", "larch", "maple", "willow")


@pytest.fixture
def change(make_change: Callable[[], Change]) -> Change:
    """Six documents, each with a word that only it has."""
    made = make_change()
    for n, tree in enumerate(TREES):
        put(made, n, tree)
    made.sync()
    return made


def put(change: Change, number: int, tree: str) -> None:
    change.memory.put(f"{number}.md", f"{article(f'word{number}', 4, tag=f't{number}')}\n\n{tree}")


def to_words(change: Change, **options: Any) -> bool:
    return change.app.change_index(change.space, index_options={**WORDS, **options})


def without(change: Change) -> bool:
    return change.app.change_index(change.space, index_options={})


def found(change: Change, word: str, mode: Mode = Mode.KEYWORD) -> set[str]:
    return {h.external_id for h in search(change.engine, change.space, word, k=20, mode=mode).hits}


def words(change: Change, index: Index) -> set[Any]:
    return {r.vec_id for r in change.execute("SELECT vec_id FROM kb_words WHERE index_id = %(id)s", id=index.ref.index_id)}


def equal(change: Change) -> None:
    """Every living index has exactly what is current, and words where it says so."""
    collect_vectors(change.engine, change.space)
    for index in change.living():
        report = reconcile(change.engine, change.space, index=index, repair=False)
        assert (report.missing, report.wrong, report.orphaned) == (0, 0, 0), index
        assert change.held(index) == change.current()
        assert words(change, index) == (change.current() if index.ref.options.get("keyword") else set())


def test_a_space_gets_words_and_loses_them_without_an_embedding(change: Change) -> None:
    asked = change.asked_first()
    assert to_words(change) is True
    with pytest.raises(Misconfigured):
        found(change, "larch")
    report = change.build()
    assert (report.embedded, report.chunks, report.agreement) == (0, len(change.current()), 1.0)
    assert found(change, "larch") == {"3.md"}
    equal(change)
    assert without(change) is True
    assert change.build().chunks == 0  # the former one has followed
    with pytest.raises(Misconfigured):
        found(change, "larch")
    assert found(change, "larch", Mode.VECTOR)
    equal(change)
    assert change.asked_first() == asked


def test_other_options_of_an_index_with_words_hold_in_place(change: Change) -> None:
    to_words(change)
    change.build()
    assert to_words(change, ef_search=200) is False
    assert change.serving().options == {"keyword": True, "ef_search": 200}
    assert found(change, "larch") == {"3.md"}


def test_a_build_of_words_that_ended_goes_on(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    to_words(change)
    original, times = rebuild._bring, [0]

    def bring(*arguments: Any) -> Any:
        times[0] += 1
        if times[0] == 2:
            raise Transient("away", code="index_down")
        return original(*arguments)

    monkeypatch.setattr(rebuild, "BATCH", 5)
    monkeypatch.setattr(rebuild, "_bring", bring)
    with pytest.raises(Transient):
        change.build()
    _, building = change.living()
    assert 0 < len(words(change, building)) < len(change.current())
    assert change.build().embedded == 0
    assert found(change, "larch") == {"3.md"}
    equal(change)


def test_what_is_published_and_deleted_meanwhile_is_so_in_both(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    to_words(change)
    compare = rebuild._compare

    def meanwhile(*arguments: Any) -> None:
        compare(*arguments)
        put(change, 3, "novelty")
        change.memory.remove("5.md")
        change.sync()

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "_compare", meanwhile)
        change.build()
    assert (found(change, "novelty"), found(change, "larch"), found(change, "willow")) == ({"3.md"}, set(), set())
    put(change, 4, "later")
    change.sync()
    assert (found(change, "later"), found(change, "maple")) == ({"4.md"}, set())
    equal(change)


@pytest.mark.parametrize("to", ["model", "other", "none"])
def test_words_are_gone_when_the_index_that_had_them_is_dropped(change: Change, to: str) -> None:
    to_words(change)
    change.build()
    change.execute("UPDATE kb_index SET keep_until = clock_timestamp() WHERE space_id = %(space)s AND status = 'FOLLOWING'")
    purge(change.engine, change.space)
    had = change.living()[0]
    {"model": lambda: change.to_model(64), "other": change.to_other, "none": lambda: without(change)}[to]()
    change.build()
    if to == "model":
        assert found(change, "larch") == {"3.md"}
    change.execute("UPDATE kb_index SET keep_until = clock_timestamp() WHERE space_id = %(space)s AND status = 'FOLLOWING'")
    purge(change.engine, change.space)
    assert [i.ref.kind for i in change.living()] == [OTHER if to == "other" else "pgvector"]
    assert words(change, had) == set()
    if to == "model":
        equal(change)


def test_what_is_lost_of_vectors_and_words_is_repaired_together(change: Change) -> None:
    to_words(change)
    change.build()
    index = change.living()[0]
    lost = sorted(change.current())[:3]
    change.engine.index(index.ref).delete(index.ref, lost)
    assert not set(lost) & words(change, index)
    assert reconcile(change.engine, change.space).repaired == 3
    equal(change)
