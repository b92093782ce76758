"""What a pass finds, what it writes for it, and what it does not embed again."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kb_pipeline.errors import Fatal
from kb_pipeline.states import FLOW, Node
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article, grown


def test_first_load_makes_every_document_searchable(flow: Flow) -> None:
    for name in ("apple", "birch", "cedar"):
        flow.memory.put(f"{name}.md", article(name))
    report = flow.sync()
    assert report.passes[0].counts["new"] == 3
    assert report.ingest.published == 3
    for name in ("apple", "birch", "cedar"):
        assert flow.showing(f"{name}word1x7") == {f"{name}.md"}
    assert len(flow.embedder.texts) == report.ingest.counts["embedded"] == flow.rows()["kb_chunk"]
    flow.assert_whole()


def test_no_change_walks_nothing_and_writes_one_job_row(flow: Flow) -> None:
    flow.memory.put("a.md", article("a"))
    flow.sync()
    rows, untouched, listings, fetched = flow.rows(), flow.untouched(), flow.memory.listings, list(flow.memory.fetched)
    report = flow.sync()
    assert report.passes[0].counts["unchanged"] == 1
    assert grown(rows, flow.rows()) == {"sync_job": 1}
    after = flow.untouched()
    assert {t for t in after if after[t] != untouched[t]} == {"sync_job", "kb_source"}  # the source: when it was looked at
    assert (flow.memory.listings, flow.memory.fetched) == (listings, fetched)


def test_a_full_pass_over_the_unchanged_walks_but_writes_no_document(flow: Flow) -> None:
    flow.memory.put("a.md", article("a"))
    flow.sync()
    untouched = flow.untouched()
    assert flow.sync(full=True).passes[0].counts["unchanged"] == 1
    after = flow.untouched()
    assert flow.memory.listings == 2
    assert {t for t in after if after[t] != untouched[t]} == {"sync_job", "kb_source"}


@pytest.mark.parametrize("sections", [3, 80])
def test_one_word_costs_one_chunk_whatever_the_size_of_the_document(flow: Flow, sections: int) -> None:
    text = article("oak", sections)
    flow.memory.put("oak.md", text)
    flow.sync()
    rows, calls = flow.rows(), len(flow.embedder.texts)
    flow.memory.put("oak.md", text.replace("oakword1x30 ", "gingko "))
    flow.sync()
    one_each = ("kb_chunk", "kb_chunk_state", "kb_doc_version", "kb_publication", "kb_embedding", "ingestion_task", "sync_job")
    assert grown(rows, flow.rows()) == {**dict.fromkeys(one_each, 1), "ingestion_node_log": len(FLOW)}
    assert len(flow.embedder.texts) == calls + 1
    assert "gingko" in flow.hits("gingko", k=1)[0].text
    assert all("oakword1x30 " not in h.text for h in flow.hits("oakword1x30", k=50))
    flow.assert_whole()


def test_statements_do_not_grow_with_the_documents_of_a_page(
    make_flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    execute = psycopg.Cursor.execute

    def counted(cursor: Any, *args: Any, **options: Any) -> Any:
        sent.append(1)
        return execute(cursor, *args, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    needed = []
    for documents in (4, 40):
        flow = make_flow({f"{n:02}.md": article(f"w{n}", 1) for n in range(documents)})
        flow.sync()
        for n in range(documents):
            flow.memory.put(f"{n:02}.md", article(f"v{n}", 1))
        sent.clear()
        assert flow.sync().ingest.published == documents
        needed.append(len(sent))
    assert needed[1] == needed[0]


# --- moves ----------------------------------------------------------------------------------------------------------


def _age(root: Path) -> None:
    """Files that were written a while ago: nothing is provisional about them."""
    for path in root.rglob("*.md"):
        os.utime(path, (1_700_000_000, 1_700_000_000))


@pytest.fixture
def folder(flow: Flow, tmp_path: Path) -> Path:
    """A folder of files as the flow's only source."""
    root = tmp_path / "documents"
    root.mkdir()
    flow.execute("UPDATE kb_source SET status = 'REMOVED' WHERE id = %(source)s")
    flow.app.add_source(flow.space, "folder", "local_dir", {"path": str(root)})
    return root


def _kept(flow: Flow, old: str, new: str, change: Callable[[], object]) -> None:
    """``change`` moves ``old`` to ``new``: document, versions and vectors stay, and nothing is embedded."""
    document, versions, ids = flow.document(old), flow.rows()["kb_doc_version"], flow.current_ids()
    calls = len(flow.embedder.calls)
    change()
    report = sync_space(flow.engine, flow.space)
    assert report.passes[0].counts["moved"] == 1
    assert report.passes[0].counts["deleted"] == report.passes[0].counts["hidden"] == 0
    moved = flow.document(new)
    assert moved.id == document.id
    assert moved.current_ver == document.current_ver
    assert flow.rows()["kb_doc_version"] == versions
    assert flow.current_ids() == ids
    assert len(flow.embedder.calls) == calls


def test_a_renamed_file_keeps_document_versions_and_vectors(flow: Flow, folder: Path) -> None:
    (folder / "a.md").write_text(article("a"))
    (folder / "b.md").write_text(article("b"))
    _age(folder)
    flow.sync()
    _kept(flow, "a.md", "z.md", lambda: (folder / "a.md").rename(folder / "z.md"))
    assert flow.showing("aword1x5") == {"z.md"}


def test_a_file_moved_across_file_systems_keeps_its_document(flow: Flow, folder: Path) -> None:
    (folder / "a.md").write_text(article("a"))
    (folder / "b.md").write_text(article("b"))
    _age(folder)
    flow.sync()
    inode = (folder / "a.md").stat().st_ino

    def move() -> None:
        (folder / "sub").mkdir()
        shutil.copy(folder / "a.md", folder / "sub" / "a.md")
        (folder / "a.md").unlink()
        _age(folder)

    _kept(flow, "a.md", "sub/a.md", move)
    assert (folder / "sub" / "a.md").stat().st_ino != inode


@pytest.mark.parametrize(("names", "new", "expected"), [
    (("one.md", "two.md"), "sub/two.md", "two.md"),  # the same file name wins
    (("one.md", "two.md"), "three.md", "one.md"),  # then the order of names
])  # fmt: skip
def test_among_vanished_copies_the_same_name_is_the_moved_one(
    flow: Flow, names: tuple[str, ...], new: str, expected: str
) -> None:
    for name in (*names, "kept.md", "other1.md", "other2.md"):
        flow.memory.put(name, article("copies" if not name.startswith("other") else name[:6]))
    flow.sync()
    ids = {n: flow.document(n).id for n in (*names, "kept.md")}
    flow.memory.remove(*names)
    flow.memory.put(new, article("copies"))
    calls = len(flow.embedder.calls)
    flow.approve(1)
    report = flow.sync()
    assert report.passes[0].counts["moved"] == 1
    assert flow.document(new).id == ids[expected]
    assert flow.document("kept.md").id == ids["kept.md"]
    assert len(flow.embedder.calls) == calls


def test_a_new_copy_of_a_living_document_is_a_document_of_its_own(flow: Flow) -> None:
    flow.memory.put("a.md", article("copies"))
    flow.sync()
    old, calls = flow.document("a.md").id, len(flow.embedder.calls)
    flow.memory.put("b.md", article("copies"))
    report = flow.sync()
    assert (report.passes[0].counts["new"], report.passes[0].counts["moved"]) == (1, 0)
    assert flow.document("a.md").id == old != flow.document("b.md").id
    assert len(flow.embedder.calls) == calls
    assert flow.showing("copiesword1x5") == {"a.md", "b.md"}


def test_two_files_that_swap_names_swap_contents_without_embedding(flow: Flow, folder: Path) -> None:
    (folder / "a.md").write_text(article("ash"))
    (folder / "b.md").write_text(article("beech"))
    _age(folder)
    flow.sync()
    ids, calls = {n: flow.document(n).id for n in ("a.md", "b.md")}, len(flow.embedder.calls)
    (folder / "a.md").rename(folder / "x")
    (folder / "b.md").rename(folder / "a.md")
    (folder / "x").rename(folder / "b.md")
    flow.sync()
    assert flow.showing("ashword1x5") == {"b.md"}
    assert flow.showing("beechword1x5") == {"a.md"}
    assert {n: flow.document(n).id for n in ids} == ids
    assert len(flow.embedder.calls) == calls
    flow.assert_whole()


# --- changes that are not in the text -------------------------------------------------------------------------------


def test_a_touched_document_is_metadata_only(flow: Flow) -> None:
    flow.memory.put("a.md", article("a"))
    flow.sync()
    rows, fetched = flow.rows(), len(flow.memory.fetched)
    flow.memory.put("a.md", article("a"))
    report = flow.sync()
    assert (report.passes[0].counts["metadata_only"], report.passes[0].counts["changed"]) == (1, 0)
    assert grown(rows, flow.rows()) == {"sync_job": 1}
    assert len(flow.memory.fetched) == fetched
    assert flow.version("a.md", 1).revision == flow.memory.items["a.md"][0].revision
    assert flow.sync().passes[0].counts["unchanged"] == 1


def test_a_touched_document_of_a_source_without_digests_embeds_nothing(make_flow: Callable[..., Flow]) -> None:
    source = MemorySource({"a.md": article("a")})
    source.capabilities = replace(source.capabilities, digest=False, snapshot_digest=False)
    flow = make_flow(memory=source)
    flow.sync()
    rows, calls = flow.rows(), len(flow.embedder.calls)
    source.put("a.md", article("a"))
    flow.sync()
    assert len(flow.embedder.calls) == calls
    assert "kb_chunk" not in grown(rows, flow.rows())
    assert flow.showing("aword1x5") == {"a.md"}


def test_a_title_of_the_source_changes_without_a_version(flow: Flow) -> None:
    text = "no heading, only words of a plain note\n"
    flow.memory.put("a.md", text, title="Old name")
    flow.sync()
    assert flow.hits("plain note")[0].title == "Old name"
    rows = flow.rows()
    flow.memory.put("a.md", text, title="New name")
    flow.sync()
    assert flow.hits("plain note")[0].title == "New name"
    assert grown(rows, flow.rows()) == {"sync_job": 1}
    assert flow.document("a.md").current_ver == 1


def test_a_full_pass_sees_a_new_title_under_an_old_revision(flow: Flow) -> None:
    flow.memory.put("a.md", "words of a plain note\n", title="Old name")
    flow.sync()
    item, raw = flow.memory.items["a.md"]
    flow.memory.items["a.md"] = (replace(item, title="New name"), raw)
    flow.sync(full=True)
    assert flow.hits("plain note")[0].title == "New name"
    assert flow.document("a.md").current_ver == 1


def test_a_new_link_target_is_shown_after_publish_and_embeds_nothing(flow: Flow) -> None:
    text = article("links").replace("linksword1x7 ", "[linksword1x7](https://old.example/page) ")
    flow.memory.put("a.md", text)
    flow.sync()
    rows, calls = flow.rows(), len(flow.embedder.calls)
    flow.memory.put("a.md", text.replace("old.example", "new.example"))
    flow.walk()
    flow.ingest(nodes=FLOW[:-1])
    assert flow.task("a.md").current_node == Node.INDEXER
    assert "https://old.example/page" in flow.hits("linksword1x7", k=1)[0].text
    flow.sync()
    assert "https://new.example/page" in flow.hits("linksword1x7", k=1)[0].text
    assert not any("old.example" in h.text for h in flow.hits("linksword1x7", k=50))
    assert len(flow.embedder.calls) == calls
    assert "kb_chunk" not in grown(rows, flow.rows())
    assert flow.rows()["kb_chunk_restated"] == 0


def test_a_renamed_heading_restates_the_path_of_the_chunks_below_it(flow: Flow) -> None:
    sections = "\n\n".join(f"### Part {n}\n\n" + " ".join(f"part{n}word{i}" for i in range(60)) for n in range(4))
    text = f"# Guide\n\n## Alpha\n\n{' '.join(f'intro{i}' for i in range(60))}\n\n{sections}\n"
    flow.memory.put("a.md", text)
    flow.sync()
    before = flow.hits("part3word20", k=1)[0]
    assert "Alpha" in before.title_path
    rows, calls = flow.rows(), len(flow.embedder.texts)
    flow.memory.put("a.md", text.replace("## Alpha", "## Omega"))
    flow.sync()
    after = flow.hits("part3word20", k=1)[0]
    assert after.chunk_id == before.chunk_id
    assert "Omega" in after.title_path
    assert "Alpha" not in after.title_path
    assert len(flow.embedder.texts) == calls + 1  # the chunk that holds the heading's own line
    assert grown(rows, flow.rows())["kb_chunk"] == 1


# --- coming back, and reading again -----------------------------------------------------------------------------------


def test_a_document_that_reappears_is_a_new_document_and_embeds_nothing(flow: Flow) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        flow.memory.put(f"{name}.md", article(name))
    flow.sync()
    old, calls = flow.document("a.md").id, len(flow.embedder.calls)
    flow.memory.remove("a.md")
    assert flow.sync().passes[0].counts["deleted"] == 1
    assert flow.document("a.md") is None
    flow.memory.put("a.md", article("a"))
    flow.sync()
    assert flow.document("a.md").id != old
    assert flow.showing("aword1x5") == {"a.md"}
    assert len(flow.embedder.calls) == calls
    assert flow.execute("SELECT status FROM kb_doc WHERE id = %(old)s", old=old)[0].status == "DELETED"
    flow.assert_whole()


def test_a_provisional_item_is_read_again_by_the_next_pass(flow: Flow) -> None:
    flow.memory.put("a.md", article("first"), provisional=True)
    flow.sync()
    item = flow.memory.items["a.md"][0]
    # a second edit within the same tick of the source's clock: the revision says nothing about it
    flow.memory.items["a.md"] = (replace(item, provisional=False), article("second").encode())
    flow.sync()
    assert flow.showing("secondword1x5") == {"a.md"}
    calls = len(flow.embedder.calls)
    assert flow.sync().passes[0].counts["unchanged"] == 1
    assert len(flow.embedder.calls) == calls


def test_a_provisional_item_that_stayed_equal_costs_no_version(flow: Flow) -> None:
    flow.memory.put("a.md", article("first"), provisional=True)
    flow.sync()
    rows = flow.rows()
    for _ in range(2):
        assert flow.sync().passes[0].counts["unchanged"] == 1
    assert grown(rows, flow.rows()) == {"sync_job": 2}


def test_equal_ids_in_two_sources_are_two_documents(flow: Flow) -> None:
    other = MemorySource({"a.md": article("willow")})
    flow.add_source(other, "other")
    flow.memory.put("a.md", article("acacia"))
    report = flow.sync()
    assert len(report.passes) == 2
    first, second = flow.hits("acaciaword1x5", k=1)[0], flow.hits("willowword1x5", k=1)[0]
    assert first.document_id != second.document_id
    other.put("a.md", article("poplar"))
    report = flow.sync(source="other")
    assert [p.source for p in report.passes] == ["other"]
    assert flow.hits("poplarword1x5", k=1)[0].document_id == second.document_id
    assert flow.hits("acaciaword1x5", k=1)[0].document_id == first.document_id


def test_an_unreachable_source_does_not_keep_the_other_from_being_read(flow: Flow) -> None:
    other = MemorySource({"b.md": article("willow")})
    other.page_errors[0] = Fatal("the root is not reachable", code="unreachable")
    flow.add_source(other, "other")
    flow.memory.put("a.md", article("acacia"))
    report = flow.sync()
    assert report.errors["other"].code == "unreachable"
    assert flow.showing("acaciaword1x5") == {"a.md"}


def test_the_same_text_in_two_spaces_is_embedded_once(make_flow: Callable[..., Flow]) -> None:
    one, two = make_flow({"a.md": article("shared")}), make_flow({"b.md": article("shared")})
    one.sync()
    report = two.sync()
    assert report.ingest.counts["chunks_written"] > 0
    assert two.embedder.calls == []
    assert (one.showing("sharedword1x5"), two.showing("sharedword1x5")) == ({"a.md"}, {"b.md"})


def test_the_same_text_in_many_documents_of_one_load_is_embedded_once(flow: Flow) -> None:
    for n in range(5):
        flow.memory.put(f"{n}.md", article("shared"))
    flow.sync()
    assert len(flow.embedder.texts) == len(set(flow.embedder.texts))
    assert len(flow.showing("sharedword1x5")) == 5
