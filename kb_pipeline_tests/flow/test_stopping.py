"""Work that is asked to end, or made to: claims go back at once, nothing is lost, nothing is embedded a second time."""

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kb_pipeline.engine import Stopped
from kb_pipeline.signals import orderly_stop
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline_tests.fakes import CountingEmbedder
from kb_pipeline_tests.flow.scenario import Flow, article


class ActingEmbedder(CountingEmbedder):
    """Does something within its second request: by then one is stored."""

    max_batch = 2

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def embed_documents(self, texts: Any) -> Any:
        vectors = super().embed_documents(texts)
        if len(self.calls) == 2:
            self._act()
        return vectors


def fill(flow: Flow, documents: int = 6) -> None:
    for n in range(documents):
        flow.memory.put(f"d{n}.md", article(f"maple{n}"))


def claims(flow: Flow) -> list[Any]:
    return flow.execute(
        "SELECT id FROM ingestion_task WHERE space_id = %(space)s AND (status = 'PROCESSING' OR claimed_by IS NOT NULL OR deaths > 0)"
    )


def interrupted(flow: Flow) -> set[str]:
    rows = flow.execute("SELECT DISTINCT node FROM ingestion_node_log WHERE space_id = %(space)s AND status = 'INTERRUPTED'")
    return {r.node for r in rows}


def finish(flow: Flow, before: CountingEmbedder) -> list[str]:
    """The next process, with an embedder of its own. All texts that were ever asked for."""
    flow.engine.stop.clear()
    flow.app.embedder = CountingEmbedder()
    flow.sync()
    assert {r.status for r in flow.execute("SELECT status FROM ingestion_task WHERE space_id = %(space)s")} == {"SUCCESS"}
    assert len(flow.found("maple0word1x1", k=50)) == len(flow.memory.items)
    return before.texts + flow.embedder.texts


def test_a_stop_in_the_middle_of_embedding_keeps_what_was_answered_and_gives_the_rest_back(flow: Flow) -> None:
    embedder = flow.app.embedder = ActingEmbedder(flow.engine.stop.set)
    fill(flow)
    report = flow.sync()
    assert isinstance(report.ingest.stopped, Stopped) and report.failed == 0
    assert claims(flow) == [] and "EMBEDDING" in interrupted(flow)
    assert flow.rows()["kb_embedding"] == len(embedder.texts) and flow.rows()["embedding_claims"] == 0
    texts = finish(flow, embedder)
    assert len(texts) == len(set(texts)) > len(embedder.texts)


def test_a_document_that_had_all_its_vectors_goes_on_when_work_stops_and_a_shorter_one_does_not(flow: Flow) -> None:
    embedder = flow.app.embedder = ActingEmbedder(flow.engine.stop.set)
    flow.memory.put("a.md", "# A\n\nmaple0word1x1 alone.\n")
    for n in range(4):
        flow.memory.put(f"b{n}.md", article(f"birch{n}"))
    flow.sync()
    at = {r.external_id: r.current_node for r in flow.execute(
        "SELECT d.external_id, t.current_node FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id WHERE t.space_id = %(space)s")}  # fmt: skip
    done = {name for name, node in at.items() if node == "INDEXER"}
    assert set(at.values()) == {"EMBEDDING", "INDEXER"}
    missing = flow.execute("""SELECT d.external_id FROM kb_chunk c JOIN kb_doc d ON d.id = c.doc_id WHERE c.space_id = %(space)s
        AND NOT EXISTS (SELECT FROM kb_embedding e WHERE e.content_hash = c.content_hash AND e.vector IS NOT NULL)""")
    assert done.isdisjoint(r.external_id for r in missing)
    assert len(embedder.calls) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_process_that_is_made_to_end_gives_its_claims_back_and_dies_no_death(flow: Flow, error: type[BaseException]) -> None:
    def act() -> None:
        raise error

    embedder = flow.app.embedder = ActingEmbedder(act)
    fill(flow)
    with pytest.raises(error):
        flow.sync()
    assert claims(flow) == [] and interrupted(flow) == {"EMBEDDING"} and flow.rows()["embedding_claims"] == 0
    finish(flow, embedder)


def test_parts_of_a_batch_that_were_not_begun_are_given_back_too(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(batch_bytes=1)
    flow.app.embedder = ActingEmbedder(flow.engine.stop.set)
    fill(flow)
    flow.sync()
    assert claims(flow) == [] and interrupted(flow) >= {"FETCHER"}
    finish(flow, flow.embedder)


def test_a_listing_that_is_stopped_stays_open_and_is_gone_on_with_by_whoever_comes_next(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(page_size=2)
    fill(flow)

    class StoppingPages:
        def pass_through(self) -> None:
            flow.engine.stop.set()

    gate, flow.memory.gate = flow.memory.gate, StoppingPages()  # type: ignore[assignment]
    report = flow.sync()
    assert isinstance(report.errors["memory"], Stopped)
    (job,) = flow.execute("SELECT status FROM sync_job WHERE space_id = %(space)s")
    (lease,) = flow.execute("SELECT until < clock_timestamp() AS free FROM sync_lease WHERE source_id = %(source)s")
    assert job.status == "RUNNING" and lease.free
    assert len(flow.execute("SELECT id FROM kb_doc WHERE space_id = %(space)s")) == 2
    flow.memory.gate = gate
    flow.engine.stop.clear()
    again = flow.sync()
    assert again.passes[0].resumed and len(flow.execute("SELECT id FROM kb_doc WHERE space_id = %(space)s")) == 6


def test_nothing_is_begun_once_it_was_asked_to_stop(flow: Flow) -> None:
    fill(flow)
    flow.walk()
    flow.engine.stop.set()
    report = flow.ingest()
    assert report.tasks == 0 and isinstance(report.stopped, Stopped) and flow.embedder.texts == []


def test_the_last_requests_are_waited_for_and_no_other_is_sent() -> None:
    """Two are under way side by side: the first answer brings the stop, the second must not be lost."""
    last, second = threading.Event(), threading.Event()

    class Embedder:
        fingerprint, dimension, max_batch, max_batch_tokens, concurrency = "two", 2, 1, 100, 2

        def __init__(self) -> None:
            self.sent: list[str] = []

        def embed_documents(self, texts: Any) -> Any:
            self.sent += texts
            if texts == ["t1"]:
                second.wait(60)
            return np.ones((1, 2), np.float32)

    embedder = Embedder()
    texts = [(hashlib.sha256(t.encode()).digest(), t) for t in ("t0", "t1", "t2", "t3")]
    answered = []
    for part in embed_texts(embedder, texts, last=last.is_set):  # type: ignore[arg-type]
        answered += part.vectors
        last.set()
        second.set()
    assert sorted(embedder.sent)[:2] == ["t0", "t1"] and len(embedder.sent) <= 3
    assert set(answered) == {h for h, t in texts if t in embedder.sent}


# --- signals ----------------------------------------------------------------------------------------------------------


class Told(Exception):
    pass


@pytest.fixture
def handled() -> Any:
    """SIGTERM raises Told, as some program's own handler would."""

    def tell(*_: Any) -> None:
        raise Told

    before = signal.signal(signal.SIGTERM, tell)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_first_signal_lets_the_work_end_and_is_delivered_then(handled: None) -> None:
    stop, did = threading.Event(), []
    with pytest.raises(Told):
        with orderly_stop(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.is_set()
            did.append("the rest of the unit")
    assert did and signal.getsignal(signal.SIGTERM).__name__ == "tell"  # type: ignore[union-attr]


def test_a_second_signal_acts_at_once(handled: None) -> None:
    reached = []
    with pytest.raises(Told):
        with orderly_stop(threading.Event()):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("never")
    assert not reached and signal.getsignal(signal.SIGTERM).__name__ == "tell"  # type: ignore[union-attr]


def test_without_a_signal_nothing_has_changed_and_an_ignored_one_stays_ignored(handled: None) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = threading.Event()
        with orderly_stop(stop):
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.is_set() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM).__name__ == "tell"  # type: ignore[union-attr]
    finally:
        signal.signal(signal.SIGINT, before)
