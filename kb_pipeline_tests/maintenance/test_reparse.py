"""Parsing again what is stored: every document once, nothing embedded twice, nothing lost beside a sync."""

from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO

import pytest

from kb_pipeline.maintenance.reparse import reparse_space
from kb_pipeline.model import Parsed
from kb_pipeline.parsers.markdown import MarkdownParser
from kb_pipeline.states import Node
from kb_pipeline_tests.cli.conftest import Kb
from kb_pipeline_tests.flow.scenario import Flow, article

DOCUMENTS = {f"{n}.md": article(f"Paper{n}") for n in range(6)}


@pytest.fixture
def synced(make_flow: Callable[..., Flow]) -> Flow:
    flow = make_flow(dict(DOCUMENTS))
    flow.sync()
    return flow


def versions(flow: Flow) -> dict[str, int]:
    rows = flow.execute("SELECT external_id, current_ver FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED'")
    return {r.external_id: r.current_ver for r in rows}


def test_equal_chunks_cost_nothing_and_the_source_is_not_asked(synced: Flow) -> None:
    before, asked, fetched = synced.chunks(), len(synced.embedder.texts), list(synced.memory.fetched)
    assert reparse_space(synced.engine, synced.space).queued == 6
    report = synced.ingest()
    assert (report.published, report.failed) == (6, 0)
    assert report.counts["chunks_written"] == 0
    assert synced.chunks() == before
    assert len(synced.embedder.texts) == asked
    assert synced.memory.fetched == fetched
    assert set(versions(synced).values()) == {2}
    assert all(synced.version(name, 2).raw_path == synced.version(name, 1).raw_path for name in DOCUMENTS)
    synced.assert_whole()


def test_parser_that_has_learned_something_shows(synced: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = MarkdownParser.parse

    def louder(self: MarkdownParser, raw: BinaryIO, name: str) -> Parsed:
        return parse(self, BytesIO(raw.read().replace(b"Paper3word1x7 ", b"learned ")), name)

    monkeypatch.setattr(MarkdownParser, "parse", louder)
    reparse_space(synced.engine, synced.space)
    synced.sync()
    assert synced.showing("learned") == {"3.md"}
    synced.assert_whole()


def test_next_walk_sees_nothing_new_and_still_sees_an_edit(synced: Flow) -> None:
    reparse_space(synced.engine, synced.space)
    synced.ingest()
    walked = synced.sync(full=True).passes[0].counts
    assert (walked["unchanged"], walked["changed"], walked["new"]) == (6, 0, 0)
    synced.memory.put("0.md", article("Edited"))
    assert synced.sync().passes[0].counts["changed"] == 1
    assert "0.md" in synced.found("Editedword0x1")


def test_document_with_a_live_task_is_skipped_and_counted(synced: Flow) -> None:
    synced.memory.put("0.md", article("Edited"))
    synced.walk()
    report = reparse_space(synced.engine, synced.space)
    assert (report.queued, report.skipped) == (5, 1)
    synced.ingest()
    assert versions(synced) == dict.fromkeys(DOCUMENTS, 2)
    assert "0.md" in synced.found("Editedword0x1")


def test_twice_makes_one_task_a_document(synced: Flow) -> None:
    first, second = (reparse_space(synced.engine, synced.space) for _ in range(2))
    assert (first.queued, first.skipped, second.queued, second.skipped) == (6, 0, 0, 6)
    synced.ingest()
    assert set(versions(synced).values()) == {2}


def test_two_at_once_make_one_task_a_document(synced: Flow) -> None:
    with synced.beside(lambda: reparse_space(synced.engine, synced.space)) as ended:
        here = reparse_space(synced.engine, synced.space)
    (there,) = ended
    assert here.queued + there.queued == 6
    synced.ingest()
    assert set(versions(synced).values()) == {2}


def test_what_got_a_version_meanwhile_is_left_alone(synced: Flow) -> None:
    """As a run that was killed and goes on does: the moment it was asked for is passed again."""
    (now,) = synced.execute("SELECT clock_timestamp() AS at")
    reparse_space(synced.engine, synced.space, before=now.at)
    synced.ingest()
    again = reparse_space(synced.engine, synced.space, before=now.at)
    assert (again.queued, again.skipped, again.fresh) == (0, 0, 6)


def test_beside_a_sync_nothing_is_lost_or_done_twice(synced: Flow) -> None:
    gate = synced.embedder.gate
    for n in range(3):
        synced.memory.put(f"{n}.md", article(f"Edited{n}"))
    synced.memory.put("new.md", article("Fresh"))
    gate.close()
    with synced.beside(synced.sync) as ended:
        gate.await_caller()  # the sync holds its tasks
        report = reparse_space(synced.engine, synced.space)
        gate.open()
    assert not isinstance(ended[0], BaseException), ended
    assert (report.queued, report.skipped) == (3, 4)
    synced.sync()
    assert versions(synced) == {**dict.fromkeys(DOCUMENTS, 2), "new.md": 1}
    assert all(f"{n}.md" in synced.found(f"Edited{n}word0x1") for n in range(3))
    assert len(synced.embedder.texts) == len(set(synced.embedder.texts))
    synced.assert_whole()


def test_edit_that_comes_after_it_wins(synced: Flow) -> None:
    reparse_space(synced.engine, synced.space)
    synced.memory.put("0.md", article("Edited"))
    synced.sync()
    assert "0.md" in synced.found("Editedword0x1")
    assert versions(synced)["0.md"] == 3
    assert synced.sync().passes[0].counts["unchanged"] == 6


def test_document_that_failed_is_tried_with_its_own_newest_content(synced: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    synced.memory.put("0.md", b"%PDF-1.4 nothing in it")
    synced.sync()
    assert synced.task("0.md").status == "DEAD"
    report = reparse_space(synced.engine, synced.space)
    assert report.queued == 6
    assert synced.task("0.md").current_node == Node.PARSER
    synced.ingest()
    assert synced.task("0.md").status == "DEAD"  # no older content in its place: the failure stays to be seen
    assert synced.task("0.md").error_code == "unsupported_format"
    assert versions(synced)["0.md"] == 1
    live = synced.execute("SELECT count(*) AS n FROM ingestion_task WHERE space_id = %(space)s AND status = 'DEAD'")
    assert live[0].n == 1


def test_document_without_an_original_is_counted(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow({"a.md": article("One")})
    flow.memory.vanishing.add("gone.md")
    flow.memory.put("gone.md", article("Gone"))
    flow.sync()
    report = reparse_space(flow.engine, flow.space)
    assert report.without_original == 1
    assert report.queued == 1


def test_hidden_documents_stay_hidden(synced: Flow) -> None:
    synced.execute("UPDATE kb_doc SET hidden_at = now(), hidden_sync = 1 WHERE space_id = %(space)s AND external_id = '0.md'")
    reparse_space(synced.engine, synced.space)
    synced.ingest()
    assert "0.md" not in synced.found("Paper0word0x1")


def test_command_tells_what_was_parsed_again(kb: Kb, loaded: str) -> None:
    found: dict[str, Any] = kb.json("sync", loaded, "--reparse")
    assert found["reparse"] == {"queued": 2, "skipped": 0, "fresh": 0, "without_original": 0}
    assert (found["published"], found["embedded"]) == (2, 0)
    assert "parsed again: 2 documents" in kb("sync", loaded, "--reparse").out
