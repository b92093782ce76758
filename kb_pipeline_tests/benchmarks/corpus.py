"""The corpus that the benchmarks run on: ``base.tar.gz`` and ``edits.jsonl.gz`` in a folder that is given on the command line.

Each benchmark prints its figures side by side and asserts nothing about time.
"""

import gzip
import json
import os
import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "corpora" / "docs-cn"
LONG_AGO = time.time() - 86_400  # outside of any file system's clock tick


def corpus_folder() -> Path:
    """The first argument, or the corpora folder beside a checkout that has one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if not (folder / "base.tar.gz").exists():
        sys.exit(f"{folder} has no base.tar.gz: give a corpus folder (base.tar.gz, edits.jsonl.gz) as the first argument")
    return folder


def unpack(folder: Path, into: Path, copies: int = 1) -> int:
    """The base state as files, ``copies`` times side by side. How many files."""
    n = 0
    for i in range(copies):
        target = into if copies == 1 else into / f"copy{i}"
        with tarfile.open(folder / "base.tar.gz") as tar:
            tar.extractall(target, filter="data")
            n += len(tar.getmembers())
    age(into)
    return n


def age(root: Path) -> None:
    """Move fresh files out of the clock tick in which a listing would call them provisional."""
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_mtime > time.time() - 60:
            os.utime(path, (LONG_AGO, LONG_AGO))


def edits_by_commit(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The year's edits in order, one group a commit."""
    with gzip.open(folder / "edits.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from ((k, list(g)) for k, g in groupby((json.loads(x) for x in lines), key=lambda e: e["commit"]))


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, readable for the embedded server's account."""
    path = Path(tempfile.mkdtemp(prefix="kb-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def peak_rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
