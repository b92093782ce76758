"""Every node may fail: the old version stays whole, the rest of the batch goes on, and the next try resumes where it stopped."""

from collections.abc import Callable, Generator, Sequence
from datetime import timedelta

import numpy as np
import pytest

from kb_pipeline.errors import KbError, RateLimited, Rejected, Transient
from kb_pipeline.ports import Vectors
from kb_pipeline.states import Node
from kb_pipeline.store import tasks
from kb_pipeline.store.database import transaction, worker_id
from kb_pipeline_tests.fakes import CountingEmbedder, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article

DOWN = Transient("endpoint: connection refused", code="endpoint_down")


@pytest.fixture
def patient(make_flow: Callable[..., Flow]) -> Flow:
    """Three published documents; a failed task waits for an hour, so that a test decides when it is due."""
    flow = make_flow({f"{n}.md": article(n) for n in ("ash", "birch", "cedar")}, index=MemoryIndex(), retry_base_seconds=3600.0)
    flow.sync()
    return flow


def _work_done(flow: Flow) -> dict[str, int]:
    """How often each kind of work was done so far."""
    nodes = [key.rpartition("/")[2].rpartition("-a")[0] for key in flow.blobs.objects]
    return {"fetched": len(flow.memory.fetched), "parsed": nodes.count("parser"), "embedded": len(flow.embedder.calls)}


def _edit(flow: Flow) -> None:
    """Two of three documents change; birch is the one that will be in trouble."""
    flow.memory.put("birch.md", article("birch").replace("birchword1x7", "novelty"))
    flow.memory.put("cedar.md", article("cedar").replace("cedarword1x7", "surprise"))


def _assert_old_stands(flow: Flow, status: str, code: str, node: Node) -> None:
    """birch is searchable as it was, as a whole; its task says what happened to it; cedar's news are out."""
    task = flow.task("birch.md")
    assert (task.status, task.error_code, task.current_node) == (status, code, node)
    assert "birch.md" in task.error_message
    document = flow.document("birch.md")
    assert (document.status, document.current_ver, document.last_ver) == ("AVAILABLE", 1, 2)
    shown = {t for e, _, _, t, _ in flow.chunks() if e == "birch.md"}
    assert "birchword1x7" in "".join(shown)
    assert "novelty" not in "".join(shown)
    down, flow.index.down = flow.index.down, False
    assert flow.showing("birchword1x7") == {"birch.md"}
    assert flow.current_ids() <= flow.indexed_ids()
    flow.index.down = down


def _assert_published(flow: Flow) -> None:
    assert flow.showing("novelty") == {"birch.md"}
    assert flow.task("birch.md").status == "SUCCESS"
    assert flow.task("birch.md").error_code is None
    flow.assert_whole()


@pytest.mark.parametrize(("error", "status"), [
    (Transient("timeout", code="timeout"), "FAILED"), (Rejected("closed", code="forbidden"), "DEAD"),
], ids=lambda x: getattr(x, "code", None))  # fmt: skip
def test_a_failed_fetch_costs_its_document_only(patient: Flow, error: KbError, status: str) -> None:
    _edit(patient)
    patient.memory.fetch_errors["birch.md"] = error
    report = patient.sync()
    assert [(c.external_id, f.code) for c, f in report.ingest.failures] == [("birch.md", error.code)]
    _assert_old_stands(patient, status, error.code, Node.FETCHER)
    assert patient.showing("surprise") == {"cedar.md"}
    patient.memory.fetch_errors.clear()
    patient.due()
    if status == "DEAD":
        assert patient.sync().ingest.tasks == 0  # only an operator, or new content, brings it back
        assert patient.retry(patient.task("birch.md").id)
    patient.sync()
    _assert_published(patient)


def test_what_was_gone_when_it_was_read_and_comes_back_as_it_was_is_taken(patient: Flow) -> None:
    """An object that is put again has the revision that it had."""
    patient.memory.put("birch.md", article("birch") + "surprise", revision="etag")
    patient.memory.fetch_errors["birch.md"] = Rejected("birch.md is gone", code="gone")
    patient.sync()
    assert (patient.task("birch.md").status, patient.task("birch.md").error_code) == ("DEAD", "gone")
    patient.memory.fetch_errors.clear()
    patient.sync()
    assert "birch.md" in patient.showing("surprise")
    assert patient.sync(full=True).ingest.tasks == 0


def test_a_full_object_store_loses_nothing(patient: Flow) -> None:
    _edit(patient)
    patient.blobs.full = True
    report = patient.sync()
    assert report.ingest.stopped is not None
    _assert_old_stands(patient, "FAILED", "blob_store_full", Node.FETCHER)
    patient.blobs.full = False
    patient.due()
    patient.sync()
    _assert_published(patient)


def test_an_object_store_that_fills_up_at_the_parser_does_not_fetch_again(patient: Flow) -> None:
    _edit(patient)
    patient.walk()
    patient.ingest(nodes=[Node.FETCHER])
    patient.blobs.full = True
    patient.ingest()
    _assert_old_stands(patient, "FAILED", "blob_store_full", Node.PARSER)
    before = _work_done(patient)
    patient.blobs.full = False
    patient.due()
    patient.sync()
    _assert_published(patient)
    assert _work_done(patient)["fetched"] == before["fetched"]


def test_content_that_no_parser_takes_is_dead_and_named(patient: Flow) -> None:
    patient.memory.put("birch.md", b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20)
    patient.memory.put("cedar.md", article("cedar").replace("cedarword1x7", "surprise"))
    patient.sync()
    _assert_old_stands(patient, "DEAD", patient.task("birch.md").error_code, Node.PARSER)
    assert patient.showing("surprise") == {"cedar.md"}
    patient.memory.put("birch.md", article("birch").replace("birchword1x7", "novelty"))
    patient.sync()
    _assert_published(patient)


def test_an_embedder_that_is_down_is_resumed_from_the_stored_chunks(patient: Flow) -> None:
    _edit(patient)
    patient.embedder.failures = [DOWN]
    report = patient.sync()
    assert report.ingest.stopped is not None
    _assert_old_stands(patient, "FAILED", "endpoint_down", Node.EMBEDDING)
    before, rows = _work_done(patient), patient.rows()
    patient.due()
    patient.sync()
    _assert_published(patient)
    after = _work_done(patient)
    assert (after["fetched"], after["parsed"]) == (before["fetched"], before["parsed"])
    assert patient.rows()["kb_embedding"] == rows["kb_embedding"] + 2


def test_a_rate_limit_waits_as_long_as_the_server_asked(patient: Flow) -> None:
    _edit(patient)
    patient.embedder.failures = [RateLimited("slow down", retry_after=86_400)]
    patient.sync()
    _assert_old_stands(patient, "FAILED", "rate_limited", Node.EMBEDDING)
    task = patient.task("birch.md")
    assert task.next_attempt_at - task.updated_at > timedelta(hours=23)
    assert patient.sync().ingest.tasks == 0
    patient.due()
    patient.sync()
    _assert_published(patient)


def test_a_refused_text_costs_its_document_only(patient: Flow) -> None:
    _edit(patient)
    patient.embedder.refused = {"novelty": Rejected("the text was refused", code="bad_text")}
    patient.sync()
    _assert_old_stands(patient, "DEAD", "bad_text", Node.EMBEDDING)
    assert patient.showing("surprise") == {"cedar.md"}


class _Broken(CountingEmbedder):
    """Answers with vectors that no index could use."""

    kind = ""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        vectors = super().embed_documents(texts)
        if self.kind == "wrong_dimension":
            return vectors[:, :-1]
        hit = [self.kind == "bad_vector" and "novelty" in t for t in texts]
        vectors[hit] = np.nan
        return vectors


@pytest.mark.parametrize(("kind", "status"), [("wrong_dimension", "FAILED"), ("bad_vector", "DEAD")])
def test_an_unusable_vector_never_reaches_the_index(patient: Flow, kind: str, status: str) -> None:
    broken = _Broken()
    broken.kind = kind
    patient.app.embedder = broken
    _edit(patient)
    patient.sync()
    _assert_old_stands(patient, status, kind, Node.EMBEDDING)
    assert (patient.task("cedar.md").status == "SUCCESS") == (kind == "bad_vector")
    assert patient.rows()["embedding_claims"] == 0
    broken.kind = ""
    patient.due()
    if status == "DEAD":
        assert patient.retry(patient.task("birch.md").id)
    patient.sync()
    _assert_published(patient)


@pytest.mark.parametrize(("fault", "code"), [("down", "index_down"), ("drops_upserts", "index_incomplete")])
def test_an_index_that_is_down_or_lies_is_resumed_without_embedding(patient: Flow, fault: str, code: str) -> None:
    _edit(patient)
    setattr(patient.index, fault, True)
    patient.sync()
    _assert_old_stands(patient, "FAILED", code, Node.INDEXER)
    before = _work_done(patient)
    setattr(patient.index, fault, False)
    patient.due()
    patient.sync()
    _assert_published(patient)
    assert _work_done(patient) == before


def test_a_new_document_that_fails_is_not_found_and_does_not_count_as_published(patient: Flow) -> None:
    patient.memory.put("new.md", article("newcomer"))
    patient.memory.fetch_errors["new.md"] = Rejected("closed", code="forbidden")
    patient.sync()
    assert (patient.document("new.md").status, patient.document("new.md").current_ver) == ("FAILED", 0)
    assert "new.md" not in patient.found("newcomerword1x5", k=50)


# --- trying again -----------------------------------------------------------------------------------------------------


def test_retries_back_off_and_end_dead_until_somebody_retries(patient: Flow) -> None:
    _edit(patient)
    patient.memory.fetch_errors["birch.md"] = Transient("timeout", code="timeout")
    for _ in range(3):
        patient.sync()
        task = patient.task("birch.md")
        assert task.status == "FAILED"
        patient.due()
    patient.sync()
    dead = patient.task("birch.md")
    assert (dead.status, dead.next_attempt_at, dead.retry_count) == ("DEAD", None, 4)
    _assert_old_stands(patient, "DEAD", "timeout", Node.FETCHER)
    patient.memory.fetch_errors.clear()
    assert patient.sync().ingest.tasks == 0
    assert patient.retry(dead.id)
    back = patient.task("birch.md")
    assert (back.status, back.retry_count, back.error_code) == ("PENDING", 0, None)
    assert back.attempt >= dead.attempt
    patient.sync()
    _assert_published(patient)


def test_the_back_off_doubles(make_flow: Callable[..., Flow]) -> None:
    flow = make_flow(
        {"a.md": article("a"), "b.md": article("b")}, index=MemoryIndex(), retry_base_seconds=1000.0, retry_max_seconds=3500.0
    )
    flow.memory.fetch_errors["b.md"] = Transient("timeout", code="timeout")
    waits = []
    for _ in range(3):
        flow.sync()
        task = flow.task("b.md")
        waits.append((task.next_attempt_at - task.updated_at).total_seconds())
        flow.due()
    jitter = 500 + 2
    assert all(least - 2 <= wait <= least + jitter for least, wait in zip((1000, 2000, 3500), waits, strict=True))


def test_a_task_that_waits_for_its_next_try_is_not_taken_before(patient: Flow) -> None:
    _edit(patient)
    patient.memory.fetch_errors["birch.md"] = Transient("timeout", code="timeout")
    patient.sync()
    fetched = patient.memory.fetched.count("birch.md")
    patient.sync(full=True)
    assert patient.memory.fetched.count("birch.md") == fetched


def test_new_content_takes_the_place_of_a_failed_version(patient: Flow) -> None:
    _edit(patient)
    patient.index.down = True
    patient.sync()
    patient.index.down = False
    patient.memory.put("birch.md", article("birch").replace("birchword1x7", "later"))
    patient.sync()
    assert patient.document("birch.md").current_ver == 3
    assert patient.version("birch.md", 2).status == "CANCELED"
    assert patient.version("birch.md", 2).chunk_ids is None
    assert patient.showing("later") == {"birch.md"}
    assert not any("novelty" in t for _, _, _, t, _ in patient.chunks())
    assert not patient.execute("SELECT 1 FROM kb_chunk WHERE space_id = %(space)s AND content LIKE '%%novelty%%'")
    patient.assert_whole()


def test_a_dead_version_that_is_retried_shows_what_it_says(patient: Flow) -> None:
    linked = article("birch").replace("birchword1x7 ", "[birchword1x7](https://{}.example/page) ")
    patient.memory.put("birch.md", linked.format("old"))
    patient.sync()
    patient.memory.put("birch.md", linked.format("new"))
    patient.walk()
    patient.ingest(nodes=[Node.FETCHER, Node.PARSER, Node.CHUNKER, Node.EMBEDDING])
    patient.execute("UPDATE ingestion_task SET max_retry_count = 0 WHERE space_id = %(space)s AND status = 'PENDING'")
    patient.index.down = True
    patient.ingest()
    assert patient.task("birch.md").status == "DEAD"
    patient.index.down = False
    assert patient.showing("https://old.example/page") == {"birch.md"}
    assert patient.retry(patient.task("birch.md").id)
    patient.sync()
    assert patient.showing("https://new.example/page") == {"birch.md"}
    assert patient.rows()["kb_chunk_restated"] == 0


# --- processes that die, and bugs -------------------------------------------------------------------------------------


def _die(flow: Flow, *, known_dead: bool) -> None:
    """A worker takes birch's task and dies over it."""
    with transaction(flow.app.pool) as c:
        (claim,) = tasks.claim(c, flow.space, 1, 120, list(Node))
    assert claim.external_id == "birch.md"
    if known_dead:
        host, boot, _, _ = worker_id().rsplit("/", 3)
        owner = f"{host}/{boot}/{2**22 + 1}/1"  # above the largest pid there is
        flow.execute("UPDATE ingestion_task SET claimed_by = %(owner)s WHERE id = %(task)s", owner=owner, task=claim.task_id)
    else:
        flow.expire_leases()


@pytest.mark.parametrize("known_dead", [True, False])
def test_a_document_whose_process_dies_three_times_is_dead(patient: Flow, known_dead: bool) -> None:
    patient.memory.put("birch.md", article("birch").replace("birchword1x7", "novelty"))
    patient.walk()
    for deaths in (1, 2):
        _die(patient, known_dead=known_dead)
        patient.sweep()
        task = patient.task("birch.md")
        assert (task.status, task.deaths, task.retry_count) == ("PENDING", deaths, 0)
    _die(patient, known_dead=known_dead)
    patient.sweep()
    task = patient.task("birch.md")
    assert (task.status, task.error_code, task.lease_until) == ("DEAD", "poison", None)
    assert f"kb task retry {task.id}" in task.error_message
    assert patient.document("birch.md").current_ver == 1
    assert patient.showing("birchword1x7") == {"birch.md"}
    assert patient.ingest().tasks == 0
    assert patient.retry(task.id)
    patient.sync()
    _assert_published(patient)


def test_a_node_that_succeeds_forgets_the_deaths_before_it(patient: Flow) -> None:
    patient.memory.put("birch.md", article("birch").replace("birchword1x7", "novelty"))
    patient.walk()
    for _ in range(2):
        _die(patient, known_dead=True)
        patient.sweep()
    patient.ingest(nodes=[Node.FETCHER])
    assert patient.task("birch.md").deaths == 0
    patient.sync()
    _assert_published(patient)


def test_a_living_worker_keeps_its_task(patient: Flow) -> None:
    patient.memory.put("birch.md", article("birch").replace("birchword1x7", "novelty"))
    patient.walk()
    with transaction(patient.app.pool) as c:
        (claim,) = tasks.claim(c, patient.space, 10, 120, list(Node))
    patient.sweep()
    assert patient.ingest().tasks == 0
    assert (patient.task("birch.md").status, patient.task("birch.md").attempt) == ("PROCESSING", claim.attempt)


@pytest.mark.parametrize(("module", "function", "node"), [
    ("fetch", "_fetch", Node.FETCHER), ("parse", "parse_document", Node.PARSER), ("chunk", "chunk_blocks", Node.CHUNKER),
])  # fmt: skip
def test_a_bug_costs_the_document_that_meets_it(
    patient: Flow, monkeypatch: pytest.MonkeyPatch, module: str, function: str, node: Node
) -> None:
    _edit(patient)
    name = f"kb_pipeline.nodes.{module}.{function}"
    real = getattr(__import__(f"kb_pipeline.nodes.{module}", fromlist=[function]), function)

    def buggy(*args: object) -> object:
        args = tuple(list(a) if isinstance(a, Generator) else a for a in args)  # the chunker gets blocks, and no name
        if "birch" in repr(args):
            raise ZeroDivisionError("a bug")
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(name, buggy)
        patient.sync()
    _assert_old_stands(patient, "DEAD", "internal", node)
    assert "ZeroDivisionError" in patient.task("birch.md").error_message
    assert patient.showing("surprise") == {"cedar.md"}
    assert patient.retry(patient.task("birch.md").id)
    patient.sync()
    _assert_published(patient)


def test_a_bug_in_the_embedder_costs_its_document_and_leaves_no_claim(patient: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    class Buggy(CountingEmbedder):
        def embed_documents(self, texts: Sequence[str]) -> Vectors:
            if any("novelty" in t for t in texts):
                raise ZeroDivisionError("a bug")
            return super().embed_documents(texts)

    def never(_: float) -> None:
        raise AssertionError("the worker waits for a claim that is its own")

    patient.app.embedder = Buggy()
    _edit(patient)
    monkeypatch.setattr("kb_pipeline.nodes.embed.time.sleep", never)
    patient.sync()
    _assert_old_stands(patient, "DEAD", "internal", Node.EMBEDDING)
    assert patient.showing("surprise") == {"cedar.md"}
    assert patient.rows()["embedding_claims"] == 0
