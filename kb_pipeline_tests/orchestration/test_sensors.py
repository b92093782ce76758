"""Sensors as functions: which runs they ask for, and that no lost tick, run or daemon loses what they are for."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RunRequest,
    SensorResult,
    build_sensor_context,
)
from dagster._core.events import JobFailureData, RunFailureReason

from kb_pipeline.errors import Fatal
from kb_pipeline.orchestration import resources
from kb_pipeline.orchestration.definitions import defs
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.sensors import SENSORS, due_runs, event_inbox, run_ended, source_changes, waiting_tasks
from kb_pipeline.settings import Settings
from kb_pipeline.states import FLOW
from kb_pipeline.store import events, schedules, tasks, walks
from kb_pipeline.store.database import transaction, work_for
from kb_pipeline.store.schedules import Kind
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App
from kb_pipeline_tests.fakes import FakedApp, MemorySource
from kb_pipeline_tests.store.shelf import Shelf

_number = count(1)


class Ticks:
    """One sensor, tick by tick, with the cursor that the daemon would keep. Its run requests are launched."""

    def __init__(self, sensor: Any, instance: DagsterInstance, kb: KbResource) -> None:
        self.sensor, self.instance, self.kb = sensor, instance, kb
        self.cursor: str | None = None
        self.message = ""
        self.keys: list[str] = []

    def __call__(self, *, launch: bool = True, lose: bool = False) -> list[RunRequest]:
        """``lose``: the daemon dies before it has noted anything of the tick."""
        with build_sensor_context(instance=self.instance, cursor=self.cursor, resources={"kb": self.kb}) as context:
            result = self.sensor(context)
        assert isinstance(result, SensorResult)
        requests = list(result.run_requests or ())
        self.message = str(result.skip_reason.skip_message) if result.skip_reason else ""
        if lose:
            return requests
        self.cursor = result.cursor
        new = [r for r in requests if r.run_key not in self.keys]
        assert len(new) == len(requests), "a run key that was used already starts no run"
        self.keys += [str(r.run_key) for r in requests]
        for request in requests if launch else ():
            start(self.instance, str(request.job_name), str(request.partition_key), **request.tags)
        return requests


def start(
    instance: DagsterInstance, job: str, space: str, status: DagsterRunStatus = DagsterRunStatus.STARTING, **tags: str
) -> Any:
    return instance.create_run_for_job(defs.resolve_job_def(job), status=status, tags={"dagster/partition": space, **tags})


def end(instance: DagsterInstance, status: DagsterRunStatus) -> None:
    """Whatever is running."""
    for run in instance.get_runs():
        if not run.is_finished:
            finish(instance, run, status)


def finish(instance: DagsterInstance, run: Any, status: DagsterRunStatus, reason: RunFailureReason | None = None) -> None:
    kind = {
        DagsterRunStatus.SUCCESS: DagsterEventType.RUN_SUCCESS,
        DagsterRunStatus.FAILURE: DagsterEventType.RUN_FAILURE,
        DagsterRunStatus.CANCELED: DagsterEventType.RUN_CANCELED,
    }[status]
    data = JobFailureData(None, failure_reason=reason) if kind is DagsterEventType.RUN_FAILURE else None
    instance.report_dagster_event(DagsterEvent(kind.value, run.job_name, event_specific_data=data), run.run_id)


@pytest.fixture
def ticks(instance: DagsterInstance, kb: KbResource, app: FakedApp) -> Callable[[Any], Ticks]:
    """The tests of a file share a database: no earlier space is in the way."""
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE status = 'ACTIVE'")
    return lambda sensor: Ticks(sensor, instance, kb)


@pytest.fixture
def docs(ticks: object, app: FakedApp, tmp_path: Path) -> Space:
    """A space over a folder with one document, synced."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A\n\nOne.", encoding="utf-8")
    space = app.add_space(f"docs-{next(_number)}")
    app.add_source(space, "docs", "local_dir", {"path": str(tmp_path / "docs")})
    sync_until_settled(app, space)
    return space


def sync_until_settled(app: FakedApp, space: Space) -> None:
    """A file written within the clock tick before a walk makes the next probe differ, whatever comes: walk until it does not."""
    for _ in range(200):
        sync_space(app.engine, space)
        with transaction(app.pool) as c:
            (found,) = [(s, h) for s, h in events.probed_sources(c, 0, 1000) if s.space_id == space.id][:1]
        if app.engine.connector(found[0]).change_token(60.0) == found[1].mark:  # type: ignore[attr-defined]
            return
    raise AssertionError("the folder never settled")


# --- source_changes -------------------------------------------------------------------------------------------------


def test_edit_is_followed_by_a_sync_and_an_unchanged_source_by_none(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    tick = ticks(source_changes)
    assert tick() == []
    assert "nothing changed in 1 sources" in tick.message
    (tmp_path / "docs" / "b.md").write_text("# B\n\nTwo.", encoding="utf-8")
    (request,) = tick()
    assert (request.job_name, request.partition_key) == ("sync_space", docs.key)
    assert request.tags["kb/sync"] == docs.key
    assert request.run_config == {"ops": {"source_snapshot": {"config": {"source": "docs"}}}}
    sync_until_settled(app, docs)
    end(tick.instance, DagsterRunStatus.SUCCESS)
    assert tick() == []


@pytest.mark.parametrize("how", ["new", "removed", "renamed", "same size and mtime"])
def test_every_kind_of_edit_is_noticed(ticks: Callable[[Any], Ticks], docs: Space, tmp_path: Path, how: str) -> None:
    import os

    file = tmp_path / "docs" / "a.md"
    before = file.stat()
    if how == "new":
        (tmp_path / "docs" / "sub").mkdir()
        (tmp_path / "docs" / "sub" / "n.md").write_text("new", encoding="utf-8")
    elif how == "removed":
        file.unlink()
    elif how == "renamed":
        file.rename(file.with_name("c.md"))
    else:
        file.write_text("# A\n\nTwo.", encoding="utf-8")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(ticks(source_changes)()) == 1


def test_while_a_sync_is_queued_or_running_nothing_is_asked_for(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    tick = ticks(source_changes)
    (tmp_path / "docs" / "b.md").write_text("two", encoding="utf-8")
    assert len(tick()) == 1
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_source_request SET requested_at = requested_at - interval '31 s'")
    assert tick() == []
    assert "1 changed, and a sync is queued or running" in tick.message


def test_worker_on_the_queue_is_no_reason_to_wait(ticks: Callable[[Any], Ticks], docs: Space, tmp_path: Path) -> None:
    tick = ticks(source_changes)
    start(tick.instance, "ingest_batch", docs.key)
    (tmp_path / "docs" / "b.md").write_text("two", encoding="utf-8")
    assert len(tick()) == 1


def test_sync_in_vain_is_repeated_later_under_another_run_key(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    tick = ticks(source_changes)
    (tmp_path / "docs" / "b.md").write_text("two", encoding="utf-8")
    assert len(tick()) == 1
    end(tick.instance, DagsterRunStatus.FAILURE)
    assert tick() == []
    assert "asked for not long ago" in tick.message
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_source_request SET requested_at = requested_at - interval '31 s'")
    assert len(tick()) == 1  # Ticks has compared the keys


def test_lost_tick_delays_a_sync_and_loses_none(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    tick = ticks(source_changes)
    (tmp_path / "docs" / "b.md").write_text("two", encoding="utf-8")
    assert len(tick(lose=True)) == 1
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_source_request SET requested_at = requested_at - interval '31 s'")
    assert len(tick()) == 1


def test_walk_that_did_not_complete_stores_no_token(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    for n in range(9):
        (tmp_path / "docs" / f"{n}.md").write_text(f"# {n}\n\nText of {n}.", encoding="utf-8")
    sync_until_settled(app, docs)
    for n in range(9):
        (tmp_path / "docs" / f"{n}.md").unlink()
    assert sync_space(app.engine, docs).waiting_deletions == 9
    assert len(ticks(source_changes)()) == 1


def test_token_is_taken_before_the_walk_begins(
    ticks: Callable[[Any], Ticks], app: FakedApp, kb: KbResource, monkeypatch: Any
) -> None:
    source = TokenSource({"a.md": "one"})
    space = app.add_space(f"token-{next(_number)}")
    app.add_fake_source(space, source)
    use(app, monkeypatch)
    source.during_listing = lambda: source.put("a.md", "two")
    sync_space(app.engine, space)
    assert len(ticks(source_changes)()) == 1


def test_source_that_cannot_tell_is_left_to_schedules_and_the_tick_says_so(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: Any
) -> None:
    space = app.add_space(f"mute-{next(_number)}")
    app.add_fake_source(space, MemorySource({"a.md": "one"}))
    use(app, monkeypatch)
    tick = ticks(source_changes)
    assert tick() == []
    assert "1 cannot tell: left to schedules and events" in tick.message


def test_source_that_fails_does_not_keep_another_from_being_probed(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    second = app.add_space(f"gone-{next(_number)}")
    app.add_source(second, "gone", "local_dir", {"path": str(other)})
    other.rmdir()
    tick = ticks(source_changes)
    assert tick() == []
    assert "could not be asked" in tick.message and str(other) in tick.message
    (tmp_path / "docs" / "b.md").write_text("two", encoding="utf-8")
    assert [r.partition_key for r in tick()] == [docs.key]


def test_tick_is_bounded_and_the_next_one_goes_on(ticks: Callable[[Any], Ticks], app: FakedApp, tmp_path: Path) -> None:
    tick, made = ticks(source_changes), []
    for n in range(23):
        (tmp_path / str(n)).mkdir()
        made.append(app.add_space(f"bounded-{next(_number)}"))
        app.add_source(made[-1], "docs", "local_dir", {"path": str(tmp_path / str(n))})
    first, second = tick(), tick()
    assert len(first) == 20
    assert {r.partition_key for r in first[:] + second} == {s.key for s in made}


# --- event_inbox ----------------------------------------------------------------------------------------------------


def test_event_is_followed_by_a_sync_until_one_has_answered_it(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp
) -> None:
    tick = ticks(event_inbox)
    assert tick() == []
    assert tick.message == "no event waits"
    send(app, docs, "e1")
    send(app, docs, "e2")
    (request,) = tick()
    assert (request.job_name, request.partition_key) == ("sync_space", docs.key)
    end(tick.instance, DagsterRunStatus.FAILURE)
    assert tick() == []
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_source_request SET requested_at = requested_at - interval '31 s'")
    assert len(tick()) == 1
    end(tick.instance, DagsterRunStatus.SUCCESS)
    sync_space(app.engine, docs)
    assert tick() == []
    send(app, docs, "e3")
    assert len(tick()) == 1


def test_event_received_during_a_walk_is_not_answered_by_it(
    ticks: Callable[[Any], Ticks], app: FakedApp, kb: KbResource, monkeypatch: Any
) -> None:
    source = TokenSource({"a.md": "one"})
    space = app.add_space(f"late-{next(_number)}")
    app.add_fake_source(space, source)
    use(app, monkeypatch)
    send(app, space, "before")
    source.during_listing = lambda: send(app, space, "during")
    sync_space(app.engine, space)
    with transaction(app.pool) as c:
        left = c.execute("SELECT event_id FROM source_event WHERE space_id = %s AND taken_at IS NULL", (space.id,)).fetchall()
    assert [r.event_id for r in left] == ["during"]


def test_hundred_events_of_a_source_are_one_sync(ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp) -> None:
    for n in range(100):
        send(app, docs, f"e{n}")
    tick = ticks(event_inbox)
    assert len(tick()) == 1
    assert tick() == []


# --- waiting_tasks --------------------------------------------------------------------------------------------------


def shelf_of(app: FakedApp, tasks_: int, name: str = "waiting") -> Shelf:
    shelf = Shelf(app.pool, app.add_space(f"{name}-{next(_number):03}"))
    shelf.add(*(f"d{n}" for n in range(tasks_)))
    return shelf


def test_waiting_task_gets_a_worker_and_only_one(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    tick = ticks(waiting_tasks)
    assert tick() == []
    assert tick.message == "nothing waits"
    shelf = shelf_of(app, 3)
    (request,) = tick()
    assert (request.job_name, request.partition_key) == ("ingest_batch", shelf.space.key)
    assert tick() == []
    assert "workers for all of them" in tick.message
    end(tick.instance, DagsterRunStatus.SUCCESS)
    assert len(tick()) == 1  # they still wait, and its key is new


def test_running_sync_and_a_kb_command_are_workers_too(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    tick = ticks(waiting_tasks)
    shelf = shelf_of(app, 3)
    run = start(tick.instance, "sync_space", shelf.space.key, DagsterRunStatus.STARTED)
    assert tick() == []
    finish(tick.instance, run, DagsterRunStatus.SUCCESS)
    with transaction(app.pool) as c:
        walks.take_lease(c, shelf.source.id, 600)
    assert tick() == []
    with transaction(app.pool) as c:
        c.execute("UPDATE sync_lease SET owner = %s WHERE source_id = %s", ("0000-run@gone/1/2/3", shelf.source.id))
    assert len(tick()) == 1  # of a run that is not at work any more


def test_many_tasks_get_several_workers_side_by_side(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_FANOUT_TASKS", "10")
    monkeypatch.setenv("KB_FANOUT_RUNS", "3")
    tick = ticks(waiting_tasks)
    small, large, huge = shelf_of(app, 10), shelf_of(app, 11), shelf_of(app, 50)
    asked = [r.partition_key for r in tick()]
    assert sorted(asked) == sorted([small.space.key, *[large.space.key] * 2, *[huge.space.key] * 3])
    assert set(asked[:3]) == {small.space.key, large.space.key, huge.space.key}  # one each before a second one
    slots = {r.tags["kb/slot"] for r in tick.instance.get_runs() if r.tags["dagster/partition"] == huge.space.key}
    assert slots == {f"{huge.space.key}/{n}" for n in range(3)}
    run = next(r for r in tick.instance.get_runs() if r.tags["kb/slot"] == f"{huge.space.key}/1")
    finish(tick.instance, run, DagsterRunStatus.SUCCESS)
    (request,) = tick()
    assert request.tags["kb/slot"] == f"{huge.space.key}/1"


def test_tick_asks_for_twenty_workers_at_most_and_spaces_take_turns(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    tick = ticks(waiting_tasks)
    made = {shelf_of(app, 1, "turn").space.key for _ in range(25)}
    first, second = tick(launch=False), tick(launch=False)
    assert len(first) == 20
    assert made - {r.partition_key for r in first} <= {r.partition_key for r in second[:5]}


def test_lost_tick_is_repeated_with_the_same_run_keys(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    tick = ticks(waiting_tasks)
    shelf_of(app, 1)
    tick(launch=False)
    lost = [r.run_key for r in tick(lose=True)]
    assert [r.run_key for r in tick()] == lost


def test_failed_worker_is_not_repeated_at_once(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    tick, ended = ticks(waiting_tasks), ticks(run_ended)
    app_spaces = shelf_of(app, 1)
    ended()
    assert len(tick()) == 1
    end(tick.instance, DagsterRunStatus.FAILURE)
    ended()
    assert tick() == []
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_schedule SET due_at = clock_timestamp() WHERE space_id = %s", (app_spaces.space.id,))
    assert len(tick()) == 1


# --- run_ended ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status, reason, deaths",
    [
        (DagsterRunStatus.CANCELED, None, 0),
        (DagsterRunStatus.FAILURE, RunFailureReason.STEP_FAILURE, 0),
        (DagsterRunStatus.FAILURE, RunFailureReason.UNEXPECTED_TERMINATION, 1),
        (DagsterRunStatus.FAILURE, None, 1),
        (DagsterRunStatus.STARTED, None, None),
    ],
)
def test_what_an_ended_run_holds_is_given_back_and_a_death_is_counted_where_there_was_one(
    ticks: Callable[[Any], Ticks], app: FakedApp, status: DagsterRunStatus, reason: Any, deaths: int | None
) -> None:
    tick = ticks(run_ended)
    shelf = shelf_of(app, 2)
    run = start(tick.instance, "sync_space", shelf.space.key, DagsterRunStatus.STARTED)
    work_for(run.run_id)
    with transaction(app.pool) as c:
        assert len(tasks.claim(c, shelf.space, 10, 600, FLOW)) == 2
        walks.take_lease(c, shelf.source.id, 600)
    work_for("")
    if status is not DagsterRunStatus.STARTED:
        finish(tick.instance, run, status, reason)
    tick()
    with transaction(app.pool) as c:
        tasks.sweep(c, shelf.space)
        rows = c.execute("SELECT status, deaths FROM ingestion_task WHERE space_id = %s", (shelf.space.id,)).fetchall()
        walked = walks.walked_by(c, shelf.source.id)
    if deaths is None:
        assert {r.status for r in rows} == {"PROCESSING"} and walked
    else:
        assert {(r.status, r.deaths) for r in rows} == {("PENDING", deaths)} and walked is None
        assert "2 tasks given back" in tick.message
    tick()
    assert "given back" not in tick.message


def test_run_of_another_instance_is_left_alone(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    shelf = shelf_of(app, 1)
    work_for("somebody-elses-run")
    with transaction(app.pool) as c:
        tasks.claim(c, shelf.space, 10, 600, FLOW)
    work_for("")
    ticks(run_ended)()
    assert shelf.value("SELECT status FROM ingestion_task WHERE space_id = %(space)s") == "PROCESSING"


# --- due_runs -------------------------------------------------------------------------------------------------------


def due(app: FakedApp, space: Space, kind: Kind) -> None:
    with transaction(app.pool) as c:
        c.execute(
            "INSERT INTO kb_schedule (space_id, kind, due_at) VALUES (%s, %s, clock_timestamp()) "
            "ON CONFLICT (space_id, kind) DO UPDATE SET due_at = clock_timestamp()",
            (space.id, kind.value),
        )


def test_what_is_due_is_started_once_with_its_job_and_its_kind(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp
) -> None:
    tick = ticks(due_runs)
    assert tick() == []
    assert tick.message == "nothing is due"
    for kind in (Kind.SWEEP, Kind.RECONCILIATION, Kind.PURGE, Kind.GC):
        due(app, docs, kind)
    found = {r.tags["kb/schedule"]: r for r in tick()}
    assert {k: r.job_name for k, r in found.items()} == {
        "sweep": "sync_space",
        "reconciliation": "reconcile_space",
        "purge": "purge_space",
        "gc": "collect_vectors",
    }
    assert found["sweep"].run_config == {"ops": {"source_snapshot": {"config": {"full": True}}}}
    assert tick() == []


def test_sync_that_is_due_while_one_is_running_is_passed_over(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp
) -> None:
    tick = ticks(due_runs)
    run = start(tick.instance, "sync_space", docs.key, DagsterRunStatus.STARTED)
    due(app, docs, Kind.SYNC)
    assert tick() == []
    assert "passed over" in tick.message
    finish(tick.instance, run, DagsterRunStatus.SUCCESS)
    due(app, docs, Kind.SYNC)
    assert len(tick()) == 1


def test_two_thousand_due_spaces_are_started_a_few_a_tick(ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp) -> None:
    tick = ticks(due_runs)
    with transaction(app.pool) as c:
        c.execute(
            "INSERT INTO kb_space (key, name, shard, model_id, embedder, index_kind) SELECT 'crowd-' || n, 'x', 0, %s, 'hashing', 'pgvector' "
            "FROM generate_series(1, 2000) n",
            (docs.model_id,),
        )
        assert schedules.mark_due(c, Kind.PURGE) == 2001
    assert [len(tick(launch=False)) for _ in range(3)] == [25, 25, 25]
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE key LIKE 'crowd-%%'")


@pytest.mark.parametrize("ends", [DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED, None])
def test_whatever_comes_of_a_scheduled_run_there_is_a_next_one_and_three_misses_are_found(
    ticks: Callable[[Any], Ticks], docs: Space, app: FakedApp, ends: DagsterRunStatus | None
) -> None:
    tick, ended = ticks(due_runs), ticks(run_ended)
    ended()
    for _ in range(4):
        due(app, docs, Kind.SWEEP)
        assert len(tick(launch=ends is not None)) == 1  # None: the run is lost on its way to the queue
        if ends is not None:
            end(tick.instance, ends)
        ended()
    with transaction(app.pool) as c:
        assert [(m.space, m.kind) for m in schedules.missed(c) if m.space == docs.key] == [(docs.key, Kind.SWEEP)]


# --- all of them ----------------------------------------------------------------------------------------------------


def test_everything_runs_without_being_switched_on_and_says_what_it_does() -> None:
    repository = defs.get_repository_def()
    assert {s.name for s in SENSORS} <= {s.name for s in repository.sensor_defs}
    for sensor in SENSORS:
        assert sensor.default_status is DefaultSensorStatus.RUNNING, sensor.name
        assert "If it is off" in (sensor.description or ""), sensor.name
    assert {s.name: s.minimum_interval_seconds for s in SENSORS if s in (source_changes, event_inbox, waiting_tasks)} == {
        "source_changes": 3,
        "event_inbox": 10,
        "waiting_tasks": 10,
    }
    for schedule in repository.schedule_defs:
        assert schedule.default_status is DefaultScheduleStatus.RUNNING, schedule.name


@pytest.mark.parametrize("sensor", [s for s in SENSORS if s.name != "space_lifecycle"], ids=lambda s: s.name)
def test_unreachable_database_fails_the_tick(instance: DagsterInstance, kb: KbResource, sensor: Any) -> None:
    down = KbResource(home=kb.home, database_url="postgresql://kb@127.0.0.1:1/kb")
    with pytest.raises(Fatal, match="database unreachable"):
        Ticks(sensor, instance, down)()


# --- what these tests stand on ----------------------------------------------------------------------------------------


class TokenSource(MemorySource):
    """With a change token; ``during_listing`` happens once, while a walk lists it."""

    def __init__(self, documents: Any) -> None:
        from kb_pipeline.ports import Capabilities

        super().__init__(documents, Capabilities(order_stable=True, digest=True, token=True))
        self.during_listing: Callable[[], Any] | None = None

    def change_token(self, budget_seconds: float) -> str | None:
        return json.dumps(sorted(item.revision for item, _ in self.items.values()))

    def pages(self, checkpoint: Any, limit: int) -> Any:
        for page in super().pages(checkpoint, limit):
            yield page
            if self.during_listing:
                happens, self.during_listing = self.during_listing, None
                happens()


def use(app: FakedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sensors work with this application, fakes and all."""

    @contextmanager
    def opened(_: Settings) -> Iterator[App]:
        yield app

    monkeypatch.setattr(resources, "open_app", opened)


def send(app: FakedApp, space: Space, event_id: str) -> None:
    with transaction(app.pool) as c:
        (source,) = c.execute("SELECT id FROM kb_source WHERE space_id = %s", (space.id,)).fetchall()
        events.record_event(c, source.id, event_id, {})
