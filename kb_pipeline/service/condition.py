"""``KB_HOME/up.json``: what ``kb up`` says about its children, for the service that is one of them.

The service must not load Dagster to ask for heartbeats, and need not: the daemon ends itself when one of its threads dies or
falls silent, and whether it runs is known to ``kb up``. A file that is not renewed: ``kb up`` itself is gone, or hangs.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "up.json"
STALE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Condition:
    """Of one child. ``state``: starting, ready, restarting, stopping."""

    state: str
    pid: int
    restarts: int = 0
    reason: str = ""  # of the last restart


def write(home: Path, children: Mapping[str, Condition]) -> None:
    """Whole or not at all, for a reader at any moment."""
    path = home / NAME
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({name: asdict(c) for name, c in children.items()}), encoding="utf-8")
    new.replace(path)


def read(home: Path) -> dict[str, Condition] | None:
    """None: ``kb up`` does not run here, or has not written for half a minute."""
    path = home / NAME
    try:
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            return None
        return {name: Condition(**values) for name, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return None


def clear(home: Path) -> None:
    (home / NAME).unlink(missing_ok=True)
