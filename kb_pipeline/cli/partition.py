"""A deleted space leaves the web UI as well: asked of Dagster in a process of its own, since commands do without it."""

import subprocess
import sys
from typing import TYPE_CHECKING

from kb_pipeline.cli.up import dagster_environment

if TYPE_CHECKING:
    from kb_pipeline.settings import Settings

SECONDS = 60


def forget_partition(settings: "Settings", space: str) -> int:
    """Partitions of that name that are left: 0 where `kb up` never ran; 1 also where Dagster could not be asked."""
    folder = settings.home / "dagster"
    if not (folder / "dagster.yaml").is_file():
        return 0
    command = [sys.executable, "-m", "kb_pipeline.orchestration.forget", space]
    try:
        done = subprocess.run(
            command, env=dagster_environment(settings, folder), capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return int(done.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 1
