"""A space whose vectors are in another store than PostgreSQL, from its first sync to its removal."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kb_pipeline.errors import StateError
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.sweep import sweep_removed
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.ports import VectorIndex
from kb_pipeline.search import search
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import FakedApp

TOPICS = ("backups", "holidays", "printers", "invoices", "parking", "lunch")  # one of them may go unasked
_number = count(1)


@pytest.fixture(params=["qdrant", "milvus"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(kind: str, make_app: Callable[..., FakedApp], tmp_path: Path) -> tuple[FakedApp, Space, Path]:
    """A folder of documents in a space of its own, synchronised."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for topic in TOPICS:
        sections = [f"## {topic} {n}\n\nWhat everybody asks about {topic} in office {n}." for n in range(3)]
        (folder / f"{topic}.md").write_text(f"# {topic}\n\n" + "\n\n".join(sections), encoding="utf-8")
    app = make_app()
    options = {"path": str(tmp_path / "vectors.db")}
    space = app.add_space(f"flow-{next(_number)}", index=kind, index_options=options, embedder_options={"dimension": 32})
    app.add_source(space, "docs", "local_dir", {"path": str(folder)})
    assert sync_space(app.engine, space).ingest.published == len(TOPICS)
    return app, space, folder


def opened(app: FakedApp, space: Space) -> tuple[IndexRef, VectorIndex]:
    with transaction(app.pool) as c:
        ref = spaces.serving_index(c, space.id)
    return ref, app.engine.index(ref)


def held(ref: IndexRef, index: VectorIndex) -> dict[UUID, int]:
    found: dict[UUID, int] = {}
    for bucket in index.digest(ref):
        found |= index.ids(ref, bucket)
    return found


def spoilt(ref: IndexRef, vec_id: UUID) -> VectorEntry:
    vector = bytes(2 * (ref.dimension - 1)) + b"\x00\x3c"
    return VectorEntry(vec_id, 1, 1, vector, (7,), 0, 1, int(vec_id.hex[:3], 16))


def test_a_space_is_synchronised_searched_repaired_and_removed(loaded: tuple[FakedApp, Space, Path]) -> None:
    app, space, folder = loaded
    ref, index = opened(app, space)
    assert search(app.engine, space, "printers office").hits[0].external_id == "printers.md"

    (folder / "holidays.md").write_text("# holidays\n\nAll about sabbaticals and nothing else.", encoding="utf-8")
    (folder / "invoices.md").unlink()
    sync_space(app.engine, space)
    assert search(app.engine, space, "sabbaticals").hits[0].external_id == "holidays.md"
    assert "invoices.md" not in {h.external_id for h in search(app.engine, space, "invoices office", k=20).hits}
    collect_vectors(app.engine, space)

    right = held(ref, index)
    lost, wrong = sorted(right)[:2]
    foreign = UUID(bytes=hashlib.sha256(b"foreign").digest()[:16])
    index.delete(ref, [lost])
    index.upsert(ref, [spoilt(ref, wrong), spoilt(ref, foreign)])
    report = reconcile(app.engine, space)
    assert (report.missing, report.wrong, report.orphaned) == (1, 1, 1)
    _assert_repaired(app, space, ref, index, right, foreign)

    assert not any(delete_space(app.engine, space).values())
    with pytest.raises(StateError):
        index.upsert(ref, [spoilt(ref, foreign)])
    assert index.drop(ref) == 0


def _assert_repaired(
    app: FakedApp, space: Space, ref: IndexRef, index: VectorIndex, right: dict[UUID, int], foreign: UUID
) -> None:
    collect_vectors(app.engine, space)
    report = reconcile(app.engine, space)
    assert (report.missing, report.wrong, report.orphaned, report.remaining) == (0, 0, 0, 0)
    assert held(ref, index) == right
    assert search(app.engine, space, "backups office").hits[0].external_id == "backups.md"


def test_an_index_that_appears_after_its_space_was_removed_is_swept(loaded: tuple[FakedApp, Space, Path]) -> None:
    app, space, _ = loaded
    ref, index = opened(app, space)
    delete_space(app.engine, space)
    index.ensure(ref)  # what a client does that was cut off in the middle of making it
    living = app.add_space(
        f"living-{next(_number)}", index=ref.kind, index_options=ref.options, embedder_options={"dimension": 32}
    )
    alive, _ = opened(app, living)
    listing: Any = index
    assert {ref.name, alive.name} <= set(listing.names())
    assert sweep_removed(app.engine).indexes == 1
    assert ref.name not in listing.names() and alive.name in listing.names()
    assert index.drop(replace(ref, name=alive.name)) == 0
