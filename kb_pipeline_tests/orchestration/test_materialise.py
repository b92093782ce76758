"""Materialising the five assets is `kb sync`, told in the words of the web UI."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kb_pipeline.errors import Fatal, Transient
from kb_pipeline.orchestration import metadata, resources
from kb_pipeline.search import search
from kb_pipeline.settings import Settings
from kb_pipeline.store import status
from kb_pipeline.store.database import connection
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemorySource
from kb_pipeline_tests.orchestration.conftest import Materialise, Run

FLOW = ["source_snapshot", "parsed_documents", "chunks", "embeddings", "vector_index"]

HELD = """
SELECT d.external_id, d.title, d.status AS doc, d.hidden_at IS NOT NULL AS hidden, d.current_ver, d.last_ver, v.status AS version,
       t.status AS task, t.current_node, t.error_code, array(
           SELECT encode(c.content_hash, 'hex') FROM unnest(v.chunk_ids) WITH ORDINALITY u (id, seq)
           JOIN kb_space s ON s.id = d.space_id JOIN kb_chunk c ON c.shard = s.shard AND c.id = u.id ORDER BY u.seq) AS hashes
FROM kb_doc d LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.last_ver
LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver WHERE d.space_id = %s ORDER BY d.external_id, d.id
"""


def held(app: FakedApp, space: Space) -> tuple[list[Any], dict[str, dict[str, int]], list[tuple[str, str, float]]]:
    """Everything of a space but its numbers: documents with their chunk hashes, counts, and what a search shows."""
    with connection(app.pool) as c:
        documents = [tuple(row) for row in c.execute(HELD, (space.id,))]
        counts = status.counts(c, space.id)
    hits = search(app.engine, space, "which letter confirms reservation 3 of part 2?", k=8).hits
    return documents, counts, sorted((h.external_id, h.text, round(h.score, 5)) for h in hits)


def published(app: FakedApp, space: Space) -> set[str]:
    with connection(app.pool) as c:
        rows = c.execute("SELECT external_id FROM kb_doc WHERE space_id = %s AND status = 'AVAILABLE'", (space.id,))
        return {row.external_id for row in rows}


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakedApp], None]:
    """Let runs work with this application, fakes and all."""

    def use(app: FakedApp) -> None:
        @contextmanager
        def opened(_: Settings) -> Iterator[App]:
            yield app

        monkeypatch.setattr(resources, "open_app", opened)

    return use


# --- the same as kb sync --------------------------------------------------------------------------------------------


def test_five_assets_do_what_kb_sync_does(app: FakedApp, filled: Space, folder: Path, materialise: Materialise) -> None:
    (folder / "scan.pdf").write_bytes(b"%PDF-1.4 nothing in it")
    twin = app.add_space(f"{filled.key}-twin")
    app.add_source(twin, "docs", "local_dir", {"path": str(folder)})

    assert list(materialise(filled.key).metadata) == FLOW
    sync_space(app.engine, twin)
    assert held(app, filled) == held(app, twin)
    assert len(published(app, filled)) == 10

    text = (folder / "guide-3.md").read_text(encoding="utf-8")
    (folder / "guide-3.md").write_text(text.replace("letter 6 ", "letter 66 ", 1), encoding="utf-8")
    (folder / "guide-4.md").rename(folder / "moved.md")
    (folder / "guide-5.md").unlink()
    (folder / "new.md").write_text("# New\n\nReservation 99 of part 2 has no letter yet.", encoding="utf-8")

    run = materialise(filled.key)
    sync_space(app.engine, twin)
    assert held(app, filled) == held(app, twin)
    assert published(app, filled) == {f"guide-{n}.md" for n in (0, 1, 2, 3, 6, 7, 8, 9)} | {"moved.md", "new.md"}
    snapshot = run.metadata["source_snapshot"]
    assert {k: snapshot[k] for k in ("new", "changed", "moved", "deleted")} == {
        "new": 1,
        "changed": 1,
        "moved": 1,
        "deleted": 1,
    }
    assert 0 < run.metadata["chunks"]["reuse_rate"] < 1


def test_unchanged_space_embeds_nothing_and_shows_unchanged(filled: Space, folder: Path, materialise: Materialise) -> None:
    first, second = materialise(filled.key), materialise(filled.key)
    assert first.metadata["embeddings"]["embedded"] > 0
    assert first.metadata["vector_index"]["published"] == 10
    assert second.metadata["embeddings"]["embedded"] == 0
    assert second.metadata["vector_index"]["published"] == 0
    assert second.metadata["source_snapshot"]["documents"] == 0
    assert second.versions == first.versions
    assert set(first.versions) == set(FLOW)

    (folder / "guide-0.md").write_text("# Guide 0\n\nRewritten.", encoding="utf-8")
    third = materialise(filled.key)
    assert all(third.versions[asset] != second.versions[asset] for asset in FLOW)


def test_asset_alone_leaves_the_rest_to_the_next_one(app: FakedApp, filled: Space, materialise: Materialise) -> None:
    for asset in FLOW[:-1]:
        run = materialise(filled.key, asset)
        assert run.success
        assert run.metadata[asset]["documents"] == 10
        assert published(app, filled) == set()
    last = materialise(filled.key, "vector_index")
    assert last.metadata["vector_index"]["published"] == 10
    assert len(published(app, filled)) == 10


def test_data_version_of_the_index_changes_with_publishing_only(filled: Space, folder: Path, materialise: Materialise) -> None:
    first = materialise(filled.key)
    (folder / "guide-0.md").write_text("# Guide 0\n\nRewritten.", encoding="utf-8")
    snapshot = materialise(filled.key, "source_snapshot")
    assert snapshot.versions["source_snapshot"] != first.versions["source_snapshot"]
    assert materialise(filled.key, "vector_index").versions["vector_index"] == first.versions["vector_index"]


def test_ingest_batch_takes_what_waits_without_asking_sources(
    app: FakedApp, filled: Space, folder: Path, materialise: Materialise
) -> None:
    materialise(filled.key, "source_snapshot")
    (folder / "late.md").write_text("# Late\n\nComes after the listing.", encoding="utf-8")
    run = materialise(filled.key, job="ingest_batch")
    assert list(run.metadata) == FLOW[1:]
    assert published(app, filled) == {f"guide-{n}.md" for n in range(10)}


def test_space_that_will_be_large_has_its_shard_before_its_first_chunk(
    app: FakedApp, filled: Space, materialise: Materialise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_OWN_SHARD_CHUNKS", "10")
    assert materialise(filled.key, "source_snapshot").success
    with connection(app.pool) as c:
        owned = c.execute("SELECT state FROM kb_shard JOIN kb_space s USING (shard) WHERE s.id = %s", (filled.id,)).fetchall()
        assert status.counts(c, filled.id)["chunks"] == {}
    assert [row.state for row in owned] == ["OWNED"]


def test_application_is_opened_once_for_all_assets_of_a_run_and_closed(
    filled: Space, materialise: Materialise, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[App] = []

    @contextmanager
    def counted(settings: Settings) -> Iterator[App]:
        with open_app(settings) as app:
            opened.append(app)
            yield app

    monkeypatch.setattr(resources, "open_app", counted)
    assert materialise(filled.key).success
    assert len(opened) == 1
    assert opened[0].pool.closed


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_failed_document_is_shown_and_fails_no_run(filled: Space, folder: Path, materialise: Materialise) -> None:
    (folder / "scan | old.pdf").write_bytes(b"%PDF-1.4 nothing in it")
    run = materialise(filled.key)
    assert run.success
    parsed = run.metadata["parsed_documents"]
    assert parsed["failed"] == 1
    row = parsed["failed_documents"].splitlines()[2]
    assert row.startswith("| scan \\| old.pdf | unsupported_format | ")
    assert run.metadata["vector_index"]["published"] == 10
    again = materialise(filled.key).metadata
    assert "failed_documents" not in again["parsed_documents"]
    assert "unsupported_format" in again["vector_index"]["failing_documents_now"]


def test_missing_folder_fails_the_snapshot_with_its_message(filled: Space, folder: Path, materialise: Materialise) -> None:
    folder.rename(folder.with_name("elsewhere"))
    run = materialise(filled.key)
    assert not run.success
    assert list(run.failures)[0] == "source_snapshot"
    description, told = run.failures["source_snapshot"]
    assert filled.key in description
    assert told["source"] == "docs"
    assert told["code"] in description
    assert told["message"] in description
    assert str(folder) in told["message"]
    assert run.metadata == {}


def test_broken_source_does_not_hold_up_documents_of_another(
    app: FakedApp, filled: Space, folder: Path, tmp_path: Path, materialise: Materialise
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    app.add_source(filled, "aaa-first", "local_dir", {"path": str(gone)})
    gone.rmdir()
    run = materialise(filled.key)
    assert not run.success
    assert run.failures["source_snapshot"][1]["source"] == "aaa-first"
    assert len(published(app, filled)) == 10


def test_listing_that_shrank_is_told_with_the_way_out(
    app: FakedApp, filled: Space, folder: Path, materialise: Materialise
) -> None:
    materialise(filled.key)
    for n in range(6):
        (folder / f"guide-{n}.md").unlink()
    run = materialise(filled.key)
    assert run.metadata["source_snapshot"]["waiting_deletions"] == 6
    assert "UNTRUSTED" in run.metadata["source_snapshot"]["sources"]
    assert any("UNTRUSTED" in line and "kb source approve" in line for line in run.logs)
    assert len(published(app, filled)) == 10


def test_endpoint_that_refuses_us_fails_its_asset_and_stops_there(
    make_app: Callable[..., FakedApp], faked: Callable[[FakedApp], None], materialise: Materialise
) -> None:
    embedder = CountingEmbedder()
    app = make_app(embedder=embedder)
    space = app.add_space("refused")
    app.add_fake_source(space, MemorySource({"a.md": "# A\n\nOne.", "b.md": "# B\n\nTwo."}))
    embedder.refused = {"One": Fatal("the key is refused: renew it", code="unauthorized")}
    faked(app)
    run = materialise(space.key)
    assert list(run.metadata) == FLOW[:3]
    description, told = run.failures["embeddings"]
    assert "the key is refused: renew it" in description
    assert told["code"] == "unauthorized"
    assert told["failed"] == 2


def test_document_that_cannot_be_read_just_now_fails_no_run(
    make_app: Callable[..., FakedApp], faked: Callable[[FakedApp], None], materialise: Materialise
) -> None:
    app = make_app()
    source = MemorySource({"a.md": "# A\n\nOne."})
    source.fetch_errors["a.md"] = Transient("a.md is being written", code="changing")
    space = app.add_space("writing")
    app.add_fake_source(space, source)
    faked(app)
    run = materialise(space.key)
    assert run.success
    assert "changing" in run.metadata["source_snapshot"]["failed_documents"]
    assert list(run.metadata) == FLOW


def test_partition_without_a_space_says_what_there_is(filled: Space, materialise: Materialise) -> None:
    run: Run = materialise("never-made")
    description, told = run.failures["source_snapshot"]
    assert filled.key in description
    assert told == {"space": "never-made", "code": "no_space", "message": told["message"]}


def test_what_comes_from_outside_cannot_break_a_table() -> None:
    value = metadata.table(("a", "b"), [("x|y", "two\nlines <b>"), ("z" * 1000, "\\|")]).value
    head, rule, first, second = value.splitlines()
    assert (head, rule) == ("| a | b |", "| --- | --- |")
    assert first == "| x\\|y | two lines &lt;b> |"
    assert len(second) < 350
    assert second.endswith("| \\\\\\| |")
