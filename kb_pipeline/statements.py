"""SQL beside the module that sends it: named blocks of a .sql file.

A block begins with ``-- name: word`` and ends before the next one. Parameters are psycopg's ``%(name)s``.
"""

import re
from importlib import resources
from types import SimpleNamespace
from typing import LiteralString, cast

from kb_pipeline.errors import StateError

_NAME = re.compile(r"^-- name: ([a-z_]+)\s*$", re.M)


class Statements(SimpleNamespace):
    """The blocks as attributes; a missing one is an AttributeError when it is used."""

    def __getattr__(self, name: str) -> LiteralString:
        raise AttributeError(f"no SQL block {name!r}")


def load_statements(package: str, file: str) -> Statements:
    """All blocks of ``file`` in ``package``. Raises StateError for a name given twice."""
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    found: dict[str, LiteralString] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if name in found:
            raise StateError(f"{package}/{file}: block {name} stands twice")
        found[name] = cast(LiteralString, body.strip().rstrip(";"))
    return Statements(**found)
