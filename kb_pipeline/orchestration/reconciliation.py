"""The index against the database, exactly; and what else no single step can see. An asset, so that the web UI can run it for a
space: checks of a partition cannot be run on their own."""

from collections.abc import Callable
from typing import TypeVar

from dagster import AssetCheckResult, AssetExecutionContext, Failure, MaterializeResult, asset

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected
from kb_pipeline.maintenance.reconcile import ReconcileReport, reconcile
from kb_pipeline.orchestration.checks import result, spec
from kb_pipeline.orchestration.config import ReconcileConfig
from kb_pipeline.orchestration.lineage import GROUP, OWNERS, SEARCH_INDEX
from kb_pipeline.orchestration.metadata import MAX_ROWS
from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import integrity, spaces
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.spaces import Space

T = TypeVar("T")
NAME = "index_reconciliation"
EXACT, ORPHANS, GHOSTS, STUCK, GIVEN_UP = (
    "index_equals_database",
    "no_orphan_vectors",
    "no_ghost_documents",
    "no_stuck_tasks",
    "no_vectors_given_up",
)
STUCK_SECONDS = 3600.0
_SAMPLE = ("difference", "document", "id", "chunk", "vector")


@asset(
    name=NAME,
    partitions_def=SPACES,
    group_name=GROUP,
    owners=OWNERS,
    deps=[SEARCH_INDEX],
    kinds={"python", "postgres"},
    tags={"kb/step": "check"},
    check_specs=[
        spec(EXACT, NAME, "Every current chunk has its vector in the index, with its permissions, compared id by id."),
        spec(ORPHANS, NAME, "The index holds no vector that nothing refers to."),
        spec(GHOSTS, NAME, "No document is shown that is deleted, whose source is gone, or whose version is not ready."),
        spec(STUCK, NAME, f"No task has stood still for {STUCK_SECONDS / 3600:g} hours with nothing that keeps it."),
        spec(GIVEN_UP, NAME, f"No vector has failed {integrity.MAX_ATTEMPTS} times."),
    ],
    description="""
The vector index compared with the database, id by id, and repaired: what is missing or wrong is written again from the stored
vectors, what is too much is condemned and erased later. The same as `kb reconcile`.

**A materialisation means:** every current chunk of the space and every vector of its index were compared. With `report_only`
in the run's configuration nothing is changed. A check that stays red shows what could not be repaired, and the command for it.

**When it fails:** the index or the database cannot be used, see `code` and `message`. Nothing is half repaired.
""",
)
def index_reconciliation(context: AssetExecutionContext, config: ReconcileConfig, kb: KbResource) -> MaterializeResult:
    key = context.partition_key
    try:
        engine, space = kb.space(key)
        report = reconcile(engine, space, repair=not config.report_only)
        checks = _checks(engine, space, report)
    except KbError as e:
        raise Failure(f"space {key}: {e.message}", metadata={"space": key, "code": e.code, "message": e.message}) from e
    counted = ("chunks", "vectors", "missing", "orphaned", "wrong", "repaired", "remaining", "waiting", "embedded")
    return MaterializeResult(metadata={n: getattr(report, n) for n in counted}, check_results=checks)


def _checks(engine: Engine, space: Space, report: ReconcileReport) -> list[AssetCheckResult]:
    ghosts = _rows(engine, space, lambda c, shard: integrity.ghosts(c, space.id, shard, MAX_ROWS))
    stuck = _rows(engine, space, lambda c, _: integrity.stuck(c, space.id, STUCK_SECONDS, MAX_ROWS))
    given_up = _rows(engine, space, lambda c, shard: integrity.given_up(c, space.id, shard, MAX_ROWS))
    return [
        _differences(space, report, EXACT, ("missing", "wrong"), f"kb reconcile {space.key}"),
        _differences(space, report, ORPHANS, ("orphaned",), f"kb reconcile {space.key}, then kb gc {space.key}"),
        result(
            GHOSTS,
            space,
            passed=not ghosts,
            says=_many(len(ghosts), "ghost document"),
            repair=f"kb doc delete ID; where it should be shown: kb sync {space.key} --reparse",
            columns=("document", "id", "what"),
            rows=[(r.external_id, r.doc_id, r.what) for r in ghosts],
            counts={"ghosts": len(ghosts)},
        ),
        result(
            STUCK,
            space,
            passed=not stuck,
            says=_many(len(stuck), "stuck task"),
            repair=f"kb sync {space.key}; one that stays: kb task cancel ID",
            columns=("document", "task", "status", "step", "since"),
            rows=[(r.external_id, r.task_id, r.status, r.current_node, f"{r.updated_at:%Y-%m-%d %H:%M}Z") for r in stuck],
            counts={"stuck": len(stuck)},
        ),
        result(
            GIVEN_UP,
            space,
            passed=not given_up,
            says=_many(len(given_up), "vector", f" that failed {integrity.MAX_ATTEMPTS} times"),
            repair=f"remove the cause that is named, then kb reconcile {space.key}",
            columns=("document", "id", "chunk", "tries", "what happened"),
            rows=[(r.external_id, r.doc_id, r.chunk_id, r.attempts, r.error) for r in given_up],
            counts={"given_up": len(given_up)},
        ),
    ]


def _differences(space: Space, report: ReconcileReport, name: str, kinds: tuple[str, ...], repair: str) -> AssetCheckResult:
    """Green once it is repaired: how many there were stays to be seen."""
    found = sum(getattr(report, kind) for kind in kinds)
    red = found > 0 and report.remaining > 0
    says = f"{', '.join(f'{getattr(report, kind)} {kind}' for kind in kinds)} of {report.chunks} chunks"
    why = f": a text could not be embedded: {report.error.message}" if red and report.error else ""
    return result(
        name,
        space,
        passed=not red,
        says=says + ("" if red or not found else ", repaired") + why,
        repair=repair,
        columns=_SAMPLE,
        rows=[
            (kind, s.get("external_id") or "", s["document_id"] or "", s["chunk_id"] or "", s["vec_id"])
            for kind in kinds
            for s in report.samples[kind]
        ],
        counts={kind: getattr(report, kind) for kind in kinds},
    )


def _many(n: int, what: str, rest: str = "") -> str:
    """``no tasks``, ``1 task``, ``50 or more tasks``: rows are counted up to what is shown."""
    shown = f"{n} or more" if n >= MAX_ROWS else str(n or "no")
    return f"{shown} {what}{'' if n == 1 else 's'}{rest}"


def _rows(engine: Engine, space: Space, read: Callable[[Connection, int], T]) -> T:
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is None:
            raise Rejected(f"space {space.key!r} is being removed", code="no_space")
        return read(c, shard)
