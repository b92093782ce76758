"""Who is asked to work on what waits: parts of the flow as runs of their own, and no waiting for a run that has fallen silent."""

from collections.abc import Callable
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus
from dagster._core.events import RunFailureReason

from kb_pipeline.orchestration.definitions import defs
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.sensors import event_inbox, run_ended, waiting_tasks
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import tasks
from kb_pipeline.store.database import transaction, work_for
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import take_snapshot
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.orchestration.conftest import Materialise
from kb_pipeline_tests.orchestration.test_sensors import Ticks, end, finish, send, shelf_of, start, ticks

__all__ = ["ticks"]


def stand_at(app: FakedApp, space: Space, node: Node, limit: int = 1000) -> None:
    """So many of the space's first tasks wait at ``node``."""
    query = "UPDATE ingestion_task SET current_node = %s WHERE id IN (SELECT id FROM ingestion_task WHERE space_id = %s ORDER BY id LIMIT %s)"
    with transaction(app.pool) as c:
        c.execute(query, (node.value, space.id, limit))


def held_by(app: FakedApp, run_id: str, space: Space, limit: int = 100) -> None:
    """A run has claims that ended just now: its process is silent."""
    work_for(run_id)
    with transaction(app.pool) as c:
        assert tasks.claim(c, space, limit, 600, FLOW)
        c.execute(
            "UPDATE ingestion_task SET lease_until = clock_timestamp() WHERE space_id = %s AND status = 'PROCESSING'",
            (space.id,),
        )
    work_for("")


def test_nodes_are_not_split_unless_it_is_set(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    shelf = shelf_of(app, 3)
    stand_at(app, shelf.space, Node.EMBEDDING)
    (request,) = ticks(waiting_tasks)()
    assert (request.job_name, request.asset_selection) == ("ingest_batch", None)
    assert not {"kb/node", "dagster-celery/queue"} & set(request.tags)


def test_split_nodes_are_asked_for_by_what_waits_at_them(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_SPLIT_NODES", "true")
    monkeypatch.setenv("KB_FANOUT_TASKS", "10")
    shelf, tick = shelf_of(app, 30), ticks(waiting_tasks)
    stand_at(app, shelf.space, Node.INDEXER)
    stand_at(app, shelf.space, Node.EMBEDDING, 25)
    stand_at(app, shelf.space, Node.FETCHER, 2)
    asked = [(r.job_name, r.tags["kb/node"], r.tags.get("dagster-celery/queue")) for r in tick()]
    assert asked == [
        ("ingest_batch", "ingest", None),
        *[("embed_batch", "embedding", "kb_embedding")] * 3,
        ("index_batch", "index", "kb_index"),
    ]
    slots = [r.tags["kb/slot"] for r in tick.instance.get_runs()]
    assert len(set(slots)) == len(slots) == 5
    assert tick() == []
    end(tick.instance, DagsterRunStatus.SUCCESS)
    stand_at(app, shelf.space, Node.INDEXER)
    assert {r.job_name for r in tick()} == {"index_batch"}


def test_split_nodes_behind_a_long_queue_are_seen(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SPLIT_NODES": "true", "FANOUT_TASKS": "2", "FANOUT_RUNS": "1"}.items():
        monkeypatch.setenv(f"KB_{name}", value)
    shelf = shelf_of(app, 6)
    stand_at(app, shelf.space, Node.EMBEDDING)
    stand_at(app, shelf.space, Node.PARSER, 4)  # more than are looked at, and all of them older
    assert [r.job_name for r in ticks(waiting_tasks)()] == ["ingest_batch", "embed_batch"]


def test_split_sync_that_runs_does_not_keep_embedding_and_indexing_waiting(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_SPLIT_NODES", "true")
    shelf, tick = shelf_of(app, 3), ticks(waiting_tasks)
    start(tick.instance, "sync_space", shelf.space.key, DagsterRunStatus.STARTED)
    assert tick() == []  # the sync is about to take them
    stand_at(app, shelf.space, Node.EMBEDDING)
    assert [r.job_name for r in tick()] == ["embed_batch"]


def test_split_space_with_something_to_clean_up_only_gets_one_run(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_SPLIT_NODES", "true")
    shelf = shelf_of(app, 2)
    with transaction(app.pool) as c:
        tasks.cancel_unfinished(c, shelf.space.id, None, "test")
    assert [r.job_name for r in ticks(waiting_tasks)()] == ["ingest_batch"]


def test_split_runs_take_a_space_to_its_end_one_part_each(
    ticks: Callable[[Any], Ticks], filled: Space, app: FakedApp, materialise: Materialise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_SPLIT_NODES", "true")
    tick = ticks(waiting_tasks)
    with transaction(app.pool) as c:
        c.execute("UPDATE kb_space SET status = 'ACTIVE' WHERE id = %s", (filled.id,))
    take_snapshot(app.engine, filled)
    done = []
    for _ in range(3):
        (request,) = tick(launch=False)
        chosen = [key.to_user_string() for key in request.asset_selection or ()]
        run = materialise(filled.key, *chosen, job=str(request.job_name))
        assert run.success and not run.red
        done.append((request.job_name, sorted(run.metadata)))
    assert done == [
        ("ingest_batch", ["chunks", "parsed_documents"]),
        ("embed_batch", ["embeddings"]),
        ("index_batch", ["vector_index"]),
    ]
    assert tick() == []
    assert run.metadata["vector_index"]["published"] == 10


def test_pools_can_limit_embedding_and_indexing_whatever_job_they_run_in() -> None:
    pools = {"embeddings": "kb_embedding", "vector_index": "kb_index"}
    for job in ("sync_space", "ingest_batch", "embed_batch", "index_batch"):
        chosen = defs.resolve_job_def(job)
        for name, pool in pools.items():
            if AssetKey(name) in chosen.asset_layer.executable_asset_keys:
                assert chosen.get_node_named(name).definition.pool == pool


def test_split_workers_are_no_reason_for_a_change_to_wait(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    shelf, tick = shelf_of(app, 1), ticks(event_inbox)
    for job in ("embed_batch", "index_batch"):
        start(tick.instance, job, shelf.space.key, DagsterRunStatus.STARTED)
    send(app, shelf.space, "edit")
    assert [r.job_name for r in tick()] == ["sync_space"]


@pytest.mark.parametrize("runs", [1, 4])
def test_run_that_has_fallen_silent_is_replaced_before_dagster_knows(
    ticks: Callable[[Any], Ticks], app: FakedApp, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setenv("KB_FANOUT_RUNS", str(runs))
    shelf, tick = shelf_of(app, 3), ticks(waiting_tasks)
    tick()
    (run,) = tick.instance.get_runs()
    assert tick() == []
    held_by(app, run.run_id, shelf.space)
    (request,) = tick()
    assert request.tags["kb/slot"] != run.tags["kb/slot"]  # which the queue gives to nobody before the dead run is ended
    assert tick() == []


def test_run_that_still_holds_something_is_not_replaced(ticks: Callable[[Any], Ticks], app: FakedApp) -> None:
    shelf, tick = shelf_of(app, 3), ticks(waiting_tasks)
    tick()
    (run,) = tick.instance.get_runs()
    held_by(app, run.run_id, shelf.space)
    with transaction(app.pool) as c:
        c.execute(
            "UPDATE ingestion_task SET lease_until = clock_timestamp() + interval '1 minute' WHERE id = (SELECT min(id) FROM ingestion_task WHERE space_id = %s)",
            (shelf.space.id,),
        )
    assert tick() == []


@pytest.mark.parametrize("reason, again", [(RunFailureReason.UNEXPECTED_TERMINATION, 1), (RunFailureReason.STEP_FAILURE, 0)])
def test_what_a_dead_worker_held_is_not_made_to_wait(
    ticks: Callable[[Any], Ticks], app: FakedApp, reason: RunFailureReason, again: int
) -> None:
    shelf, tick, ended = shelf_of(app, 3), ticks(waiting_tasks), ticks(run_ended)
    ended()
    tick()
    (run,) = tick.instance.get_runs()
    held_by(app, run.run_id, shelf.space)
    finish(tick.instance, run, DagsterRunStatus.FAILURE, reason)
    ended()
    assert len(tick()) == again


def test_worker_fetches_what_a_dead_run_had_only_found(
    filled: Space, app: FakedApp, materialise: Materialise, instance: DagsterInstance, kb: KbResource
) -> None:
    take_snapshot(app.engine, filled)
    run = materialise(filled.key, job="ingest_batch")
    assert run.success and not run.red
    assert run.metadata["vector_index"]["published"] == 10
