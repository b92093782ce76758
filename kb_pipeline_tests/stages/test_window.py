"""Windows, watermarks and what is provisional, as numbers."""

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.model import Item, Page
from kb_pipeline.ports import Capabilities
from kb_pipeline.stages import window
from kb_pipeline.stages.window import Past
from kb_pipeline.states import WalkKind

FEED = Capabilities(changes=True)
NOW = 1_700_000_000.0

moments = st.floats(1e9, 2e9, allow_nan=False)
resolutions = st.sampled_from([0.0, 0.001, 1.0, 60.0, 86400.0])
skews = st.floats(0, 90_000)


def feed(resolution: float = 0.0, skew: float = 0.0) -> Capabilities:
    return replace(FEED, resolution_seconds=resolution, skew_seconds=skew)


def floor(moment: float, resolution: float) -> float:
    return math.floor(moment / resolution) * resolution if resolution else moment


@pytest.mark.parametrize(
    ("resolution", "skew", "expected"),
    [
        (0.0, 0.0, NOW - 60),
        (1.0, 5.0, NOW - 60),
        (60.0, 300.0, NOW - 20 - 360),  # NOW is 20 s behind a full minute
        (86400.0, 0.0, floor(NOW, 86400.0) - 86400),
    ],
)
def test_the_window_begins_the_overlap_before_the_truncated_watermark(resolution: float, skew: float, expected: float) -> None:
    assert window.lower_bound(NOW, feed(resolution, skew)) == expected


@given(watermark=moments, resolution=resolutions, skew=skews, late=st.floats(0, 1), zone=st.integers(-12, 14))
def test_what_a_walk_could_not_see_yet_is_in_the_window_of_the_next(
    watermark: float, resolution: float, skew: float, late: float, zone: int
) -> None:
    """Stamped up to ``skew`` before it shows, and truncated in whatever zone."""
    stamp = watermark - skew * late
    truncated = floor(stamp + zone * 3600, resolution) - zone * 3600
    assert truncated >= window.lower_bound(watermark, feed(resolution, skew)) - 1e-6


@given(clock=moments, age=st.floats(0, 200_000), resolution=resolutions, skew=skews)
def test_what_is_provisional_is_in_the_window_of_the_next_walk(
    clock: float, age: float, resolution: float, skew: float
) -> None:
    capabilities = feed(resolution, skew)
    item = Item("a", "r", "a", "a", modified_at=datetime.fromtimestamp(floor(clock - age, resolution), UTC))
    if window.unsettled(item, clock, capabilities):
        assert item.modified_at is not None
        assert item.modified_at.timestamp() >= window.lower_bound(clock, capabilities) - 1e-6


def _item(seconds_ago: float, **changes: object) -> Item:
    return replace(Item("a", "r", "a", "a", modified_at=datetime.fromtimestamp(NOW - seconds_ago, UTC)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ago", "marked"), [(0.0, True), (64.0, True), (65.0, False)])
def test_an_item_is_provisional_until_nobody_can_write_the_same_stamp(ago: float, marked: bool) -> None:
    page = window.provisional(Page((_item(ago),)), NOW, feed(60.0, 5.0))
    assert page.items[0].provisional is marked


def test_what_the_connector_marks_stays_marked_and_exact_revisions_are_never_provisional() -> None:
    old, fresh = _item(1e6, provisional=True), _item(0.0)
    assert window.provisional(Page((old,)), NOW, feed(60.0)).items[0].provisional
    assert not window.provisional(Page((fresh,)), NOW, feed(0.0, 90.0)).items[0].provisional
    assert not window.provisional(Page((replace(fresh, modified_at=None),)), NOW, feed(60.0)).items[0].provisional


# --- full or incremental ----------------------------------------------------------------------------------------------

PAST = Past(clock=NOW, watermark={"*": NOW - 300}, listed_ago=3600.0, deletions_approved=False)


def choose(past: Past = PAST, capabilities: Capabilities = FEED, *, full: bool = False) -> tuple[WalkKind, window.Windows]:
    return window.choose(capabilities, ["*"], past, full=full)


def test_a_source_that_was_listed_lately_is_asked_for_changes() -> None:
    assert choose() == (WalkKind.INCREMENTAL, {"*": NOW - 360})


@pytest.mark.parametrize(
    "past",
    [
        replace(PAST, watermark={}),
        replace(PAST, listed_ago=None),
        replace(PAST, listed_ago=window.SWEEP_SECONDS + 1),
        replace(PAST, deletions_approved=True),
        replace(PAST, clock=NOW - 1000),  # the watermark lies in the future: the source's clock was set back
    ],
    ids=["no watermark", "never listed", "listed long ago", "deletions approved", "clock set back"],
)
def test_everything_is_listed_where_changes_would_not_tell(past: Past) -> None:
    assert choose(past) == (WalkKind.FULL, {"*": None})


def test_everything_is_listed_when_asked_for_or_nothing_else_can_be() -> None:
    assert choose(full=True) == (WalkKind.FULL, {"*": None})
    assert choose(capabilities=Capabilities()) == (WalkKind.FULL, {"*": None})


def test_a_clock_that_jitters_within_the_overlap_is_no_clock_that_was_set_back() -> None:
    assert choose(replace(PAST, clock=NOW - 301))[0] is WalkKind.INCREMENTAL


def test_a_new_scope_is_listed_as_a_whole_beside_the_changes_of_the_others() -> None:
    past = replace(PAST, watermark={"a": NOW - 300, "gone": NOW})
    assert window.choose(FEED, ["a", "b"], past, full=False) == (WalkKind.INCREMENTAL, {"a": NOW - 360, "b": None})
