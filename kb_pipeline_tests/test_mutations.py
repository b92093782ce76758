"""The list of rules is true to the code: every text is there exactly once, and every test that is named exists."""

import ast
from pathlib import Path

import pytest

from kb_pipeline_tests.mutations.__main__ import main
from kb_pipeline_tests.mutations.rule import Rule
from kb_pipeline_tests.mutations.rules import BY_KEY, RULES
from kb_pipeline_tests.mutations.runner import ROOT, edits_of, problem_of

TESTS = ROOT / "kb_pipeline_tests"


def _functions(file: Path) -> set[str]:
    return {n.name for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.key)
def test_the_text_of_every_rule_stands_in_its_file_exactly_once(rule: Rule) -> None:
    assert problem_of(rule) is None
    assert all(e.old != e.new for e in rule.edits)


def test_every_rule_has_a_key_of_its_own_below_a_subject() -> None:
    assert len(BY_KEY) == len(RULES)
    assert [r.key for r in RULES if r.key.count(".") != 1] == []


def test_every_test_that_holds_a_rule_exists() -> None:
    functions: dict[str, set[str]] = {}
    for rule in RULES:
        for test in rule.tests:
            file, _, name = test.partition("::")
            if file not in functions:
                functions[file] = _functions(TESTS / file)
            assert name.partition("[")[0] in functions[file], f"{rule.key}: {test}"


def test_every_rule_is_held_by_a_test_or_says_why_not() -> None:
    assert [r.key for r in RULES if not r.tests and not r.redundant] == []
    assert [r.key for r in RULES if r.beside and not (r.tests and r.redundant)] == []
    assert [r.key for r in RULES if r.redundant and not r.beside and r.tests] == []


def test_rules_that_are_removed_together_do_not_touch_the_same_text() -> None:
    for rule in RULES:
        assert set(rule.beside) <= BY_KEY.keys() - {rule.key}
        texts: dict[str, str] = {}
        for edit in edits_of(rule):
            text = texts.setdefault(edit.file, (ROOT / edit.file).read_text(encoding="utf-8"))
            assert text.count(edit.old) == 1, rule.key
            texts[edit.file] = text.replace(edit.old, edit.new)


def test_the_list_is_shown_by_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watermark", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "watermark.overlap: the window begins an overlap before the watermark" in shown
    assert "tasks." not in shown


def test_an_unknown_rule_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nothing.such"])
    assert stopped.value.code == 2
    assert "no such rule: nothing.such" in capsys.readouterr().err
