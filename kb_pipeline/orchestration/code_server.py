"""The code server of ``kb up``: Dagster's own, in one process that both the daemon and the web server ask.

    python -m kb_pipeline.orchestration.code_server SOCKET

Left alone, each of the two starts one for itself, and the daemon a new one every minute: half of what an idle instance costs.
And every run is a fork of a process that has imported everything, where Dagster starts an interpreter anew.
"""

import multiprocessing
import signal
import sys
from multiprocessing import forkserver
from typing import Any

from dagster._cli.api import grpc_command
from dagster._grpc import server

from kb_pipeline.orchestration.resources import KEPT

LOCATION = "kb_pipeline.orchestration.definitions"
# What a run of the usual adapters imports, and nothing that opens a connection or starts a thread.
PRELOADED = [
    LOCATION,
    "kb_pipeline.orchestration.code_server",
    "kb_pipeline.orchestration.storage",
    "kb_pipeline.blobs.folder",
    "kb_pipeline.connectors.local_dir",
    "kb_pipeline.embedders.local",
    "kb_pipeline.embedders.openai",
    "kb_pipeline.indexes.pgvector",
    "kb_pipeline.parsers.html",
    "kb_pipeline.parsers.markdown",
    "dagster._core.execution.api",
    "dagster._core.execution.plan.active",
    "dagster._core.executor.in_process",
    "dagster._core.instance.factory",
    "dagster._core.remote_representation.external",
    "dagster._core.storage.local_compute_log_manager",
    "pyarrow.parquet",
    "watchdog.observers",
]


class ForkingApiServer(server.DagsterApiServer):
    """Dagster asks for "spawn" by name and offers no choice. Should it call the attribute otherwise, runs are spawned."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mp_ctx: Any = multiprocessing.get_context("forkserver")


def main(socket: str) -> None:
    if sys.platform == "linux":  # elsewhere libraries may not be used in a fork of what has loaded them
        _start_forking()
        vars(server)["DagsterApiServer"] = ForkingApiServer
    where = ["--socket", socket, "--location-name", LOCATION, "--module-name", LOCATION]
    with KEPT.keeping():
        grpc_command.main(where, standalone_mode=False)


def _start_forking() -> None:
    """It imports while we do. Told to end with all others it stays, or its runs would count as dead while they end in order."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a new process inherits
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main(sys.argv[1])
