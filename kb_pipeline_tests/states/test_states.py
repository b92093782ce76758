"""The transition table as a whole: any sequence of events, not only the ones somebody thought of."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb_pipeline.errors import StateError
from kb_pipeline.states import FLOW, LIVE, TRANSITIONS, Event, Node, TaskStatus, next_node, next_state, sources_of
from kb_pipeline.store.migrations import migrations

BEGIN = (TaskStatus.INIT, TaskStatus.PENDING)  # a task is made queued behind another one, or ready
END = {TaskStatus.SUCCESS, TaskStatus.CANCELED}
DDL = "\n".join(m.text for m in migrations())


def exits(status: TaskStatus) -> set[Event]:
    return {event for (source, event) in TRANSITIONS if source is status}


def reachable(begin: set[TaskStatus]) -> set[TaskStatus]:
    found, new = set[TaskStatus](), set(begin)
    while new:
        found |= new
        new = {target for (source, _), target in TRANSITIONS.items() if source in found} - found
    return found


def history(begin: TaskStatus, choices: list[int]) -> list[tuple[TaskStatus, Event, TaskStatus]]:
    """A life of a task: each choice picks one of the events that are possible then."""
    steps, status = [], begin
    for choice in choices:
        if not (possible := sorted(exits(status))):
            break
        event = possible[choice % len(possible)]
        after = next_state(status, event)
        steps.append((status, event, after))
        status = after
    return steps


def names_in(pattern: str) -> set[str]:
    found = re.search(pattern, DDL)
    assert found is not None, pattern
    return set(re.findall(r"'([A-Z]+)'", found[1]))


histories = st.builds(history, st.sampled_from(BEGIN), st.lists(st.integers(0, 59), min_size=4, max_size=40))
many = settings(max_examples=1000, deadline=None)  # three certain steps in a row are rare among random ones


@given(st.sampled_from(TaskStatus), st.sampled_from(Event))
def test_an_event_leads_to_the_table_s_status_or_is_refused_naming_both(status: TaskStatus, event: Event) -> None:
    if (status, event) in TRANSITIONS:
        assert next_state(status, event) is TRANSITIONS[status, event]
    else:
        with pytest.raises(StateError) as e:
            next_state(status, event)
        assert e.value.code == "bad_transition"
        assert status in e.value.message and event in e.value.message


def test_every_status_can_be_reached_from_a_new_task() -> None:
    assert reachable(set(BEGIN)) == set(TaskStatus)


def test_every_event_does_something() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_only_success_and_canceled_are_final_and_dead_waits_for_a_person_or_newer_content() -> None:
    assert {s for s in TaskStatus if not exits(s)} == END
    assert exits(TaskStatus.DEAD) == {Event.RETRY, Event.CANCEL, Event.SUPERSEDE}


@pytest.mark.parametrize("status", sorted(set(TaskStatus) - END))
def test_no_status_is_a_dead_end(status: TaskStatus) -> None:
    assert reachable({status}) & END


@many
@given(histories)
def test_nothing_is_published_that_is_not_claimed_at_that_moment(steps: list[tuple[TaskStatus, Event, TaskStatus]]) -> None:
    """From the last CLAIM on, only ADVANCE lies before PUBLISH."""
    for i, (_, event, after) in enumerate(steps):
        assert (after is TaskStatus.SUCCESS) == (event is Event.PUBLISH)
        if event is Event.PUBLISH:
            before = [e for _, e, _ in steps[:i] if e is not Event.ADVANCE]
            assert before and before[-1] is Event.CLAIM


@many
@given(histories)
def test_a_cancelled_task_is_never_worked_on_again(steps: list[tuple[TaskStatus, Event, TaskStatus]]) -> None:
    reached = [after for _, _, after in steps]
    if TaskStatus.CANCELING in reached:
        assert set(reached[reached.index(TaskStatus.CANCELING) :]) <= {TaskStatus.CANCELING, TaskStatus.CANCELED}


@many
@given(histories)
def test_what_may_have_written_is_cleaned_up_before_it_is_canceled(steps: list[tuple[TaskStatus, Event, TaskStatus]]) -> None:
    """A task that was claimed ends as CANCELED over CLEANED, or was DEAD, whose version was given up when it died."""
    worked = False
    for before, event, after in steps:
        worked = worked or event is Event.CLAIM
        if worked and after is TaskStatus.CANCELED:
            assert event is Event.CLEANED or before is TaskStatus.DEAD


@many
@given(histories)
def test_a_finished_task_stays_as_it_is(steps: list[tuple[TaskStatus, Event, TaskStatus]]) -> None:
    assert not any(before in END for before, _, _ in steps)


@pytest.mark.parametrize("event", sorted(Event))
def test_an_update_is_guarded_by_exactly_the_statuses_that_its_event_may_start_from(event: Event) -> None:
    assert sources_of(event) == sorted(status.value for status in TaskStatus if (status, event) in TRANSITIONS)


def test_the_flow_visits_every_node_but_cleanup_once_and_ends() -> None:
    visited, node = [], FLOW[0]
    while node is not None:
        visited.append(node)
        node = next_node(node)
    assert tuple(visited) == FLOW
    assert set(Node) - set(visited) == {Node.CLEANUP}


def test_the_database_knows_the_same_statuses_and_nodes() -> None:
    assert names_in(r"ingestion_task_status\s+CHECK \(status IN \(([^)]*)\)") == {s.value for s in TaskStatus}
    assert names_in(r"ingestion_task_node\s+CHECK \(current_node IN \(([^)]*)\)") == {n.value for n in Node}


def test_a_document_has_one_live_task_for_the_database_as_for_us() -> None:
    assert names_in(r"ingestion_task_one_live ON ingestion_task \(doc_id\) WHERE status IN \(([^)]*)\)") == {
        s.value for s in LIVE
    }
    assert not LIVE & END and TaskStatus.INIT not in LIVE
