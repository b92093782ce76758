"""Runs as processes of this machine, each of which is asked for while it works: one whose server is gone is known as dead."""

import json
from collections.abc import Sequence

import grpc
from dagster import DagsterRun, DefaultRunLauncher
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._grpc.client import DagsterGrpcClient
from dagster._grpc.types import GetCurrentRunsResult
from dagster._serdes import deserialize_value

ASKED = 2  # times, before a server that does not answer is held to be gone


class WatchedRunLauncher(DefaultRunLauncher):
    """Knows a run as dead when the code server that has started it knows it no more, or is itself gone.

    That server tells of a run that died under it. Nobody tells of one that died with it, as on a machine that was switched
    off: for Dagster it works for ever, and the queue lets no other sync of its space begin.
    """

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Raises where a server is there and does not answer in time: the check is made again."""
        where = json.loads(run.tags[GRPC_INFO_TAG])
        for _ in range(ASKED):
            try:
                if run.run_id in _runs_of(DagsterGrpcClient(**where)):
                    return CheckRunHealthResult(WorkerStatus.RUNNING)
                return CheckRunHealthResult(WorkerStatus.FAILED, "the code server that started it has no such run any more")
            except DagsterUserCodeUnreachableError as e:
                if not (isinstance(e.__cause__, grpc.RpcError) and e.__cause__.code() is grpc.StatusCode.UNAVAILABLE):
                    raise
        return CheckRunHealthResult(WorkerStatus.FAILED, "the code server that started it is gone, and its runs with it")


def _runs_of(client: DagsterGrpcClient) -> Sequence[str]:
    found = deserialize_value(client.get_current_runs(), GetCurrentRunsResult)
    return found.current_runs
