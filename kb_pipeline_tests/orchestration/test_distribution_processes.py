"""Runs as processes of one machine, started by the daemon: they share a space, and one that is killed loses nothing."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterRunStatus

from kb_pipeline.store.database import Pool, run_of
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.orchestration.cluster import EMBED_BATCH, ROOT, Cluster, cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one_machine(
    embedded_server: Server, pool: Pool, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("one-machine")
    with cluster(embedded_server, pool, database_url, folder, ROOT / "dagster.yaml") as made:
        made.start_here()
        yield made


def test_three_runs_share_a_large_space_and_do_nothing_twice(one_machine: Cluster) -> None:
    one_machine.doors.close("wide")
    space = one_machine.add_space("wide", 45)
    until("three runs embed at the same time", lambda: len({run_of(o) for o in one_machine.owners(space)}) == 3)
    until("all of them are at the endpoint", lambda: one_machine.doors.came("wide") == 3)
    one_machine.doors.open("wide")
    until("every document is published", lambda: one_machine.published(space) == 45)
    until("every run has ended", lambda: all(r.is_finished for r in one_machine.runs(space)))
    one_machine.check(space, 45)
    assert {r.status for r in one_machine.runs(space)} == {DagsterRunStatus.SUCCESS}


def test_run_whose_process_is_killed_is_shown_as_failed_and_others_do_its_work(one_machine: Cluster) -> None:
    one_machine.doors.close("solo")
    space = one_machine.add_space("solo", 10)
    until("a run is at the endpoint", lambda: one_machine.doors.came("solo"))
    (owner,) = one_machine.owners(space)
    os.kill(int(owner.split("/")[2]), signal.SIGKILL)
    killed = time.monotonic()
    one_machine.doors.open("solo")
    known, continued = one_machine.after_kill(space, owner)
    until("every document is published", lambda: one_machine.published(space) == 10)
    print(f"shown as failed after {known - killed:.1f} s, work goes on after {continued - killed:.1f} s")
    one_machine.check(space, 10, repeated=EMBED_BATCH)


def test_run_begins_as_a_fork_of_what_has_imported_everything(one_machine: Cluster) -> None:
    one_machine.doors.close("fork")
    space = one_machine.add_space("fork", 1)
    until("a run is at the endpoint", lambda: one_machine.doors.came("fork"))
    (owner,) = one_machine.owners(space)
    parent = Path(f"/proc/{owner.split('/')[2]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
    assert "multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_text(encoding="utf-8")
    one_machine.doors.open("fork")
    until("every run has ended", lambda: all(r.is_finished for r in one_machine.runs(space)))
    one_machine.check(space, 1)


def test_machine_that_was_switched_off_leaves_no_run_that_holds_up_its_space(one_machine: Cluster) -> None:
    """Nobody is left who could say that it has died: its space would never be synced again."""
    one_machine.doors.close("power")
    space = one_machine.add_space("power", 10)
    until("a run is at the endpoint", lambda: one_machine.doors.came("power"))
    (owner,) = one_machine.owners(space)
    one_machine.switch_off()
    one_machine.doors.open("power")
    assert one_machine.status(run_of(owner)) is DagsterRunStatus.STARTED
    one_machine.start_here()
    one_machine.after_kill(space, owner)
    assert "is gone, and its runs with it" in one_machine.log(run_of(owner))
    until("every document is published", lambda: one_machine.published(space) == 10)
    until("every run has ended", lambda: all(r.is_finished for r in one_machine.runs(space)))
    one_machine.check(space, 10, repeated=EMBED_BATCH)
