"""Another index or model beside the serving one: complete before it serves, in one step, and back again."""

from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from kb_pipeline.as_of import as_of, read_answer, replay
from kb_pipeline.errors import Misconfigured, Rejected, StateError, Transient
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import IndexRef
from kb_pipeline.nodes import index as indexer
from kb_pipeline.search import search
from kb_pipeline.store import indexes, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline_tests.flow.scenario import article
from kb_pipeline_tests.interleaving import Begun
from kb_pipeline_tests.rebuild.conftest import OTHER, Change


def equal(change: Change) -> None:
    """Every living index holds exactly what is current."""
    collect_vectors(change.engine, change.space)
    for index in change.living():
        found = reconcile(change.engine, change.space, index=index, repair=False)
        assert (found.missing, found.wrong, found.orphaned) == (0, 0, 0), index
        assert change.held(index) == change.current()
        assert change.all_held(index) == len(change.current())


def test_another_kind_gets_every_vector_from_the_cache(change: Change) -> None:
    asked = change.asked_first()
    assert change.to_other() is True
    assert change.serving().kind == "pgvector"
    report = change.build()
    assert (report.kind, report.embedded, report.chunks) == (OTHER, 0, len(change.current()))
    assert report.agreement is not None and report.agreement > 0.9
    assert change.serving().kind == OTHER
    assert change.asked_first() == asked
    assert change.found("word3")
    equal(change)


def test_another_model_embeds_every_text_once(change: Change) -> None:
    assert change.to_model(64) is True
    report = change.build()
    assert report.embedded == len(change.current())
    assert set(change.app.models[64].texts.values()) == {1}
    assert (change.space.dimension, change.serving().dimension) == (64, 64)
    assert change.found("word3")
    equal(change)


def test_the_former_index_follows_and_serves_again_without_an_embedding(change: Change) -> None:
    change.to_other()
    change.build()
    change.memory.put("3.md", article("novelty", 4, tag="n"))
    change.memory.remove("5.md")
    change.sync()
    equal(change)
    asked = change.asked_first()
    rebuild.back(change.engine, change.space)
    assert change.build().embedded == 0
    assert (change.serving().kind, change.asked_first()) == ("pgvector", asked)
    assert change.showing("novelty1x1") or change.found("novelty")
    equal(change)


def test_the_former_model_follows_too(change: Change) -> None:
    change.to_model(64)
    change.build()
    change.memory.put("3.md", article("novelty", 4, tag="n"))
    change.sync()
    assert set(change.app.models[change.first].texts.values()) == {1}
    rebuild.back(change.engine, change.space)
    assert change.build().embedded == 0
    assert change.space.dimension == change.first
    equal(change)


def test_the_former_index_is_taken_up_again_when_it_is_named(change: Change) -> None:
    change.to_other()
    change.build()
    former = change.living()[1].ref.index_id
    assert change.app.change_index(change.space, index="pgvector") is True
    assert change.build().chunks == 0
    assert change.serving().index_id == former


def test_what_is_so_already_builds_nothing_and_takes_new_options_in_place(change: Change) -> None:
    assert change.app.change_index(change.space) is False
    assert change.app.change_index(change.space, index_options={"ef_search": 200}) is False
    (only,) = change.living()
    assert only.ref.options == {"ef_search": 200}
    change.again()
    assert change.space.index_options == {"ef_search": 200}


def test_one_is_built_at_a_time_and_the_same_wish_goes_on(change: Change) -> None:
    assert change.to_other() is True
    assert change.to_other() is True
    assert len(change.living()) == 2
    with pytest.raises(Misconfigured) as e:
        change.to_model(64)
    assert e.value.code == "already_building"


# --- published meanwhile ------------------------------------------------------------------------------------------------


def test_what_is_published_between_the_steps_is_in_the_next_index(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the row, after the base, and after everything was given: each is left a note."""
    change.to_other()
    steps = iter(("a", "b"))

    def publish(name: str) -> None:
        change.memory.put(f"{name}.md", article(f"late{name}", 3, tag=name))
        change.memory.put("1.md", article(f"again{name}", 3, tag=f"x{name}"))
        change.sync()

    publish("before")
    original = rebuild._compare

    def compare(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        publish(next(steps))

    monkeypatch.setattr(rebuild, "_compare", compare)
    change.build()
    assert {"before.md", "a.md"} <= change.found("late", 50)
    assert change.todo() == 0
    equal(change)


def test_a_publication_that_began_before_the_row_is_waited_for(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not see that somebody follows, so its chunks must be in the base."""
    change.memory.put("late.md", article("latecomer", 3, tag="l"))
    publishing, go_on = Event(), Event()
    publish = indexer._publish

    def held(*arguments: object) -> object:
        done = publish(*arguments)  # type: ignore[arg-type]
        publishing.set()
        assert go_on.wait(60)
        return done

    monkeypatch.setattr(indexer, "_publish", held)
    with change.beside(change.sync):
        assert publishing.wait(60)
        change.to_other()
        builder = Begun(change.app.pool, lambda: change.app.build_index(change.space))
        go_on.set()
        monkeypatch.undo()
        builder.result()
    change.again()
    assert change.found("latecomer") >= {"late.md"}
    equal(change)


@pytest.mark.parametrize("other_model", [False, True])
def test_a_version_that_was_verified_in_the_former_index_is_published_in_the_new_one(
    change: Change, monkeypatch: pytest.MonkeyPatch, other_model: bool
) -> None:
    change.memory.put("3.md", article("moved", 4, tag="m"))
    commit, switched = indexer.commit, []

    def late(*arguments: object, **options: object) -> object:
        if not switched:
            switched.append(change.to_model(64) if other_model else change.to_other())
            change.app.build_index(change.space)
        return commit(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(indexer, "commit", late)
    change.sync()
    change.again()
    assert switched == [True]
    assert change.found("moved") >= {"3.md"}
    equal(change)
    tried = change.execute("SELECT max(retry_count) AS n FROM ingestion_task WHERE space_id = %(space)s")
    assert tried[0].n == 0


def test_a_note_that_was_made_again_meanwhile_stays(change: Change) -> None:
    change.to_other()
    with transaction(change.app.pool) as c:
        index = next(i.ref.index_id for i in indexes.living(c, change.space.id) if i.building)
        shard = spaces.lock_shared(c, change.space)
        indexes.base(c, change.space.id, shard or 0, index, 0, 10)
        (first, *_) = indexes.todo(c, index, (0, 0), 10)
        c.execute(
            "UPDATE kb_index_todo SET seq = nextval('kb_todo_seq') WHERE index_id = %s AND chunk_id = %s",
            [index, first.chunk_id],
        )
        indexes.done(c, index, [first])
        assert first.chunk_id in {t.chunk_id for t in indexes.todo(c, index, (0, 0), 10)}


def test_nothing_serves_that_still_lacks_something(change: Change) -> None:
    change.to_other()
    with transaction(change.app.pool) as c:
        index = next(i.ref.index_id for i in indexes.living(c, change.space.id) if i.building)
        assert indexes.switch(c, change.space.id, index, 60) is False  # its base is not even listed
        indexes.base_done(c, index, 0)
        c.execute("INSERT INTO kb_index_todo (index_id, doc_id, chunk_id) VALUES (%s, 1, 1)", [index])
        assert indexes.switch(c, change.space.id, index, 60) is False
    assert change.serving().kind == "pgvector"


# --- searches never fail or mix ---------------------------------------------------------------------------------------------


def test_a_reader_that_never_stops_meets_no_error_no_gap_and_no_mixture(change: Change) -> None:
    ended, seen = Event(), [0]

    def read() -> int:
        space = change.space  # as a process that looked it up once
        while not ended.is_set():
            found = search(change.engine, space, "word2word1x2", k=5)
            assert {"2.md"} <= {h.external_id for h in found.hits}
            seen[0] += 1
        return seen[0]

    with change.beside(read) as result:
        change.to_model(64)
        change.build()
        rebuild.back(change.engine, change.space)
        change.build()
        change.to_other()
        change.build()
        ended.set()
    assert result == [seen[0]] and seen[0] > 5


def test_a_search_that_began_by_one_model_ends_by_the_other(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    port = change.engine.index(change.serving())
    real, switched = port.search, []

    def gone(ref: IndexRef, *arguments: Any) -> Any:
        if switched:
            return real(ref, *arguments)
        switched.append(change.to_model(64))
        change.app.build_index(change.space)
        raise StateError(f"index {ref.name} is gone", code="index_gone")

    monkeypatch.setattr(port, "search", gone)
    assert "2.md" in {h.external_id for h in search(change.engine, change.space, "word2", k=5).hits}
    assert switched == [True]


# --- trouble ----------------------------------------------------------------------------------------------------------------


def test_an_index_that_is_down_leaves_the_serving_one_alone_and_is_gone_on_with(change: Change) -> None:
    change.app.other.down = True
    change.to_other()
    with pytest.raises(Transient):
        change.app.build_index(change.space)
    assert change.living()[1].error == "index_down: vector index: down"
    assert change.found("word3")
    change.app.other.down = False
    change.build()
    assert change.living()[0].error is None
    equal(change)


def test_an_index_that_lies_never_serves(change: Change) -> None:
    change.app.other.drops_upserts = True
    change.to_other()
    with pytest.raises(Transient) as e:
        change.app.build_index(change.space)
    assert e.value.code == "index_behind"
    assert (change.serving().kind, change.todo()) == ("pgvector", len(change.current()))
    change.app.other.drops_upserts = False
    change.build()
    equal(change)


def test_an_index_that_loses_what_it_had_is_found_out_before_it_serves(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change.to_other()
    settle = change.app.other.settle

    def lose(ref: object) -> bool:
        rows = change.app.other.indexes[ref.name]  # type: ignore[attr-defined]
        for vec_id in sorted(rows)[:3]:
            del rows[vec_id]
        return settle(ref)  # type: ignore[arg-type]

    monkeypatch.setattr(change.app.other, "settle", lose)
    change.build()
    equal(change)


def test_one_that_is_given_up_leaves_nothing(change: Change) -> None:
    change.to_other()
    with transaction(change.app.pool) as c:
        ref = next(i.ref for i in indexes.living(c, change.space.id) if i.building)
    change.app.other.ensure(ref)
    change.memory.put("1.md", article("fresh", 3, tag="f"))
    change.sync()
    assert change.todo() > 0
    rebuild.cancel(change.engine, change.space, keep_seconds=60)
    assert ref.name in change.app.other.dropped and ref.name not in change.app.other.indexes
    left = change.execute(
        "SELECT (SELECT count(*) FROM kb_index_todo WHERE index_id = %(index)s) + (SELECT count(*) FROM vector_tombstone "
        "WHERE index_id = %(index)s) AS n",
        index=ref.index_id,
    )
    assert left[0].n == 0 and [i.status for i in change.living()] == ["SERVING"]
    with pytest.raises(Misconfigured):
        change.build()


def test_a_way_back_that_is_given_up_keeps_the_former_index(change: Change) -> None:
    change.to_other()
    change.build()
    rebuild.back(change.engine, change.space)
    rebuild.cancel(change.engine, change.space, keep_seconds=60)
    assert [i.ref.kind for i in change.living()] == [OTHER, "pgvector"]
    assert not any(i.building for i in change.living())
    equal(change)


def test_a_former_index_is_dropped_when_its_time_is_over(change: Change) -> None:
    change.to_other()
    change.build()
    former = change.living()[1].ref
    assert purge(change.engine, change.space).indexes == 0
    change.execute("UPDATE kb_index SET keep_until = clock_timestamp() WHERE id = %(id)s", id=former.index_id)
    assert purge(change.engine, change.space).indexes == 1
    assert [i.ref.kind for i in change.living()] == [OTHER]
    with pytest.raises(Misconfigured, match="no former index is kept"):
        rebuild.back(change.engine, change.space)
    rows = change.execute(f"SELECT count(*) AS n FROM kb_vector_m{former.model_id} WHERE index_id = %(id)s", id=former.index_id)
    assert rows[0].n == 0
    equal(change)


def test_vectors_of_a_model_that_served_once_are_forgotten_later(change: Change) -> None:
    old = change.space.model_id
    change.to_model(64)
    change.build()
    cached = "SELECT count(*) AS n FROM kb_embedding WHERE model_id = %(model)s"
    change.execute("UPDATE kb_index SET keep_until = clock_timestamp() WHERE space_id = %(space)s AND status = 'FOLLOWING'")
    purge(change.engine, change.space)
    assert change.execute(cached, model=old)[0].n > 0  # answers of that time may be asked for
    change.execute(
        "UPDATE kb_index SET keep_until = '2020-01-01', created_at = '2020-01-01' WHERE space_id = %(space)s AND status = 'DROPPED'"
    )
    change.execute("UPDATE kb_embedding SET last_used = '2020-01-01'")
    purge(change.engine, change.space)
    assert change.execute(cached, model=old)[0].n == 0
    assert change.execute(cached, model=change.space.model_id)[0].n > 0


@pytest.mark.parametrize("built", [False, True])
def test_a_space_is_deleted_with_all_its_indexes_and_models(change: Change, built: bool) -> None:
    change.to_model(64)
    if built:
        change.build()
        change.to_other()
    texts = change.execute("SELECT content_hash FROM kb_chunk WHERE space_id = %(space)s")
    assert set(delete_space(change.engine, change.space).values()) == {0}
    for table in change.execute("SELECT relname AS name FROM pg_class WHERE relname ~ '^kb_vector_m[0-9]+$'"):
        assert change.execute(f"SELECT count(*) AS n FROM {table.name} WHERE space_id = %(space)s")[0].n == 0
    left = "SELECT count(*) AS n FROM kb_embedding WHERE content_hash = ANY(%(hashes)s)"
    assert texts and change.execute(left, hashes=[r.content_hash for r in texts])[0].n == 0


def test_two_builders_at_once_end_with_one_switch(change: Change) -> None:
    change.to_model(64)
    with change.beside(lambda: change.app.build_index(change.space)) as other:
        change.build()
    assert not isinstance(other[0], BaseException) or getattr(other[0], "code", "") == "nothing_building"
    assert [i.status for i in change.living()] == ["SERVING", "FOLLOWING"]
    assert set(change.app.models[64].texts.values()) == {1}
    equal(change)


# --- the past of another model ------------------------------------------------------------------------------------------------


def test_the_past_before_a_change_of_model_is_ranked_by_the_former_one(change: Change) -> None:
    given = search(change.engine, change.space, "word3", k=3)
    at = change.execute("SELECT clock_timestamp() AS at")[0].at
    change.memory.put("3.md", article("novelty", 4, tag="n"))
    change.sync()  # what was current then and is not now will never be embedded by the next model
    change.to_model(64)
    change.build()
    change.execute(
        "UPDATE kb_publication SET from_at = from_at - interval '1 hour', to_at = to_at - interval '1 hour' WHERE space_id = %(space)s"
    )
    then = as_of(change.engine, change.space, "word3", at - timedelta(hours=1), k=3)
    assert [h.chunk_id for h in then.hits] == [h.chunk_id for h in given.hits]
    assert [h.score for h in then.hits] == pytest.approx([h.score for h in given.hits], abs=2e-3)
    change.execute("DELETE FROM kb_embedding WHERE model_id <> %(model)s", model=change.space.model_id)
    with pytest.raises(Rejected) as e:
        as_of(change.engine, change.space, "word3", at - timedelta(hours=1), k=3)
    assert e.value.code == "vectors_missing"


def test_an_answer_is_replayed_by_the_model_that_gave_it(change: Change) -> None:
    given = search(change.engine, change.space, "word3", k=3)
    change.to_model(64)
    change.build()
    assert given.answer_id is not None
    space, logged, shown = read_answer(change.engine, given.answer_id)
    assert replay(change.engine, space, logged, shown).differences == ()
