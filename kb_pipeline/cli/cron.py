"""Cron lines as cron(5) reads them, in UTC: checked when a schedule is set, and asked for the next time."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

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


def next_time(cron: str, after: datetime) -> datetime:
    """The first minute behind ``after`` that matches. Raises Misconfigured for what is no cron line, or never comes."""
    parts = _MACROS.get(cron.strip().lower(), cron).split()
    if len(parts) != len(_FIELDS):
        raise Misconfigured(
            f"schedule {cron!r}: write five fields (minute hour day month weekday), as in '*/15 * * * *'", code="bad_schedule"
        )
    minutes, hours, days, months, weekdays = (_values(cron, part, field) for part, field in zip(parts, _FIELDS, strict=True))
    weekdays = {d % 7 for d in weekdays}
    either = not parts[2].startswith("*") and not parts[4].startswith("*")  # cron's rule: both restricted, either will do
    start = after.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    for n in range(_HORIZON_DAYS):
        day = (start + timedelta(days=n)).replace(hour=0, minute=0) if n else start
        in_month, in_week = day.day in days, day.isoweekday() % 7 in weekdays
        if day.month not in months or not (in_month or in_week if either else in_month and in_week):
            continue
        for hour in sorted(h for h in hours if h >= day.hour):
            for minute in sorted(minutes):
                if (found := day.replace(hour=hour, minute=minute)) >= start:
                    return found
    raise Misconfigured(f"schedule {cron!r}: such a day never comes", code="bad_schedule")


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
