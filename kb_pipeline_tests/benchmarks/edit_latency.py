"""From the edit of a file to its new words in an answer, through sensor and run.

    python -m kb_pipeline_tests.benchmarks.edit_latency FOLDER [SAMPLES=30] [SPACES=1] [BUSY=0]

`kb up` is started below FOLDER on free ports with the hashing embedder. SPACES have FILES files each; one of the first space is
edited at a random moment, and BUSY others of other spaces with it. Prints each sample's parts, p50 and p95. Asserts nothing.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.engine import Engine
from kb_pipeline.search import search
from kb_pipeline.settings import load_settings
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.idle import PROGRAM, _free_port

FILES = 100
POLL_SECONDS = 0.1
GIVE_UP_SECONDS = 120.0
RUNS = """SELECT extract(epoch FROM create_timestamp AT TIME ZONE 'UTC')::float8, start_time FROM runs
          WHERE create_timestamp AT TIME ZONE 'UTC' >= to_timestamp(%s) AND partition = 'space-0' ORDER BY id LIMIT 1"""


def main() -> None:
    given = [int(x) for x in sys.argv[2:]]
    samples, spaces, busy = (*given, *(30, 1, 0)[len(given) :])
    folder = Path(sys.argv[1]).absolute()
    with open_app(load_settings({}, home=folder / "home", embedder="hashing")) as app:
        made = [_space(app, folder / f"docs-{n}", n) for n in range(spaces)]
        up = _start(folder / "home")
        try:
            time.sleep(30)
            found = [_sample(app.engine, made, folder, n, busy) for n in range(samples)]
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait()
    print(f"load={os.getloadavg()[0]:.1f} samples={samples} spaces={spaces} busy={busy}")
    for name, values in zip(
        ("edit_to_run_asked", "asked_to_started", "started_to_found", "edit_to_found"), zip(*found, strict=True), strict=True
    ):
        ordered = sorted(values)
        print(
            f"{name}: p50={ordered[len(ordered) // 2]:.2f} s p95={ordered[int(len(ordered) * 0.95)]:.2f} s max={ordered[-1]:.2f} s"
        )


def _space(app: App, docs: Path, n: int) -> Space:
    docs.mkdir(parents=True)
    for i in range(FILES):
        (docs / f"{i}.md").write_text(f"# Page {i}\n\nWhat page {i} of space {n} says about backups, leave and travel.\n")
    space = app.add_space(f"space-{n}")
    app.add_source(space, "docs", "local_dir", {"path": str(docs)})
    sync_space(app.engine, space)
    return space


def _start(home: Path) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "--home",
        str(home),
        "up",
        "--port",
        str(_free_port()),
        "--service-port",
        str(_free_port()),
    ]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"KB_EMBEDDER": "hashing"})
    assert up.stdout is not None and "http://" in up.stdout.readline(), "kb up did not start"
    return up


def _sample(engine: Engine, spaces: list[Space], folder: Path, n: int, busy: int) -> tuple[float, float, float, float]:
    time.sleep(random.uniform(0.5, 5.5))
    word = f"sample{n}x{random.randrange(10**9)}"
    for other in random.sample(range(1, len(spaces)), busy):
        with (folder / f"docs-{other}" / "7.md").open("a") as f:
            f.write(f"\nand {word}\n")
    with (folder / "docs-0" / f"{random.randrange(FILES)}.md").open("a") as f:
        f.write(f"\n\n## {word}\n\nThe word is {word}.\n")
    began = time.time()
    while not any(word in hit.text for hit in search(engine, spaces[0], f"The word is {word}", k=3).hits):
        assert time.time() < began + GIVE_UP_SECONDS, f"{word} was never found"
        time.sleep(POLL_SECONDS)
    found = time.time()
    with psycopg.connect(EmbeddedPostgres(folder / "home").dagster_url()) as c:
        row = c.execute(RUNS, [began - 1]).fetchone()
    asked, started = row if row else (found, found)
    parts = asked - began, (started or found) - asked, found - (started or found), found - began
    print("  ".join(f"{p:.2f}" for p in parts), flush=True)
    return parts


if __name__ == "__main__":
    main()
