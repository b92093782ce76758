"""Copies of the project, one a job, in which a rule is taken away and put back."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kb_pipeline_tests.mutations.rule import Edit, Rule
from kb_pipeline_tests.mutations.rules import BY_KEY

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kb_pipeline", "kb_pipeline_tests", "sql", "pyproject.toml", "dagster.yaml")
LIMIT_SECONDS = 180  # a rule whose removal makes everybody wait
# Quick to start: no other plugins, and no filter of warnings that imports Dagster for its classes.
OPTIONS = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-o", "filterwarnings=ignore", "-x", "-q", "-rfE", "--timeout=120")
FAILED = 1  # pytest's exit code: tests ran, and some failed
# What a text that does not even run looks like: then a failing test says nothing about the rule.
BROKEN = re.compile(
    r"\b(SyntaxError|IndentationError|NameError|ImportError|UndefinedColumn|UndefinedTable|UndefinedFunction|AmbiguousColumn"
    r"|AmbiguousParameter|IndeterminateDatatype|InvalidColumnReference|GroupingError|ProgrammingError)\b"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    key: str
    outcome: str  # KILLED, SURVIVED or ERROR
    test: str  # the first that failed
    seconds: float
    message: str = ""


def edits_of(rule: Rule) -> list[Edit]:
    """Everything that is removed with it."""
    return [*rule.edits, *(e for key in rule.beside for e in BY_KEY[key].edits)]


def problem_of(rule: Rule, root: Path = ROOT) -> str | None:
    """Why the rule's text cannot be replaced, if it cannot."""
    for edit in rule.edits:
        found = (root / edit.file).read_text(encoding="utf-8").count(edit.old)
        if found != 1:
            return f"{edit.file}: found {found} times: {edit.old.strip()[:100]!r}"
    return None


class Copy:
    """A folder of its own, from which the tests import."""

    def __init__(self, folder: Path, server_url: str, template: str) -> None:
        self.folder, self._template = folder, template
        own = {k: v for k, v in os.environ.items() if not k.startswith(("KB_", "TEST_", "PYTEST_"))}
        self._env = {**own, "PYTHONPATH": str(folder), "TEST_EMBEDDED_URL": server_url, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".kb", "benchmarks"))
            elif (ROOT / name).is_file():
                shutil.copy2(ROOT / name, folder / name)

    def imported_from(self) -> list[Path]:
        """Where the tests of this copy find the package and themselves."""
        program = "import kb_pipeline.model, kb_pipeline_tests.fakes as t; print(kb_pipeline.model.__file__); print(t.__file__)"
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=self.folder, env=self._env, capture_output=True, text=True, check=True
        )
        return [Path(line) for line in ran.stdout.split()]

    def judge(self, rule: Rule) -> Verdict:
        """Take the rule away, run its tests, put it back."""
        began = time.monotonic()

        def verdict(outcome: str, test: str = "", message: str = "") -> Verdict:
            return Verdict(rule.key, outcome, test, time.monotonic() - began, message)

        edits = edits_of(rule)
        for edit in edits:
            text = (self.folder / edit.file).read_text(encoding="utf-8")
            if text.count(edit.old) != 1:
                return verdict("ERROR", message=f"{edit.file}: found {text.count(edit.old)} times: {edit.old.strip()[:100]!r}")
        with self._without(edits):
            code, out = self.run(rule.tests, migrate=any(e.file.startswith("sql/") for e in edits))
        if code == 0:
            return verdict("SURVIVED")
        failed = re.search(r"^(?:FAILED|ERROR) kb_pipeline_tests/(\S+)", out, re.M)
        if code != FAILED or failed is None:
            return verdict("ERROR", message="\n".join(out.splitlines()[-15:]) or f"pytest ended with {code}")
        if broken := BROKEN.search(out):
            return verdict("ERROR", failed[1], f"the changed text does not run: {broken[0]}")
        return verdict("KILLED", failed[1])

    @contextmanager
    def _without(self, edits: Sequence[Edit]) -> Iterator[None]:
        kept = {e.file: ((self.folder / e.file).read_bytes(), (self.folder / e.file).stat()) for e in edits}
        try:
            for e in edits:
                path = self.folder / e.file
                path.write_text(path.read_text(encoding="utf-8").replace(e.old, e.new), encoding="utf-8")
            yield
        finally:
            for file, (content, stat) in kept.items():
                (self.folder / file).write_bytes(content)
                os.utime(self.folder / file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # compiled code is known by it

    def run(self, tests: Sequence[str], *, migrate: bool = False) -> tuple[int, str]:
        """Exit code and output of the tests, up to the first failure. ``migrate``: the schema is another one now."""
        env = self._env if migrate else {**self._env, "TEST_EMBEDDED_TEMPLATE": self._template}
        command = [sys.executable, "-m", "pytest", *OPTIONS, *(f"kb_pipeline_tests/{t}" for t in tests)]
        try:
            ran = subprocess.run(
                command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, f"no end within {LIMIT_SECONDS} seconds"
        return ran.returncode, ran.stdout + ran.stderr
