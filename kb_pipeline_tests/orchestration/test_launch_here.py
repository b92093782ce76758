"""A run's code server is asked for it: one that is gone, or knows it no more, makes it dead; one that is slow does not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
from dagster import DagsterRun
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher import WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._grpc.client import DagsterGrpcClient
from dagster._grpc.types import GetCurrentRunsResult
from dagster._serdes import serialize_value

from kb_pipeline.orchestration.launch_here import WatchedRunLauncher


@pytest.fixture
def run(tmp_path: Path) -> DagsterRun:
    where = json.dumps({"host": "localhost", "socket": str(tmp_path / "s")})
    return DagsterRun("sync_space", run_id=str(uuid4()), tags={GRPC_INFO_TAG: where})


def knows(monkeypatch: pytest.MonkeyPatch, *runs: str) -> None:
    answer = serialize_value(GetCurrentRunsResult(current_runs=list(runs), serializable_error_info=None))
    monkeypatch.setattr(DagsterGrpcClient, "get_current_runs", lambda _: answer)


def test_run_that_its_server_knows_works(run: DagsterRun, monkeypatch: pytest.MonkeyPatch) -> None:
    knows(monkeypatch, "another", run.run_id)
    assert WatchedRunLauncher().check_run_worker_health(run).status is WorkerStatus.RUNNING


def test_run_that_its_server_does_not_know_is_dead(run: DagsterRun, monkeypatch: pytest.MonkeyPatch) -> None:
    knows(monkeypatch, "another")
    assert WatchedRunLauncher().check_run_worker_health(run).status is WorkerStatus.FAILED


def test_run_whose_server_is_gone_is_dead(run: DagsterRun) -> None:
    found = WatchedRunLauncher().check_run_worker_health(run)
    assert found.status is WorkerStatus.FAILED and "is gone" in str(found.msg)


def test_server_that_does_not_answer_in_time_is_asked_again_later(
    run: DagsterRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_insecure_port(f"unix:{tmp_path / 's'}")  # it is there and serves nothing
        server.start()
        query = DagsterGrpcClient._query
        monkeypatch.setattr(DagsterGrpcClient, "_query", lambda self, *a, **kw: query(self, *a, **{**kw, "timeout": 0}))
        with pytest.raises(DagsterUserCodeUnreachableError):
            WatchedRunLauncher().check_run_worker_health(run)
        server.stop(None).wait()
