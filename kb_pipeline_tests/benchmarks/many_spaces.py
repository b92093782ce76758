"""Two thousand spaces: what one tick of each sensor costs, and how long the web UI takes to show an asset and its partitions.

    python -m kb_pipeline_tests.benchmarks.many_spaces [SPACES=2000] [TICKS=5] [CHROMIUM=]

In an embedded server in a temporary folder, which holds Dagster's storage too. Each space has a folder as its source, with one
document that is published: nothing is due and nothing has changed, which is what nearly every tick finds. A tick is timed as a
call of the sensor, beside it the time of its first one. The pages are opened in a browser where one is found, else left out.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dagster import DagsterInstance, SensorDefinition, build_sensor_context

from kb_pipeline.cli import up
from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.orchestration.definitions import defs
from kb_pipeline.orchestration.partitions import SPACE
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.settings import load_settings
from kb_pipeline.store import events
from kb_pipeline.store.database import connection, open_pool
from kb_pipeline.store.migrations import migrate
from kb_pipeline.walk import change_token
from kb_pipeline_tests.cli.conftest import environment, spawn
from kb_pipeline_tests.cli.test_up import free_port

GOAL_SECONDS = 1.0
FILL = """
SELECT kb_ensure_model('hashing-256', 256);
INSERT INTO kb_space (key, name, shard, model_id, embedder, index_kind)
SELECT 's' || lpad(n::text, 5, '0'), 'x', 0, 1, 'hashing', 'pgvector' FROM generate_series(1, {spaces}) n;
INSERT INTO kb_source (space_id, name, kind, config)
SELECT id, 'docs', 'local_dir', jsonb_build_object('path', '{folder}') FROM kb_space;
INSERT INTO sync_lease (source_id) SELECT id FROM kb_source;
INSERT INTO kb_doc (space_id, source_id, external_id, title, uri) SELECT space_id, id, 'd', 't', 'u' FROM kb_source;
INSERT INTO ingestion_task (space_id, doc_id, version, status) SELECT space_id, id, 1, 'SUCCESS' FROM kb_doc;
"""


def main(spaces: int = 2000, ticks: int = 5, chromium: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, documents = Path(folder) / ".kb", Path(folder) / "docs"
        documents.mkdir()
        (documents / "d.md").write_text("# One\n\nThe only document of all of them.\n", encoding="utf-8")
        server = EmbeddedPostgres(home)
        try:
            url = server.start()
            fill(url, spaces, documents)
            settle(KbResource(home=str(home), database_url=url), spaces)
            show_ticks(home, url, ticks)
            show_pages(home, spaces, chromium)
        finally:
            server.stop(mode="immediate")


def fill(url: str, spaces: int, documents: Path) -> None:
    pool = open_pool(url, max_size=1)
    try:
        migrate(pool)
        with connection(pool) as c:
            c.execute(FILL.format(spaces=spaces, folder=documents))
            c.execute("ANALYZE")
    finally:
        pool.close()


def show_ticks(home: Path, url: str, ticks: int) -> None:
    """The first tick of space_lifecycle makes the partitions; its time is of that."""
    os.environ.update(up.dagster_database(load_settings(home=home)))
    with DagsterInstance.from_config(str(up.dagster_home(home))) as made:
        for sensor in sorted(defs.get_repository_def().sensor_defs, key=lambda s: s.name != "space_lifecycle"):
            kb, times = KbResource(home=str(home), database_url=url), []
            for _ in range(ticks + 1):
                begin = time.perf_counter()
                said = tick(sensor, made, kb)
                times.append(time.perf_counter() - begin)
                for request in said.dynamic_partitions_requests or ():
                    made.add_dynamic_partitions(SPACE, list(request.partition_keys))
            kb.close()
            first, ordered = times[0], sorted(times[1:])
            p50, worst, words = (
                ordered[len(ordered) // 2],
                ordered[-1],
                (said.skip_message or f"{len(said.run_requests or ())} runs"),
            )
            print(
                f"{sensor.name:<18} first {first:6.3f} s  p50 {p50:6.3f} s  max {worst:6.3f} s  goal {GOAL_SECONDS} s  {words[:60]}"
            )


def tick(sensor: SensorDefinition, made: DagsterInstance, kb: KbResource) -> Any:
    with build_sensor_context(instance=made, resources={"kb": kb}, repository_def=defs.get_repository_def()) as context:
        return sensor.evaluate_tick(context)


def settle(kb: KbResource, spaces: int) -> None:
    """As if every source had been walked: its token is stored, so that nothing has changed."""
    app = kb.app()
    with connection(app.pool) as c:
        for source, _ in events.probed_sources(c, 0, spaces):
            events.store_token(c, source.id, change_token(app.engine.connector(source), 5.0))


def show_pages(home: Path, spaces: int, chromium: str) -> None:
    from kb_pipeline_tests.ui.browser import CHROMIUM, WIDE, Ui, browser

    program = chromium or next((path for path in map(shutil.which, CHROMIUM) if path), "")
    if not program:
        print("no browser is found: the pages are not opened")
        return
    port = str(free_port())
    process = spawn(["up", "--port", port, "--service-port", str(free_port())], environment(KB_HOME=str(home)))
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), process.communicate()
        with browser(program) as made:
            ui = Ui(made.new_page(viewport=WIDE), f"http://{up.HOST}:{port}", home)
            ui.page.set_default_timeout(120_000)
            last = f"s{spaces:05}"
            for path, *texts in (
                ("/asset-groups", "vector_index"),
                ("/assets/vector_index", "Description", "Automation details"),
                ("/assets/vector_index?view=partitions", "s00001"),
                (f"/assets/vector_index?view=partitions&partition={last}", last),
                ("/runs", "Created at"),
            ):
                begin = time.perf_counter()
                ui.open(path, *texts)
                print(f"{path:<52} shown after {time.perf_counter() - begin:5.1f} s")
    finally:
        process.terminate()
        process.communicate()


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:3]), *sys.argv[3:4])
