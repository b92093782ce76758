"""k=v arguments, and cron lines."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kb_pipeline.cli.options import adapter_options, masked, pairs, truth, whole_number
from kb_pipeline.cron import next_time
from kb_pipeline.errors import Misconfigured


class Config(BaseModel):
    names: list[str] = []
    many: tuple[str, ...] | None = None
    where: Path | None = None
    extra: dict[str, Any] = {}
    text: str = ""
    number: int = 0


ADAPTERS = {"mine": f"{__name__}:Adapter"}


def test_values_get_the_kinds_that_the_adapter_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given_ = {
        "names": "a, b,",
        "many": "c",
        "where": "x",
        "extra": '{"k": [1]}',
        "text": "a,b",
        "number": "5",
        "unknown": "a,b",
    }
    typed = adapter_options(ADAPTERS, "mine", given_)
    assert typed == {
        "names": ["a", "b"],
        "many": ["c"],
        "where": str(tmp_path / "x"),
        "extra": {"k": [1]},
        "text": "a,b",
        "number": "5",
        "unknown": "a,b",
    }


def test_references_to_secrets_and_empty_values_stay_as_they_are() -> None:
    given_ = {"where": "", "names": "env:NAMES", "extra": "file:/x"}
    assert adapter_options(ADAPTERS, "mine", given_) == given_


def test_an_unknown_adapter_is_left_to_the_registry() -> None:
    assert adapter_options(ADAPTERS, "other", {"a": "b"}) == {"a": "b"}
    assert adapter_options({"gone": "no_such_module_here:X"}, "gone", {"a": "b"}) == {"a": "b"}


@pytest.mark.parametrize("wrong", [["a"], ["=b"], ["a=1", "a=2"]])
def test_what_is_no_pair_is_refused(wrong: list[str]) -> None:
    with pytest.raises(Misconfigured):
        pairs(wrong, "option")


def test_a_value_may_hold_equals_signs() -> None:
    assert pairs(["a=b=c", "d="], "option") == {"a": "b=c", "d": ""}


def test_broken_json_is_refused_with_an_example() -> None:
    with pytest.raises(Misconfigured, match="JSON object"):
        adapter_options(ADAPTERS, "mine", {"extra": "{"})


def test_written_out_secrets_are_masked_and_references_are_shown() -> None:
    assert masked({"api_key": "sk-1", "password": "env:PW", "db_password": "x", "path": "/x"}) == {
        "api_key": "********",
        "password": "env:PW",
        "db_password": "********",
        "path": "/x",
    }


@pytest.mark.parametrize("wrong", ["", "-1", "0", "1.5", "٣", "1e3"])
def test_what_is_no_whole_number_is_refused(wrong: str) -> None:
    with pytest.raises(Misconfigured):
        whole_number("retain", wrong, 1)


def test_truth() -> None:
    assert [truth("x", v) for v in ("true", "No", "1", "YES")] == [True, False, True, True]
    with pytest.raises(Misconfigured):
        truth("x", "maybe")


@pytest.mark.parametrize(
    "cron, then",
    [
        ("* * * * *", "2026-03-13T10:08"),
        ("*/15 * * * *", "2026-03-13T10:15"),
        ("5/20 * * * *", "2026-03-13T10:25"),
        ("7 10 * * *", "2026-03-14T10:07"),
        ("0 9-17/4 * * mon-fri", "2026-03-13T13:00"),
        ("30 2 1,15 * *", "2026-03-15T02:30"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
        ("0 0 * * 7", "2026-03-15T00:00"),
        ("0 0 1 * sun", "2026-03-15T00:00"),  # both restricted: either will do
        ("0 0 */2 * mon", "2026-03-23T00:00"),  # a star: both must hold
        ("0 0 1 jan *", "2027-01-01T00:00"),
        ("@Daily", "2026-03-14T00:00"),
        ("@hourly", "2026-03-13T11:00"),
    ],
)
def test_the_next_time_of_a_cron_line(cron: str, then: str) -> None:
    assert next_time(cron, datetime(2026, 3, 13, 10, 7, 30, tzinfo=UTC)) == datetime.fromisoformat(then).replace(tzinfo=UTC)


WRONG = ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *", "5-1 * * * *", "a * * * *",
         "-1 * * * *", "1- * * * *", "1,,2 * * * *", "+1 * * * *", "1_0 * * * *", "0 0 30 2 *", "@sometimes", "jan * * * *", "* * * * */x"]  # fmt: skip


@pytest.mark.parametrize("cron", WRONG)
def test_what_is_no_cron_line_or_never_comes_is_refused(cron: str) -> None:
    with pytest.raises(Misconfigured) as e:
        next_time(cron, datetime(2026, 1, 1, tzinfo=UTC))
    assert repr(cron) in e.value.message


@pytest.mark.parametrize(
    "cron, after, then",
    [
        ("30 9 * * *", "2026-07-01T00:00", "2026-07-01T07:30"),  # two hours ahead of UTC in summer
        ("30 9 * * *", "2026-01-01T00:00", "2026-01-01T08:30"),
        ("30 2 * * *", "2026-03-28T12:00", "2026-03-29T01:30"),  # 02:30 does not exist on that day: an hour later, not never
        ("30 2 * * *", "2026-10-25T00:00", "2026-10-25T00:30"),  # it comes twice, and is met once
        ("30 2 * * *", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("*/30 * * * *", "2026-10-25T00:30", "2026-10-25T01:00"),  # real time goes on while the clock repeats an hour
        ("*/30 * * * *", "2026-10-25T01:00", "2026-10-25T01:30"),
        ("0 * 1 * *", "2026-06-30T21:59", "2026-06-30T22:00"),  # the first of July there
    ],
)
def test_a_cron_line_follows_its_time_zone_through_changes_of_the_clock(cron: str, after: str, then: str) -> None:
    found = next_time(cron, datetime.fromisoformat(after).replace(tzinfo=UTC), "Europe/Berlin")
    assert found == datetime.fromisoformat(then).replace(tzinfo=UTC)


def test_an_unknown_time_zone_is_refused() -> None:
    for wrong in ("Mars/Olympus", "../etc/passwd", ""):
        with pytest.raises(Misconfigured) as e:
            next_time("* * * * *", datetime(2026, 1, 1, tzinfo=UTC), wrong)
        assert e.value.code == "bad_time_zone"


@given(
    st.integers(0, 59),
    st.integers(0, 23),
    st.integers(0, 6),
    st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),
)
def test_the_next_time_is_later_fits_and_is_the_first(minute: int, hour: int, weekday: int, after: datetime) -> None:
    found = next_time(f"{minute} {hour} * * {weekday}", after)
    assert after < found <= after + timedelta(days=7, minutes=1)
    assert (found.minute, found.hour, found.isoweekday() % 7, found.second) == (minute, hour, weekday, 0)
