"""kb_index: what serves, what follows it, and what a following one must still be given."""

from datetime import UTC, datetime, timedelta

import pytest

from kb_pipeline.errors import Misconfigured
from kb_pipeline.store import embeddings, indexes, retention, spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.indexes import Made
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.interleaving import Begun
from kb_pipeline_tests.store.shelf import Shelf

KEEP = 3600.0


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def other_model(shelf: Shelf, dimension: int = 64) -> Made:
    with transaction(shelf.pool) as c:
        model = spaces.ensure_model(c, f"another:{dimension}:{shelf.space.id}", dimension)
    return Made("elsewhere", {"shards": 1}, model, "hashing", {"dimension": dimension})


def begun(shelf: Shelf, made: Made) -> int:
    with transaction(shelf.pool) as c:
        return indexes.begin(c, shelf.space.id, made)


def switch(shelf: Shelf, index: int, keep: float = KEEP) -> bool:
    with transaction(shelf.pool) as c:
        indexes.base_done(c, index, 0)
        spaces.lock_exclusive(c, shelf.space.id)
        return indexes.switch(c, shelf.space.id, index, keep)


def states(shelf: Shelf) -> list[tuple[int, str, bool]]:
    with transaction(shelf.pool) as c:
        return [(i.ref.index_id, i.status, i.building) for i in indexes.living(c, shelf.space.id)]


def test_one_index_of_a_space_is_built_at_a_time(shelf: Shelf) -> None:
    made = other_model(shelf)
    begun(shelf, made)
    with pytest.raises(Misconfigured) as e:
        begun(shelf, other_model(shelf, 32))
    assert e.value.code == "already_building"


def test_none_is_begun_for_a_space_that_is_being_removed(shelf: Shelf) -> None:
    made = other_model(shelf)
    with transaction(shelf.pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETING' WHERE id = %s", [shelf.space.id])
    with pytest.raises(Misconfigured) as e:
        begun(shelf, made)
    assert e.value.code == "no_space"


def test_the_space_says_what_serves_it(shelf: Shelf) -> None:
    first, made = shelf.index().index_id, other_model(shelf)
    second = begun(shelf, made)
    assert states(shelf) == [(first, "SERVING", False), (second, "FOLLOWING", True)]
    assert switch(shelf, second)
    assert states(shelf) == [(second, "SERVING", False), (first, "FOLLOWING", False)]
    row = shelf.rows("SELECT model_id, index_kind, index_options, embedder_options FROM kb_space WHERE id = %(space)s")[0]
    assert tuple(row) == (made.model_id, "elsewhere", {"shards": 1}, {"dimension": 64})


def test_options_of_an_index_that_only_follows_are_not_the_spaces(shelf: Shelf) -> None:
    made = other_model(shelf)
    second = begun(shelf, made)
    with transaction(shelf.pool) as c:
        indexes.restate(c, second, Made("elsewhere", {"shards": 2}, made.model_id, "hashing", {"dimension": 64}))
        assert (found := indexes.by_id(c, second)) is not None and found.ref.options == {"shards": 2}
    assert shelf.value("SELECT model_id FROM kb_space WHERE id = %(space)s") == shelf.space.model_id


def test_the_base_is_what_is_current_in_pages(shelf: Shelf) -> None:
    doc = shelf.published("a", "stays", "goes")
    shelf.edited(doc, "stays", "comes")
    other = shelf.published("b", "one", "two")
    index = begun(shelf, other_model(shelf))
    found, after = [], 0
    with transaction(shelf.pool) as c:
        while True:
            n, after = indexes.base(c, shelf.space.id, shelf.shard, index, after, 3)
            found.append(n)
            if n < 3:
                break
        listed = {(t.doc_id, t.chunk_id) for t in indexes.todo(c, index, (0, 0), 100)}
        assert indexes.todo_left(c, index) == 4
    assert found == [3, 1]
    assert listed == {(d, r.id) for d in (doc, other) for r in shelf.states(d) if r.in_current}


def test_a_publication_leaves_a_note_and_a_tombstone_for_each_that_follows(shelf: Shelf) -> None:
    first = shelf.index().index_id
    doc = shelf.published("a", "stays", "goes")
    second = begun(shelf, other_model(shelf))
    shelf.edited(doc, "stays", "comes")
    (came,) = [r.id for r in shelf.states(doc) if r.content == "comes"]
    with transaction(shelf.pool) as c:
        assert [t.chunk_id for t in indexes.todo(c, second, (0, 0), 100)] == [came]
        assert indexes.todo_left(c, first) == 0
    stones = shelf.rows("SELECT index_id FROM vector_tombstone WHERE space_id = %(space)s ORDER BY 1")
    assert [r.index_id for r in stones] == [first, second]
    with transaction(shelf.pool) as c:
        assert indexes.give_up(c, second)
        indexes.dropped(c, second)
    stones = shelf.rows("SELECT index_id FROM vector_tombstone WHERE space_id = %(space)s")
    assert [r.index_id for r in stones] == [first]
    assert shelf.value("SELECT count(*) FROM kb_index_todo WHERE index_id = %(index)s", index=second) == 0


def test_a_former_index_is_kept_until_its_time_is_over(shelf: Shelf) -> None:
    second = begun(shelf, other_model(shelf))
    with transaction(shelf.pool) as c:
        assert indexes.keep(c, second, KEEP) is False  # it never served
    switch(shelf, second)
    with transaction(shelf.pool) as c:
        assert indexes.expire(c, shelf.space.id) == 0
        c.execute(
            "UPDATE kb_index SET keep_until = '2020-01-01' WHERE space_id = %s AND status = 'FOLLOWING'", [shelf.space.id]
        )
        assert indexes.expire(c, shelf.space.id) == 1
        assert len(indexes.dropping(c, shelf.space.id)) == 1
    assert states(shelf) == [(second, "SERVING", False)]


def test_nobody_switches_to_what_is_given_up(shelf: Shelf) -> None:
    first, second = shelf.index().index_id, begun(shelf, other_model(shelf))
    with transaction(shelf.pool) as c:
        indexes.base_done(c, second, 0)
        assert indexes.give_up(c, second)
    assert switch(shelf, second) is False
    assert shelf.index().index_id == first
    with transaction(shelf.pool) as c:
        assert indexes.give_up(c, first) is False  # what serves is never given up


def retired(shelf: Shelf) -> Made:
    """The model of an index that served and is dropped, with a cached vector."""
    made = other_model(shelf)
    first, second = shelf.index().index_id, begun(shelf, made)
    assert switch(shelf, second)
    with transaction(shelf.pool) as c:
        indexes.want_again(c, first)
    assert switch(shelf, first, 0.0)
    with transaction(shelf.pool) as c:
        indexes.give_up(c, second)
        indexes.dropped(c, second)
        token = embeddings.new_token(c)
        embeddings.claim(c, made.model_id, [b"h" * 32], 60, token)
        embeddings.store(c, made.model_id, token, {b"h" * 32: b"\0" * 128})
    return made


def test_the_vectors_of_a_model_that_is_built_again_are_not_forgotten(shelf: Shelf) -> None:
    made, later = retired(shelf), datetime.now(UTC) + timedelta(days=1)
    with transaction(shelf.pool) as c:
        assert retention.retired_models(c, shelf.space.id, later) == [made.model_id]
    begun(shelf, made)
    with transaction(shelf.pool) as c:
        assert retention.forget_retired(c, made.model_id, later, 100) == 0


def test_whoever_builds_a_model_again_waits_for_what_is_being_forgotten(shelf: Shelf) -> None:
    made, later = retired(shelf), datetime.now(UTC) + timedelta(days=1)
    with transaction(shelf.pool) as c:
        assert retention.forget_retired(c, made.model_id, later, 100) == 1
        builder = Begun(shelf.pool, lambda: begun(shelf, made))
        assert states(shelf) == [(shelf.index().index_id, "SERVING", False)]
    assert builder.result() > 0
