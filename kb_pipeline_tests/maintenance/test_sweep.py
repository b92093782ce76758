"""Objects that no row names go; an object whose row is about to be written, or has just been, stays."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kb_pipeline.maintenance.sweep import sweep_objects
from kb_pipeline.pipeline import ingest
from kb_pipeline.store import retention
from kb_pipeline_tests.fakes import Gate, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.maintenance.watched import WatchedBlobs


@pytest.fixture
def flow(make_flow: Callable[..., Flow]) -> Flow:
    made = make_flow({"a.md": article("aa", 2)}, index=MemoryIndex())
    made.app.blobs = WatchedBlobs()
    made.engine = made.app.engine = replace(made.engine, blobs=made.app.blobs)
    made.sync()
    return made


def _blobs(flow: Flow) -> WatchedBlobs:
    assert isinstance(flow.blobs, WatchedBlobs)
    return flow.blobs


def _sweep(flow: Flow) -> int:
    return sweep_objects(flow.engine, flow.space)


def _folder(flow: Flow) -> str:
    return f"spaces/{flow.space.id}/docs/{flow.document('a.md').id}/"


def test_what_no_version_refers_to_goes_and_the_rest_stays(flow: Flow) -> None:
    blobs, kept = _blobs(flow), set(flow.blobs.objects)
    dead = [_folder(flow) + key for key in ("v1/fetcher-a9", "v1/parser-a3", "v7/fetcher-a1")]
    dead.append(f"spaces/{flow.space.id}/docs/999999999/v1/fetcher-a1")
    foreign = [
        f"spaces/{flow.space.id}0/docs/1/v1/fetcher-a1",
        f"spaces/{flow.space.id}/export/data",
        f"{_folder(flow)}v1/notes.txt",
    ]
    for key in dead + foreign:
        blobs.objects[key] = b"x"
    assert _sweep(flow) == len(dead)
    assert set(blobs.objects) == kept | set(foreign)
    assert len(kept) == 2


def test_objects_of_a_failed_version_stay_for_its_retry_and_those_of_a_canceled_one_go(flow: Flow) -> None:
    flow.index.drops_upserts = True
    flow.memory.put("a.md", article("bb", 2))
    flow.walk()
    flow.ingest(limit=1)
    flow.execute("UPDATE ingestion_task SET retry_count = max_retry_count WHERE space_id = %(space)s")
    flow.due()
    flow.ingest(limit=1)
    (task,) = flow.execute("SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'DEAD'")
    assert _sweep(flow) == 0
    assert flow.cancel(task.id)
    flow.sweep()
    assert flow.version("a.md", 2).status == "CANCELED"
    assert _sweep(flow) == 2


def test_a_put_in_flight_is_not_swept(flow: Flow) -> None:
    """written, and its row not yet."""
    blobs, swept = _blobs(flow), []
    flow.memory.put("a.md", article("bb", 2))
    flow.walk()
    blobs.after_put = lambda: swept.append(_sweep(flow))
    report = flow.ingest()
    assert swept == [0]
    assert (report.published, report.failed) == (1, 0)
    assert flow.showing("bbword0x5") == {"a.md"}
    assert set(blobs.objects) >= {flow.version("a.md", 2).raw_path, flow.version("a.md", 2).parsed_path}


def test_the_put_of_an_attempt_that_lost_its_task_is_swept(flow: Flow) -> None:
    blobs, swept = _blobs(flow), []
    flow.memory.put("a.md", article("bb", 2))
    flow.walk()

    def lose() -> None:
        flow.execute("UPDATE ingestion_task SET attempt = attempt + 1 WHERE space_id = %(space)s AND status = 'PROCESSING'")
        swept.append(_sweep(flow))

    blobs.after_put = lose
    flow.ingest()
    assert swept == [1]


def test_what_is_written_while_the_sweep_begins_stays(flow: Flow) -> None:
    """rows that were read before the listing would not know it."""
    blobs = _blobs(flow)
    flow.memory.put("b.md", article("bb", 2))
    flow.walk()
    blobs.before_keys = lambda: ingest(flow.engine, flow.space)
    assert _sweep(flow) == 0
    assert flow.version("b.md", 1).raw_path in blobs.objects


def test_an_attempt_that_commits_between_the_two_readings_of_rows_keeps_its_object(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is at work is read first: a path committed after that is found by the second reading."""
    blobs, gate = _blobs(flow), Gate()
    flow.memory.put("b.md", article("bb", 2))
    flow.walk()
    blobs.after_put = gate.pass_through
    gate.close()
    with flow.beside(flow.ingest) as ended:
        gate.await_caller()

        def committing(read: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*args: Any) -> Any:
                found = read(*args)
                gate.open()
                _await(lambda: bool(ended))
                return found

            return reading

        for name in ("attempts_worked_on", "referenced_paths"):
            monkeypatch.setattr(retention, name, committing(getattr(retention, name)))
        assert _sweep(flow) == 0
    assert ended[0].published == 1
    assert flow.version("b.md", 1).raw_path in blobs.objects


def _await(true: Callable[[], bool]) -> None:
    """The other thread goes on to its end; it has no event for that."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
