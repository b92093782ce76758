"""Work that waits is seen whatever left it there, and work that somebody does is seen as such."""

from collections.abc import Iterator
from itertools import count
from uuid import uuid4

import pytest

from kb_pipeline.states import FLOW
from kb_pipeline.store import tasks, waiting, walks
from kb_pipeline.store.database import Pool, is_dead, run_of, transaction, work_for, worker_id
from kb_pipeline.store.waiting import Waiting
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.store.shelf import Shelf

_number = count(1)


@pytest.fixture
def shelf(app: FakedApp, pool: Pool) -> Shelf:
    return Shelf(pool, app.add_space(f"waiting-{next(_number):03}"))


@pytest.fixture
def run() -> Iterator[str]:
    """This process works for a run, as long as the test goes on."""
    run_id = str(uuid4())
    work_for(run_id)
    yield run_id
    work_for("")


def seen(shelf: Shelf, limit: int = 100) -> Waiting | None:
    with transaction(shelf.pool) as c:
        return next((w for w in waiting.waiting_spaces(c, "", 1000, limit) if w.space == shelf.space.key), None)


def claim(shelf: Shelf) -> list[tasks.Claim]:
    with transaction(shelf.pool) as c:
        return tasks.claim(c, shelf.space, 10, 600, FLOW)


def update(shelf: Shelf, what: str) -> None:
    with transaction(shelf.pool) as c:
        c.execute(f"UPDATE ingestion_task SET {what} WHERE space_id = %s", (shelf.space.id,))


def test_space_without_tasks_or_with_finished_ones_does_not_wait(shelf: Shelf) -> None:
    assert seen(shelf) is None
    shelf.add("a", "b")
    update(shelf, "status = 'SUCCESS'")
    assert seen(shelf) is None


@pytest.mark.parametrize(
    "left, waits",
    [
        ("status = 'PENDING'", True),
        ("status = 'FAILED', next_attempt_at = clock_timestamp() - interval '1 second'", True),
        ("status = 'FAILED', next_attempt_at = clock_timestamp() + interval '1 hour'", False),
        ("status = 'PROCESSING', claimed_by = 'elsewhere/1/2/3', lease_until = clock_timestamp() - interval '1 second'", True),
        ("status = 'PROCESSING', claimed_by = 'elsewhere/1/2/3', lease_until = clock_timestamp() + interval '1 hour'", False),
        ("status = 'CANCELING'", True),
        ("status = 'INIT'", True),
        ("status = 'DEAD'", False),
    ],
)
def test_what_can_be_worked_on_waits_and_nothing_else(shelf: Shelf, left: str, waits: bool) -> None:
    shelf.add("a", "b")
    update(shelf, left)
    assert (seen(shelf) is not None) == waits


def test_queued_task_behind_a_living_one_does_not_wait(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    update(shelf, "status = 'FAILED', next_attempt_at = clock_timestamp() + interval '1 hour'")
    with transaction(shelf.pool) as c:
        c.execute(
            "INSERT INTO ingestion_task (space_id, doc_id, version, status) VALUES (%s, %s, 2, 'INIT')", (shelf.space.id, doc)
        )
    assert seen(shelf) is None


def test_count_is_bounded(shelf: Shelf) -> None:
    shelf.add(*(f"d{n}" for n in range(20)))
    assert seen(shelf, 100).tasks == 20  # type: ignore[union-attr]
    assert seen(shelf, 7).tasks == 7  # type: ignore[union-attr]


def test_workers_and_walkers_of_a_space_are_named(shelf: Shelf) -> None:
    shelf.add("a")
    assert seen(shelf).owners == []  # type: ignore[union-attr]
    claim(shelf)
    shelf.add("b")
    assert seen(shelf).owners == [worker_id()]  # type: ignore[union-attr]
    update(shelf, "status = 'PENDING', claimed_by = NULL, lease_until = NULL")
    with transaction(shelf.pool) as c:
        walks.take_lease(c, shelf.source.id, 600)
    assert seen(shelf).owners == [worker_id()]  # type: ignore[union-attr]


def test_space_whose_last_worker_failed_is_left_alone_for_a_while(shelf: Shelf) -> None:
    shelf.add("a")
    with transaction(shelf.pool) as c:
        c.execute(
            "INSERT INTO kb_schedule (space_id, kind, due_at) VALUES (%s, 'ingest', clock_timestamp() + interval '30 s')",
            (shelf.space.id,),
        )
    assert seen(shelf) is None
    with transaction(shelf.pool) as c:
        c.execute(
            "UPDATE kb_schedule SET due_at = clock_timestamp() WHERE space_id = %s AND kind = 'ingest'", (shelf.space.id,)
        )
    assert seen(shelf) is not None


def test_spaces_take_turns(app: FakedApp, pool: Pool) -> None:
    made = [Shelf(pool, app.add_space(f"zz-{next(_number):03}")) for _ in range(3)]
    for each in made:
        each.add("a")
    keys = [each.space.key for each in made]
    with transaction(pool) as c:
        assert [w.space for w in waiting.waiting_spaces(c, keys[0], 2, 10)] == keys[1:]


# --- runs that have ended -------------------------------------------------------------------------------------------


def test_worker_of_a_run_names_it_and_is_known_as_alive_or_dead_as_any_other(run: str) -> None:
    assert run_of(worker_id()) == run
    assert not is_dead(worker_id())
    assert is_dead(worker_id().rpartition("/")[0] + "/0")
    work_for("")
    assert run_of(worker_id()) == ""


@pytest.mark.parametrize("died", [True, False])
def test_run_that_ended_gives_its_tasks_back_at_once(shelf: Shelf, run: str, died: bool) -> None:
    shelf.add("a", "b")
    claims = claim(shelf)
    with transaction(shelf.pool) as c:
        assert run in waiting.working_runs(c, 100)
        assert tasks.release_run(c, run, died=died) == 2
    assert seen(shelf).tasks == 2  # type: ignore[union-attr]
    with transaction(shelf.pool) as c:
        tasks.sweep(c, shelf.space)
        assert tasks.fence(c, shelf.space, claims).claims == []  # whatever still comes of it is refused
        deaths = {r.deaths for r in c.execute("SELECT deaths FROM ingestion_task WHERE space_id = %s", (shelf.space.id,))}
        logged = [r.status for r in c.execute("SELECT status FROM ingestion_node_log WHERE space_id = %s", (shelf.space.id,))]
    assert deaths == {int(died)}
    assert logged == ["INTERRUPTED"] * 2
    assert len(claim(shelf)) == 2


def test_tasks_of_others_are_not_given_back(shelf: Shelf) -> None:
    shelf.add("a")
    claim(shelf)
    with transaction(shelf.pool) as c:
        assert tasks.release_run(c, str(uuid4()), died=False) == 0
        assert tasks.release_run(c, "", died=False) == 0


def test_source_of_a_run_that_ended_is_free_and_its_late_walker_fenced(shelf: Shelf, run: str) -> None:
    with transaction(shelf.pool) as c:
        token = walks.take_lease(c, shelf.source.id, 600)
        assert walks.walked_by(c, shelf.source.id) == worker_id()
        assert walks.release_run(c, run) == 1
        assert walks.walked_by(c, shelf.source.id) is None
        late = c.execute("UPDATE sync_lease SET until = until WHERE source_id = %s AND token = %s", (shelf.source.id, token))
        assert late.rowcount == 0
