"""``kb up`` for real on a home of its own, with two spaces that it has taken in, and a browser in front of it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline_tests.cli.conftest import environment, run, spawn
from kb_pipeline_tests.cli.test_up import free_port
from kb_pipeline_tests.ui.browser import CHROMIUM, WIDE, Ui, browser

SPACES = {"handbook": 12, "support": 4}  # and how many documents
_SECTION = "Backups of system {n} are kept for {n} weeks; part {part} says who may ask for one, and how. "


@pytest.fixture(scope="session")
def chromium() -> str:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it comes with the extra `test`")
    pytest.importorskip("dagster_webserver", reason="dagster-webserver is not installed")
    found = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if found is None:
        pytest.skip("chromium is not installed: the web UI is looked at with it")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui") / ".kb"


@pytest.fixture(scope="module")
def web(chromium: str, home: Path) -> Iterator[str]:
    """The address of the web UI. Both spaces have a source, and nobody has asked for a sync."""
    env = environment(KB_HOME=str(home))
    for space, documents in SPACES.items():
        folder = _write(home.parent / space, documents)
        assert run(["space", "add", space], env).code == 0
        assert run(["source", "add", space, "docs", "local_dir", f"path={folder}"], env).code == 0
    port = str(free_port())
    process = spawn(["up", "--port", port, "--service-port", str(free_port())], env)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in said, process.communicate()
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        _, err = process.communicate()
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()
        EmbeddedPostgres(home).stop(mode="immediate")


def _write(folder: Path, documents: int) -> Path:
    folder.mkdir()
    for n in range(1, documents + 1):
        parts = [f"## Part {part}\n\n" + _SECTION.format(n=n, part=part) * 9 for part in range(1, 6)]
        (folder / f"guide-{n:02}.md").write_text(f"# Guide {n}\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: CI keeps that folder."""
    kept = os.environ.get("CI_ARTIFACTS")
    return Path(kept) / "ui" if kept else tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def tabs(chromium: str) -> Iterator[Any]:
    with browser(chromium) as made:
        yield made


@pytest.fixture
def ui(tabs: Any, web: str, pictures: Path, request: pytest.FixtureRequest) -> Iterator[Ui]:
    with _tab(tabs, web, pictures, request.node.name) as made:
        yield made


@contextmanager
def _tab(tabs: Any, web: str, pictures: Path, name: str) -> Iterator[Ui]:
    """What it showed last is kept, for whoever wants to know why the test failed."""
    page = tabs.new_page(viewport=WIDE)
    made = Ui(page, web, pictures)
    try:
        yield made
        assert made.elsewhere == [], "no page may ask anybody but this server"
    finally:
        made.picture(f"last-of-{name}")
        page.close()


@pytest.fixture(scope="module")
def synced(tabs: Any, web: str, pictures: Path) -> None:
    """Spaces become partitions by themselves; then all five assets of one are materialised, and of all in a backfill, as a
    person asks for it. The backfill goes on while the tests look at the first one: Dagster thinks of it twice a minute."""
    with _tab(tabs, web, pictures, "synced") as ui:
        ui.open("/assets/vector_index?view=partitions", *SPACES)
        ui.job("sync_space", "Description")
        ui.materialise("handbook")
        ui.follow()
        ui.job("sync_space", "Description")
        ui.materialise()
        ui.open("/runs?tab=backfills", f"{len(SPACES)} partitions")


@pytest.fixture
def database(web: str, home: Path) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(EmbeddedPostgres(home).start(), autocommit=True) as c:
        yield c
