"""What a database must have before we work with it, asked without changing anything."""

from typing import Any

from kb_pipeline.errors import Fatal, KbError, Misconfigured
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one
from kb_pipeline.store.migrations import migrations

SQL = load_statements(__package__, "requirements.sql")
VECTOR = (0, 7)


def unmet(c: Connection, *, vector: bool) -> list[KbError]:
    """What the server or the database lacks, each with the way out. ``vector``: the index is in this database."""
    found: list[KbError] = []
    server = one(c.execute(SQL.server))
    if server.version < 150000:
        found.append(
            Misconfigured(f"PostgreSQL {server.version // 10000} is too old: use 15 or later", code="database_too_old")
        )
    found += _vector(server) if vector else []
    ours = migrations()[-1].version
    theirs = schema_version(c) if server.migrated else 0
    if theirs > ours:
        found.append(
            Fatal(
                f"the database has schema {theirs}, this program knows up to {ours}: install the newer kb-pipeline",
                code="schema_newer",
            )
        )
    if theirs < ours and not server.may_create:
        found.append(
            Misconfigured(
                f"the schema is to be migrated from {theirs} to {ours}, and the database user may not: "
                "grant CREATE on the database and its schema to it",
                code="missing_right",
            )
        )
    return found


def _vector(server: Any) -> list[KbError]:
    needed = ".".join(map(str, VECTOR))
    version = server.vector or server.installable
    if version is None:
        message, code = f"the server has no pgvector: install version {needed} or later there", "no_vector_extension"
    elif server.vector is None and not server.may_extend:
        message = (
            "the extension vector is not in this database, and its user may not create it: "
            "let an administrator run CREATE EXTENSION vector there"
        )
        code = "no_vector_extension"
    elif tuple(int(x) for x in version.split(".")[:2]) < VECTOR:
        message = f"pgvector {version} is too old: install {needed} or later and run ALTER EXTENSION vector UPDATE"
        code = "vector_too_old"
    else:
        return []
    return [Misconfigured(message, code=code)]


def secret_references(c: Connection) -> list[tuple[str, str]]:
    """(who needs it, reference) of active sources and of the embedders of active spaces; none before the first migration."""
    if not one(c.execute(SQL.server)).filled:
        return []
    return [(r.owner, r.value) for r in c.execute(SQL.references)]


def schema_version(c: Connection) -> int:
    """Of the database; 0 if nothing was migrated yet."""
    return int(one(c.execute(SQL.schema)).version)
