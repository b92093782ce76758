"""What reaches the terminal: any encoding, no control characters, progress apart from results."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from kb_pipeline.cli.output import LINE_SECONDS, Output, printable
from kb_pipeline.cli.session import Session
from kb_pipeline.engine import Progress
from kb_pipeline_tests.cli.conftest import CODE, Kb, environment, run, spawn

HEAVY = ("dagster", "psycopg", "numpy", "rich", "httpx", "yaml", "lxml", "kb_pipeline.wiring")


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys\nfrom kb_pipeline.cli.main import main\nassert main(['--help']) == 0\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=CODE, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_help_need_no_database() -> None:
    env = environment(KB_DATABASE_URL="postgresql://kb@127.0.0.1:9/kb")
    version = run(["--version"], env)
    assert version.code == 0 and version.out.startswith("kb ")
    assert "approve" in run(["source", "--help"], env).out


def test_a_terminal_without_chinese_gets_an_answer(kb: Kb, loaded: str, home: Path, database_url: str) -> None:
    env = environment(KB_HOME=str(home), KB_DATABASE_URL=database_url, PYTHONIOENCODING="ascii", LC_ALL="C")
    text = run(["search", loaded, "年假"], env)
    assert text.code == 0 and "leave.md" in text.out and "?" in text.out and not text.err
    document = run(["search", loaded, "年假", "--json"], env)
    assert document.out.isascii() and "年假.md" in [h["external_id"] for h in document.json["hits"]]


def test_json_is_readable_where_the_terminal_is_utf8(kb: Kb, loaded: str) -> None:
    assert "年假.md" in kb("search", loaded, "年假", "--json").out


def test_documents_cannot_steer_the_terminal(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "evil\x1b[31m[red].md").write_text("# Evil\n\nbefore \x1b]0;title\x07 after [bold]\n", encoding="utf-8")
    kb("sync", loaded)
    for ran in (kb("search", loaded, "evil before after"), kb("doc", "list", loaded)):
        assert ran.code == 0 and "\x1b" not in ran.out and "\x07" not in ran.out and "[red]" in ran.out


def test_printable_keeps_lines_and_every_language() -> None:
    assert printable("a\tb\n年假 é 🙂") == "a\tb\n年假 é 🙂"
    assert printable("\x00\x1b\x7f\x9b\r") == "\ufffd" * 5


def test_an_error_that_nobody_expected_is_one_line(tmp_path: Path) -> None:
    code = "import sys\nfrom kb_pipeline.cli import main as m\nm._require_text = lambda _: 1 / 0\nsys.exit(m.main())"
    command = [sys.executable, "-c", code, "status"]
    env = environment(KB_HOME=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=CODE, check=False)
    assert done.returncode == 1 and done.stderr.startswith("kb: unexpected ZeroDivisionError") and done.stderr.count("\n") == 1
    told = subprocess.run([*command, "--debug"], capture_output=True, text=True, env=env, cwd=CODE, check=False)
    assert told.returncode == 1 and "Traceback" in told.stderr


def test_a_closed_pipe_is_no_traceback(kb: Kb, loaded: str, home: Path, database_url: str) -> None:
    process = spawn(["doc", "list", loaded], environment(KB_HOME=str(home), KB_DATABASE_URL=database_url))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in said and "Exception ignored" not in said


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("kb_pipeline.cli.output.time.monotonic", lambda: now[0])
    with Output(as_json=True).progress() as show:
        show(Progress("listing docs", 1, 9))
        now[0] += LINE_SECONDS
        show(Progress("listing docs", 5, 9))
        show(Progress("listing docs", 6, 9))
    out, err = capsys.readouterr()
    assert out == "" and err == "listing docs 5/9\n"


def test_progress_on_a_terminal_vanishes_and_takes_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=False).progress() as show:
        for done in range(3):
            show(Progress("listing [/red]\x1b]0;x\x07", done, 0 if done == 1 else 3))
    assert "listing [/red]" in terminal.getvalue() and "\x1b]0;" not in terminal.getvalue()


def test_a_session_without_an_application_tells_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    Session().progress(Progress("x", 1, 1))
    assert capsys.readouterr() == ("", "")
