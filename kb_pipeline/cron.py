"""Cron lines as cron(5) reads them, in a time zone: checked when a schedule is set, and asked for the next time."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kb_pipeline.errors import Misconfigured

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = {
    name: i for i, name in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1)
}
_DAYS = {name: i for i, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: Mapping[str, int]


_FIELDS = (
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of month", 1, 31, {}),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of week", 0, 7, _DAYS),
)
_HORIZON_DAYS = 8 * 366 + 1  # 29 February may be eight years away


class _Line(NamedTuple):
    """What a cron line allows. ``either``: cron's rule that where both days are restricted, either will do."""

    minutes: set[int]
    hours: set[int]
    days: set[int]
    months: set[int]
    weekdays: set[int]
    either: bool

    def has(self, day: date) -> bool:
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (in_month or in_week if self.either else in_month and in_week)


def next_time(cron: str, after: datetime, zone: str = "UTC") -> datetime:
    """The first minute behind ``after`` that matches in ``zone``, as UTC. Raises Misconfigured for what is no cron line, or
    never comes.

    A time that does not exist, because clocks are put forward, comes as much later; one that exists twice comes once. A line
    for every hour follows real time instead: nothing is left out, and nothing waits longer, when clocks change.
    """
    local, parts = time_zone(zone), _MACROS.get(cron.strip().lower(), cron).split()
    if len(parts) != len(_FIELDS):
        raise Misconfigured(
            f"schedule {cron!r}: write five fields (minute hour day month weekday), as in '*/15 * * * *'", code="bad_schedule"
        )
    minutes, hours, days, months, weekdays = (_values(cron, part, field) for part, field in zip(parts, _FIELDS, strict=True))
    either = not parts[2].startswith("*") and not parts[4].startswith("*")
    line = _Line(minutes, hours, days, months, {d % 7 for d in weekdays}, either)
    found = _in_real_time(line, after, local) if parts[1] == "*" else _on_the_wall(line, after, local)
    if found is None:
        raise Misconfigured(f"schedule {cron!r}: such a day never comes", code="bad_schedule")
    return found


def time_zone(name: str) -> ZoneInfo:
    """Raises Misconfigured for a name that the time zone database does not have."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as e:
        raise Misconfigured(
            f"time zone {name!r} is not known: write one such as Europe/Berlin or UTC", code="bad_time_zone"
        ) from e


def _in_real_time(line: _Line, after: datetime, zone: ZoneInfo) -> datetime | None:
    at = after.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    end = at + timedelta(days=_HORIZON_DAYS)
    while at < end:
        local = at.astimezone(zone)
        if not line.has(local.date()):
            midnight = datetime.combine(local.date() + timedelta(days=1), time(), zone).astimezone(UTC)
            at = max(midnight, at + timedelta(minutes=1))
        elif local.minute in line.minutes:
            return at
        else:
            at += timedelta(minutes=min((m - local.minute) % 60 for m in line.minutes))
    return None


def _on_the_wall(line: _Line, after: datetime, zone: ZoneInfo) -> datetime | None:
    first = after.astimezone(zone).date()
    for n in range(_HORIZON_DAYS):
        if not line.has(day := first + timedelta(days=n)):
            continue
        for hour in sorted(line.hours):
            for minute in sorted(line.minutes):
                if (found := datetime.combine(day, time(hour, minute), zone).astimezone(UTC)) > after:
                    return found
    return None


def _values(cron: str, text: str, field: _Field) -> set[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        try:
            found.update(_span(part, field))
        except ValueError:
            message = f"schedule {cron!r}: {part!r} is no {field.name} ({field.low} to {field.high})"
            raise Misconfigured(message, code="bad_schedule") from None
    return found


def _span(part: str, field: _Field) -> range:
    """``*``, ``n``, ``a-b``, each with ``/step``; ``n/step`` begins at n. Raises ValueError."""
    span, slash, step = part.partition("/")
    first, dash, last = span.partition("-")
    low, high = (field.low, field.high) if span == "*" else (_number(first, field), _number(last if dash else first, field))
    if slash and not dash:
        high = field.high
    found = range(low, high + 1, _digits(step) if slash else 1)  # range refuses a step of 0
    if not found or low < field.low or high > field.high:
        raise ValueError(part)
    return found


def _number(text: str, field: _Field) -> int:
    return field.names[text] if text in field.names else _digits(text)


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)  # int() takes signs, spaces and underscores
    return int(text)
