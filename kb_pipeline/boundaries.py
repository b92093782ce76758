"""Where to cut a row of units, so that an edit changes few pieces. Knows ranks and positions, neither text nor formats.

A boundary cuts when it stands out: no stronger one within ``minimum``, and more than ``maximum`` between the stronger ones
that stand out themselves. What is decided about a boundary depends on ``maximum + minimum`` to each side and on nothing
further away, so a window of a long document gives the same cuts as the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Limits:
    """In the unit of the positions. Ranks below ``always`` cut wherever they stand out."""

    maximum: int
    minimum: int
    always: int = 0

    @property
    def reach(self) -> int:
        """How far from a boundary its decision can depend on anything."""
        return self.maximum + self.minimum + 1

    @property
    def look_ahead(self) -> int:
        """What must be known behind the start of a piece to know its end."""
        return max(self.reach, 3 * self.minimum + 1) + self.maximum + self.reach


def cut(rank: Sequence[int], pos: Sequence[int], limits: Limits, first: int = 0, more: bool = False) -> list[int]:
    """The indices of the units that start a piece, from ``first`` on, which starts one itself.

    ``rank[i]`` is the boundary before unit i, smaller is stronger, of equal ones the left; ``pos[i]`` is what lies before
    unit i, ``pos[n]`` the end. In a window of a longer document the units before ``first`` are context, at least
    ``limits.reach`` of it unless the document begins there, and with ``more`` the document goes on: then only starts that
    are certain are given, and the last one's piece is still open.
    """
    known = pos[len(rank)] - limits.reach if more else pos[len(rank)]
    standing = _standing(rank, pos, limits)
    out = [first]
    for b in _cutting(rank, pos, standing, limits):
        if b > first and pos[b] <= known:
            out += _divided(_Span(rank, pos, limits, b, pos[b]), out[-1])
            out.append(b)
    if more:  # the end of the span is out of sight, so far that it cannot matter
        span = _Span(rank, pos, limits, len(rank), pos[len(rank)] + limits.look_ahead)
        while pos[out[-1]] + limits.look_ahead <= pos[len(rank)]:
            out.append(_best(span, out[-1]))
    else:
        out += _divided(_Span(rank, pos, limits, len(rank), pos[len(rank)]), out[-1])
    return out


def _standing(rank: Sequence[int], pos: Sequence[int], limits: Limits) -> list[int]:
    """Boundaries without a stronger one closer than the minimum on either side."""
    low = limits.minimum
    indices = range(1, len(rank))
    left, right = _stronger(rank, pos, indices)
    return [j for j, a, b in zip(indices, left, right, strict=True) if pos[j] - a >= low and b - pos[j] >= low]


def _cutting(rank: Sequence[int], pos: Sequence[int], standing: list[int], limits: Limits) -> list[int]:
    left, right = _stronger(rank, pos, standing)
    high, always = limits.maximum, limits.always
    return [j for j, a, b in zip(standing, left, right, strict=True) if b - a > high or rank[j] < always]


def _stronger(rank: Sequence[int], pos: Sequence[int], indices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Positions of the nearest stronger boundary among ``indices`` on the left and right of each; the ends outrank all."""
    left, right = [pos[0]] * len(indices), [pos[len(rank)]] * len(indices)
    waiting: list[int] = []  # places in indices with ever weaker ranks, which still look for a stronger one on the right
    for k, j in enumerate(indices):
        own = rank[j]
        while waiting and rank[indices[waiting[-1]]] > own:
            right[waiting.pop()] = pos[j]
        if waiting:
            left[k] = pos[indices[waiting[-1]]]
        waiting.append(k)
    return left, right


class _Span(NamedTuple):
    """Units up to ``stop``, between which no boundary stands out."""

    rank: Sequence[int]
    pos: Sequence[int]
    limits: Limits
    stop: int
    end: int  # the position of ``stop``


def _divided(span: _Span, start: int) -> list[int]:
    """The cuts behind ``start`` that leave nothing over the maximum, unless it is a single unit."""
    out: list[int] = []
    while span.end - span.pos[start] > span.limits.maximum and start + 1 < span.stop:
        start = _best(span, start)
        out.append(start)
    return out


def _best(span: _Span, start: int) -> int:
    """The strongest boundary in reach behind ``start``, of equal ones the last; else the last in reach; else the next."""
    rank, pos, limits, stop, end = span
    low = min(limits.minimum, (end - pos[start]) // 3)
    best, j = -1, start + 1
    while j < stop and pos[j] - pos[start] <= limits.maximum:
        if pos[j] - pos[start] >= low and end - pos[j] >= low and (best < 0 or rank[j] <= rank[best]):
            best = j
        j += 1
    return best if best >= 0 else max(j - 1, start + 1)
