"""An embedder that answers wrongly, late or not at all: what it has answered well is kept, what nobody wants is not written."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import kb_pipeline
from kb_pipeline.errors import RateLimited, Rejected, Transient
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.deletion import delete_document
from kb_pipeline.ports import Vectors
from kb_pipeline_tests.fakes import CountingEmbedder, MemoryIndex
from kb_pipeline_tests.faults.faulty import unfinished
from kb_pipeline_tests.flow.scenario import Flow, article

NAMES = [f"w{n}" for n in range(8)]
TIMEOUT = Transient("the endpoint did not answer within 60 s", code="timeout")


class SmallBatches(CountingEmbedder):
    """Four texts a request. ``spoil`` makes of a request's vectors what the test wants."""

    max_batch = 4

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[list[str], Vectors], Vectors] = lambda _, vectors: vectors
        self.answered: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        vectors = self.spoil(list(texts), super().embed_documents(texts))
        self.answered += texts
        return vectors


@pytest.fixture
def flow(make_flow: Callable[..., Flow]) -> Flow:
    """Eight documents of two chunks, listed, not worked on; a task that failed waits until the test calls it due."""
    flow = make_flow({f"{n}.md": article(n, 2) for n in NAMES}, index=MemoryIndex(), retry_base_seconds=3600.0)
    flow.app.embedder = SmallBatches()
    flow.walk()
    return flow


@pytest.fixture
def embedder(flow: Flow) -> SmallBatches:
    assert isinstance(flow.embedder, SmallBatches)
    return flow.embedder


def cached(flow: Flow) -> int:
    return int(flow.rows()["kb_embedding"])


def finish(flow: Flow) -> None:
    flow.due()
    assert flow.sync().ingest.failed == 0
    assert flow.rows()["embedding_claims"] == 0


# --- wrong answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_request_that_times_out_costs_its_own_texts_and_is_asked_once_more(
    flow: Flow, embedder: SmallBatches, at: int
) -> None:
    asked: list[list[str]] = []

    def spoil(texts: list[str], vectors: Vectors) -> Vectors:
        asked.append(texts)
        if len(asked) - 1 == at:
            raise TIMEOUT
        return vectors

    embedder.spoil = spoil
    report = flow.ingest()
    assert (len(asked), cached(flow)) == (4, 12)
    assert 2 <= report.failed <= 4 and report.published == 8 - report.failed
    assert set(unfinished(flow)) == {("FAILED", "timeout")}
    assert flow.rows()["embedding_claims"] == 0
    finish(flow)
    assert sorted(asked[4]) == sorted(asked[at]) and len(asked) == 5
    assert flow.chunks() and {e for e, *_ in flow.chunks()} == set(flow.memory.items)
    flow.assert_whole()


@pytest.mark.parametrize(
    ("kind", "code"), [("few", "wrong_count"), ("many", "wrong_count"), ("flat", "wrong_count"), ("short", "wrong_dimension")]
)
def test_an_answer_of_the_wrong_shape_is_no_answer_to_anything(
    flow: Flow, embedder: SmallBatches, kind: str, code: str
) -> None:
    """A vector too few: there is no telling whose it is. The model changed: no further request is made."""
    shapes: dict[str, Callable[[Vectors], Vectors]] = {
        "few": lambda v: v[1:], "many": lambda v: np.concatenate([v, v[:1]]), "flat": lambda v: v.ravel(), "short": lambda v: v[:, :-1],
    }  # fmt: skip
    embedder.spoil = lambda texts, vectors: shapes[kind](vectors) if len(embedder.calls) == 2 else vectors
    report = flow.ingest()
    assert (len(embedder.calls), cached(flow)) == (2, 4)
    assert set(unfinished(flow)) == {("FAILED", code)}
    assert report.failures[0][1].code == code
    assert flow.indexed_ids() == flow.current_ids()
    finish(flow)
    assert len(embedder.texts) == 16 + 4
    flow.assert_whole()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_vector_of_no_numbers_costs_its_document_only(flow: Flow, embedder: SmallBatches, value: float) -> None:
    def spoil(texts: list[str], vectors: Vectors) -> Vectors:
        bad = [i for i, text in enumerate(texts) if "w3word1x" in text]
        vectors[bad] = value
        return vectors

    embedder.spoil = spoil
    report = flow.ingest()
    assert (report.published, report.failed, cached(flow)) == (7, 1, 15)
    assert (flow.task("w3.md").status, flow.task("w3.md").error_code) == ("DEAD", "bad_vector")
    calls = len(embedder.calls)
    assert flow.sync(full=True).ingest.tasks == 0
    assert len(embedder.calls) == calls
    embedder.spoil = lambda _, vectors: vectors
    assert flow.retry(flow.task("w3.md").id)
    finish(flow)
    assert len(embedder.calls[-1]) == 1
    flow.assert_whole()


def test_one_poison_text_is_found_by_halving_and_nothing_is_asked_twice_for_its_neighbours(
    flow: Flow, embedder: SmallBatches
) -> None:
    embedder.refused = {"w3word1x": Rejected("the endpoint refused the text", code="refused")}
    report = flow.ingest()
    assert (report.published, report.failed, cached(flow)) == (7, 1, 15)
    assert flow.task("w3.md").status == "DEAD"
    assert len(embedder.calls) <= 4 + 4 + 1  # halved twice; a harmless text is asked for if nothing was answered before
    assert len(embedder.answered) - ("ok" in embedder.answered) == len(set(embedder.answered) - {"ok"}) == 15
    flow.memory.put("w3.md", article("w3", 1))
    embedder.refused = {}
    finish(flow)
    assert {e for e, *_ in flow.chunks()} == set(flow.memory.items)


def test_a_rate_limit_in_the_middle_keeps_what_was_answered_and_asks_no_further(flow: Flow, embedder: SmallBatches) -> None:
    def spoil(texts: list[str], vectors: Vectors) -> Vectors:
        if len(embedder.calls) == 3:
            raise RateLimited("slow down", retry_after=7200.0)
        return vectors

    embedder.spoil = spoil
    report = flow.ingest()
    assert (len(embedder.calls), cached(flow)) == (3, 8)
    assert report.published > 0 and set(unfinished(flow)) == {("FAILED", "rate_limited")}
    waits = flow.execute(
        "SELECT min(next_attempt_at - clock_timestamp()) > interval '115 minutes' AS long FROM ingestion_task "
        "WHERE space_id = %(space)s AND status = 'FAILED'"
    )
    assert waits[0].long
    assert flow.sync().ingest.tasks == 0 and len(embedder.calls) == 3
    finish(flow)
    assert len(embedder.answered) == len(set(embedder.answered)) == 16
    flow.assert_whole()


# --- nobody wants it any more -----------------------------------------------------------------------------------------


def _cancel_task(flow: Flow) -> None:
    assert flow.cancel(flow.task("w0.md").id)


def _delete_document(flow: Flow) -> None:
    delete_document(flow.engine, flow.space, flow.source.id, flow.document("w0.md").id)


def _delete_space(flow: Flow) -> None:
    assert set(delete_space(flow.engine, flow.space).values()) == {0}


@pytest.mark.parametrize("give_up", [_cancel_task, _delete_document, _delete_space])
def test_a_call_whose_result_nobody_wants_ends_and_is_not_written(
    flow: Flow, embedder: SmallBatches, give_up: Callable[[Flow], None]
) -> None:
    embedder.gate.close()
    with flow.beside(lambda: flow.ingest(limit=1)) as ended:
        embedder.gate.await_caller()
        give_up(flow)
        embedder.gate.open()
    assert (ended[0].tasks, ended[0].published, ended[0].failed) == (1, 0, 0)
    assert len(embedder.answered) == 2  # the call itself went its way
    assert (cached(flow), flow.rows()["embedding_claims"]) == (0, 0)
    assert flow.indexed_ids() == set()
    if give_up is not _delete_space:
        flow.sweep()
        assert flow.rows()["kb_chunk"] == 0
        finish(flow)
        back = {"w0.md"} if give_up is _delete_document else set()  # as a new document: the source still has it
        assert {e for e, *_ in flow.chunks()} == set(flow.memory.items) - {"w0.md"} | back


def test_a_call_that_another_document_still_wants_is_written(flow: Flow, embedder: SmallBatches) -> None:
    embedder.gate.close()
    with flow.beside(lambda: flow.ingest(limit=2)) as ended:
        embedder.gate.await_caller()
        _cancel_task(flow)
        embedder.gate.open()
    assert (ended[0].published, cached(flow)) == (1, 4)
    flow.sweep()
    assert {e for e, *_ in flow.chunks()} == {"w1.md"}


# --- its process dies -------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from pathlib import Path
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.settings import load_settings
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import open_app

url, home, key, fatal, log = sys.argv[1:]
embed, calls = HashingEmbedder.embed_documents, []
HashingEmbedder.max_batch = 4

def dying(self, texts):
    calls.append(texts)
    with open(log, "a", encoding="utf-8") as f:
        f.writelines(text.replace("\\n", " ") + "\\n" for text in texts)
    if len(calls) == int(fatal):
        os.kill(os.getpid(), signal.SIGKILL)
    return embed(self, texts)

HashingEmbedder.embed_documents = dying
with open_app(load_settings({}, home=Path(home), database_url=url, embedder="hashing")) as app:
    sync_space(app.engine, app.space(key))
"""


def test_a_process_that_dies_in_the_middle_of_a_load_repeats_one_request(
    make_flow: Callable[..., Flow], database_url: str, tmp_path: Path
) -> None:
    """Each process dies at its third request. Nothing waits for a lease: its owner is known to be dead."""
    flow = make_flow()
    folder, log = tmp_path / "docs", tmp_path / "asked"
    folder.mkdir()
    for n in NAMES:
        (folder / f"{n}.md").write_text(article(n, 3))
    flow.app.add_source(flow.space, "docs", "local_dir", {"path": str(folder)})
    flow.execute("UPDATE kb_source SET status = 'PAUSED' WHERE id = %(source)s")
    ends = []
    while not ends or ends[-1] != 0:
        ends.append(_run(database_url, tmp_path, flow.space.key, 3, log))
        assert len(ends) < 10
    asked = log.read_text().splitlines()
    died = len(ends) - 1
    assert died == 2
    assert set(ends) == {-signal.SIGKILL, 0}
    assert len(asked) - len(set(asked)) <= 4 * died
    assert len(set(asked)) == 24
    assert {e for e, *_ in flow.chunks()} == {f"{n}.md" for n in NAMES}
    assert unfinished(flow) == [] and flow.rows()["embedding_claims"] == 0
    flow.assert_whole()


def _run(url: str, tmp_path: Path, key: str, fatal: int, log: Path) -> int:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KB_")}
    env["PYTHONPATH"] = str(Path(kb_pipeline.__file__).parents[1])
    command = [sys.executable, "-c", DIES, url, str(tmp_path / ".kb"), key, str(fatal), str(log)]
    return subprocess.run(command, env=env, check=False).returncode
