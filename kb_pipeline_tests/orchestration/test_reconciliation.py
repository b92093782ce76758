"""index_reconciliation: what it finds, names and repairs; and what no single step can see."""

from typing import Any

import pytest

from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.orchestration.conftest import Materialise, Run

NAME = "index_reconciliation"
DOC = "(SELECT id FROM kb_doc WHERE space_id = %(space)s AND external_id = 'guide-3.md')"


def execute(app: FakedApp, space: Space, statement: str) -> list[Any]:
    with transaction(app.pool) as c:
        done = c.execute(statement.replace("{vectors}", f"kb_vector_m{space.model_id}"), {"space": space.id})  # type: ignore[arg-type]
        assert done.rowcount > 0
        return done.fetchall() if done.description else []


@pytest.fixture
def synced(filled: Space, materialise: Materialise) -> Space:
    assert materialise(filled.key).success
    return filled


def reconciled(materialise: Materialise, space: Space, **config: Any) -> Run:
    return materialise(space.key, job="reconcile_space", **({NAME: config} if config else {}))


def test_sound_space_is_green_for_its_partition(synced: Space, materialise: Materialise) -> None:
    run = reconciled(materialise, synced)
    assert run.success
    assert {c.partition for c in run.checks} == {synced.key}
    assert len(run.checks) == 5
    assert run.red == {}
    told = run.metadata[NAME]
    assert told["chunks"] == told["vectors"] > 10
    assert (told["missing"], told["orphaned"], told["wrong"]) == (0, 0, 0)


def test_missing_vectors_are_named_and_repaired_unless_told_not_to(
    app: FakedApp, synced: Space, materialise: Materialise
) -> None:
    execute(app, synced, f"DELETE FROM {{vectors}} WHERE space_id = %(space)s AND doc_id = {DOC}")
    run = reconciled(materialise, synced, report_only=True)
    assert run.success
    red = run.red["index_equals_database"]
    assert list(run.red) == ["index_equals_database"]
    assert "guide-3.md" in red.metadata["documents"]
    assert red.metadata["repair"] == f"kb reconcile {synced.key}"
    assert run.metadata[NAME]["repaired"] == 0
    missing = run.metadata[NAME]["missing"]
    assert missing > 0

    repaired = reconciled(materialise, synced)
    assert repaired.red == {}
    assert repaired.metadata[NAME]["repaired"] == missing
    assert reconciled(materialise, synced, report_only=True).metadata[NAME]["missing"] == 0


def test_orphan_vectors_are_named(app: FakedApp, synced: Space, materialise: Materialise) -> None:
    orphan = (
        "INSERT INTO {vectors} SELECT shard, x.id, space_id, index_id, 0, 0, 0, 1, kb_bucket(x.id), acl, v FROM "
        "(SELECT gen_random_uuid() AS id) x, (SELECT * FROM {vectors} WHERE space_id = %(space)s LIMIT 1) o RETURNING vec_id"
    )
    (row,) = execute(app, synced, orphan)
    run = reconciled(materialise, synced, report_only=True)
    assert list(run.red) == ["no_orphan_vectors"]
    assert str(row.vec_id) in run.red["no_orphan_vectors"].metadata["documents"]
    assert f"kb gc {synced.key}" in run.red["no_orphan_vectors"].metadata["repair"]


@pytest.mark.parametrize(
    "damage",
    [
        f"UPDATE kb_doc SET status = 'DELETED' WHERE id = {DOC}",
        "UPDATE kb_source SET status = 'REMOVED' WHERE space_id = %(space)s",
        f"UPDATE kb_doc_version SET status = 'ARCHIVED' WHERE doc_id = {DOC}",
    ],
)
def test_documents_that_are_shown_and_should_not_be_are_named(
    app: FakedApp, synced: Space, materialise: Materialise, damage: str
) -> None:
    execute(app, synced, damage)
    red = reconciled(materialise, synced).red
    assert list(red) == ["no_ghost_documents"]
    assert "guide-3.md" in red["no_ghost_documents"].metadata["documents"]


STALE = "UPDATE ingestion_task SET status = '{}', updated_at = now() - interval '{} minutes' WHERE doc_id = " + DOC


@pytest.mark.parametrize(
    ("statement", "is_stuck"),
    [
        (STALE.format("PENDING", 90), True),
        (STALE.format("PENDING", 30), False),
        (STALE.format("CANCELING", 90), True),
        (STALE.format("INIT", 90), True),
        (STALE.format("PROCESSING', lease_until = now() + '1 minute", 90), False),
        (STALE.format("PROCESSING', lease_until = now() - interval '1 minute", 90), True),
        (STALE.format("FAILED', next_attempt_at = now() + interval '1 minute", 90), False),
        (STALE.format("FAILED', next_attempt_at = now() - interval '90 minutes", 90), True),
        (STALE.format("DEAD", 90), False),
    ],
)
def test_task_is_stuck_only_when_nothing_keeps_it(
    app: FakedApp, synced: Space, materialise: Materialise, statement: str, is_stuck: bool
) -> None:
    execute(app, synced, statement)
    red = reconciled(materialise, synced).red
    assert list(red) == (["no_stuck_tasks"] if is_stuck else [])
    if is_stuck:
        assert "guide-3.md" in red["no_stuck_tasks"].metadata["documents"]


@pytest.mark.parametrize(("attempts", "given_up"), [(4, False), (5, True)])
def test_vector_that_failed_five_times_is_named_with_its_reason(
    app: FakedApp, synced: Space, materialise: Materialise, attempts: int, given_up: bool
) -> None:
    execute(
        app,
        synced,
        "INSERT INTO vector_retry (shard, chunk_id, space_id, attempts, error) SELECT shard, id, space_id, "
        f"{attempts}, 'refused: not this one' FROM kb_chunk_state WHERE space_id = %(space)s AND doc_id = {DOC} LIMIT 1",
    )
    red = reconciled(materialise, synced, report_only=True).red
    assert list(red) == (["no_vectors_given_up"] if given_up else [])
    if given_up:
        shown = red["no_vectors_given_up"].metadata["documents"]
        assert "guide-3.md" in shown and "refused: not this one" in shown


def test_space_without_a_partition_says_what_to_do(synced: Space, materialise: Materialise) -> None:
    run = reconciled(materialise, Space(**{**{f: getattr(synced, f) for f in synced.__slots__}, "key": "never-made"}))
    assert run.failures[NAME][1]["code"] == "no_space"
