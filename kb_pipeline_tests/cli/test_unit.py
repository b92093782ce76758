"""The systemd unit that README shows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kb_pipeline.settings import Settings
from kb_pipeline_tests.cli.conftest import CODE

README = (CODE / "README.md").read_text(encoding="utf-8")


def unit() -> str:
    found = re.search(r"```ini\n(.*?)```", README, re.DOTALL)
    assert found, "README shows no unit"
    return found[1]


def values() -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit().splitlines() if "=" in line)


def test_the_unit_gives_the_drain_its_time_and_tells_only_kb_up_to_end() -> None:
    """With KillMode=control-group every run would be told at the same moment as its daemon."""
    found = values()
    drain = int(re.search(r"KB_DRAIN_SECONDS=(\d+)", unit())[1])  # type: ignore[index]
    assert drain == Settings().drain_seconds and int(found["TimeoutStopSec"]) >= drain + 30
    assert found["Type"] == "notify" and found["KillMode"] == "mixed" and found["Restart"] == "on-failure"
    assert found["User"] != "root" and found["ExecStart"].endswith("/kb up")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "kb.service"
    here = unit().replace("/opt/kb/.venv/bin/kb", sys.executable).replace("User=kb", "User=root")
    file.write_text(here, encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "kb.service" in line]
    assert complaints == [], done.stderr
    file.write_text(here.replace("Type=notify", "Type=notified"), encoding="utf-8")
    wrong = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False)
    assert "notified" in wrong.stderr, "the test sees what it looks for"
