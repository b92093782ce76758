"""The two-rule cut against its definition, word for word and quadratic."""

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb_pipeline.boundaries import Limits, cut

RANKS = st.integers(0, 12)
SIZES = st.integers(1, 40)
UNITS = st.lists(st.tuples(RANKS, SIZES), min_size=1, max_size=120)
LIMITS = st.sampled_from([Limits(60, 12, 3), Limits(60, 12), Limits(50, 25, 2), Limits(40, 40), Limits(45, 1, 1)])


def columns(units: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [r for r, _ in units], [0, *accumulate(s for _, s in units)]


def by_definition(rank: list[int], pos: list[int], limits: Limits) -> list[int]:
    n = len(rank)

    def around(j: int, among: list[int]) -> tuple[int, int]:
        """Positions of the nearest stronger ones; of equal ones the left is stronger."""
        left = [pos[i] for i in among if i < j and rank[i] <= rank[j]]
        right = [pos[i] for i in among if i > j and rank[i] < rank[j]]
        return max(left, default=0), min(right, default=pos[n])

    everyone = list(range(1, n))
    near = []
    for j in everyone:
        left, right = around(j, everyone)
        if pos[j] - left >= limits.minimum and right - pos[j] >= limits.minimum:
            near.append(j)
    starts = [0]
    for j in near:
        left, right = around(j, near)
        if right - left > limits.maximum or rank[j] < limits.always:
            starts.append(j)
    out = []
    for a, b in pairwise([*starts, n]):
        out.append(a)
        while pos[b] - pos[a] > limits.maximum:
            reach = [j for j in range(a + 1, b) if pos[j] - pos[a] <= limits.maximum]
            low = min(limits.minimum, (pos[b] - pos[a]) // 3)
            good = [j for j in reach if pos[j] - pos[a] >= low and pos[b] - pos[j] >= low]
            a = min(good, key=lambda j: (rank[j], -j)) if good else reach[-1] if reach else a + 1
            if a >= b:
                break
            out.append(a)
    return out


@settings(max_examples=400, deadline=None)
@given(UNITS, LIMITS)
def test_the_cuts_are_those_of_the_definition(units: list[tuple[int, int]], limits: Limits) -> None:
    rank, pos = columns(units)
    assert cut(rank, pos, limits) == by_definition(rank, pos, limits)


@settings(max_examples=300, deadline=None)
@given(UNITS, LIMITS)
def test_no_piece_is_over_the_maximum_unless_it_is_one_unit(units: list[tuple[int, int]], limits: Limits) -> None:
    rank, pos = columns(units)
    for a, b in pairwise([*cut(rank, pos, limits), len(rank)]):
        assert pos[b] - pos[a] <= limits.maximum or b == a + 1


@pytest.mark.parametrize("limits", [Limits(60, 12, 3), Limits(60, 25), Limits(40, 40), Limits(45, 1, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_a_window_gives_the_cuts_of_the_whole(seed: int, limits: Limits) -> None:
    r = random.Random(seed)
    rank, pos = columns([(r.randrange(12), r.randint(1, 15)) for _ in range(150)])
    whole = cut(rank, pos, limits)
    for first in whole[:: 1 + len(whole) // 12]:
        oldest = max((i for i in range(first + 1) if pos[i] <= pos[first] - limits.reach), default=0)
        for newest in range(first + 1, len(rank) + 1):
            more = newest < len(rank)
            window = cut(rank[oldest:newest], pos[oldest : newest + 1], limits, first - oldest, more)
            found = [i + oldest for i in window]
            assert found == whole[whole.index(first) :][: len(found)]
            assert len(found) > 1 or pos[newest] - pos[first] < limits.look_ahead, "with so much in sight a cut is certain"
            assert more or found[-1] == whole[-1]


def test_a_weak_boundary_beside_a_strong_one_never_cuts() -> None:
    rank, pos = columns([(9, 30), (5, 4), (1, 30), (9, 30)])
    assert cut(rank, pos, Limits(60, 10, 6)) == [0, 2]


def test_of_equal_boundaries_the_left_one_is_stronger() -> None:
    rank, pos = columns([(5, 30), (5, 5), (5, 30)])
    assert cut(rank, pos, Limits(60, 10)) == [0, 1]


def test_an_insertion_does_not_pair_anew_what_follows() -> None:
    section = [(1, 20), (8, 20), (9, 15)]
    document = [(k * 7 % 5 + r, size) for k in range(40) for r, size in section]
    limits = Limits(60, 12, 6)
    rank, pos = columns(document)
    left = [i for i in cut(rank, pos, limits) if pos[30] - pos[i] > limits.reach]
    right = [i for i in cut(rank, pos, limits) if pos[i] - pos[30] > limits.reach + limits.maximum]
    rank, pos = columns([*document[:30], (8, 33), *document[30:]])
    starts = cut(rank, pos, limits)
    assert left == [i for i in starts if i in left]
    assert right == [i - 1 for i in starts if i - 1 in right]
    assert left and right
