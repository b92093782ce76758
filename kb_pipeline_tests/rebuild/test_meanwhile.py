"""What happens to documents, indexes and options while the next index is built, or the former one is kept."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from kb_pipeline.cli.space_index import indexes_of
from kb_pipeline.errors import Misconfigured, Rejected, Transient
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.reparse import reparse_space
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.search import search
from kb_pipeline.store import indexes, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.sync import settle
from kb_pipeline_tests.flow.scenario import article
from kb_pipeline_tests.rebuild.conftest import OTHER, Change
from kb_pipeline_tests.rebuild.test_rebuild import equal


class NotYet(Exception):
    """Stands for whatever ends a builder."""


@pytest.fixture
def filled(change: Change, monkeypatch: pytest.MonkeyPatch) -> Change:
    """The other index was given everything, and its builder ended before it served."""

    def end(*_: object) -> None:
        raise NotYet

    change.to_other()
    with monkeypatch.context() as patched:
        patched.setattr(rebuild, "_compare", end)
        with pytest.raises(NotYet):
            change.app.build_index(change.space)
    return change


def tombstones(change: Change) -> dict[int, set[UUID]]:
    rows = change.execute("SELECT index_id, vec_id FROM vector_tombstone WHERE space_id = %(space)s")
    return {i: {r.vec_id for r in rows if r.index_id == i} for i in {r.index_id for r in rows}}


# --- deleted ----------------------------------------------------------------------------------------------------------------


def test_what_leaves_while_an_index_is_built_is_erased_in_both(filled: Change) -> None:
    first, second = (i.ref.index_id for i in filled.living())
    before = filled.current()
    filled.memory.remove("5.md")
    filled.memory.put("1.md", article("novelty", 2, tag="n"))
    filled.walk()
    filled.ingest()
    left = before - filled.current()
    assert left and tombstones(filled) == {first: left, second: left}
    assert collect_vectors(filled.engine, filled.space) == 2 * len(left)
    assert tombstones(filled) == {}
    filled.build()
    equal(filled)
    assert filled.showing("t1x5word0x1") == set() and "1.md" in filled.found("novelty")


def test_an_index_that_keeps_what_it_was_told_to_erase_holds_up_only_its_own_tombstones(filled: Change) -> None:
    _, second = (i.ref.index_id for i in filled.living())
    filled.memory.remove("5.md")
    filled.walk()
    filled.app.other.drops_deletes = True
    collect_vectors(filled.engine, filled.space)
    assert tombstones(filled).keys() == {second}
    filled.app.other.drops_deletes = False
    filled.build()
    equal(filled)


def test_what_was_noted_and_is_not_current_any_more_is_not_given(change: Change) -> None:
    change.to_other()
    with transaction(change.app.pool) as c:
        index = next(i.ref.index_id for i in indexes.living(c, change.space.id) if i.building)
        shard = spaces.lock_shared(c, change.space)
        indexes.base(c, change.space.id, shard or 0, index, 0, 1000)
    change.memory.put("4.md", article("novelty", 2, tag="n"))  # its former chunks are retained
    change.memory.remove("5.md")
    change.sync()
    report = change.build()
    assert report.chunks == len(change.current())
    equal(change)


def test_permissions_that_change_meanwhile_are_those_of_both(filled: Change) -> None:
    filled.memory.put("3.md", filled.memory.items["3.md"][1], acl=(("staff",),))
    filled.sync()
    filled.build()
    equal(filled)
    assert filled.found("word3") & {"3.md"} == set()
    assert "3.md" in filled.found("word3", principals=("staff",))


# --- refused ----------------------------------------------------------------------------------------------------------------


def test_an_entry_that_is_refused_is_told_and_costs_no_other(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, upsert = max(change.current()), change.app.other.upsert

    def choosy(ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        if any(e.vec_id == refused for e in entries):
            raise Rejected("a payload that it does not take", code="index_refused")
        upsert(ref, entries)

    change.to_other()
    with monkeypatch.context() as patched:
        patched.setattr(change.app.other, "upsert", choosy)
        with pytest.raises(Transient, match="a payload that it does not take") as e:
            change.app.build_index(change.space)
    assert e.value.code == "index_behind"
    serving, building = indexes_of(change.app, change.space)
    assert (serving["state"], serving["error"]) == ("serving", None)
    assert (building["state"], building["left"]) == ("building", 1)
    assert "a payload that it does not take" in building["error"]
    assert change.found("word3")
    assert change.build().chunks == 1
    assert indexes_of(change.app, change.space)[0]["error"] is None
    equal(change)


def test_a_kept_index_that_is_down_is_told_and_caught_up_with_later(change: Change) -> None:
    change.to_model(64)
    change.build()
    change.to_other()
    change.build()
    rebuild.back(change.engine, change.space)
    change.build()
    change.app.other.down = True
    change.memory.put("3.md", article("novelty", 2, tag="n"))
    change.sync()
    assert "3.md" in change.found("novelty")
    kept = next(i for i in indexes_of(change.app, change.space) if i["kind"] == OTHER)
    assert (kept["state"], kept["error"]) == ("kept", "index_down: vector index: down")
    change.app.other.down = False
    settle(change.engine, change.space, loaded=0)
    equal(change)
    assert [i.error for i in change.living()] == [None] * 3


# --- other options ------------------------------------------------------------------------------------------------------------


def test_an_index_in_this_database_is_taken_up_again_with_other_options(change: Change) -> None:
    """Two of one model would want the same rows."""
    first = change.serving().index_id
    change.to_other()
    change.build()
    assert change.app.change_index(change.space, index="pgvector", index_options={"ef_search": 200}) is True
    change.again()
    assert change.space.index_kind == OTHER  # until the other one serves
    change.build()
    assert (change.serving().index_id, change.serving().options) == (first, {"ef_search": 200})
    assert change.space.index_options == {"ef_search": 200}
    equal(change)


def test_a_drop_that_was_broken_off_is_ended_by_the_next_purge_or_change(change: Change) -> None:
    change.to_other()
    change.build()
    former = change.living()[1].ref
    rebuild.back(change.engine, change.space)
    change.build()
    change.app.other.down = True
    change.execute("UPDATE kb_index SET keep_until = clock_timestamp() WHERE space_id = %(space)s AND status = 'FOLLOWING'")
    assert purge(change.engine, change.space).indexes == 0  # and everything else of it goes on
    change.app.other.down = False
    assert rebuild.drop_former(change.engine, change.space) == 1
    assert rebuild.drop_former(change.engine, change.space) == 0
    with pytest.raises(Misconfigured) as e:
        rebuild.back(change.engine, change.space)
    assert (e.value.code, change.serving().index_id) == ("no_index", former.index_id)
    equal(change)


def test_an_index_that_was_never_reached_is_given_up_without_its_server(change: Change) -> None:
    """A mistyped address: nothing was ever written there."""
    change.app.other.down = True
    change.to_other()
    with pytest.raises(Transient):
        change.app.build_index(change.space)
    rebuild.cancel(change.engine, change.space, keep_seconds=60)
    assert [i.status for i in change.living()] == ["SERVING"]
    change.to_other()
    assert set(delete_space(change.engine, change.space).values()) == {0}


def test_an_index_whose_server_is_down_is_given_up_now_and_dropped_later(change: Change) -> None:
    change.to_other()
    with transaction(change.app.pool) as c:
        ref = next(i.ref for i in indexes.living(c, change.space.id) if i.building)
        indexes.base_done(c, ref.index_id, 0)
    change.app.other.ensure(ref)
    change.app.other.down = True
    rebuild.cancel(change.engine, change.space, keep_seconds=60)
    with pytest.raises(Transient):
        delete_space(change.engine, change.space)
    change.app.other.down = False
    assert set(delete_space(change.engine, change.space).values()) == {0}
    assert ref.name in change.app.other.dropped


def test_a_space_whose_index_cannot_be_made_is_not_there(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change.app.other.down = True
    monkeypatch.setattr("kb_pipeline.wiring.INDEXES", {OTHER: ""})
    with pytest.raises(Transient):
        change.app.add_space("unreachable", index=OTHER)
    assert "unreachable" not in {s.key for s in change.app.spaces()}
    change.app.other.down = False
    assert change.app.add_space("unreachable", index=OTHER).status == "ACTIVE"


def test_what_serves_by_now_is_not_given_up(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change.to_other()
    building = rebuild.being_built(change.engine, change.space)
    change.build()
    monkeypatch.setattr(rebuild, "being_built", lambda *_: building)
    with pytest.raises(Misconfigured, match="serves space"):
        rebuild.cancel(change.engine, change.space, keep_seconds=60)
    assert change.serving().index_id == building.ref.index_id
    equal(change)


# --- chunking -----------------------------------------------------------------------------------------------------------------


def test_other_chunks_replace_each_document_as_a_whole_and_back_again_without_an_embedding(change: Change) -> None:
    """A reader sees a document as it was or as it will be."""
    before = change.chunks()
    ids = {name: change.document(name).id for name in change.memory.items}

    def shown() -> dict[str, set[int]]:
        hits = search(change.engine, change.space, "word", k=1000).hits
        return {name: {h.chunk_id for h in hits if h.document_id == doc} for name, doc in ids.items()}

    def cut_by(**chunking: object) -> None:
        with transaction(change.app.pool) as c:
            spaces.update_space(c, change.space.id, {"chunking": chunking})
        change.again()
        reparse_space(change.engine, change.space)

    old = shown()
    cut_by(max_tokens=32, min_tokens=8)
    seen = []
    while change.ingest(limit=1).tasks:
        seen.append(shown())
    settle(change.engine, change.space, loaded=1)
    new = shown()
    assert all(new[name] and new[name].isdisjoint(old[name]) for name in ids)
    assert all(s[name] in (old[name], new[name]) for s in seen for name in ids)
    assert any(s[name] == old[name] for s in seen for name in ids)
    asked = change.asked_first()
    cut_by()
    change.ingest()
    settle(change.engine, change.space, loaded=1)
    assert (change.chunks(), change.asked_first()) == (before, asked)
    equal(change)


def test_other_chunks_while_another_model_is_built(filled: Change) -> None:
    with transaction(filled.app.pool) as c:
        spaces.update_space(c, filled.space.id, {"chunking": {"max_tokens": 32, "min_tokens": 8}})
    filled.again()
    reparse_space(filled.engine, filled.space)
    filled.ingest()
    filled.build()
    equal(filled)


def test_a_reconciliation_whose_index_stands_down_meanwhile_looks_at_the_one_that_serves(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published after the switch is noted for the former index, and no difference."""
    port, switched = change.engine.index(change.serving()), list[bool]()
    real = port.digest

    def digest(ref: IndexRef) -> Any:
        held = real(ref)
        if not switched:
            switched.append(change.to_other())
            change.build()
            change.memory.put("late.md", article("latecomer", 3, tag="l"))
            change.walk()
            change.ingest()
        return held

    monkeypatch.setattr(port, "digest", digest)
    found = reconcile(change.engine, change.space)
    assert switched == [True]
    assert (found.missing, found.remaining, found.vectors) == (0, 0, len(change.current()))
    retries = change.execute("SELECT count(*) AS n FROM vector_retry WHERE space_id = %(space)s")
    assert retries[0].n == 0
