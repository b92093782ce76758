"""What arrives late for a deleted space goes with the next sweep; nothing of a living one does, nor what is not ours."""

from collections.abc import Callable, Iterable

import pytest

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.sweep import Listing, sweep_removed
from kb_pipeline.model import IndexRef
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article


class ListedIndex(MemoryIndex):
    """One that can say what it holds, as a store with an index of its own for each space can."""

    def names(self) -> Iterable[str]:
        return list(self.indexes)


@pytest.fixture
def living(make_flow: Callable[..., Flow]) -> Flow:
    flow = make_flow({"a.md": article("aa", 2)}, index=ListedIndex())
    flow.sync()
    return flow


def _deleted_neighbour(flow: Flow) -> int:
    space = flow.app.add_space(f"{flow.space.key}-gone")
    assert set(delete_space(flow.engine, space).values()) == {0}
    return space.id


def test_a_late_put_for_a_deleted_space_is_removed_and_a_living_one_keeps_everything(living: Flow) -> None:
    gone = _deleted_neighbour(living)
    kept = dict(living.blobs.objects)
    for key in (f"spaces/{gone}/docs/1/v1/fetcher-a1", f"spaces/{gone}/docs/9/v2/parser-a3", f"spaces/{gone}/export"):
        living.blobs.objects[key] = b"late"
    found = sweep_removed(living.engine)
    assert (found.objects, found.indexes, found.foreign) == (3, 0, 0)
    assert living.blobs.objects == kept
    assert len(kept) == 2
    assert sweep_removed(living.engine).objects == 0
    living.assert_whole()


def test_objects_of_a_space_without_a_row_are_removed(living: Flow) -> None:
    (row,) = living.execute("SELECT nextval(pg_get_serial_sequence('kb_space', 'id')) AS id")  # given out and rolled back
    living.blobs.objects[f"spaces/{row.id}/docs/1/v1/fetcher-a1"] = b"late"
    assert sweep_removed(living.engine).objects == 1


def test_names_that_this_database_never_gave_out_stay(living: Flow) -> None:
    """A wrong database beside the right object store must not empty it."""
    foreign = {f"spaces/{n}/docs/1/v1/fetcher-a1": b"theirs" for n in (987_654, 10**12)} | {"other/file": b"theirs"}
    living.blobs.objects |= foreign
    found = sweep_removed(living.engine)
    assert (found.objects, found.foreign) == (0, 2)
    assert foreign.items() <= living.blobs.objects.items()


def test_a_space_that_is_being_deleted_is_left_to_its_deletion(living: Flow) -> None:
    kept = dict(living.blobs.objects)
    living.execute("UPDATE kb_space SET status = 'DELETING' WHERE id = %(space)s")
    assert sweep_removed(living.engine).objects == 0
    assert living.blobs.objects == kept


def test_a_space_that_comes_while_objects_are_listed_keeps_them(living: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed first, rows read second: its row is older than its objects."""
    listed = living.blobs.keys

    def keys(prefix: str):  # type: ignore[no-untyped-def]
        if prefix == "spaces/":
            space = living.app.add_space(f"{living.space.key}-new")
            living.blobs.objects[f"spaces/{space.id}/docs/1/v1/fetcher-a1"] = b"new"
        return listed(prefix)

    monkeypatch.setattr(living.blobs, "keys", keys)
    before = len(living.blobs.objects)
    assert sweep_removed(living.engine).objects == 0
    assert len(living.blobs.objects) == before + 1


def test_an_index_made_late_for_a_deleted_space_is_dropped_by_name(living: Flow) -> None:
    index = living.index
    assert isinstance(index, Listing)
    gone = _deleted_neighbour(living)
    (row,) = living.execute("SELECT nextval(pg_get_serial_sequence('kb_index', 'id'))::int AS id")
    late = IndexRef(row.id, gone, living.space.model_id, f"kb_{gone}_{row.id}", 256)
    index.ensure(late)
    index.indexes |= {f"kb_{gone}_99999999": {}, "somebody_elses": {}}
    found = sweep_removed(living.engine)
    assert (found.indexes, found.foreign) == (1, 1)
    assert late.name not in index.indexes
    assert {f"kb_{gone}_99999999", "somebody_elses"} <= set(index.indexes)
    living.assert_whole()


def test_an_index_that_cannot_list_is_left_alone(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({"a.md": article("aa", 1)}, index=MemoryIndex())
    flow.sync()
    assert sweep_removed(flow.engine).indexes == 0
    flow.assert_whole()
