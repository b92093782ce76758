"""Every difference between index and database is reported by its exact id and repaired, and nothing else is touched."""

from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kb_pipeline.errors import Rejected
from kb_pipeline.maintenance.reconcile import ReconcileReport, reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.states import Node
from kb_pipeline.store import publications, spaces, tasks
from kb_pipeline.store.database import transaction
from kb_pipeline.store.publications import Wanted
from kb_pipeline_tests.fakes import MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.maintenance.watched import Tamper, WatchedIndex, bucket_of, text_for_bucket
from kb_pipeline_tests.store.shelf import Shelf, cut

NAMES = ("aa", "bb", "cc", "dd")


@pytest.fixture(params=["pgvector", "memory"])
def loaded(request: pytest.FixtureRequest, make_flow: Callable[..., Flow]) -> Flow:
    return _load(make_flow(index=MemoryIndex() if request.param == "memory" else None))


def _load(flow: Flow) -> Flow:
    for name in NAMES:
        flow.memory.put(f"{name}.md", article(name))
    flow.sync()
    return flow


def _current(flow: Flow) -> list[UUID]:
    return sorted(flow.current_ids())


def _reconcile(flow: Flow, **options: Any) -> ReconcileReport:
    return reconcile(flow.engine, flow.space, **options)


def _sampled(report: ReconcileReport) -> dict[str, set[UUID]]:
    return {kind: {UUID(s["vec_id"]) for s in samples} for kind, samples in report.samples.items() if samples}


def _assert_clean(flow: Flow) -> ReconcileReport:
    report = _reconcile(flow)
    assert (report.missing, report.orphaned, report.wrong, report.repaired) == (0, 0, 0, 0)
    return report


# --- exactness --------------------------------------------------------------------------------------------------------


def test_equal_sides_are_clean(loaded: Flow) -> None:
    report = _assert_clean(loaded)
    assert report.chunks == report.vectors == len(loaded.current_ids()) > 10
    assert report.waiting == 0


def test_missing_orphaned_and_wrong_are_reported_by_their_ids_and_repaired(loaded: Flow) -> None:
    tamper, current, asked = Tamper(loaded), _current(loaded), len(loaded.embedder.texts)
    missing, wrong = current[:3], current[3:5]
    for vec_id in missing:
        tamper.lose(vec_id)
    for vec_id in wrong:
        tamper.spoil(vec_id)
    foreign = {tamper.add(), tamper.add()}
    report = _reconcile(loaded)
    assert _sampled(report) == {"missing": set(missing), "wrong": set(wrong), "orphaned": foreign}
    assert (report.missing, report.wrong, report.orphaned, report.repaired, report.remaining) == (3, 2, 2, 7, 0)
    assert {s["external_id"] for s in report.samples["missing"]} <= {f"{n}.md" for n in NAMES}
    assert loaded.indexed_ids() == set(current) | foreign  # nothing is deleted here
    assert _assert_clean(loaded).waiting == 2
    assert collect_vectors(loaded.engine, loaded.space) == 2
    assert _assert_clean(loaded).waiting == 0
    loaded.assert_whole()
    assert len(loaded.embedder.texts) == asked


def test_report_only_changes_nothing(loaded: Flow) -> None:
    tamper, current = Tamper(loaded), _current(loaded)
    tamper.lose(current[0])
    tamper.spoil(current[1])
    foreign = tamper.add()
    held, rows = loaded.indexed_ids(), loaded.untouched()
    report = _reconcile(loaded, repair=False)
    assert (report.missing, report.wrong, report.orphaned, report.repaired, report.remaining) == (1, 1, 1, 0, 3)
    assert _sampled(report)["orphaned"] == {foreign}
    assert loaded.indexed_ids() == held
    assert loaded.untouched() == rows


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_reported_exactly_and_undone(data: st.DataObject, lying: Flow) -> None:
    if not lying.current_ids():
        _load(lying)
    tamper, current = Tamper(lying), _current(lying)
    damage = data.draw(st.lists(st.sampled_from(["keep", "lose", "spoil"]), min_size=len(current), max_size=len(current)))
    foreign = {tamper.add() for _ in range(data.draw(st.integers(0, 3)))}
    by_kind = {kind: {i for i, d in zip(current, damage) if d == kind} for kind in ("lose", "spoil")}
    for vec_id in by_kind["lose"]:
        tamper.lose(vec_id)
    for vec_id in by_kind["spoil"]:
        tamper.spoil(vec_id)
    report = _reconcile(lying)
    expected = {"missing": by_kind["lose"], "wrong": by_kind["spoil"], "orphaned": foreign}
    assert _sampled(report) == {k: v for k, v in expected.items() if v}
    assert report.repaired == sum(map(len, expected.values()))
    assert collect_vectors(lying.engine, lying.space) == len(foreign)
    _assert_clean(lying)
    lying.assert_whole()


def test_an_index_that_lost_everything_is_refilled_group_by_group(lying: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(lying)
    asked = len(lying.embedder.texts)
    monkeypatch.setattr("kb_pipeline.maintenance.reconcile.GROUP", 3)
    monkeypatch.setattr("kb_pipeline.maintenance.reconcile.SLICE", 2)
    Tamper(lying).held.clear()
    report = _reconcile(lying)
    assert report.missing == report.repaired == report.chunks > 10
    lying.assert_whole()
    assert len(lying.embedder.texts) == asked


# --- vectors that are not in the cache --------------------------------------------------------------------------------


def _lose_with_its_embedding(flow: Flow, vec_id: UUID) -> None:
    Tamper(flow).lose(vec_id)
    flow.execute(
        "DELETE FROM kb_embedding e USING kb_chunk c, kb_chunk_state s WHERE e.content_hash = c.content_hash AND c.id = s.id AND s.vec_id = %(id)s",
        id=vec_id,
    )


def test_exactly_the_texts_without_a_vector_are_embedded(lying: Flow) -> None:
    _load(lying)
    first, second = _current(lying)[:2]
    _lose_with_its_embedding(lying, first)
    Tamper(lying).lose(second)
    lying.embedder.calls.clear()
    report = _reconcile(lying)
    (row,) = lying.execute(
        "SELECT c.prefix || E'\\n\\n' || c.content AS text FROM kb_chunk c JOIN kb_chunk_state s ON s.id = c.id WHERE s.vec_id = %(id)s",
        id=first,
    )
    assert lying.embedder.texts == [row.text]
    assert (report.missing, report.repaired, report.embedded) == (2, 2, 1)
    lying.assert_whole()
    assert lying.rows()["embedding_claims"] == 0


def test_a_text_that_is_refused_stays_missing_and_says_why(lying: Flow) -> None:
    _load(lying)
    first, second = _current(lying)[:2]
    _lose_with_its_embedding(lying, first)
    Tamper(lying).lose(second)
    lying.embedder.refused["word"] = Rejected("not permitted", code="policy")
    report = _reconcile(lying)
    assert (report.missing, report.repaired, report.remaining) == (2, 1, 1)
    assert report.error is not None and report.error.code == "policy"
    assert lying.rows()["embedding_claims"] == 0  # the claim was given back
    lying.embedder.refused.clear()
    assert _reconcile(lying).repaired == 1
    lying.assert_whole()


def test_a_text_that_another_process_has_claimed_is_left_to_it(lying: Flow) -> None:
    _load(lying)
    vec_id = _current(lying)[0]
    _lose_with_its_embedding(lying, vec_id)
    lying.execute(
        "INSERT INTO kb_embedding (model_id, content_hash, token, lease_until) "
        "SELECT %(model)s, c.content_hash, nextval('kb_embedding_token'), clock_timestamp() + interval '1 hour' "
        "FROM kb_chunk c JOIN kb_chunk_state s ON s.id = c.id WHERE s.vec_id = %(id)s",
        model=lying.space.model_id,
        id=vec_id,
    )
    lying.embedder.calls.clear()
    assert _reconcile(lying).remaining == 1
    assert lying.embedder.texts == []
    assert lying.rows()["embedding_claims"] == 1


# --- an index that lies, or knows better ------------------------------------------------------------------------------


def test_an_index_that_forgets_what_it_accepts_is_found_out(lying: Flow) -> None:
    _load(lying)
    vec_id = _current(lying)[0]
    Tamper(lying).lose(vec_id)
    lying.index.drops_upserts = True
    report = _reconcile(lying)
    assert (report.missing, report.repaired, report.remaining) == (1, 0, 1)
    lying.index.drops_upserts = False
    assert _reconcile(lying).remaining == 0
    lying.assert_whole()


def test_an_older_payload_is_replaced_and_a_newer_one_is_not(lying: Flow) -> None:
    _load(lying)
    tamper, (older, newer) = Tamper(lying), _current(lying)[:2]
    lying.execute("UPDATE kb_chunk_state SET acl_seq = 5 WHERE space_id = %(space)s")
    for vec_id, seq in ((older, 4), (newer, 6)):
        tamper.spoil(vec_id)
        tamper.held[vec_id] = replace(tamper.held[vec_id], acl_seq=seq)
    report = _reconcile(lying)
    assert _sampled(report) == {"wrong": {older, newer}}
    assert report.remaining == 1
    assert tamper.held[older].acl == () and tamper.held[newer].acl == (7,)


# --- beside writers ---------------------------------------------------------------------------------------------------


def test_a_row_that_came_after_the_listing_began_saves_its_vector(watched: Flow) -> None:
    """The row and its vector appear between the two readings, whichever comes first."""
    _load(watched)
    tamper, shelf, index = Tamper(watched), Shelf(watched.app.pool, watched.space), watched.app.index
    assert isinstance(index, WatchedIndex)
    foreign = tamper.add()
    text, vec_id = text_for_bucket(watched, bucket_of(foreign))

    def arrive() -> None:
        doc_id = shelf.published("fresh.md", text)
        (row,) = shelf.states(doc_id)
        assert row.vec_id == vec_id
        tamper.held[vec_id] = replace(tamper.held[foreign], vec_id=vec_id, chunk_id=row.id, doc_id=doc_id, checksum=row.ck)

    index.before_ids = arrive
    report = _reconcile(watched)
    assert _sampled(report) == {"orphaned": {foreign}}
    collect_vectors(watched.engine, watched.space)
    assert vec_id in watched.indexed_ids()
    watched.assert_whole()


def test_what_a_second_look_does_not_show_is_not_reported(watched: Flow) -> None:
    _load(watched)
    tamper, shelf, index = Tamper(watched), Shelf(watched.app.pool, watched.space), watched.app.index
    assert isinstance(index, WatchedIndex)
    foreign = tamper.add()
    text, vec_id = text_for_bucket(watched, bucket_of(foreign))

    def publish() -> None:  # behind the listing: the first look sees the row and not the vector
        (row,) = shelf.states(shelf.published("fresh.md", text))
        tamper.held[vec_id] = replace(tamper.held[foreign], vec_id=vec_id, chunk_id=row.id, checksum=row.ck)

    index.after_ids = publish
    report = _reconcile(watched)
    assert _sampled(report) == {"orphaned": {foreign}}
    assert report.missing == 0


def _verified(flow: Flow, shelf: Shelf, *texts: str) -> tuple[tasks.Claim, list[Wanted]]:
    """A version whose vectors are in the index, just before it is published."""
    (doc_id,) = shelf.add("draft.md")
    (claim,) = shelf.claim()
    shelf.chunk(claim, cut(*texts))
    (claim,) = shelf.at(Node.INDEXER, [claim])
    with transaction(flow.app.pool) as c:
        held = tasks.fence(c, flow.space, [claim], documents=True)
        wanted = publications.revive(c, flow.space.id, held.shard, [doc_id], [claim.version])
    return claim, wanted


def test_vectors_of_a_version_that_is_being_worked_on_are_no_orphans(lying: Flow) -> None:
    """A version that is being worked on is nobody's orphan."""
    _load(lying)
    tamper, shelf = Tamper(lying), Shelf(lying.app.pool, lying.space)
    claim, wanted = _verified(lying, shelf, "one", "two")
    for w in wanted:
        tamper.add(w.vec_id, chunk_id=w.chunk_id, doc_id=w.doc_id)
        tamper.held[w.vec_id] = replace(tamper.held[w.vec_id], checksum=w.checksum)
    report = _assert_clean(lying)
    assert report.vectors == report.chunks + 2
    assert shelf.tombstones() == {}
    collect_vectors(lying.engine, lying.space)
    shelf.publish(claim)
    _assert_clean(lying)
    lying.assert_whole()


def test_a_vector_of_a_retained_version_is_left_to_the_gc(lying: Flow) -> None:
    """Its row lives, so its name may be needed again: W, which the GC decides under the document's lock."""
    _load(lying)
    lying.memory.put("aa.md", article("aa", 1))
    lying.sync()
    tamper, shelf = Tamper(lying), Shelf(lying.app.pool, lying.space)
    (row, *_) = lying.execute("SELECT id, doc_id, vec_id FROM kb_chunk_state WHERE space_id = %(space)s AND NOT in_current")
    tamper.add(row.vec_id, chunk_id=row.id, doc_id=row.doc_id)
    report = _reconcile(lying)
    assert _sampled(report) == {"orphaned": {row.vec_id}}
    assert shelf.tombstones() == {row.vec_id: "W"}
    assert _assert_clean(lying).waiting == 1
    assert collect_vectors(lying.engine, lying.space) == 1
    lying.assert_whole()


def test_an_id_without_a_row_is_dead_at_once(lying: Flow) -> None:
    _load(lying)
    foreign = Tamper(lying).add()
    _reconcile(lying)
    assert Shelf(lying.app.pool, lying.space).tombstones() == {foreign: "E"}


def test_a_vector_that_is_condemned_already_is_no_difference(lying: Flow) -> None:
    _load(lying)
    lying.memory.put("aa.md", article("aa", 1))
    lying.walk()
    lying.ingest()  # what the new version lacks has tombstones now, and is still there
    report = _assert_clean(lying)
    assert report.waiting == report.vectors - report.chunks > 0


def test_a_space_of_its_own_shard_is_compared_where_it_is(make_flow: Callable[..., Flow]) -> None:
    flow = _load(make_flow(own_shard_chunks=3))
    with transaction(flow.app.pool) as c:
        assert spaces.lock_shared(c, flow.space) not in range(32)
    _assert_clean(flow)
    vec_id = _current(flow)[0]
    Tamper(flow).lose(vec_id)
    assert _sampled(_reconcile(flow)) == {"missing": {vec_id}}


@pytest.mark.parametrize("kind", ["pgvector", "memory"])
def test_ingestion_beside_it_loses_nothing(kind: str, make_flow: Callable[..., Flow]) -> None:
    """Reconciliation with repair and GC, over and over, while documents come, change and go."""
    flow = _load(make_flow(index=MemoryIndex() if kind == "memory" else None))
    over = Event()

    def edit() -> None:
        try:
            for n in range(12):
                flow.memory.put("aa.md", article("aa", 1 + n % 3))
                flow.memory.put("bb.md", article("bb", 3, tag=str(n % 2)))
                flow.memory.put(f"new{n}.md", article(f"new{n}", 2))
                if n:
                    flow.memory.remove(f"new{n - 1}.md")
                assert not flow.sync().errors
        finally:
            over.set()

    with flow.beside(edit) as ended:
        rounds = 0
        while not over.is_set():
            report = _reconcile(flow)
            assert (report.missing, report.wrong) == (0, 0)
            collect_vectors(flow.engine, flow.space)
            rounds += 1
    assert ended == [None]
    assert rounds > 1
    collect_vectors(flow.engine, flow.space)
    _assert_clean(flow)
    collect_vectors(flow.engine, flow.space)
    flow.assert_whole()
    assert flow.showing("new11word0x5") == {"new11.md"}
