import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.model import BlockKind, Parsed
from kb_pipeline.parsers import encoding
from kb_pipeline.parsers.csv import MAX_ROWS, MIN_ROWS, Config, CsvParser


def parse(text: str | bytes, name: str = "a.csv") -> Parsed:
    data = text if isinstance(text, bytes) else text.encode()
    return CsvParser(Config()).parse(io.BytesIO(data), name)


def tables(text: str | bytes) -> list[str]:
    blocks = list(parse(text).blocks)
    assert all(b.kind is BlockKind.TABLE for b in blocks)
    return [b.text for b in blocks]


def rows_of(count: int, seed: int = 1) -> list[str]:
    pick = random.Random(seed)
    return [f"{i},name {pick.randrange(10**6)},{pick.random():.3f}" for i in range(count)]


def test_rows_become_pipe_rows_under_the_header() -> None:
    assert tables("id,city\n1,Berlin\n2,Paris\n") == ["| id | city |\n| --- | --- |\n| 1 | Berlin |\n| 2 | Paris |"]


def test_pipes_and_line_ends_in_cells_do_not_break_rows() -> None:
    assert tables('a,b\n"x|y","one\ntwo"\n') == ["| a | b |\n| --- | --- |\n| x\\|y | one two |"]


@pytest.mark.parametrize(
    ("delimiter", "text"), [(",", "a,b\n1,2\n"), ("\t", "a,x\tb\n1\t2\n"), (";", "a;b\n1,5;2,5\n"), ("|", "a|b\n1|2\n")]
)
def test_the_delimiter_is_found(delimiter: str, text: str) -> None:
    assert parse(text).meta["delimiter"] == delimiter


def test_ragged_and_empty_rows_cost_nothing() -> None:
    assert tables("a,b\n1\n\n,\n1,2,3\n") == ["| a | b |\n| --- | --- |\n| 1 |\n| 1 | 2 | 3 |"]


def test_only_a_header_is_a_table_and_nothing_is_none() -> None:
    assert tables("a,b\n") == ["| a | b |\n| --- | --- |"]
    assert tables("") == tables("\n\n,,\n") == []


def test_every_table_repeats_the_header_and_keeps_its_size() -> None:
    rows = rows_of(1000)
    found = [t.split("\n") for t in tables("\n".join(["id,name,value", *rows]))]
    assert len(found) > 10
    assert all(t[:2] == ["| id | name | value |", "| --- | --- | --- |"] for t in found)
    assert all(MIN_ROWS <= len(t) - 2 <= MAX_ROWS for t in found[:-1])
    assert [r for t in found for r in t[2:]] == [f"| {r.replace(',', ' | ')} |" for r in rows]


@pytest.mark.parametrize("count", [0, 8, 24, 64, 72])
def test_no_empty_table_behind_the_last_row(count: int) -> None:
    for seed in range(20):
        found = tables("\n".join(["id,name,value", *rows_of(count, seed)]))
        assert len(found) == 1 or all(t.count("\n") > 1 for t in found)


def test_a_row_put_in_at_the_top_changes_few_tables() -> None:
    rows = rows_of(2000)
    before = tables("\n".join(["id,name,value", *rows]))
    after = tables("\n".join(["id,name,value", "new,row,0", *rows]))
    assert len(set(after) - set(before)) <= 5
    assert before[-50:] == after[-50:]


def test_a_quote_that_nobody_closes_does_not_swallow_the_file() -> None:
    text = "\n".join(["id,name,value", '0,"open,1', *rows_of(20000)])
    parsed = parse(text)
    assert parsed.meta["quoting"] is False
    assert sum(b.text.count("\n") - 1 for b in parsed.blocks) == 20001


def test_a_line_of_ten_megabytes_is_read() -> None:
    assert len(tables("a,b\n" + "x" * 10_000_000 + ",1\n")[0]) > 10_000_000


@pytest.mark.parametrize("codec", ["gb18030", "utf-16", "utf-8-sig"])
def test_any_encoding_is_read(codec: str) -> None:
    assert "| 1 | 北京 | 正常 |" in tables("id,城市,备注\n1,北京,正常\n2,上海,缺货\n".encode(codec))[0]


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), max_size=4), max_size=20))
def test_any_cells_are_read_the_same_streamed(rows: list[list[str]]) -> None:
    data = "\n".join(",".join('"' + c.replace('"', '""') + '"' for c in row) for row in rows).encode()
    try:
        whole = tables(data)
    except encoding.Rejected:
        return  # too many control characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "SMALL", 1)
        patch.setattr(encoding, "PIECE", 3)
        assert tables(data) == whole
