"""Hints that a source has changed: kept until a walk has answered them, and not asked for again and again in vain."""

from itertools import count

import pytest

from kb_pipeline.store import events, sources
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.events import Hint
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.store.shelf import Shelf

_number = count(1)


@pytest.fixture
def shelf(app: FakedApp, pool: Pool) -> Shelf:
    return Shelf(pool, app.add_space(f"events-{next(_number)}"))


def send(shelf: Shelf, event_id: str, **payload: object) -> bool:
    with transaction(shelf.pool) as c:
        return events.record_event(c, shelf.source.id, event_id, dict(payload))


def waiting(shelf: Shelf) -> list[Hint]:
    with transaction(shelf.pool) as c:
        return [h for h in events.waiting_events(c) if h.source_id == shelf.source.id]


def probed(shelf: Shelf) -> Hint:
    with transaction(shelf.pool) as c:
        return next(h for s, h in events.probed_sources(c, 0, 1000) if s.id == shelf.source.id)


def ask(shelf: Shelf, hint: Hint, reason: str, mark: str) -> int:
    with transaction(shelf.pool) as c:
        return events.request_walk(c, hint, reason, mark)


def later(shelf: Shelf, seconds: float) -> None:
    with transaction(shelf.pool) as c:
        c.execute("UPDATE kb_source_request SET requested_at = requested_at - %s * interval '1 second'", (seconds,))


def test_event_is_stored_once_however_often_it_is_sent(shelf: Shelf) -> None:
    assert send(shelf, "e1", external_id="a.md", kind="edited")
    assert not send(shelf, "e1", external_id="a.md")
    (row,) = shelf.rows("SELECT external_id, payload, taken_at FROM source_event WHERE space_id = %(space)s")
    assert (row.external_id, row.payload, row.taken_at) == ("a.md", {"external_id": "a.md", "kind": "edited"}, None)


def test_event_of_a_removed_source_is_not_stored(shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        sources.set_status(c, shelf.source.id, "REMOVED")
    assert not send(shelf, "e1")


def test_walk_answers_the_events_received_before_it_began(shelf: Shelf) -> None:
    send(shelf, "before")
    began = shelf.value("SELECT clock_timestamp()")
    send(shelf, "during")
    with transaction(shelf.pool) as c:
        assert events.take_events(c, shelf.source.id, began) == 1
    rows = shelf.rows("SELECT event_id FROM source_event WHERE space_id = %(space)s AND taken_at IS NULL")
    assert [r.event_id for r in rows] == ["during"]


def test_paused_source_asks_for_nothing(shelf: Shelf) -> None:
    send(shelf, "e1")
    assert len(waiting(shelf)) == 1
    with transaction(shelf.pool) as c:
        sources.set_status(c, shelf.source.id, "PAUSED")
    assert waiting(shelf) == []


def test_walk_in_vain_is_asked_for_ever_later_and_at_most_an_hour_later(shelf: Shelf) -> None:
    send(shelf, "e1")
    hint, waits = waiting(shelf)[0], []
    mark = str(hint.mark)
    assert hint.may_ask(mark)
    numbers = set()
    for _ in range(10):
        numbers.add(ask(shelf, hint, "event", mark))
        hint = waiting(shelf)[0]
        assert not hint.may_ask(mark)
        waits.append(hint.wait_seconds(mark))
        later(shelf, waits[-1])
        hint = waiting(shelf)[0]
        assert hint.may_ask(mark)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    assert len(numbers) == 10  # a run key that was used is never used again


def test_newer_event_waits_no_longer_than_the_first_wait(shelf: Shelf) -> None:
    send(shelf, "e1")
    hint = waiting(shelf)[0]
    for _ in range(5):
        ask(shelf, hint, "event", str(hint.mark))
        hint = waiting(shelf)[0]
    send(shelf, "e2")
    hint = waiting(shelf)[0]
    assert hint.wait_seconds(str(hint.mark)) == 30.0
    ask(shelf, hint, "event", str(hint.mark))
    assert waiting(shelf)[0].tries == 1


def test_answered_event_asks_at_once_for_the_next_one(shelf: Shelf) -> None:
    send(shelf, "e1")
    hint = waiting(shelf)[0]
    ask(shelf, hint, "event", str(hint.mark))
    with transaction(shelf.pool) as c:
        events.take_events(c, shelf.source.id, shelf.value("SELECT clock_timestamp()"))
    assert waiting(shelf) == []
    send(shelf, "e2")
    (hint,) = waiting(shelf)
    assert hint.done and hint.may_ask(str(hint.mark))


def test_token_of_a_completed_walk_ends_the_waiting(shelf: Shelf) -> None:
    hint = probed(shelf)
    assert hint.mark is None and hint.may_ask("t1")
    ask(shelf, hint, "change", "t1")
    assert not probed(shelf).may_ask("t1")
    with transaction(shelf.pool) as c:
        events.store_token(c, shelf.source.id, "t1")
    hint = probed(shelf)
    assert (hint.mark, hint.done) == ("t1", True)
    assert hint.may_ask("t2")


@pytest.mark.parametrize("change", ["approve", "pause and resume"])
def test_operator_makes_the_next_probe_differ(shelf: Shelf, change: str) -> None:
    with transaction(shelf.pool) as c:
        events.store_token(c, shelf.source.id, "t1")
        if change == "approve":
            sources.approve(c, shelf.source.id, 5)
        else:
            sources.set_status(c, shelf.source.id, "PAUSED")
            sources.set_status(c, shelf.source.id, "ACTIVE")
    assert probed(shelf).mark is None


def test_probing_goes_round_the_sources(app: FakedApp, shelf: Shelf) -> None:
    with transaction(shelf.pool) as c:
        more = [sources.add_source(c, shelf.space.id, f"s{n}", "local_dir", {}).id for n in range(3)]
        found = [s.id for s, _ in events.probed_sources(c, more[0], 1000)]
        assert found[:2] == more[1:]
        assert found[-1] == more[0]
        assert [s.id for s, _ in events.probed_sources(c, more[0], 1)] == more[1:2]
