"""Numbered, forward-only DDL. Safe when two processes start at once, and refuses a database newer than this program."""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import psycopg

from kb_pipeline.errors import Fatal, Misconfigured
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Pool, one

SQL = load_statements(__package__, "migrations.sql")
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def migrations(folder: Traversable | Path | None = None) -> list[Migration]:
    """All migrations by number: from the installed package, or from ``sql/`` of an editable install."""
    found = []
    for file in (folder or _folder()).iterdir():
        if m := _FILE.fullmatch(file.name):
            found.append(Migration(int(m[1]), m[2], file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda m: m.version)


def migrate(pool: Pool, steps: list[Migration] | None = None) -> int:
    """Bring the schema up to date and return its version. Each step is one transaction under one lock."""
    steps = migrations() if steps is None else steps
    newest = steps[-1].version
    if _applied_fast(pool, newest, steps[-1]):
        return newest
    try:
        for step in steps:
            with pool.connection() as c, c.transaction():
                c.execute(SQL.lock)
                c.execute(SQL.create_table)
                applied = {row.version: row.sha256 for row in c.execute(SQL.applied)}
                _check(applied, steps)
                if step.version not in applied:
                    c.execute(step.text.encode("utf-8"))
                    c.execute(SQL.record, {"version": step.version, "name": step.name, "sha256": step.sha256})
    except psycopg.errors.InsufficientPrivilege as e:
        raise Misconfigured(
            f"the database user may not create tables: {e.diag.message_primary}. "
            "Grant CREATE on the database and its schema to it",
            code="missing_right",
        ) from e
    return newest


def _applied_fast(pool: Pool, newest: int, last: Migration) -> bool:
    with pool.connection() as c:
        if one(c.execute(SQL.exists)).found is None:
            return False
        row = c.execute(SQL.newest).fetchone()
        if row is not None and row.version > newest:
            _refuse(row.version, newest)
        return row is not None and (row.version, row.sha256) == (newest, last.sha256)


def _check(applied: dict[int, str], steps: list[Migration]) -> None:
    if applied and max(applied) > steps[-1].version:
        _refuse(max(applied), steps[-1].version)
    for step in steps:
        if applied.get(step.version, step.sha256) != step.sha256:
            raise Fatal(
                f"migration {step.version:04d}_{step.name} was changed after it ran: install the matching version",
                code="schema_differs",
            )


def _refuse(theirs: int, ours: int) -> None:
    raise Fatal(
        f"the database has schema {theirs}, this program knows up to {ours}: install the newer kb-pipeline", code="schema_newer"
    )


def _folder() -> Traversable | Path:
    installed = resources.files(__package__).joinpath("schema")
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "sql"
