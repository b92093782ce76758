"""What a text is found by: words whole and in parts, pairs of characters, and no text that shares nothing with itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline import terms
from kb_pipeline.terms import ASKED, Frequency, document_keys, question_keys, weighed

SALT = 7
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.lists(
    st.sampled_from(
        [
            "KB-2041",
            "v2.3.1",
            "备份",
            "恢复",
            "的",
            "kubectl",
            "C++",
            "１２",
            "ﬁ",
            "データ",
            "데이터",
            "_",
            "-",
            " ",
            "。",
            "\n",
        ]
    )
).map("".join)


def asked(text: str) -> list[str]:
    return list(dict.fromkeys(terms._terms(text, terms._pairs)))


def found(question: str, document: str, title: str = "") -> bool:
    return bool(set(question_keys(question, SALT)) & set(document_keys(document, title, SALT)))


@pytest.mark.parametrize(
    ("text", "whole", "parts"),
    [
        ("KB-2041", "kb-2041", ["kb", "2041"]),
        ("v2.3.1", "v2.3.1", ["v", "2", "3", "1"]),
        ("kubectl", "kubectl", []),
        ("tidb_gc_life_time", "tidb_gc_life_time", ["tidb", "gc", "life", "time"]),
        ("utf8mb4", "utf8mb4", ["utf", "8", "mb", "4"]),
        ("C++", "c++", ["c"]),
        ("C#", "c#", ["c"]),
        ("ＫＢ－２０４１", "kb-2041", ["kb", "2041"]),
        ("Straße", "strasse", []),
        ("naïve", "naïve", []),
        ("2041", "2041", []),
    ],
)
def test_a_word_is_a_term_as_a_whole_and_in_its_parts(text: str, whole: str, parts: list[str]) -> None:
    assert asked(text) == [whole, *parts]


def test_punctuation_around_a_word_is_none_of_it() -> None:
    assert asked("(kb-2041), 'kubectl'. --force-") == ["kb-2041", "kb", "2041", "kubectl", "force"]


def test_what_is_written_without_spaces_is_pairs() -> None:
    assert asked("备份恢复") == ["备份", "份恢", "恢复"]
    assert asked("データ") == ["デー", "ータ"]
    assert asked("用kubectl部署Pod") == ["用", "kubectl", "部署", "pod"]


@pytest.mark.parametrize(
    ("question", "document"),
    [
        ("备份", "数据库的备份策略"),
        ("份", "数据库的备份策略"),
        ("KB2041", "see kb-2041"),
        ("2041", "KB-2041"),
        ("ERROR", "an error"),
    ],
)
def test_a_question_finds_a_document_that_has_its_words(question: str, document: str) -> None:
    assert found(question, document) and found(question, "", document)


@pytest.mark.parametrize(("question", "document"), [("份备", "备份"), ("KB-2041", "KC-20410"), ("cat", "concatenate")])
def test_what_only_looks_alike_shares_no_term(question: str, document: str) -> None:
    assert not found(question, document)


@pytest.mark.parametrize("text", ["", " \n", "?!", "。，；", "—", "🚀", "___", "\0"])
def test_there_are_texts_without_a_term(text: str) -> None:
    assert question_keys(text, SALT) == [] and document_keys(text, text, SALT) == []


@given(TEXTS, TEXTS)
def test_a_text_shares_with_a_document_that_contains_it_every_term_it_is_asked_by(text: str, other: str) -> None:
    keys = set(question_keys(text, SALT))
    assert keys <= set(document_keys(text, "", SALT)) and keys <= set(document_keys(other, text, SALT))
    assert keys <= set(document_keys(f"{other}\n{text}\n{other}", "", SALT))
    assert bool(keys) == bool(document_keys(text, "", SALT))


@given(st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1, max_size=20))
def test_each_character_of_a_run_finds_it(run: str) -> None:
    assert all(found(c, f"before {run} after") for c in run)


def test_a_long_question_is_asked_by_its_first_terms() -> None:
    words = " ".join(f"word{'x' * n}" for n in range(1, 10_001, 7))
    assert len(question_keys(words, SALT)) == ASKED
    assert question_keys(words, SALT)[:2] == question_keys("wordx wordxxxxxxxx", SALT)


def test_another_index_has_other_keys_and_a_title_counts_twice() -> None:
    assert set(document_keys("backup", "", 1)).isdisjoint(document_keys("backup", "", 2))
    assert document_keys("backup", "", 1) * 2 == document_keys("", "backup", 1)


def test_a_rarer_term_weighs_more_and_its_documents_are_looked_at_first() -> None:
    found = [Frequency(1, 900, 0), Frequency(2, 3, 0), Frequency(3, 1001, 40), Frequency(4, 1001, 300), Frequency(5, 0, 0)]
    question = weighed(found, 10_000.0, 400, 1000)
    assert question.keys == [2, 1, 3, 4]
    assert question.weights == sorted(question.weights, reverse=True)
    assert question.weights[0] == pytest.approx(math.log(1 + (10_000 - 3 + 0.5) / 3.5))
    assert question.weights[3] == pytest.approx(math.log(1 + (10_000 - 7500 + 0.5) / 7500.5))
    assert (question.rare, question.frequent) == ([2, 1], [(3, 4), (3, 3)])


def test_rare_terms_never_have_more_documents_together_than_are_looked_at() -> None:
    found = [Frequency(n, 300, 0) for n in range(10)]
    question = weighed(found, 5000.0, 400, 1000)
    assert (question.rare, question.frequent) == ([0, 1, 2], [(3, 4), (3, 3)])
    last = weighed([*found[:1], Frequency(1, 1001, 100)], 5000.0, 400, 1000)
    assert (last.rare, last.frequent) == ([0], [(1, 1)])
    small = weighed(found, 900.0, 400, 1000)
    assert (small.rare, small.frequent) == (list(range(10)), [])
    nothing = weighed([], 0.0, 1, 1000)
    assert (nothing.keys, nothing.rare, nothing.frequent) == ([], [], [])
