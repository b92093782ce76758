"""``kb demo``: from nothing to answers, as often as one likes."""

from pathlib import Path

import pytest

from kb_pipeline.cli import demo
from kb_pipeline_tests.cli.conftest import Kb


@pytest.fixture(autouse=True)
def _removed(kb: Kb) -> None:
    """Each test begins without the space."""
    kb("space", "remove", demo.SPACE, "--yes")


def test_demo_of_a_folder_reads_it_where_it_is_and_a_second_run_finds_nothing_to_do(kb: Kb, folder: Path) -> None:
    first = kb.json("demo", folder)
    assert first["space"] == "demo" and first["path"] == str(folder) and first["sync"]["new"] == 2 and first["answers"] == []
    again = kb("demo", folder)
    assert again.code == 0 and "docs: 2 seen, nothing changed" in again.out and "kb space add mydocs" in again.out
    assert kb.json("source", "show", "demo", "docs")["config"]["path"] == str(folder)


def test_demo_of_the_samples_answers_and_keeps_what_was_edited(
    kb: Kb, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(8):
        (folder / f"{n}.txt").write_text(f"{n}{n}{n}")
    monkeypatch.setattr(demo, "_SAMPLES", folder)
    monkeypatch.setattr(demo, "QUESTIONS", ("新员工有几天年假？", "How many days of leave?"))
    found = kb.json("demo")
    assert [a["hits"][0]["external_id"] for a in found["answers"]] == ["年假.md", "leave.md"]
    copy = home / "samples" / "leave.md"
    copy.write_text("# Leave\n\nNow it is thirty days of leave.\n", encoding="utf-8")
    (home / "samples" / "年假.md").unlink()
    again = kb("demo")
    assert again.code == 0 and "thirty days" in again.out and "1 changed" in again.out and "1 deleted" in again.out


def test_demo_refuses_another_folder_than_it_was_made_from(kb: Kb, folder: Path, tmp_path: Path) -> None:
    kb("demo", folder)
    for other in ((tmp_path,), ()):
        refused = kb("demo", *other)
        assert refused.code == 2 and str(folder) in refused.err and "kb space remove demo --yes" in refused.err
    assert kb.json("source", "show", "demo", "docs")["config"]["path"] == str(folder)


def test_demo_refuses_what_is_no_folder(kb: Kb, tmp_path: Path) -> None:
    refused = kb("demo", tmp_path / "nowhere")
    assert refused.code == 2 and "nowhere" in refused.err


def test_demo_goes_on_where_it_was_interrupted(kb: Kb, folder: Path) -> None:
    kb("space", "add", "demo")
    assert kb.json("demo", folder)["sync"]["new"] == 2


def test_demo_tells_of_documents_that_fail(kb: Kb, folder: Path) -> None:
    (folder / "empty.md").write_text("")
    ran = kb("demo", folder)
    assert ran.code == 3 and "failed: empty.md" in ran.err and "Next:" in ran.out


def test_a_half_made_copy_of_the_samples_is_made_anew(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "samples"
    (tmp_path / "samples.partial").mkdir()
    (tmp_path / "samples.partial" / "old.md").write_text("old")
    demo.copy_samples(folder, target)
    assert sorted(p.name for p in target.iterdir()) == ["leave.md", "年假.md"]
