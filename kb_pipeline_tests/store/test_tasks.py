"""The task machine in SQL: who gets what, in which order, what a dead worker leaves, and that no guard differs from the table."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kb_pipeline.states import FLOW, TRANSITIONS, Event, Node, TaskStatus, sources_of
from kb_pipeline.store import database, documents, tasks
from kb_pipeline.store.database import Pool, transaction, worker_id
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import MAX_DEATHS, Claim
from kb_pipeline_tests.interleaving import Begun
from kb_pipeline_tests.store.shelf import Shelf, cut

PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def shelf(pool: Pool, space: Space) -> Shelf:
    return Shelf(pool, space)


def expire(shelf: Shelf) -> None:
    """Every lease of the space ran out, its owner unknown to this host."""
    with transaction(shelf.pool) as c:
        c.execute(
            "UPDATE ingestion_task SET lease_until = '-infinity', claimed_by = 'elsewhere/1/2/3' WHERE status = 'PROCESSING' AND space_id = %s",
            [shelf.space.id],
        )


def kill_owner(shelf: Shelf) -> None:
    """The owner was a process of this host and is dead; its lease has not run out."""
    dead = worker_id().rpartition("/")[0] + "/0"
    with transaction(shelf.pool) as c:
        c.execute(
            "UPDATE ingestion_task SET claimed_by = %s WHERE status = 'PROCESSING' AND space_id = %s", [dead, shelf.space.id]
        )


# --- claim ------------------------------------------------------------------------------------------------------------


def test_tasks_are_claimed_in_the_order_in_which_they_became_ready(shelf: Shelf) -> None:
    first, second, third = shelf.add("a", "b", "c")
    given_back = shelf.claim(1)
    with transaction(shelf.pool) as c:
        tasks.give_back(c, given_back)
    assert [x.doc_id for x in shelf.claim()] == [second, third, first]


def test_a_claim_takes_what_it_asked_for_and_raises_the_attempt(shelf: Shelf) -> None:
    shelf.add("a", "b", "c")
    assert len(shelf.claim(2)) == 2
    (left,) = shelf.claim(2)
    assert left.attempt == 1 and left.node is Node.FETCHER and left.external_id == "c"
    assert shelf.claim() == []


def test_several_claimers_get_each_task_once(shelf: Shelf) -> None:
    ids = set(shelf.add(*(f"d{n:03}" for n in range(120))))
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda _: shelf.claim(7), range(24)))
    claimed = [x.doc_id for part in taken for x in part]
    claimed += [x.doc_id for x in shelf.claim()]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) == ids


def test_a_task_that_another_claimer_holds_is_skipped_not_waited_for(shelf: Shelf) -> None:
    shelf.add("a", "b")
    with transaction(shelf.pool) as c:
        (mine,) = tasks.claim(c, shelf.space, 1, 120, FLOW)
        (other,) = shelf.claim()  # in another transaction, while this one is open
    assert mine.doc_id != other.doc_id


def test_only_tasks_at_the_wanted_nodes_are_claimed(shelf: Shelf) -> None:
    one, two = shelf.add("a", "b")
    moved = shelf.at(Node.CHUNKER, [x for x in shelf.claim() if x.doc_id == one])
    with transaction(shelf.pool) as c:
        tasks.give_back(c, moved)
    assert [x.doc_id for x in shelf.claim(nodes=[Node.CHUNKER])] == [one]
    assert shelf.claim(nodes=[Node.EMBEDDING]) == []
    assert shelf.task(two).status == "PROCESSING"


def test_the_floor_rises_behind_what_is_done_and_hides_nothing(shelf: Shelf) -> None:
    (late,) = shelf.add("late")
    with transaction(shelf.pool) as c:
        c.execute("SELECT setval('kb_ready_seq', nextval('kb_ready_seq') + 5000)")
    shelf.add("a", "b")
    before = shelf.task(late).ready_seq
    with transaction(shelf.pool) as c:  # the slow inserter's rows are not there yet
        c.execute("UPDATE ingestion_task SET status = 'INIT' WHERE doc_id = %s", [late])
    shelf.claim()
    floor = shelf.value("SELECT floor FROM kb_queue_floor WHERE space_id = %(space)s")
    assert floor > before
    with transaction(shelf.pool) as c:
        c.execute("UPDATE ingestion_task SET status = 'PENDING' WHERE doc_id = %s", [late])
    assert [x.doc_id for x in shelf.claim()] == [late]


def test_nothing_of_a_space_that_is_being_deleted_is_claimed_or_written(shelf: Shelf) -> None:
    shelf.add("a", "b")
    (held,) = shelf.claim(1)
    with transaction(shelf.pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETING', generation = generation + 1 WHERE id = %s", [shelf.space.id])
    assert shelf.claim() == []
    with transaction(shelf.pool) as c:
        assert tasks.fence(c, shelf.space, [held]).claims == []
    assert shelf.sweep() == 0


# --- fence ------------------------------------------------------------------------------------------------------------


def test_a_fence_holds_the_newest_attempt_only(shelf: Shelf) -> None:
    shelf.add("a")
    (zombie,) = shelf.claim()
    expire(shelf)
    shelf.sweep()
    with transaction(shelf.pool) as c:
        assert tasks.fence(c, shelf.space, [zombie]).claims == []  # waits again
    (heir,) = shelf.claim()
    assert heir.attempt == zombie.attempt + 1
    with transaction(shelf.pool) as c:
        assert tasks.fence(c, shelf.space, [zombie]).claims == []
        assert tasks.fence(c, shelf.space, [heir]).claims == [heir]


def test_what_a_zombie_writes_about_its_task_changes_nothing(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (zombie,) = shelf.claim()
    expire(shelf)
    shelf.sweep()
    shelf.claim()
    before = shelf.task(doc)
    with transaction(shelf.pool) as c:
        tasks.advance(c, [zombie], datetime.now(UTC), {})
        tasks.release(c, [zombie], datetime.now(UTC))
        tasks.give_back(c, [zombie])
        tasks.supersede(c, [zombie])
        tasks.renew(c, [(zombie.task_id, zombie.attempt)], 3600)
    assert shelf.task(doc) == before


def test_a_fence_drops_tasks_of_deleted_documents(shelf: Shelf) -> None:
    gone, stays = shelf.add("a", "b")
    claims = shelf.claim()
    shelf.delete(gone)
    with transaction(shelf.pool) as c:
        assert [x.doc_id for x in tasks.fence(c, shelf.space, claims, documents=True).claims] == [stays]
    assert shelf.task(gone).status == "CANCELED"


def test_a_renewed_lease_is_longer_and_a_released_task_waits_where_it_stood(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.at(Node.CHUNKER, shelf.claim(lease_seconds=5))
    before = shelf.task(doc).lease_until
    with transaction(shelf.pool) as c:
        tasks.renew(c, [(held.task_id, held.attempt)], 1000)
    assert shelf.task(doc).lease_until > before + timedelta(seconds=900)
    with transaction(shelf.pool) as c:
        tasks.release(c, [held], datetime.now(UTC))
    found = shelf.task(doc)
    assert (found.status, found.current_node, found.claimed_by, found.lease_until) == ("PENDING", "CHUNKER", None, None)


# --- due, interrupted, poison ------------------------------------------------------------------------------------------


def test_a_failed_task_waits_for_its_time_and_is_due_then(shelf: Shelf) -> None:
    now, later = shelf.add("a", "b")
    one, two = shelf.claim()
    shelf.fail(one, PAST)
    shelf.fail(two, datetime.now(UTC) + timedelta(hours=1))
    assert (shelf.task(now).status, shelf.task(now).retry_count) == ("FAILED", 1)
    shelf.sweep()
    assert [x.doc_id for x in shelf.claim()] == [now]
    assert shelf.task(later).status == "FAILED"
    with transaction(shelf.pool) as c:
        assert 3000 < (tasks.next_due_seconds(c, shelf.space.id) or 0) <= 3600


def test_a_failure_without_a_next_time_is_dead_and_gives_its_version_up(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    shelf.fail(held, None)
    assert (shelf.task(doc).status, shelf.task(doc).error_code) == ("DEAD", "broken")
    assert shelf.value("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc) == "FAILED"
    assert shelf.value("SELECT status FROM kb_doc WHERE id = %(doc)s", doc=doc) == "FAILED"
    shelf.sweep()
    assert shelf.claim() == []


def test_a_lease_that_ran_out_is_no_failed_try(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    shelf.claim()
    shelf.sweep()
    assert shelf.task(doc).status == "PROCESSING"  # its owner lives and its lease runs
    expire(shelf)
    assert shelf.sweep() == 1
    found = shelf.task(doc)
    assert (found.status, found.deaths, found.retry_count) == ("PENDING", 1, 0)


def test_a_process_of_this_host_that_is_dead_loses_its_tasks_at_once(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    shelf.claim(lease_seconds=3600)
    kill_owner(shelf)
    shelf.sweep()
    assert shelf.task(doc).status == "PENDING"


def test_the_owner_of_another_host_is_never_held_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    host, boot, pid, started = worker_id().rsplit("/", 3)
    assert not database.is_dead(worker_id())
    assert database.is_dead(f"{host}/{boot}/{pid}/{int(started) - 1}")  # the pid was used again
    assert database.is_dead(f"{host}/an-earlier-boot/{pid}/{started}")
    assert not database.is_dead(f"elsewhere/{boot}/0/0")
    assert not database.is_dead("")
    assert not database.is_dead("somebody")


def test_three_deaths_at_one_node_are_the_document_s_fault(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    for death in range(1, MAX_DEATHS + 1):
        (held,) = shelf.claim()
        expire(shelf)
        shelf.sweep()
        assert shelf.task(doc).deaths == death
    found = shelf.task(doc)
    assert (found.status, found.error_code) == ("DEAD", "poison")
    assert found.attempt > held.attempt
    assert shelf.value("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc) == "FAILED"


def test_a_node_that_succeeds_forgets_the_deaths_before_it(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    for node in FLOW[:3]:
        for _ in range(MAX_DEATHS - 1):
            shelf.claim()
            expire(shelf)
            shelf.sweep()
        (held,) = shelf.claim()
        assert held.node is node
        with transaction(shelf.pool) as c:
            tasks.advance(c, [held], datetime.now(UTC), {})
            tasks.give_back(c, [held])
    assert (shelf.task(doc).status, shelf.task(doc).deaths) == ("PENDING", 0)


def test_the_log_has_a_line_for_every_node_failure_and_death(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    shelf.at(Node.CHUNKER, shelf.claim())
    expire(shelf)
    shelf.sweep()
    (held,) = shelf.claim()
    shelf.fail(held, None)
    with transaction(shelf.pool) as c:
        _, log = tasks.get_task(c, held.task_id)
    assert [(r.node, r.status, r.attempt) for r in log] == [
        ("FETCHER", "SUCCESS", 1), ("PARSER", "SUCCESS", 1), ("CHUNKER", "INTERRUPTED", 1), ("CHUNKER", "FAILED", 2)]  # fmt: skip
    assert log[-1].error == "broken: it is broken"


def test_work_goes_on_in_a_week_that_nobody_made_a_log_for(shelf: Shelf) -> None:
    """A database that was migrated long ago, its partitions all of the past."""
    with transaction(shelf.pool) as c:
        leaves = "SELECT inhrelid::regclass::text AS leaf FROM pg_inherits WHERE inhparent = 'ingestion_node_log'::regclass"
        for row in c.execute(leaves).fetchall():
            c.execute(f"DROP TABLE {row.leaf}")
        tasks.ensure_log(c)
    shelf.add("a")
    assert len(shelf.at(Node.INDEXER, shelf.claim())) == 1


# --- one live task a document --------------------------------------------------------------------------------------------


def test_newer_content_waits_for_the_version_that_is_being_worked_on(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    shelf.edit(doc)
    assert (shelf.task(doc, 1).status, shelf.task(doc, 2).status) == ("PROCESSING", "INIT")
    shelf.sweep()
    assert shelf.task(doc, 2).status == "INIT"
    shelf.chunk(first, cut("one"))
    shelf.publish(shelf.at(Node.INDEXER, [first])[0])
    shelf.sweep()
    assert shelf.task(doc, 2).status == "PENDING"


def test_of_several_queued_versions_only_the_newest_is_worked_on(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    for _ in range(3):
        shelf.edit(doc)
    assert [shelf.task(doc, v).status for v in (1, 2, 3, 4)] == ["PROCESSING", "CANCELED", "CANCELED", "INIT"]
    shelf.fail(first, None)
    shelf.sweep()
    assert [shelf.task(doc, v).status for v in (1, 4)] == ["DEAD", "PENDING"]


def test_content_that_nobody_has_begun_is_replaced_by_newer_content(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    shelf.edit(doc)
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["CANCELING", "INIT"]
    shelf.sweep()
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["CANCELED", "PENDING"]
    assert [x.version for x in shelf.claim()] == [2]


def test_sweepers_at_once_admit_one_task_a_document(shelf: Shelf) -> None:
    ids = shelf.add(*(f"d{n}" for n in range(30)))
    for doc in ids:
        shelf.edit(doc)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: database.retried(shelf.sweep), range(8)))
    database.retried(shelf.sweep)
    found = shelf.rows("SELECT doc_id, version, status FROM ingestion_task WHERE space_id = %(space)s AND status <> 'CANCELED'")
    assert sorted(found) == [(d, 2, "PENDING") for d in sorted(ids)]


# --- cancel, retry ----------------------------------------------------------------------------------------------------


def cancel(shelf: Shelf, task_id: int) -> bool:
    with transaction(shelf.pool) as c:
        return tasks.cancel(c, task_id, "a test's")


def retry(shelf: Shelf, task: Any) -> bool:
    with transaction(shelf.pool) as c:
        documents.lock_documents(c, [task.doc_id])
        return tasks.retry(c, task.id)


def test_a_cancelled_version_is_cleaned_up_by_the_sweeper_and_its_worker_is_fenced_off(shelf: Shelf) -> None:
    doc = shelf.published("a", "one")
    shelf.edit(doc)
    (held,) = shelf.claim()
    shelf.chunk(held, cut("one", "two"))
    assert cancel(shelf, held.task_id)
    with transaction(shelf.pool) as c:
        assert tasks.fence(c, shelf.space, [held]).claims == []
    shelf.sweep()
    assert (shelf.task(doc, 2).status, shelf.task(doc, 2).current_node) == ("CANCELED", "CLEANUP")
    assert [r.content for r in shelf.states(doc)] == ["one"]
    version = shelf.rows("SELECT status, chunk_ids FROM kb_doc_version WHERE doc_id = %(doc)s AND version = 2", doc=doc)[0]
    assert tuple(version) == ("CANCELED", None)
    assert shelf.value("SELECT current_ver FROM kb_doc WHERE id = %(doc)s", doc=doc) == 1


def test_what_is_unfinished_of_a_document_or_a_space_is_cancelled_and_nothing_else(shelf: Shelf) -> None:
    done = shelf.published("done", "one")
    first, second, third = shelf.add("a"), shelf.add("b"), shelf.add("c")
    held = shelf.claim(limit=1)
    shelf.edit(first[0])  # queued behind the one that is worked on
    shelf.edit(done)

    def give_up(doc: int | None) -> int:
        with transaction(shelf.pool) as c:
            return tasks.cancel_unfinished(c, shelf.space.id, doc, "a test's")

    assert give_up(first[0]) == 2
    with transaction(shelf.pool) as c:
        assert tasks.fence(c, shelf.space, held).claims == []
    assert give_up(first[0]) == 0
    assert [shelf.task(d).status for d in (*second, *third)] == ["PENDING", "PENDING"]
    assert give_up(None) == 3
    shelf.sweep()
    assert {shelf.task(d).status for d in (*first, *second, *third)} == {"CANCELED"} and shelf.task(done).status == "SUCCESS"
    assert shelf.value("SELECT current_ver FROM kb_doc WHERE id = %(done)s", done=done) == 1


def test_a_finished_task_cannot_be_cancelled_or_tried_again(shelf: Shelf) -> None:
    task = shelf.task(shelf.published("a", "one"))
    assert not cancel(shelf, task.id)
    assert not retry(shelf, task)


def test_a_queued_version_can_be_cancelled_while_the_one_before_it_is_worked_on(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    shelf.edit(doc)
    assert cancel(shelf, shelf.task(doc, 2).id)
    shelf.chunk(first, cut("one"))
    shelf.publish(shelf.at(Node.INDEXER, [first])[0])
    shelf.sweep()
    shelf.sweep()
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["SUCCESS", "CANCELED"]
    assert shelf.value("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s AND version = 2", doc=doc) == "CANCELED"


def test_a_dead_version_can_be_cancelled_while_the_one_behind_it_waits(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    shelf.edit(doc)
    shelf.fail(first, None)
    shelf.sweep()
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["DEAD", "PENDING"]
    assert cancel(shelf, first.task_id)
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["CANCELED", "PENDING"]


def test_a_dead_version_that_is_tried_again_while_the_one_behind_it_is_admitted_queues_up(shelf: Shelf) -> None:
    """The sweeper locks no document: the one-live index is where they meet."""
    (doc,) = shelf.add("a")
    (first,) = shelf.claim()
    shelf.edit(doc)
    shelf.fail(first, None)
    with transaction(shelf.pool) as c:
        assert tasks.sweep(c, shelf.space) == 1  # not committed yet
        again = Begun(shelf.pool, lambda: retry(shelf, shelf.task(doc, 1)))
    assert again.result()
    assert [shelf.task(doc, v).status for v in (1, 2)] == ["INIT", "PENDING"]


def test_a_dead_task_that_is_tried_again_keeps_its_attempt_and_starts_where_it_can(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.at(Node.EMBEDDING, shelf.claim())
    shelf.fail(held, None)
    dead = shelf.task(doc)
    assert retry(shelf, dead)
    (again,) = shelf.claim()
    assert (again.node, again.attempt) == (Node.FETCHER, dead.attempt + 1)  # it has neither original nor chunks
    assert (shelf.task(doc).retry_count, shelf.task(doc).deaths) == (0, 0)
    assert shelf.value("SELECT status FROM kb_doc_version WHERE doc_id = %(doc)s", doc=doc) == "PROCESSING"


def test_a_dead_task_that_is_tried_again_over_its_chunks_resumes_behind_the_chunker(shelf: Shelf) -> None:
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    shelf.chunk(held, cut("one"))
    (held,) = shelf.at(Node.INDEXER, [held])
    shelf.fail(held, None)
    assert retry(shelf, shelf.task(doc))
    (again,) = shelf.claim()
    assert again.node is Node.INDEXER
    assert shelf.publish(again).appeared == 1


# --- every guard is the table's -------------------------------------------------------------------------------------------

Step = Callable[[Shelf, Claim], object]


def _failing(at: datetime | None) -> Step:
    def fail(shelf: Shelf, held: Claim) -> None:
        with transaction(shelf.pool) as c:
            tasks.fail(c, shelf.space.id, shelf.shard, [(held, tasks.Failure("x", "x", at))], datetime.now(UTC))

    return fail


def _moving(work: Callable[[Any, Sequence[Claim], datetime], None], node: Node) -> Step:
    def move(shelf: Shelf, held: Claim) -> None:
        with transaction(shelf.pool) as c:
            work(c, [replace(held, node=node)], datetime.now(UTC))

    return move


def _advancing(c: Any, claims: Sequence[Claim], started: datetime) -> None:
    tasks.advance(c, claims, started, {})


def _sql(name: str, **values: Any) -> Step:
    """One statement of the sweeper by itself, for the space."""

    def run(shelf: Shelf, _: Claim) -> None:
        with transaction(shelf.pool) as c:
            c.execute(getattr(tasks.SQL, name), {"space": shelf.space.id, "dead": [], "deaths": MAX_DEATHS, **values})

    return run


def _expired(shelf: Shelf, held: Claim) -> None:
    expire(shelf)
    with transaction(shelf.pool) as c:
        c.execute("UPDATE ingestion_task SET deaths = 0 WHERE space_id = %s", [shelf.space.id])
    _sql("interrupt")(shelf, held)


def _cleaned(shelf: Shelf, held: Claim) -> None:
    with transaction(shelf.pool) as c:
        c.execute(tasks.SQL.cleaned, {"ids": [held.task_id]})


def _superseded(shelf: Shelf, held: Claim) -> None:
    with transaction(shelf.pool) as c:
        c.execute(documents.SQL.supersede, {"docs": [held.doc_id]})


STEPS: dict[Event, Step] = {
    Event.ADMIT: _sql("admit"),
    Event.CLAIM: lambda shelf, _: shelf.claim(),
    Event.ADVANCE: _moving(_advancing, Node.PARSER),
    Event.PUBLISH: _moving(_advancing, Node.INDEXER),
    Event.FAIL: _failing(PAST),
    Event.GIVE_UP: _failing(None),
    Event.DUE: _sql("due"),
    Event.INTERRUPT: _expired,
    Event.RELEASE: _moving(tasks.release, Node.PARSER),
    Event.RETRY: lambda shelf, held: retry(shelf, shelf.task(held.doc_id, held.version)),
    Event.CANCEL: lambda shelf, held: cancel(shelf, held.task_id),
    Event.SUPERSEDE: _superseded,
    Event.CLEANED: _cleaned,
}


def test_every_event_has_a_statement() -> None:
    assert set(STEPS) == set(Event)


@given(st.sampled_from([TaskStatus.INIT, TaskStatus.PENDING]), st.lists(st.sampled_from(Event), min_size=4, max_size=14))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_goes_where_the_table_says_and_stays_where_it_says_nothing(
    shelf: Shelf, begin: TaskStatus, events: list[Event]
) -> None:
    """The next attempt is always held, so that only the status guards."""
    number = shelf.value("SELECT count(*) FROM kb_doc WHERE space_id = %(space)s")
    (doc,) = shelf.add(f"history-{number}")
    with transaction(shelf.pool) as c:
        c.execute("UPDATE ingestion_task SET status = %s WHERE doc_id = %s", [begin.value, doc])
    status = begin
    for event in events:
        row = shelf.task(doc)
        held = Claim(row.id, doc, 1, row.attempt, Node(row.current_node), 0, 0, 3, row.trace_id, shelf.source.id, "x", "x")
        STEPS[event](shelf, held)
        status = TRANSITIONS.get((status, event), status)
        after = shelf.task(doc)
        assert after.status == status, f"{row.status} after {event}"
        assert after.attempt >= row.attempt
    with transaction(shelf.pool) as c:  # the next example's sweeper statements see only its own task
        c.execute("UPDATE ingestion_task SET status = 'SUCCESS' WHERE doc_id = %s", [doc])


@pytest.mark.parametrize("event", [Event.RELEASE, Event.CANCEL, Event.RETRY, Event.ADVANCE, Event.FAIL])
def test_guards_are_passed_as_the_table_has_them(event: Event) -> None:
    assert sources_of(event) == sorted(s.value for (s, e) in TRANSITIONS if e is event)
