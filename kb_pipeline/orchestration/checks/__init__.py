"""Checks as data of the assets they belong to: made with the asset, evaluated in its step, stored for its space."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, PreviewWarning

from kb_pipeline.orchestration.metadata import MAX_ROWS, table
from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.store.spaces import Space

NAMED = 3  # documents in the sentence of a check


def spec(name: str, asset: str, description: str, *, blocking: bool = False) -> AssetCheckSpec:
    """Evaluations carry the space, so that one space's green does not hide another's red.

    Dagster calls the partitions of a check a preview; that is known, and said here instead of at every start.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreviewWarning)
        return AssetCheckSpec(name, asset=asset, description=description, blocking=blocking, partitions_def=SPACES)


def result(
    name: str,
    space: Space,
    *,
    passed: bool,
    says: str,
    repair: str = "",
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[Any]] = (),
    counts: Mapping[str, Any] | None = None,
    warn: bool = False,
) -> AssetCheckResult:
    """``says`` and ``repair`` are for whoever finds it red; at most MAX_ROWS of ``rows`` are shown."""
    shown = list(rows)[:MAX_ROWS]
    values: dict[str, Any] = {"space": space.key, **(counts or {})}
    if not passed and repair:
        values["repair"] = repair
    if shown:
        values["documents"] = table(columns, shown)
    severity = AssetCheckSeverity.WARN if warn else AssetCheckSeverity.ERROR
    told = f"{space.key}: {says}{_named(columns, shown)}" + (f". To repair it: {repair}" if not passed and repair else "")
    return AssetCheckResult(check_name=name, passed=passed, severity=severity, description=told, metadata=values)


def _named(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The first documents by name: the web UI keeps the table behind a click."""
    at = columns.index("document") if "document" in columns else -1
    names = list(dict.fromkeys(str(row[at]) for row in rows if row[at])) if at >= 0 else []
    return f": {', '.join(names[:NAMED])}{' …' if len(names) > NAMED else ''}" if names else ""
