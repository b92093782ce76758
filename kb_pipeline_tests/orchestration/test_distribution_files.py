"""The instance files for several machines: what the libraries say of them, and that they agree with the one that is shipped."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml
from dagster import DagsterInstance, DagsterRun
from dagster._config import process_config, resolve_to_config_type
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.launcher import LaunchRunContext, WorkerStatus
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster_celery.cli import get_validated_config
from dagster_k8s import K8sRunLauncher
from dagster_k8s.client import DagsterKubernetesClient
from psycopg.conninfo import conninfo_to_dict

import kb_pipeline.orchestration
from kb_pipeline.orchestration.definitions import defs
from kb_pipeline.orchestration.launch import WatchedCeleryRunLauncher
from kb_pipeline_tests.conftest import Server
from kb_pipeline_tests.orchestration.cluster import DEFINITIONS, ROOT

FILES = Path(kb_pipeline.orchestration.__file__).parent / "deploy"
K8S = {
    "DAGSTER_K8S_NAMESPACE": "kb",
    "DAGSTER_K8S_INSTANCE_CONFIG_MAP": "kb-instance",
    "DAGSTER_K8S_PG_PASSWORD_SECRET": "kb-postgres",
    "DAGSTER_CURRENT_IMAGE": "registry.example.com/kb-pipeline:0.1.0",
}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def problems(launcher: Any, config: Any) -> list[str]:
    done = process_config(resolve_to_config_type(launcher.config_type()), config)
    return [] if done.success else [e.message for e in done.errors or ()]


@pytest.fixture
def database(embedded_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty DAGSTER_HOME, and a database that the environment names."""
    with embedded_server.database() as url:
        where = conninfo_to_dict(url)
        for name, key in {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "DB": "dbname"}.items():
            monkeypatch.setenv(f"DAGSTER_PG_{name}", str(where[key]))
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        yield tmp_path


def opened(home: Path, file: Path) -> DagsterInstance:
    (home / "dagster.yaml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return DagsterInstance.from_config(str(home))


@pytest.mark.parametrize("kind", ["celery", "kubernetes"])
def test_what_is_not_about_launching_is_as_on_one_machine(kind: str) -> None:
    one, several = loaded(ROOT / "dagster.yaml"), loaded(FILES / kind / "dagster.yaml")
    launching = {"run_launcher", "run_coordinator", "run_monitoring"}
    assert {k: v for k, v in several.items() if k not in launching} == {k: v for k, v in one.items() if k not in launching}
    limits = [f["run_coordinator"]["config"]["tag_concurrency_limits"] for f in (one, several)]
    assert limits[0] == limits[1]
    assert {**several["run_monitoring"], "start_timeout_seconds": 180} == one["run_monitoring"]


def test_celery_instance_has_the_launcher_that_asks_the_workers(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://broker.example/0")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://broker.example/1")
    with opened(database, FILES / "celery" / "dagster.yaml") as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, WatchedCeleryRunLauncher)
        assert launcher.broker == "redis://broker.example/0"
        assert launcher.supports_check_run_worker_health
    worker = get_validated_config(str(FILES / "celery" / "worker.yaml"))
    assert (worker["broker"], worker["backend"]) == (launcher.broker, launcher.backend)
    assert worker["config_source"]["worker_disable_prefetch"] is True


class Workers:
    """Celery as the launcher sees it: one result, and what the workers answer when they are asked for the task."""

    def __init__(self, state: str, told: Any, replies: Any) -> None:
        self.state, self.info, self.replies, self.asked = state, told, replies, []
        self.control = self

    def AsyncResult(self, _: str) -> "Workers":
        return self

    def inspect(self, destination: Any, timeout: float) -> "Workers":
        self.asked.append(destination)
        return self

    def query_task(self, _: str) -> Any:
        return self.replies


@pytest.mark.parametrize(
    "state, told, replies, healthy",
    [
        ("STARTED", {"hostname": "one@a"}, {"one@a": {"t": ["active", {}]}}, True),
        ("STARTED", {"hostname": "one@a"}, None, False),  # it is gone
        ("STARTED", {"hostname": "one@a"}, {"one@a": {}}, False),  # it died and was started again
        ("PENDING", None, {"one@a": {}, "two@b": {"t": ["active", {}]}}, True),  # the result is forgotten, the run is not
        ("PENDING", None, {"one@a": {}}, False),
        ("FAILURE", RuntimeError("worker lost"), {}, False),
        ("SUCCESS", 0, {}, False),
    ],
)
def test_run_is_alive_while_a_worker_has_its_task(state: str, told: Any, replies: Any, healthy: bool) -> None:
    launcher = WatchedCeleryRunLauncher("dagster", broker="memory://", backend="cache+memory://")
    launcher.celery = workers = Workers(state, told, replies)
    run = DagsterRun("sync_space", tags={"dagster-celery/task_id": "t"})
    found = launcher.check_run_worker_health(run)
    assert found.status is (WorkerStatus.RUNNING if healthy else WorkerStatus.FAILED)
    assert healthy or found.msg
    assert all(asked == (["one@a"] if isinstance(told, dict) else None) for asked in workers.asked)


def test_run_is_not_held_to_be_dead_while_the_broker_cannot_be_asked() -> None:
    class Unreachable(Workers):
        def query_task(self, _: str) -> Any:
            raise ConnectionError("broker")

    launcher = WatchedCeleryRunLauncher("dagster", broker="memory://", backend="cache+memory://")
    launcher.celery = Unreachable("STARTED", {"hostname": "one@a"}, None)
    with pytest.raises(ConnectionError):
        launcher.check_run_worker_health(DagsterRun("sync_space", tags={"dagster-celery/task_id": "t"}))


def test_kubernetes_instance_loads_and_its_job_is_one_that_kubernetes_would_take(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the credentials of the cluster and the call that makes the Job are not the library's own."""
    for name, value in K8S.items():
        monkeypatch.setenv(name, value)
    file = FILES / "kubernetes" / "dagster.yaml"
    assert problems(K8sRunLauncher, loaded(file)["run_launcher"]["config"]) == []
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    created: list[Any] = []
    monkeypatch.setattr(
        DagsterKubernetesClient,
        "create_namespaced_job_with_retries",
        lambda _, body, namespace: created.append((namespace, body)),
    )
    with opened(database, file) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, K8sRunLauncher)
        job = defs.resolve_job_def("ingest_batch")
        code = RepositoryPythonOrigin(sys.executable, ModuleCodePointer(DEFINITIONS, "defs"))
        run = instance.create_run_for_job(job, job_code_origin=JobPythonOrigin(job.name, code))
        launcher.launch_run(LaunchRunContext(run, workspace=None))
    ((namespace, body),) = created
    made = kubernetes.client.ApiClient().sanitize_for_serialization(body)
    assert namespace == "kb"
    assert made["spec"]["backoffLimit"] == 0
    pod = made["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("Never", "dagster", 60)
    (container,) = pod["containers"]
    assert container["args"][1:5] == ["-m", "dagster", "api", "execute_run"]
    assert container["image"] == K8S["DAGSTER_CURRENT_IMAGE"]
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    sources = [next(iter(source.values()))["name"] for source in container["envFrom"]]
    assert sources == ["kb-settings", "kb-secrets"]


def test_values_for_the_chart_hold_a_launcher_that_the_library_takes() -> None:
    values = loaded(FILES / "kubernetes" / "values.yaml")
    launcher = snake(values["runLauncher"]["config"]["k8sRunLauncher"])
    for name in ("env_config_maps", "env_secrets"):  # the chart takes their names
        launcher[name] = [each["name"] for each in launcher[name]]
    own = {"service_account_name": "dagster", "instance_config_map": "kb-instance", "dagster_home": "/opt/dagster"}
    assert problems(K8sRunLauncher, launcher | own) == []
    assert problems(K8sRunLauncher, launcher | own | {"env_secret": []}) != []
    shipped = loaded(FILES / "kubernetes" / "dagster.yaml")["run_launcher"]["config"]
    assert launcher["run_k8s_config"] == shipped["run_k8s_config"]
    queue = values["dagsterDaemon"]["runCoordinator"]["config"]["queuedRunCoordinator"]
    assert queue["tagConcurrencyLimits"] == loaded(ROOT / "dagster.yaml")["run_coordinator"]["config"]["tag_concurrency_limits"]


def snake(value: Any) -> Any:
    """As the chart renders its keys."""
    if isinstance(value, dict):
        return {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", k): snake(v) for k, v in value.items()}
    return value
