"""What an answer was based on can be shown later, and comes out again when everything is ranked exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kb_pipeline.as_of import Replay, read_answer, replay
from kb_pipeline.errors import Misconfigured, Rejected
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.model import Answer
from kb_pipeline.search import search
from kb_pipeline.store import publications, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.versions import rollback
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.history.past import ALL, back_to, delete, hide, restrict, write

OLD = article("maple")
NEW = OLD.replace("mapleword1x7", "novelty")
OTHER = article("birch")


def _asked(flow: Flow, question: str, k: int = 5, principals: Sequence[str] = ()) -> Answer:
    answer = search(flow.engine, flow.space, question, k=k, principals=principals)
    assert answer.answer_id is not None
    return answer


def _read(flow: Flow, answer: Answer) -> Answer:
    assert answer.answer_id is not None
    return read_answer(flow.engine, answer.answer_id)[2]


def _replay(flow: Flow, answer: Answer) -> Replay:
    assert answer.answer_id is not None
    return replay(flow.engine, *read_answer(flow.engine, answer.answer_id))


def _ids(answer: Answer | Replay) -> list[int]:
    return [h.chunk_id for h in answer.hits]


@pytest.fixture
def loaded(flow: Flow) -> Flow:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    return flow


# --- the log ------------------------------------------------------------------------------------------------------------


def test_an_answer_is_shown_as_it_was_given(loaded: Flow) -> None:
    given = _asked(loaded, "mapleword1x7 birch", 3, ["ann"])
    write(loaded, "a.md", NEW)
    read = _read(loaded, given)
    assert (read.question, read.answer_id, read.withheld) == (given.question, given.answer_id, 0)
    assert [(h.chunk_id, h.text, h.version, h.external_id) for h in read.hits] == [
        (h.chunk_id, h.text, h.version, h.external_id) for h in given.hits
    ]
    assert [h.score for h in read.hits] == pytest.approx(
        [h.score for h in given.hits], abs=1e-5
    )  # the log has four bytes a score
    _, logged, _ = read_answer(loaded.engine, given.answer_id or 0)
    assert (logged.principals, logged.k, logged.chunk_ids) == (["ann"], 3, _ids(given))


@pytest.mark.parametrize("take_away", [delete, hide, lambda flow, name: restrict(flow, name, [["ann"]])])
def test_what_may_not_be_shown_any_more_is_withheld_and_counted(loaded: Flow, take_away: Callable[[Flow, str], None]) -> None:
    given = _asked(loaded, "mapleword1x7", 4)
    gone = sum(h.external_id == "a.md" for h in given.hits)
    take_away(loaded, "a.md")
    read = _read(loaded, given)
    assert _ids(read) == [h.chunk_id for h in given.hits if h.external_id == "b.md"]
    assert read.withheld == gone > 0
    again = _replay(loaded, given)
    assert (_ids(again), again.differences) == (_ids(read), ())


def test_an_unknown_answer_is_refused(flow: Flow) -> None:
    with pytest.raises(Misconfigured, match="KB_ANSWER_LOG"):
        read_answer(flow.engine, 2**40)


def test_answers_go_with_their_space(loaded: Flow) -> None:
    given = _asked(loaded, "maple")
    delete_space(loaded.engine, loaded.space)
    with pytest.raises(Misconfigured) as refused:
        _read(loaded, given)
    assert refused.value.code == "no_answer"


# --- replay -------------------------------------------------------------------------------------------------------------


def test_a_replay_sees_what_the_answer_saw(loaded: Flow) -> None:
    doc_id = int(loaded.document("a.md").id)
    answers = [_asked(loaded, "mapleword1x7 birch")]
    write(loaded, "a.md", NEW)
    answers.append(_asked(loaded, "mapleword1x7 birch"))
    back_to(loaded, doc_id, 1)
    answers.append(_asked(loaded, "mapleword1x7 birch"))
    write(loaded, "a.md", article("cedar"))
    calls = len(loaded.embedder.calls)
    for answer in answers:
        again = _replay(loaded, answer)
        assert (again.differences, _ids(again)) == ((), _ids(answer))
        assert [h.version for h in again.hits] == [h.version for h in answer.hits]
        assert [h.score for h in again.hits] == pytest.approx([h.score for h in answer.hits], abs=1e-5)
    assert len(loaded.embedder.calls) == calls


def test_the_snapshot_decides_and_not_the_stamps(loaded: Flow) -> None:
    """A publish that was stamped before the answer and committed after it was not seen by it."""
    doc_id = write(loaded, "a.md", NEW)
    version = rollback(loaded.engine, loaded.space, doc_id, 1)
    with transaction(loaded.app.pool) as c:
        shard = spaces.lock_shared(c, loaded.space)
        assert shard is not None and lock_documents(c, [doc_id])
        publications.publish(c, loaded.space.id, shard, {doc_id: version})
        given = _asked(loaded, "mapleword1x7 novelty")
    old, new = loaded.execute("SELECT * FROM kb_publication WHERE doc_id = %(doc)s ORDER BY id DESC LIMIT 2", doc=doc_id)[::-1]
    assert old.to_at <= new.from_at < given.at
    again = _replay(loaded, given)
    assert (again.differences, _ids(again)) == ((), _ids(given))
    assert {h.version for h in (*again.hits, *_read(loaded, given).hits) if h.document_id == doc_id} == {2}


def test_an_answer_from_before_a_restore_is_replayed_by_time(loaded: Flow) -> None:
    """Transaction ids start anew on another server: a snapshot of the old one says nothing about what is published since."""
    given = _asked(loaded, "mapleword1x7")
    write(loaded, "a.md", NEW)
    far = "SELECT (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text AS x"
    x = loaded.execute(far)[0].x
    loaded.execute(
        "UPDATE kb_answer SET snapshot = %(far)s::pg_snapshot WHERE id = %(id)s", id=given.answer_id, far=f"{x}:{x}:"
    )
    again = _replay(loaded, given)
    assert (_ids(again), again.differences) == (_ids(given), ())


def test_a_replay_beyond_the_horizon_is_refused_and_the_log_is_still_shown(loaded: Flow) -> None:
    given = _asked(loaded, "maple")
    write(loaded, "a.md", NEW)
    loaded.execute("UPDATE kb_space SET as_of_horizon = clock_timestamp() WHERE id = %(space)s")
    loaded.execute("DELETE FROM kb_embedding")  # a purge takes vectors too, but that is not the reason to tell
    with pytest.raises(Rejected) as refused:
        _replay(loaded, given)
    assert refused.value.code == "purged" and loaded.space.key in refused.value.message
    assert _ids(_read(loaded, given)) == _ids(given)


def test_a_replay_says_where_the_index_ranked_otherwise(make_flow: Callable[..., Flow]) -> None:
    """An approximate index missed the best chunk, and the next ones moved up."""
    flow = make_flow(index=MemoryIndex())
    write(flow, "a.md", OLD)
    write(flow, "b.md", OTHER)
    best = _asked(flow, "mapleword1x7", 3)
    (rows,) = (r for name, r in flow.index.indexes.items() if name.startswith(f"kb_{flow.space.id}_"))
    rows.pop(next(v for v, e in rows.items() if e.chunk_id == best.hits[0].chunk_id))
    given = _asked(flow, "mapleword1x7", 3)
    again = _replay(flow, given)
    assert _ids(again) == _ids(best)
    first = again.differences[0]
    assert (first.position, first.logged_chunk, first.replayed_chunk) == (1, given.hits[0].chunk_id, best.hits[0].chunk_id)
    assert first.logged_score == given.hits[0].score and (first.replayed_score or 0) > given.hits[0].score


def test_a_replay_says_which_vector_is_another_one(loaded: Flow) -> None:
    given = _asked(loaded, "mapleword1x7", 1)
    loaded.execute(
        "UPDATE kb_embedding e SET vector = o.vector FROM kb_embedding o, kb_chunk c, kb_chunk b "
        "WHERE c.id = %(chunk)s AND e.content_hash = c.content_hash AND b.doc_id <> c.doc_id AND b.space_id = %(space)s AND o.content_hash = b.content_hash",
        chunk=given.hits[0].chunk_id,
    )
    again = _replay(loaded, given)
    assert [d.position for d in again.differences] == [1]


def test_a_logged_chunk_that_was_not_current_is_a_difference_however_near_it_is(flow: Flow) -> None:
    text = article("maple", 2)
    write(flow, "a.md", text)
    given = _asked(flow, "maple Section 1", 1)
    write(flow, "a.md", text + "\n## Section 1" + text.rpartition("## Section 1")[2])
    held = {r.id for r in flow.execute("SELECT id FROM kb_chunk WHERE space_id = %(space)s AND occurrence = 1")}
    assert len(held) == 1
    flow.execute("UPDATE kb_answer SET chunk_ids = %(held)s WHERE id = %(id)s", held=list(held), id=given.answer_id)
    again = _replay(flow, given)
    assert [(d.logged_chunk, d.replayed_chunk) for d in again.differences] == [(min(held), given.hits[0].chunk_id)]
    assert again.differences[0].logged_score == pytest.approx(again.differences[0].replayed_score, abs=1e-5)


def test_chunks_that_are_equally_near_may_stand_in_any_order(flow: Flow) -> None:
    write(flow, "a.md", OLD)
    write(flow, "b.md", OLD)
    given = _asked(flow, "mapleword1x7", 2)
    assert given.hits[0].score == given.hits[1].score
    flow.execute("UPDATE kb_answer SET chunk_ids = ARRAY[chunk_ids[2], chunk_ids[1]] WHERE id = %(id)s", id=given.answer_id)
    assert _replay(flow, given).differences == ()


def test_what_may_be_seen_only_since_then_is_a_difference(loaded: Flow) -> None:
    restrict(loaded, "a.md", [["ann"]])
    given = _asked(loaded, "mapleword1x7", ALL)
    restrict(loaded, "a.md", None)
    found = {d.replayed_chunk for d in _replay(loaded, given).differences}
    assert {h.chunk_id for h in loaded.hits("maple", ALL) if h.external_id == "a.md"} <= found


def test_a_lost_cache_is_told(loaded: Flow) -> None:
    given = _asked(loaded, "maple")
    with transaction(loaded.app.pool) as c:
        c.execute("DELETE FROM kb_embedding")
    with pytest.raises(Rejected) as refused:
        _replay(loaded, given)
    assert refused.value.code == "vectors_missing"


POOL = [article(f"{name}{n}", 1) for name in ("maple", "birch") for n in range(3)]
STEP = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=3)),
    st.tuples(st.just("back"), st.integers(0, 2), st.integers(1, 9)),
    st.tuples(st.just("delete"), st.integers(0, 2), st.just(0)),
)


@given(history=st.lists(STEP, min_size=2, max_size=6), k=st.sampled_from([1, 3, ALL]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_answer_of_any_history_is_replayed_as_it_was(make_flow: Callable[..., Flow], history: list[Any], k: int) -> None:
    flow = make_flow()
    given = []
    for what, number, how in history:
        name = f"{number}.md"
        document = flow.document(name)
        if what == "write":
            write(flow, name, "\n\n".join(POOL[i] for i in how))
        elif document is not None and what == "back":
            back_to(flow, document.id, 1 + how % document.current_ver)
        elif document is not None:
            delete(flow, name)
        given.append(_asked(flow, "maple1word0x3 birch", k))
    living = {r.id for r in flow.execute("SELECT id FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED'")}
    for answer in given:
        left = [h for h in answer.hits if h.document_id in living]
        read, again = _read(flow, answer), _replay(flow, answer)
        assert _ids(read) == [h.chunk_id for h in left] and read.withheld == len(answer.hits) - len(left)
        assert again.differences == () and len(again.hits) == len(left)
