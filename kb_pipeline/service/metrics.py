"""``/metrics``: Prometheus text. Labels are spaces, sources and kinds, never documents."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kb_pipeline.errors import KbError
from kb_pipeline.service import condition
from kb_pipeline.service.database import Database
from kb_pipeline.settings import Settings
from kb_pipeline.store import metrics
from kb_pipeline.store.metrics import Numbers

CACHE_SECONDS = 5.0
MAX_STEPS = 20  # of the log, added up by one scrape: what is left then comes with the next ones
OUTCOMES = ("published", "failed", "interrupted", "canceled")


def routes(settings: Settings, database: Database) -> Sequence[BaseRoute]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(settings, database))
    page = Cached(lambda: generate_latest(registry))

    def answer(_: Request) -> Response:
        return Response(page.get(time.monotonic()), media_type=CONTENT_TYPE_LATEST)

    return [Route("/metrics", answer)]


class Cached:
    """One page for all who ask within five seconds; one thread makes it."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._page = b""

    def get(self, now: float) -> bytes:
        with self._lock:
            if now - self._at >= CACHE_SECONDS:
                self._page, self._at = self._make(), now
            return self._page


class _Collector(Collector):
    """A database that is away costs its own numbers, not the others."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database

    def collect(self) -> Iterable[Metric]:
        try:
            found: Numbers | None = self._numbers()
        except KbError:
            found = None
        yield _gauge("kb_database_up", "1 when the database answered this scrape", [((), found is not None)])
        if found is not None:
            yield from _of_database(found)
        yield from _of_children(self._settings)

    def _numbers(self) -> Numbers:
        for _ in range(MAX_STEPS):
            with self._database.transaction() as c:
                if not metrics.add_up(c):
                    break
        with self._database.transaction() as c:
            return metrics.numbers(c)


def _of_database(found: Numbers) -> Iterator[Metric]:
    yield _gauge(
        "kb_queue_tasks", "Unfinished and dead tasks", [((r.space, r.status), r.n) for r in found.queue], "space", "status"
    )
    yield _gauge(
        "kb_queue_oldest_seconds",
        "How long the first task in the queue has waited",
        [((r.space,), r.seconds) for r in found.oldest],
        "space",
    )
    yield _gauge(
        "kb_sync_lag_seconds",
        "Since the begin of the last complete pass over a source",
        [((r.space, r.source), r.seconds) for r in found.lag],
        "space",
        "source",
    )
    yield _gauge("kb_open_alerts", "Alerts that nobody has resolved", [((r.kind,), r.n) for r in found.alerts], "kind")
    yield _gauge("kb_database_size_bytes", "Size of the database on disk", [((), found.database_bytes)])
    outcomes = CounterMetricFamily("kb_task_outcomes", "Tries of tasks by how they ended", labels=["space", "outcome"])
    for row in found.totals:
        if row.name in OUTCOMES:
            outcomes.add_metric([row.space, row.name], row.total)
    yield outcomes
    for name, about in (
        ("embedded", "Texts that a model was asked for"),
        ("written", "Chunks that were new"),
        ("reused", "Chunks that an earlier version had"),
    ):
        family = CounterMetricFamily(_COUNTERS[name], about, labels=["space"])
        for row in found.totals:
            if row.name == name:
                family.add_metric([row.space], row.total)
        yield family


_COUNTERS = {"embedded": "kb_embedded_texts", "written": "kb_chunks_written", "reused": "kb_chunks_reused"}


def _of_children(settings: Settings) -> Iterator[Metric]:
    children = condition.read(settings.home) or {}
    yield _gauge(
        "kb_child_ready",
        "1 for a process of kb up that works",
        [((n,), c.state == "ready") for n, c in children.items()],
        "child",
    )
    restarts = CounterMetricFamily("kb_child_restarts", "How often kb up has started a process again", labels=["child"])
    for name, child in children.items():
        restarts.add_metric([name], child.restarts)
    yield restarts


def _gauge(name: str, about: str, rows: Iterable[tuple[Sequence[str], float]], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
