"""``kb`` in this process, on the database of the test file; and as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kb_pipeline
from kb_pipeline.cli.main import main

CODE = Path(kb_pipeline.__file__).parents[1]
PROGRAM = "import sys\nfrom kb_pipeline.cli.main import main\nsys.exit(main())"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout is the document: anything else beside it fails here."""
        return json.loads(self.out)


class Kb:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        code = main([str(a) for a in arguments])
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)

    def json(self, *arguments: object, code: int = 0) -> Any:
        ran = self(*arguments, "--json")
        assert ran.code == code, ran
        return ran.json


def environment(**settings: str) -> dict[str, str]:
    """Without the KB_ settings of whoever runs the tests."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("KB_")}
    return {**own, "PYTHONPATH": str(CODE), "KB_EMBEDDER": "hashing", **settings}


def spawn(arguments: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], text=True, env=env, encoding="utf-8", **pipes)


def run(arguments: list[str], env: dict[str, str]) -> Ran:
    process = spawn(arguments, env)
    out, err = process.communicate()
    return Ran(process.returncode, out, err)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / ".kb"


@pytest.fixture
def kb(home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Kb]:
    for name in [k for k in os.environ if k.startswith("KB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KB_HOME", str(home))
    monkeypatch.setenv("KB_DATABASE_URL", database_url)
    monkeypatch.setenv("KB_EMBEDDER", "hashing")
    yield Kb(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents, one of them Chinese."""
    made = tmp_path / "文档"
    made.mkdir()
    (made / "leave.md").write_text("# Leave\n\nNew employees have ten days of leave.\n", encoding="utf-8")
    (made / "年假.md").write_text("# 年假\n\n新员工每年有十天年假。\n", encoding="utf-8")
    return made


@pytest.fixture
def loaded(kb: Kb, folder: Path, request: pytest.FixtureRequest) -> str:
    """A space of the test's own, with ``folder`` as its source `docs`, synced."""
    key = request.node.name.replace("[", "-").replace("]", "")[5:60].strip("_")
    assert kb("space", "add", key).code == 0
    assert kb("source", "add", key, "docs", "local_dir", f"path={folder}").code == 0
    assert kb("sync", key).code == 0
    return key
