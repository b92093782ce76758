"""A gate that fails stops its run: what comes behind it does not start, and nothing of it is published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kb_pipeline.model import Parsed
from kb_pipeline.orchestration import assets
from kb_pipeline.parsers.markdown import MarkdownParser
from kb_pipeline.store import sources
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.orchestration.conftest import Materialise

FLOW = ["source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index"]
# Of one document's chunks that wait for the index: what became of their vectors.
WAITING = """WHERE content_hash IN (SELECT c.content_hash FROM kb_chunk c JOIN kb_doc d ON d.id = c.doc_id
                                    WHERE d.space_id = %(space)s AND d.external_id = 'guide-3.md')"""


def execute(app: FakedApp, space: Space, statement: str) -> None:
    with transaction(app.pool) as c:
        assert c.execute(statement, {"space": space.id}).rowcount > 0  # type: ignore[arg-type]


def published(app: FakedApp, space: Space) -> set[str]:
    with transaction(app.pool) as c:
        rows = c.execute("SELECT external_id FROM kb_doc WHERE space_id = %s AND current_ver > 0", (space.id,))
        return {row.external_id for row in rows}


def test_sound_run_is_green_at_every_gate(filled: Space, materialise: Materialise) -> None:
    run = materialise(filled.key)
    assert run.success
    assert len(run.checks) == 5
    assert run.red == {}
    assert {c.partition for c in run.checks} == {filled.key}


def test_shrunken_listing_stops_the_run_before_anything_of_it_is_published(
    app: FakedApp, filled: Space, folder: Path, materialise: Materialise
) -> None:
    materialise(filled.key)
    for n in range(6):
        (folder / f"guide-{n}.md").unlink()
    (folder / "stranger.md").write_text("# Stranger\n\nOf another folder.", encoding="utf-8")
    run = materialise(filled.key)
    assert not run.success
    assert list(run.metadata) == FLOW[:1]
    red = run.red["listing_did_not_shrink"]
    assert red.severity == "ERROR"
    assert f"kb source approve {filled.key} docs --up-to 6" in red.metadata["repair"]
    assert "| docs | UNTRUSTED |" in red.metadata["documents"]
    assert published(app, filled) == {f"guide-{n}.md" for n in range(10)}
    with transaction(app.pool) as c:
        sources.approve(c, sources.get_source(c, filled.id, "docs").id, 6)
    assert materialise(filled.key).success
    assert "stranger.md" in published(app, filled)


def test_parser_that_yields_nothing_stops_the_run(
    app: FakedApp, filled: Space, materialise: Materialise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarkdownParser, "parse", lambda self, raw, name: Parsed(iter(())))
    run = materialise(filled.key)
    assert not run.success
    assert list(run.metadata) == FLOW[:2]
    red = run.red["parsed_documents_have_text"]
    assert red.severity == "ERROR"
    assert "guide-0.md" in red.metadata["documents"]
    assert f"kb sync {filled.key} --reparse" in red.metadata["repair"]
    assert published(app, filled) == set()


def test_single_document_without_text_is_a_warning_and_costs_itself(
    app: FakedApp, filled: Space, folder: Path, materialise: Materialise
) -> None:
    (folder / "blank.md").write_text("<!-- nothing -->\n", encoding="utf-8")
    run = materialise(filled.key)
    assert run.success
    assert len(published(app, filled)) == 10
    assert all(c.severity == "WARN" for c in run.red.values())


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM kb_chunk WHERE doc_id = (SELECT id FROM kb_doc WHERE space_id = %(space)s AND external_id = 'guide-3.md')",
        "UPDATE kb_doc_version SET chunk_ids = '{}' "
        "WHERE doc_id = (SELECT id FROM kb_doc WHERE space_id = %(space)s AND external_id = 'guide-3.md')",
    ],
)
def test_version_without_its_chunks_stops_the_run(app: FakedApp, filled: Space, materialise: Materialise, damage: str) -> None:
    for asset in FLOW[:3]:
        assert materialise(filled.key, asset).success
    execute(app, filled, damage)
    run = materialise(filled.key, job="ingest_batch")
    assert not run.success
    assert "embeddings" not in run.metadata
    red = run.red["versions_have_their_chunks"]
    assert "guide-3.md" in red.metadata["documents"]
    assert "guide-4.md" not in red.metadata["documents"]
    assert "kb doc delete ID" in red.metadata["repair"]
    assert published(app, filled) == set()


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("missing", f"DELETE FROM kb_embedding {WAITING}"),
        ("length", f"UPDATE kb_embedding SET vector = substring(vector FROM 1 FOR 100) {WAITING}"),
        ("number", f"UPDATE kb_embedding SET vector = set_byte(vector, 1, 126) {WAITING}"),
        ("number", f"UPDATE kb_embedding SET vector = set_byte(vector, octet_length(vector) - 1, 252) {WAITING}"),
        ("zero", f"UPDATE kb_embedding SET vector = decode(repeat('0080', octet_length(vector) / 2), 'hex') {WAITING}"),
    ],
)
def test_vectors_that_are_not_sound_stop_the_run(
    app: FakedApp, filled: Space, materialise: Materialise, column: str, damage: str
) -> None:
    for asset in FLOW[:4]:
        assert materialise(filled.key, asset).success
    execute(app, filled, damage)
    run = materialise(filled.key, job="ingest_batch")
    assert not run.success
    assert "vector_index" not in run.metadata
    (row,) = run.red["vectors_are_sound"].metadata["documents"].splitlines()[2:]
    cells = dict(zip(("missing", "length", "number", "zero"), [int(x) for x in row.split("|")[4:8]], strict=True))
    assert "guide-3.md" in row
    assert [name for name, n in cells.items() if n] == [column]
    assert published(app, filled) == set()

    repaired = materialise(filled.key, job="ingest_batch", embeddings={"reembed": True})
    assert repaired.success, repaired.failures
    assert len(published(app, filled)) == 10


def test_vectors_that_vanish_behind_publishing_fail_the_run(
    app: FakedApp, filled: Space, materialise: Materialise, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle: Callable[..., int] = assets.settle

    def losing(*args: Any, **values: Any) -> int:
        execute(app, filled, f"DELETE FROM kb_vector_m{filled.model_id} WHERE space_id = %(space)s AND doc_id = "
                "(SELECT id FROM kb_doc WHERE space_id = %(space)s AND external_id = 'guide-3.md')")  # fmt: skip
        return settle(*args, **values)

    monkeypatch.setattr(assets, "settle", losing)
    run = materialise(filled.key)
    assert not run.success
    red = run.red["published_vectors_are_in_the_index"]
    assert "guide-3.md" in red.metadata["documents"]
    assert "guide-4.md" not in red.metadata["documents"]
    assert red.metadata["repair"] == f"kb reconcile {filled.key}"
