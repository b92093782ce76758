"""The bundled sample documents: each sample question has its answer in them, and is answered by the default settings."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kb_pipeline
from kb_pipeline.cli.demo import QUESTIONS as DEMO_QUESTIONS
from kb_pipeline.model import Hit
from kb_pipeline.registry import open_adapter
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.stages.parse import parse_document
from kb_pipeline.sync import SyncReport, sync_space
from kb_pipeline.wiring import App, open_app

SAMPLES = Path(kb_pipeline.__file__).parent / "samples"
QUESTIONS = Path(__file__).parent / "data" / "sample_questions.tsv"
DOCS_CN = Path(__file__).parent / "data" / "docs_cn"


class Question(NamedTuple):
    language: str
    question: str
    file: str
    phrase: str


def questions(language: str = "") -> list[Question]:
    with QUESTIONS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert tuple(rows[0]) == Question._fields
    return [q for q in map(Question._make, rows[1:]) if language in ("", q.language)]


def documents() -> list[Path]:
    return sorted(p for p in SAMPLES.rglob("*") if p.is_file() and p.suffix in (".md", ".html", ".csv", ".txt"))


def squeezed(text: str) -> str:
    """Without white space: where a line is wrapped is not part of what it says."""
    return "".join(text.split())


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_language_has_documents_and_questions(language: str) -> None:
    named = [p for p in documents() if p.parent.name == language]
    assert len(named) >= 5
    assert len(questions(language)) >= 12
    assert {q.file for q in questions(language)} == {f"{language}/{p.name}" for p in named}  # no document goes unasked


@pytest.mark.parametrize("question", questions(), ids=lambda q: f"{q.language}-{q.phrase}")
def test_the_phrase_of_a_question_stands_in_one_block_of_its_document(question: Question) -> None:
    with (SAMPLES / question.file).open("rb") as raw:
        blocks = parse_document(raw, question.file, lambda name: open_adapter("parser", name)).blocks
        holding = [b for b in blocks if squeezed(question.phrase) in squeezed(b.text)]
    assert len(holding) == 1


def test_the_samples_show_the_formats_and_an_old_encoding() -> None:
    found = {}
    for path in documents():
        with path.open("rb") as raw:
            meta = parse_document(raw, path.name, lambda name: open_adapter("parser", name)).meta
        found[path.name] = (meta["format"], meta.get("encoding"))
    assert {kind for kind, _ in found.values()} == {"markdown", "html", "csv", "text"}
    assert found["expenses.txt"] == ("text", "gb18030")


def test_the_edits_of_the_docs_cn_cut_can_be_replayed() -> None:
    base = DOCS_CN / "base"
    pages = {p.relative_to(base).as_posix(): p.read_text(encoding="utf-8") for p in base.rglob("*") if p.is_file()}
    edits = [json.loads(line) for line in (DOCS_CN / "edits.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert [e["seq"] for e in edits] == sorted(e["seq"] for e in edits)
    for edit in edits:
        before = pages.pop(edit.get("from", edit["path"]), None)
        assert before is not None or edit["op"] == "upsert"
        assert edit.get("content") != before
        if edit["op"] != "delete":
            pages[edit["path"]] = edit["content"]
    assert {e["op"] for e in edits} == {"upsert", "rename", "delete"}


class Synced(NamedTuple):
    app: App
    report: SyncReport

    def hits(self, question: str, k: int = 5) -> tuple[Hit, ...]:
        return search(self.app.engine, self.app.space("demo"), question, k=k).hits


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synced]:
    settings = load_settings({}, home=tmp_path_factory.mktemp("home"))
    with open_app(settings) as app:
        space = app.add_space("demo")
        app.add_source(space, "samples", "local_dir", {"path": str(SAMPLES)})
        yield Synced(app, sync_space(app.engine, space))


@pytest.mark.slow
def test_every_sample_is_published_and_none_fails(synced: Synced) -> None:
    report = synced.report
    assert not report.errors
    assert (report.failed, report.ingest.published) == (0, len(documents()))


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_four_of_five_questions_find_their_section_in_the_first_five_hits(synced: Synced, language: str) -> None:
    asked = questions(language)
    missed = [q for q in asked if not any(answers(hit, q) for hit in synced.hits(q.question))]
    assert len(missed) <= len(asked) * 0.2, "\n".join(f"{q.question} -> {q.file}" for q in missed)


@pytest.mark.slow
def test_the_best_hit_answers_each_question_that_the_demo_asks(synced: Synced) -> None:
    asked = {q.question: q for q in questions()}
    missed = [text for text in DEMO_QUESTIONS if not answers(synced.hits(text, k=1)[0], asked[text])]
    assert missed == []


def answers(hit: Hit, question: Question) -> bool:
    return hit.external_id == question.file and squeezed(question.phrase) in squeezed(hit.text)
