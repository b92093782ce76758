"""Every number against the tables it is about; totals that never count twice, never leave out and never go down."""

import re
from collections.abc import Callable
from itertools import count
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.service import metrics as page
from kb_pipeline.settings import Settings
from kb_pipeline.store import metrics
from kb_pipeline.store.database import Pool, connection, transaction
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article

_number = count(1)


@pytest.fixture
def flow(make_app: Callable[..., FakedApp], pool: Pool) -> Flow:
    """A space of the test's own. The cache is emptied: tests of a file share a database."""
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_embedding")
    app = make_app(embedder=CountingEmbedder())
    space = app.add_space(f"metrics-{next(_number)}")
    memory = MemorySource({f"d{n}.md": article(f"maple{n}") for n in range(3)})
    return Flow(app, space, memory, app.add_fake_source(space, memory))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "EVERY_SECONDS", 0.0)


def add_all(pool: Pool) -> None:
    more = True
    while more:
        with transaction(pool) as c:
            more = metrics.add_up(c)


def totals(flow: Flow) -> dict[str, int]:
    with connection(flow.app.pool) as c:
        return {r.name: r.total for r in metrics.numbers(c).totals if r.space == flow.space.key}


def sample(text: str, name: str, **labels: str) -> float | None:
    wanted = "".join(f'.*{k}="{re.escape(v)}"' for k, v in labels.items())
    found = re.search(rf"^{name}(?:{{{wanted}[^}}]*}})? (\S+)$", text, re.M)
    return float(found[1]) if found else None


def test_the_page_shows_the_queue_its_age_the_lag_and_the_size(flow: Flow, client: TestClient) -> None:
    flow.walk()
    flow.execute("UPDATE ingestion_task SET updated_at = updated_at - interval '100 seconds' WHERE space_id = %(space)s")
    flow.execute("UPDATE sync_job SET started_at = started_at - interval '1 hour' WHERE space_id = %(space)s")
    flow.execute("""INSERT INTO kb_alert (space_id, kind, subject, message) VALUES (%(space)s, 'TASK_DEAD', 'x', 'y'),
                    (%(space)s, 'TASK_DEAD', 'z', 'y'), (%(space)s, 'SYNC_FAILED', 'x', 'y')""")
    flow.execute("UPDATE kb_alert SET resolved_at = clock_timestamp() WHERE subject = 'z'")
    text, key = client.get("/metrics").text, flow.space.key
    assert sample(text, "kb_queue_tasks", space=key, status="PENDING") == 3
    assert 100 <= (sample(text, "kb_queue_oldest_seconds", space=key) or 0) < 3600
    assert 3600 <= (sample(text, "kb_sync_lag_seconds", source="memory", space=key) or 0) < 7200
    assert sample(text, "kb_open_alerts", kind="TASK_DEAD") == 1 and sample(text, "kb_open_alerts", kind="SYNC_FAILED") == 1
    assert (sample(text, "kb_database_size_bytes") or 0) > 1e6 and sample(text, "kb_database_up") == 1
    assert sample(text, "kb_child_restarts_total", child="webserver") == 3
    assert "d0.md" not in text, "documents are no labels"


@pytest.mark.parametrize("status", ["INIT", "PENDING", "PROCESSING", "FAILED", "CANCELING", "DEAD"])
def test_every_unfinished_status_is_counted_and_no_other(flow: Flow, client: TestClient, status: str) -> None:
    flow.sync()
    assert sample(client.get("/metrics").text, "kb_queue_tasks", space=flow.space.key) is None
    flow.execute("UPDATE ingestion_task SET status = %(to)s WHERE space_id = %(space)s", to=status)
    assert sample(client.get("/metrics").text, "kb_queue_tasks", space=flow.space.key, status=status) == 3


def test_totals_are_those_of_the_work_and_a_second_look_adds_nothing(flow: Flow) -> None:
    first = flow.sync().ingest.counts
    add_all(flow.app.pool)
    seen = totals(flow)
    assert (seen["published"], seen["embedded"], seen["written"]) == (3, first["embedded"], first["chunks_written"])
    add_all(flow.app.pool)
    assert totals(flow) == seen
    flow.memory.put("d0.md", article("maple0").replace("maple0word1x1", "novelty"))
    second = flow.sync().ingest.counts
    add_all(flow.app.pool)
    now = totals(flow)
    assert now["embedded"] - seen["embedded"] == second["embedded"] and now["reused"] == second["chunks_reused"] > 0


def test_totals_stay_when_the_log_is_purged_and_go_with_their_space(flow: Flow) -> None:
    flow.sync()
    add_all(flow.app.pool)
    seen = totals(flow)
    flow.execute("DELETE FROM ingestion_node_log WHERE space_id = %(space)s")
    add_all(flow.app.pool)
    assert totals(flow) == seen
    delete_space(flow.engine, flow.space)
    add_all(flow.app.pool)
    assert totals(flow) == {} and flow.execute("SELECT * FROM kb_counter WHERE space_id = %(space)s") == []


def test_a_step_that_commits_late_is_counted_once_it_has(flow: Flow, settings: Settings) -> None:
    """Its row is older than the moment up to which others were counted while it could not be seen."""
    flow.sync()
    add_all(flow.app.pool)
    before = totals(flow)["published"]
    row = """INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, trace_id, started_at)
             VALUES (1, %s, 'INDEXER', 'SUCCESS', 1, gen_random_uuid(), clock_timestamp())"""
    with psycopg.connect(settings.database_url) as late:
        late.execute(row, [flow.space.id])
        with connection(flow.app.pool) as c:
            c.execute(row, [flow.space.id])
        add_all(flow.app.pool)
        assert totals(flow)["published"] in (before, before + 1)
        late.commit()
    add_all(flow.app.pool)
    assert totals(flow)["published"] == before + 2


def test_a_piece_of_the_log_that_another_scrape_counts_is_not_counted_here(flow: Flow, settings: Settings) -> None:
    flow.sync()
    with psycopg.connect(settings.database_url) as other:
        other.execute("SELECT until FROM kb_counted FOR UPDATE")
        with transaction(flow.app.pool) as c:
            assert metrics.add_up(c) is False
    add_all(flow.app.pool)
    assert totals(flow)["published"] == 3


def test_a_long_log_is_added_up_in_pieces(flow: Flow) -> None:
    flow.sync()
    flow.execute("UPDATE kb_counted SET until = clock_timestamp() - interval '3 days'")
    pieces = 0
    more = True
    while more:
        with transaction(flow.app.pool) as c:
            more = metrics.add_up(c)
            pieces += 1
    assert pieces == 13 and totals(flow)["published"] == 3


def test_one_page_is_made_for_all_who_ask_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "CACHE_SECONDS", 5.0)
    made: list[Any] = []

    def make() -> bytes:
        made.append(None)
        return b"%d" % len(made)

    cached = page.Cached(make)
    assert [cached.get(t) for t in (100.0, 104.9, 105.0, 109.0, 111.0)] == [b"1", b"1", b"2", b"2", b"3"]
