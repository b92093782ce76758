"""When spaces are due. Whatever comes of a run, there is a next time; what never succeeds is found."""

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.store import schedules, sources, spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.schedules import Due, Kind
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp

_number = count(1)
NOW = datetime(2026, 3, 13, 10, 7, 30, tzinfo=UTC)


@pytest.fixture
def timed(app: FakedApp) -> Space:
    return app.add_space(f"timed-{next(_number)}", schedule="0 9 * * *", time_zone="Europe/Berlin")


def row(pool: Pool, space: Space, kind: Kind = Kind.SYNC) -> object:
    with transaction(pool) as c:
        return c.execute("SELECT * FROM kb_schedule WHERE space_id = %s AND kind = %s", (space.id, kind.value)).fetchone()


def due_at(pool: Pool, space: Space, kind: Kind = Kind.SYNC) -> datetime | None:
    found = row(pool, space, kind)
    return found.due_at if found else None  # type: ignore[attr-defined]


def follow(pool: Pool, now: datetime = NOW) -> int:
    with transaction(pool) as c:
        return schedules.follow_crons(c, now)


def make_due(pool: Pool, space: Space, kind: Kind = Kind.SYNC) -> Due:
    """Now, as the only one: the tests of a file share a database."""
    with transaction(pool) as c:
        c.execute("UPDATE kb_schedule SET due_at = NULL WHERE space_id <> %s", (space.id,))
        c.execute(
            "INSERT INTO kb_schedule (space_id, kind, due_at) VALUES (%s, %s, clock_timestamp()) "
            "ON CONFLICT (space_id, kind) DO UPDATE SET due_at = clock_timestamp()",
            (space.id, kind.value),
        )
        (due,) = [d for d in schedules.due_spaces(c, 100) if d.kind is kind]
    return due


def request(pool: Pool, due: Due) -> bool:
    with transaction(pool) as c:
        return schedules.request(c, due)


def misses(pool: Pool, space: Space) -> dict[Kind, int]:
    with transaction(pool) as c:
        return {m.kind: m.misses for m in schedules.missed(c) if m.space == space.key}


def test_cron_line_of_a_space_is_followed_in_its_time_zone(pool: Pool, timed: Space) -> None:
    assert follow(pool) >= 1
    assert due_at(pool, timed) == datetime(2026, 3, 14, 8, 0, tzinfo=UTC)
    assert follow(pool) == 0


def test_changed_line_and_changed_time_zone_are_noticed_and_a_removed_one_ends(pool: Pool, timed: Space) -> None:
    follow(pool)
    for change, then in (
        ({"schedule": "30 * * * *"}, datetime(2026, 3, 13, 10, 30, tzinfo=UTC)),
        ({"schedule": "0 20 * * *"}, datetime(2026, 3, 13, 19, 0, tzinfo=UTC)),
        ({"time_zone": "Asia/Tokyo"}, datetime(2026, 3, 13, 11, 0, tzinfo=UTC)),
        ({"schedule": ""}, None),
    ):
        with transaction(pool) as c:
            spaces.update_space(c, timed.id, change)
        follow(pool)
        assert due_at(pool, timed) == then
    assert follow(pool) == 0


def test_line_that_was_stored_unchecked_costs_its_own_space_only(app: FakedApp, pool: Pool, timed: Space) -> None:
    broken = app.add_space(f"broken-{next(_number)}", schedule="whenever")
    follow(pool)
    assert due_at(pool, timed) is not None
    assert due_at(pool, broken) is None


def test_next_time_is_set_before_a_run_is_asked_for_and_an_occurrence_is_asked_for_once(pool: Pool, timed: Space) -> None:
    due = make_due(pool, timed)
    assert request(pool, due)
    assert (due_at(pool, timed) or NOW) > datetime.now(UTC)
    assert not request(pool, due)


def test_request_without_a_success_is_a_miss_and_three_are_found(pool: Pool, timed: Space) -> None:
    for n in range(3):
        assert misses(pool, timed) == {}, n
        request(pool, make_due(pool, timed))
    assert misses(pool, timed) == {}  # the third may still be at work
    request(pool, make_due(pool, timed))
    assert misses(pool, timed) == {Kind.SYNC: 3}
    assert due_at(pool, timed) is not None

    with transaction(pool) as c:
        schedules.succeeded(c, timed.id, Kind.SYNC)
    assert misses(pool, timed) == {}
    request(pool, make_due(pool, timed))
    assert row(pool, timed).misses == 0  # type: ignore[attr-defined]


def test_failed_run_counts_once(pool: Pool, timed: Space) -> None:
    for _ in range(3):
        request(pool, make_due(pool, timed))
        with transaction(pool) as c:
            schedules.failed(c, timed.key, Kind.SYNC)
    assert misses(pool, timed) == {Kind.SYNC: 3}
    request(pool, make_due(pool, timed))
    assert misses(pool, timed) == {Kind.SYNC: 3}


def test_run_that_is_still_at_work_is_passed_over_without_a_miss(pool: Pool, timed: Space) -> None:
    request(pool, make_due(pool, timed))
    due = make_due(pool, timed)
    with transaction(pool) as c:
        schedules.pass_over(c, due)
    assert row(pool, timed).misses == 0  # type: ignore[attr-defined]
    assert (due_at(pool, timed) or NOW) > datetime.now(UTC)


def test_nightly_work_is_due_for_every_active_space_once(app: FakedApp, pool: Pool, timed: Space) -> None:
    other = app.add_space(f"other-{next(_number)}")
    with transaction(pool) as c:
        assert schedules.mark_due(c, Kind.PURGE) >= 2
    first = due_at(pool, other, Kind.PURGE)
    assert first is not None
    with transaction(pool) as c:
        schedules.mark_due(c, Kind.PURGE)
    assert due_at(pool, other, Kind.PURGE) == first
    due = make_due(pool, other, Kind.PURGE)
    request(pool, due)
    assert due_at(pool, other, Kind.PURGE) is None  # until the next night


def test_sweep_needs_a_source_and_gc_something_to_erase(app: FakedApp, pool: Pool, timed: Space) -> None:
    with transaction(pool) as c:
        schedules.mark_due(c, Kind.SWEEP)
        schedules.mark_due(c, Kind.GC)
    assert row(pool, timed, Kind.SWEEP) is None
    assert row(pool, timed, Kind.GC) is None
    with transaction(pool) as c:
        sources.add_source(c, timed.id, "docs", "local_dir", {})
        schedules.mark_due(c, Kind.SWEEP)
    assert due_at(pool, timed, Kind.SWEEP) is not None


def test_longest_due_comes_first_and_a_tick_is_bounded(app: FakedApp, pool: Pool) -> None:
    made = [app.add_space(f"many-{next(_number)}") for _ in range(4)]
    with transaction(pool) as c:
        c.execute("UPDATE kb_schedule SET due_at = NULL")
        for age, space in enumerate(made):
            at = datetime.now(UTC) - timedelta(hours=age + 1)
            c.execute("INSERT INTO kb_schedule (space_id, kind, due_at) VALUES (%s, 'sweep', %s)", (space.id, at))
        assert [d.space for d in schedules.due_spaces(c, 3)] == [s.key for s in reversed(made[1:])]


def test_failed_worker_is_repeated_ever_later_until_one_succeeds(pool: Pool, timed: Space) -> None:
    waits = []
    for _ in range(9):
        before = datetime.now(UTC)
        with transaction(pool) as c:
            schedules.failed(c, timed.key, Kind.INGEST)
        waits.append(round(((due_at(pool, timed, Kind.INGEST) or NOW) - before).total_seconds() / 30))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 120, 120]
    assert misses(pool, timed) == {}
    with transaction(pool) as c:
        schedules.succeeded(c, timed.id, Kind.INGEST)
    assert due_at(pool, timed, Kind.INGEST) is None


def test_nothing_stays_of_a_removed_space(app: FakedApp, pool: Pool, timed: Space) -> None:
    follow(pool)
    assert sum(delete_space(app.engine, timed).values()) == 0
    assert row(pool, timed) is None
