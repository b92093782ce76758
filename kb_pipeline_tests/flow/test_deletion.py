"""What may remove a document, what may not, and what is left behind when the index cannot be reached."""

from collections.abc import Callable

import pytest

from kb_pipeline.errors import Fatal, KbError, RateLimited, Rejected, Transient
from kb_pipeline.maintenance.deletion import delete_document, remove_source
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Presence, Verdict
from kb_pipeline_tests.fakes import MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article

NAMES = [f"{n}{n}" for n in "abcdefghij"]


def _load(flow: Flow) -> Flow:
    for name in NAMES:
        flow.memory.put(f"{name}.md", article(name, 1))
    flow.sync()
    return flow


def _living(flow: Flow) -> set[str]:
    """Every document that a search for its own words finds."""
    return {f"{n}.md" for n in NAMES if flow.showing(f"{n}word0x5")}


ALL = {f"{n}.md" for n in NAMES}


def test_what_a_complete_listing_lacks_is_deleted_with_its_vectors(flow: Flow) -> None:
    _load(flow)
    flow.memory.remove("aa.md")
    report = flow.sync()
    assert (report.passes[0].counts["hidden"], report.passes[0].counts["deleted"]) == (1, 1)
    assert report.vectors_deleted > 0
    assert _living(flow) == ALL - {"aa.md"}
    flow.assert_whole()
    assert flow.rows()["vector_tombstone"] == 0
    assert not [k for k in flow.blobs.objects if f"/docs/{_deleted(flow)}/" in k]


def _deleted(flow: Flow) -> int:
    (row,) = flow.execute("SELECT id FROM kb_doc WHERE space_id = %(space)s AND status = 'DELETED'")
    return int(row.id)


def test_a_deleted_document_is_not_found_although_its_vectors_are_still_there(flow: Flow) -> None:
    _load(flow)
    held = flow.indexed_ids()
    flow.memory.remove("aa.md")
    flow.walk()
    assert flow.indexed_ids() == held
    assert "aa.md" not in flow.showing("aaword0x5")
    assert collect_vectors(flow.engine, flow.space) > 0
    flow.assert_whole()


# --- listings that remove nothing -------------------------------------------------------------------------------------


def test_a_partial_page_deletes_nothing_and_leaves_the_watermark(make_flow: Callable[..., Flow]) -> None:
    flow = _load(make_flow(page_size=3))
    watermark = flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark
    flow.memory.remove("aa.md")
    flow.memory.partial = {1}
    report = flow.sync()
    assert report.passes[0].verdict is Verdict.PARTIAL
    assert report.incomplete
    assert report.passes[0].reasons == ["a folder is closed"]
    assert _living(flow) == ALL
    assert flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark == watermark
    flow.memory.partial = set()
    flow.sync()
    assert _living(flow) == ALL - {"aa.md"}


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("error", [
    Transient("timeout", code="timeout"), RateLimited("slow down"), Fatal("no longer permitted", code="unauthorized"), Rejected("bad cursor"),
], ids=lambda e: e.code)  # fmt: skip
def test_an_error_in_mid_listing_deletes_nothing(make_flow: Callable[..., Flow], error: KbError, page: int) -> None:
    flow = _load(make_flow(page_size=3, index=MemoryIndex()))
    watermark = flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark
    flow.memory.remove("aa.md", "jj.md")
    flow.memory.put("bb.md", article("fresh", 1))
    flow.memory.page_errors[page] = error
    report = flow.sync()
    assert report.errors["memory"].code == error.code
    assert flow.rows()["kb_doc"] == len(ALL)
    assert {"aa.md", "jj.md"} <= _living(flow)
    assert ("bb.md" in flow.showing("freshword0x5")) == (page > 0)  # pages before the error were taken in
    (job,) = flow.execute("SELECT status, verdict, error FROM sync_job WHERE source_id = %(source)s ORDER BY id DESC LIMIT 1")
    assert (job.status, job.verdict) == ("ROLLBACK", "PARTIAL")
    assert error.code in job.error
    assert flow.execute("SELECT watermark FROM kb_source WHERE id = %(source)s")[0].watermark == watermark
    flow.memory.page_errors.clear()
    flow.sync()
    assert _living(flow) == ALL - {"aa.md", "jj.md", "bb.md"}
    assert flow.showing("freshword0x5") == {"bb.md"}


def test_a_listing_that_shrank_beyond_the_guard_waits_for_approval(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md", "bb.md", "cc.md")
    report = flow.sync()
    assert report.passes[0].verdict is Verdict.UNTRUSTED
    assert report.waiting_deletions == 3
    assert "--up-to 3" in report.passes[0].reasons[-1]
    assert _living(flow) == ALL
    assert flow.execute("SELECT waiting_deletions AS n FROM kb_source WHERE id = %(source)s")[0].n == 3
    flow.approve(2)  # a ceiling: three are more than two
    assert flow.sync().waiting_deletions == 3
    assert _living(flow) == ALL
    flow.approve(5)
    report = flow.sync()
    assert (report.passes[0].counts["deleted"], report.waiting_deletions) == (3, 0)
    assert _living(flow) == ALL - {"aa.md", "bb.md", "cc.md"}
    (source,) = flow.execute("SELECT approved, waiting_deletions FROM kb_source WHERE id = %(source)s")
    assert (source.approved, source.waiting_deletions) == (2, 0)
    flow.memory.remove("dd.md", "ee.md", "ff.md")  # what is left of the approval does not cover them
    assert flow.sync().waiting_deletions == 3
    assert {"dd.md", "ee.md", "ff.md"} <= _living(flow)


def test_the_guard_lets_small_deletions_through(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md", "bb.md")
    assert flow.sync().passes[0].counts["deleted"] == 2


def test_an_empty_answer_deletes_nothing_and_what_returns_is_as_before(lying: Flow) -> None:
    flow = _load(lying)
    items, calls, untouched = dict(flow.memory.items), len(flow.embedder.calls), flow.untouched()
    flow.memory.items.clear()
    assert flow.sync().waiting_deletions == len(ALL)
    assert _living(flow) == ALL
    flow.memory.items.update(items)
    assert flow.sync().waiting_deletions == 0
    assert len(flow.embedder.calls) == calls
    after = flow.untouched()
    assert {t for t in after if after[t] != untouched[t]} == {"sync_job", "kb_source"}


def test_a_truly_emptied_source_converges_after_approval(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.items.clear()
    flow.sync()
    flow.approve(len(ALL))
    report = flow.sync()
    assert report.passes[0].counts["deleted"] == len(ALL)
    assert flow.indexed_ids() == set()
    assert flow.rows()["kb_chunk"] == 0
    assert flow.execute("SELECT approved FROM kb_source WHERE id = %(source)s")[0].approved == 0
    assert flow.sync().waiting_deletions == 0
    flow.memory.put("aa.md", article("aa", 1))
    flow.sync()
    assert _living(flow) == {"aa.md"}


# --- the probe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Presence.FORBIDDEN, Presence.UNKNOWN, Presence.PRESENT])
def test_only_a_probe_that_says_gone_deletes(lying: Flow, answer: Presence) -> None:
    flow = _load(lying)
    document, calls, ids = flow.document("aa.md"), len(flow.embedder.calls), flow.current_ids()
    item = flow.memory.items["aa.md"]
    flow.memory.remove("aa.md")
    flow.memory.answers["aa.md"] = answer
    report = flow.sync()
    assert (report.passes[0].counts["hidden"], report.passes[0].counts["deleted"]) == (1, 0)
    assert _living(flow) == ALL - {"aa.md"}
    assert flow.document("aa.md").hidden_at is not None
    assert flow.current_ids() == ids
    flow.memory.items["aa.md"] = item
    report = flow.sync()
    assert _living(flow) == ALL
    assert flow.document("aa.md").id == document.id
    assert flow.document("aa.md").hidden_at is None
    assert len(flow.embedder.calls) == calls
    flow.assert_whole()


def test_what_was_hidden_is_deleted_once_the_probe_says_gone(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")
    flow.memory.answers["aa.md"] = Presence.UNKNOWN
    flow.sync()
    assert flow.document("aa.md") is not None
    del flow.memory.answers["aa.md"]
    assert flow.sync().passes[0].counts["deleted"] == 1
    assert flow.document("aa.md") is None
    flow.assert_whole()


def test_a_pass_that_died_before_its_probes_is_completed_by_the_next(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")
    with monkeypatch.context() as m:
        m.setattr("kb_pipeline.sync.confirm_hidden", lambda *_a, **_k: 0)
        flow.sync()
    assert flow.document("aa.md").hidden_at is not None
    assert flow.sync().passes[0].counts["deleted"] == 1
    flow.assert_whole()


def test_a_document_that_was_shown_again_after_the_probe_is_not_deleted(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")

    def reappears(external_ids: list[str]) -> list[Presence]:
        flow.execute("UPDATE kb_doc SET hidden_at = NULL, hidden_sync = NULL WHERE space_id = %(space)s")
        return [Presence.GONE] * len(external_ids)

    flow.memory.presence = reappears  # type: ignore[method-assign,assignment]
    assert flow.sync().passes[0].counts["deleted"] == 0
    assert _living(flow) == ALL


def test_what_was_written_while_the_walk_ran_is_not_hidden_by_it(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")
    flow.memory.gate.close()
    with flow.beside(flow.sync):
        flow.memory.gate.await_caller()
        flow.execute("UPDATE kb_doc SET seen_at = clock_timestamp() WHERE space_id = %(space)s AND external_id = 'aa.md'")
        flow.memory.gate.open()
    assert flow.document("aa.md").hidden_at is None
    assert _living(flow) == ALL


# --- an index that cannot be reached ----------------------------------------------------------------------------------


def test_a_deletion_while_the_index_is_down_hides_at_once_and_is_finished_later(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")
    flow.index.down = True
    report = flow.sync()
    assert report.passes[0].counts["deleted"] == 1
    waiting = flow.rows()["vector_tombstone"]
    assert waiting > 0
    assert len(flow.indexed_ids() - flow.current_ids()) == waiting
    flow.sync()
    assert flow.rows()["vector_tombstone"] == waiting
    flow.index.down = False
    assert "aa.md" not in flow.showing("aaword0x5")
    assert flow.sync().vectors_deleted == waiting
    assert flow.rows()["vector_tombstone"] == 0
    flow.assert_whole()


def test_a_deletion_that_the_index_only_pretends_stays_a_tombstone(lying: Flow) -> None:
    flow = _load(lying)
    flow.memory.remove("aa.md")
    flow.index.drops_deletes = True
    assert flow.sync().vectors_deleted == 0
    assert flow.execute("SELECT min(tries) AS n FROM vector_tombstone WHERE space_id = %(space)s")[0].n == 1
    assert "aa.md" not in flow.showing("aaword0x5")
    flow.index.drops_deletes = False
    flow.sync()
    assert flow.rows()["vector_tombstone"] == 0
    flow.assert_whole()


# --- by an operator ---------------------------------------------------------------------------------------------------


def test_a_document_deleted_by_hand_comes_back_as_a_new_one(lying: Flow) -> None:
    flow = _load(lying)
    old, calls = flow.document("aa.md").id, len(flow.embedder.calls)
    delete_document(flow.engine, flow.space, flow.source.id, old)
    assert _living(flow) == ALL - {"aa.md"}
    flow.sync()
    assert flow.document("aa.md").id != old
    assert _living(flow) == ALL
    assert len(flow.embedder.calls) == calls
    flow.assert_whole()


def test_a_removed_source_takes_its_documents_and_no_others(lying: Flow) -> None:
    flow = _load(lying)
    flow.add_source(MemorySource({"other.md": article("other", 1)}), "other")
    flow.sync()
    assert remove_source(flow.engine, flow.space, flow.source) == len(ALL)
    collect_vectors(flow.engine, flow.space)
    assert _living(flow) == set()
    assert flow.showing("otherword0x5") == {"other.md"}
    flow.assert_whole()
