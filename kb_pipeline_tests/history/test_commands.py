"""``kb search --at`` and ``kb answer``: how times are written, the JSON keys that scripts rely on, and refusals."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kb_pipeline.cli.search import time_of
from kb_pipeline.errors import Misconfigured
from kb_pipeline_tests.cli.conftest import Kb, folder, home, kb, loaded  # noqa: F401

NOW = datetime(2026, 5, 10, 12, tzinfo=UTC)


@pytest.mark.parametrize(("text", "read"), [
    ("2h", NOW - timedelta(hours=2)),
    ("3d", NOW - timedelta(days=3)),
    ("1w2d", NOW - timedelta(days=9)),
    ("90s", NOW - timedelta(seconds=90)),
    ("1h15m", NOW - timedelta(minutes=75)),
    ("2026-05-01T10:00+08:00", datetime(2026, 5, 1, 2, tzinfo=UTC)),
    ("2026-05-01 10:00:30Z", datetime(2026, 5, 1, 10, 0, 30, tzinfo=UTC)),
])  # fmt: skip
def test_a_time_with_its_zone_and_how_long_ago_need_no_explanation(text: str, read: datetime) -> None:
    assert time_of(text, NOW) == (read, "")


@pytest.mark.parametrize("text", ["2026-05-01", "2026-05-01T10:00"])
def test_a_time_without_a_zone_is_the_terminals_and_it_says_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        at, note = time_of(text, NOW)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert at.utcoffset() == timedelta(hours=8) and at.replace(tzinfo=None) == datetime.fromisoformat(text)
    assert at.isoformat() in note and text in note


@pytest.mark.parametrize("text", ["", "yesterday", "2h ago", "-2h", "2", "2y", "99999999999d", "0001-01-01", "2026-13-01"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(Misconfigured, match="3d"):
        time_of(text, NOW)


def test_search_at_a_time_finds_what_was_there(kb: Kb, loaded: str, folder: Path) -> None:  # noqa: F811
    at = datetime.now(UTC).isoformat()
    (folder / "leave.md").write_text("# Leave\n\nNew employees have twelve days of leave.\n", encoding="utf-8")
    assert kb("sync", loaded).code == 0
    found = kb.json("search", loaded, "leave", "-k", 1, "--at", at)
    assert set(found) == {"answer_id", "question", "at", "mode", "hits", "withheld"}
    assert (found["answer_id"], found["withheld"]) == (None, 0) and datetime.fromisoformat(
        found["at"]
    ) == datetime.fromisoformat(at)
    assert "ten days" in found["hits"][0]["text"] and found["hits"][0]["version"] == 1
    assert "twelve" in kb("search", loaded, "leave").out and "twelve" not in kb("search", loaded, "leave", "--at", at).out
    empty = kb("search", loaded, "leave", "--at", "1h")
    assert empty.code == 0 and "at that time" in empty.out and "read as" not in empty.err
    local = kb("search", loaded, "leave", "--at", datetime.fromisoformat(at).astimezone().replace(tzinfo=None).isoformat())
    assert "ten days" in local.out and "no zone: read as" in local.err
    document = kb.json("doc", "list", loaded)["documents"][0]
    assert document["external_id"] == "leave.md" and kb("doc", "delete", document["document_id"]).code == 0
    assert kb.json("search", loaded, "leave", "--at", at)["withheld"] == 1
    assert "1 withheld" in kb("search", loaded, "leave", "--at", at).out


def test_search_at_a_wrong_time_is_refused(kb: Kb, loaded: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for at, code, word in (("soon", 2, "2026-"), ("2999-01-01T00:00Z", 2, "future")):
        ran = kb("search", loaded, "leave", "--at", at)
        assert ran.code == code and word in ran.err and not ran.out
    monkeypatch.setattr("kb_pipeline.as_of.SETTLED_SECONDS", 60.0)
    ran = kb("search", loaded, "leave", "--at", "1s")
    assert ran.code == 1 and "not settled" in ran.err


def test_answer_keys_and_replay(kb: Kb, loaded: str, folder: Path) -> None:  # noqa: F811
    given = kb.json("search", loaded, "leave", "--as", "hr")
    (folder / "leave.md").write_text("# Leave\n\nNew employees have twelve days of leave.\n", encoding="utf-8")
    assert kb("sync", loaded).code == 0
    shown = kb.json("answer", given["answer_id"])
    assert set(shown) == {"answer_id", "question", "at", "mode", "hits", "withheld", "space", "principals", "k"}
    assert (shown["space"], shown["principals"], shown["k"], shown["withheld"]) == (loaded, ["hr"], 5, 0)
    assert [h["chunk_id"] for h in shown["hits"]] == [h["chunk_id"] for h in given["hits"]]
    again = kb.json("answer", given["answer_id"], "--replay")["replay"]
    assert (again["equal"], again["differences"], len(again["hits"])) == (True, [], 2)
    told = kb("answer", given["answer_id"], "--replay").out
    assert told.index("ten days") < told.index("Replayed") and "asked as hr" in told and "same hits" in told


def test_answer_says_where_a_replay_differs(kb: Kb, loaded: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    given = kb.json("search", loaded, "leave")
    monkeypatch.setattr("kb_pipeline.as_of.SAME_SCORE", -1.0)
    again = kb.json("answer", given["answer_id"], "--replay")["replay"]
    assert not again["equal"] and set(again["differences"][0]) == {
        "position", "logged_chunk", "logged_score", "replayed_chunk", "replayed_score"
    }  # fmt: skip
    told = kb("answer", given["answer_id"], "--replay").out
    assert "differs" in told and str(given["hits"][0]["chunk_id"]) in told


def test_an_unknown_answer_is_wrong_usage(kb: Kb) -> None:  # noqa: F811
    ran = kb("answer", 2**40)
    assert ran.code == 2 and "no answer" in ran.err and not ran.out
