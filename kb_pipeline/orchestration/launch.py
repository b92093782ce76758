"""Runs as Celery tasks. Loaded by an instance file that names it, never by the definitions: it needs the extra ``celery``."""

from typing import Any

from dagster import DagsterRun
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster_celery.launcher import CeleryRunLauncher
from dagster_celery.tags import DAGSTER_CELERY_TASK_ID_TAG

ANSWER_SECONDS = 5.0  # a worker answers from its main process, which runs nothing else
ASKED = 2  # times, before a worker that does not answer is held to be dead


class WatchedCeleryRunLauncher(CeleryRunLauncher):
    """Knows a run as dead when no worker has its task any more.

    Celery's result says STARTED for ever after a worker was killed, and the launcher that we extend takes that for healthy.
    So the workers are asked. If the broker cannot be reached nobody is dead: the check raises, and is made again.
    """

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        task_id = run.tags[DAGSTER_CELERY_TASK_ID_TAG]
        for _ in range(ASKED):
            result = self.celery.AsyncResult(task_id)
            state, told = result.state, result.info
            if state == "SUCCESS":  # Dagster looks once more whether the run has told its end before it fails it
                return CheckRunHealthResult(WorkerStatus.FAILED, "its Celery task has ended, and its end was not recorded")
            if state == "FAILURE":
                return CheckRunHealthResult(WorkerStatus.FAILED, f"its Celery task failed: {told}")
            host = told.get("hostname") if isinstance(told, dict) else None
            if self._is_at_work(task_id, host):
                return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"its worker {host or ''} died: no worker has Celery task {task_id}")

    def _is_at_work(self, task_id: str, host: str | None) -> bool:
        """``host``: who began it. Without one all workers are asked: a result is forgotten after a day, or with the broker."""
        asked = self.celery.control.inspect(destination=[host] if host else None, timeout=ANSWER_SECONDS)
        replies: dict[str, dict[str, Any]] = asked.query_task(task_id) or {}
        return any(task_id in tasks for tasks in replies.values())

    def get_run_worker_debug_info(self, run: DagsterRun, include_container_logs: bool | None = True) -> str | None:
        """Nothing that the reason of the failure does not say."""
        return None
