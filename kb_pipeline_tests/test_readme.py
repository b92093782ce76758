"""README's two commands: they are one line each, and the first one does what a newcomer expects of it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kb_pipeline.embedded_postgres import EmbeddedPostgres

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q uv && .venv/bin/uv pip install -q --python .venv/bin/python -e "
# What a clone does not have, and what would be slow to copy.
NOT_IN_A_CLONE = shutil.ignore_patterns(
    ".git", ".venv", ".kb", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "build", "dist"
)
NO_REGISTRY = (
    "Could not find a version",
    "Failed to fetch",
    "ConnectionError",
    "error sending request",
    "dns error",
    "timed out",
)


def commands(name: str) -> list[str]:
    """The fence behind each ``<!-- command: NAME -->``, of which the first is the one that counts."""
    return re.findall(rf"<!-- command: {name} -->\s*```\w*\n(.*?)\n?```", README, re.S)


@pytest.mark.parametrize(
    ("name", "end"), [("demo", ". && .venv/bin/kb demo"), ("test", "'.[test]' && .venv/bin/python -m pytest")]
)
def test_each_command_is_one_line_that_makes_its_own_environment(name: str, end: str) -> None:
    found = commands(name)
    assert found, f"README has no fence behind <!-- command: {name} -->"
    assert found[0].count("\n") == 0
    assert found[0] == INSTALL + end


def test_both_commands_stand_on_the_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert all(command[0] in first_screen for command in (commands("demo"), commands("test")))


def test_every_promise_names_tests_that_exist() -> None:
    rows = README.split("| Promise | Held by |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`((?:\w+/)?test_\w+\.py)(?:::(test_\w+))?`", row.split("|")[-2])
        assert named, f"no test holds this promise: {row}"
        for file, test in named:
            source = (ROOT / "kb_pipeline_tests" / file).read_text(encoding="utf-8")
            assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_the_first_command_answers_questions_in_a_fresh_clone(tmp_path: Path) -> None:
    """It downloads what it installs, and embeds the samples with the local model."""
    clone, home = tmp_path / "clone", tmp_path / "home"
    shutil.copytree(ROOT, clone, ignore=NOT_IN_A_CLONE)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KB_") and k != "VIRTUAL_ENV"} | {"KB_HOME": str(home)}
    try:
        done = subprocess.run(
            ["bash", "-c", commands("demo")[0]], cwd=clone, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
    finally:
        EmbeddedPostgres(home).stop(mode="immediate")  # one that was killed leaves its server behind
    if not (clone / ".venv/bin/kb").exists() and any(x in done.stderr for x in NO_REGISTRY):
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    answers = re.split(r"^\? ", done.stdout, flags=re.M)[1:]
    samples = {p.name for p in (home / "samples").rglob("*") if p.is_file()}
    assert len(answers) >= 3, done.stdout
    assert [a for a in answers if not any(name in a for name in samples)] == [], done.stdout
    assert not (clone / ".kb").exists()
