"""The core's reports in the words of the web UI: numbers that it plots, and Markdown tables that people read."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dagster import EventLogRecord, MetadataValue

from kb_pipeline.errors import KbError
from kb_pipeline.maintenance.reembed import ReembedReport
from kb_pipeline.maintenance.reparse import ReparseReport
from kb_pipeline.pipeline import IngestReport
from kb_pipeline.store.gates import Worked
from kb_pipeline.store.indexes import Index
from kb_pipeline.sync import SyncReport
from kb_pipeline.walk import COUNTS, PassReport

MAX_ROWS = 50
MAX_RUNS = 10
_CELL = 300
_TROUBLE = ("stopped", "failed_documents", "failing_documents_now", "reembed_failures")
_SOURCES = ("source", "listing", *COUNTS, "waiting deletions", "remarks")
_FAILED = ("document", "code", "what happened", "next try")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> MetadataValue:
    lines = [head, ["---"] * len(head), *([_cell(x) for x in row] for row in rows)]
    return MetadataValue.md("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _cell(value: Any) -> str:
    """Names and messages come from outside: they must not end a cell or a row."""
    text = " ".join(str(value).split())
    text = text if len(text) <= _CELL else text[: _CELL - 1] + "…"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def of_snapshot(found: SyncReport) -> dict[str, Any]:
    totals = {name: sum(p.counts[name] for p in found.passes) for name in COUNTS if name != "failed"}
    return {
        **totals,
        "waiting_deletions": found.waiting_deletions,
        "walk_seconds": round(found.seconds, 3),
        "sources": table(_SOURCES, [_source_row(p) for p in found.passes]),
    }


def _source_row(p: PassReport) -> list[Any]:
    remarks = [*(["resumed"] if p.resumed else []), *p.reasons[:5]]
    return [p.source, p.verdict.value, *(p.counts[name] for name in COUNTS), p.waiting_deletions, "; ".join(remarks)]


def of_node(report: IngestReport, *names: str, found: SyncReport | None = None) -> dict[str, Any]:
    """Counts (of ``names`` even where they are 0), seconds, and the documents that failed.

    With ``found`` also those that were listed but cannot be read.
    """
    bad = [b for p in found.passes for b in p.bad] if found else []
    failed = report.failed + (sum(p.counts["failed"] for p in found.passes) if found else 0)
    values: dict[str, Any] = {"documents": report.tasks, "documents_out": report.tasks - report.failed, "failed": failed}
    values |= {**dict.fromkeys(names, 0), **report.counts}
    values["seconds"] = round(sum(report.seconds.values(), 0.0), 3)
    if report.stopped is not None:
        values["stopped"] = f"{report.stopped.code}: {report.stopped.message}"
    rows: list[Sequence[Any]] = [(b.external_id, b.code, b.message, "when it changes") for b in bad]
    rows += [(c.external_id, f.code, f.message, _when(f.next_attempt_at)) for c, f in report.failures]
    if rows:
        values["failed_documents"] = table(_FAILED, rows[:MAX_ROWS])
    return values


def of_index(index: Index, generation: int) -> dict[str, Any]:
    """What serves the space. ``alias`` is the name that applications and other tools see in the backend."""
    return {
        "backend": index.ref.kind, "alias": index.ref.name, "model": index.fingerprint, "index_dimensions": index.ref.dimension,
        "space_generation": generation, "serving_since": _when_served(index.served_at),
    }  # fmt: skip


def _when_served(at: datetime | None) -> str:
    return at.isoformat(" ", "seconds") if at is not None else "it was made"


def _when(at: Any) -> str:
    return at.isoformat(" ", "seconds") if at is not None else "when it changes, or after: kb task retry"


def reuse_rate(counts: Mapping[str, int]) -> dict[str, float]:
    """The share of chunks that were there already, of those that the versions consist of. Nothing where nothing was cut."""
    reused, written = counts.get("chunks_reused", 0), counts.get("chunks_written", 0)
    return {"reuse_rate": round(reused / (reused + written), 4)} if reused + written else {}


def of_state(counts: Mapping[str, Mapping[str, int]], failing: Sequence[Any]) -> dict[str, Any]:
    """What the space holds now, whichever run made it, and every document that is in trouble."""
    values: dict[str, Any] = {f"{kind}_now": _by_status(by_status) for kind, by_status in counts.items()}
    values["dagster/partition_row_count"] = counts["vectors"].get("indexed", 0)
    if failing:
        head = ("document", "code", "what happened", "status", "step", "task")
        rows = [(r.external_id, r.error_code, r.error_message, r.status, r.current_node, r.task_id) for r in failing]
        values["failing_documents_now"] = table(head, rows)
    return values


def _by_status(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {status.lower()}" for status, n in counts.items()) or "none"


def in_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """Trouble first, then what this run did, what the space holds now, and the runs before: as one reads it from above."""

    def place(name: str) -> int:
        if name in _TROUBLE:
            return 0
        return 3 if name == "last_runs" else 2 if name.endswith("_now") or name.startswith("dagster/") else 1

    return {name: values[name] for name in sorted(values, key=place)}


def of_errors(errors: Mapping[str, KbError]) -> dict[str, Any]:
    """Of sources that could not be walked: the first in plain fields, all of them as a table."""
    name, first = next(iter(errors.items()))
    all_ = table(("source", "code", "what happened"), [(n, e.code, e.message) for n, e in errors.items()])
    return {"source": name, "code": first.code, "message": first.message, "failed_sources": all_}


def of_log(worked: Worked) -> dict[str, Any]:
    """What a node's log says of this run, where it has an entry."""
    return {} if worked.p95_seconds is None else {"p95_seconds": round(worked.p95_seconds, 3)}


def of_reparse(report: ReparseReport) -> dict[str, Any]:
    names = ("queued", "skipped", "fresh", "without_original")
    return {f"reparse_{n}": getattr(report, n) for n in names}


def of_reembed(report: ReembedReport) -> dict[str, Any]:
    names = ("asked", "changed", "failed", "upserted", "last_chunk")
    values = {f"reembed_{n}": getattr(report, n) for n in names}
    if report.errors:
        values["reembed_failures"] = table(("code", "what happened"), [(e.code, e.message) for e in report.errors])
    return values


def of_history(earlier: Sequence[EventLogRecord], now: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """This run and the ones before it, of the same asset and space, side by side: no wider than the page of an asset."""
    shown = ("documents", "failed", "seconds", *names)
    rows: list[list[Any]] = [["this one", *(now.get(n, "") for n in shown)]]
    for record in earlier[: MAX_RUNS - 1]:
        made = record.asset_materialization
        then = {k: v.value for k, v in made.metadata.items()} if made else {}
        at = datetime.fromtimestamp(record.timestamp, UTC)
        rows.append([f"{at:%m-%d %H:%M}Z", *(then.get(n, "") for n in shown)])
    return {"last_runs": table(("when", *(n.replace("_", " ") for n in shown)), rows)}
