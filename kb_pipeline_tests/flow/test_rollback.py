"""An older version becomes current again as a new one, and every retained version can be read."""

import pytest

from kb_pipeline.errors import Misconfigured
from kb_pipeline.versions import rollback, version_text
from kb_pipeline_tests.flow.scenario import Flow, article

OLD = article("maple")
NEW = OLD.replace("mapleword1x7", "novelty")


def _two_versions(flow: Flow) -> int:
    flow.memory.put("a.md", OLD)
    flow.sync()
    flow.memory.put("a.md", NEW)
    flow.sync()
    return int(flow.document("a.md").id)


def test_a_rollback_is_a_new_version_and_embeds_nothing(flow: Flow) -> None:
    doc_id = _two_versions(flow)
    calls, shown = len(flow.embedder.calls), flow.chunks()
    assert flow.rows()["vector_tombstone"] == 0  # the old chunk's vector is erased: it has to come back under a new name
    assert rollback(flow.engine, flow.space, doc_id, 1) == 3
    assert flow.chunks() == shown
    flow.ingest()
    assert flow.document("a.md").current_ver == 3
    assert flow.showing("mapleword1x7") == {"a.md"}
    assert flow.showing("novelty") == set()
    assert flow.hits("mapleword1x7", k=1)[0].version == 3
    assert len(flow.embedder.calls) == calls
    assert flow.version("a.md", 3).chunk_ids == flow.version("a.md", 1).chunk_ids
    flow.sync()
    flow.assert_whole()


def test_a_rollback_stands_until_the_source_changes(flow: Flow) -> None:
    doc_id = _two_versions(flow)
    rollback(flow.engine, flow.space, doc_id, 1)
    flow.sync()
    for full in (False, True):
        flow.sync(full=full)
        assert flow.document("a.md").current_ver == flow.document("a.md").last_ver == 3
    flow.memory.put("a.md", NEW)  # touched, the same content
    flow.sync()
    assert flow.showing("mapleword1x7") == {"a.md"}
    flow.memory.put("a.md", NEW.replace("mapleword2x7", "another"))
    flow.sync()
    assert flow.document("a.md").current_ver == 4
    assert flow.showing("novelty") == flow.showing("another") == {"a.md"}
    flow.assert_whole()


def test_a_rollback_brings_back_what_was_shown_then(flow: Flow) -> None:
    text = OLD.replace("mapleword1x7 ", "[mapleword1x7](https://old.example/page) ")
    flow.memory.put("a.md", text)
    flow.sync()
    shown = flow.chunks()
    flow.memory.put("a.md", text.replace("old.example", "new.example"))
    flow.sync()
    calls = len(flow.embedder.calls)
    rollback(flow.engine, flow.space, flow.document("a.md").id, 1)
    flow.sync()
    assert "https://old.example/page" in version_text(flow.engine, flow.document("a.md").id)
    assert flow.chunks() == shown
    assert len(flow.embedder.calls) == calls


def test_each_version_can_be_read(flow: Flow) -> None:
    doc_id = _two_versions(flow)
    assert "mapleword1x7" in version_text(flow.engine, doc_id, 1)
    assert "novelty" not in version_text(flow.engine, doc_id, 1)
    assert "novelty" in version_text(flow.engine, doc_id, 2)
    assert version_text(flow.engine, doc_id) == version_text(flow.engine, doc_id, 2)
    rollback(flow.engine, flow.space, doc_id, 1)
    flow.sync()
    assert version_text(flow.engine, doc_id) == version_text(flow.engine, doc_id, 1)


def test_what_was_never_published_cannot_be_rolled_back_to(flow: Flow) -> None:
    doc_id = _two_versions(flow)
    flow.memory.put("a.md", b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20)
    flow.sync()
    assert flow.document("a.md").last_ver == 3
    rows = flow.rows()
    for version in (3, 9):
        with pytest.raises(Misconfigured, match="never published"):
            rollback(flow.engine, flow.space, doc_id, version)
    assert flow.rows() == rows
    assert flow.task("a.md").status == "DEAD"


def test_a_deleted_document_cannot_be_rolled_back(flow: Flow) -> None:
    doc_id = _two_versions(flow)
    flow.memory.put("b.md", OLD)
    flow.execute("UPDATE kb_doc SET status = 'DELETED' WHERE id = %(doc)s", doc=doc_id)
    with pytest.raises(Misconfigured, match="deleted"):
        rollback(flow.engine, flow.space, doc_id, 1)
