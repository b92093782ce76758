"""Asking the embedder again: what differs is replaced in cache and index, in every space that shares the model."""

from collections.abc import Callable, Sequence
from uuid import uuid4

import numpy as np
import pytest

from kb_pipeline.errors import Fatal, Rejected, Transient
from kb_pipeline.maintenance import reembed
from kb_pipeline.maintenance.reembed import reembed_space
from kb_pipeline.ports import Vectors
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline_tests.cli.conftest import Kb
from kb_pipeline_tests.fakes import CountingEmbedder, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.maintenance.watched import WatchedIndex

NAMES = [f"{n}.md" for n in range(4)]


def documents() -> dict[str, str]:
    """No other space of the database has these texts: it would be changed with ours."""
    own = uuid4().hex[:6]
    return {name: article(f"{own}Paper{n}") for n, name in enumerate(NAMES)}


class Swapped(CountingEmbedder):
    """Another model under the same name: the texts that hold ``word`` come out mirrored."""

    word = ""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        made = super().embed_documents(texts)
        return np.stack([v[::-1] if self.word and self.word in t else v for v, t in zip(made, texts, strict=True)])


@pytest.fixture
def swapped(make_flow: Callable[..., Flow]) -> Flow:
    flow = make_flow(documents())
    flow.app.embedder = Swapped()
    flow.sync()
    return flow


def swap(flow: Flow, word: str) -> None:
    assert isinstance(flow.app.embedder, Swapped)
    flow.app.embedder.word = word


def score(flow: Flow, external_id: str) -> float:
    """Of a chunk of the document against the vector that the embedder makes of its text now: 1 where the index has it."""
    (row, *_) = flow.execute(
        "SELECT s.vec_id, c.prefix, c.content FROM kb_chunk_state s JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id "
        "JOIN kb_doc d ON d.id = s.doc_id WHERE s.space_id = %(space)s AND s.in_current AND d.external_id = %(id)s ORDER BY s.id",
        id=external_id,
    )
    text = f"{row.prefix}\n\n{row.content}" if row.prefix else row.content
    vector = flow.embedder.embed_documents([text])[0]
    with transaction(flow.app.pool) as c:
        ref = spaces.serving_index(c, flow.space.id)
    return {h.vec_id: h.score for h in flow.engine.index(ref).search(ref, vector, 50, None)}[row.vec_id]


def test_same_model_changes_nothing(swapped: Flow) -> None:
    before = swapped.execute("SELECT content_hash, vector, xmin::text FROM kb_embedding ORDER BY content_hash")
    report = reembed_space(swapped.engine, swapped.space)
    assert report.asked == len(before) > 8
    assert (report.changed, report.upserted, report.failed) == (0, 0, 0)
    assert swapped.execute("SELECT content_hash, vector, xmin::text FROM kb_embedding ORDER BY content_hash") == before


def test_only_what_differs_is_stored_and_indexed_again(swapped: Flow) -> None:
    swap(swapped, "Paper2")
    assert score(swapped, "2.md") < 0.9
    texts = {t for t in swapped.embedder.texts if "Paper2" in t}
    report = reembed_space(swapped.engine, swapped.space)
    assert report.changed == report.upserted == len(texts)
    assert score(swapped, "2.md") > 0.999
    assert score(swapped, "1.md") > 0.999
    swapped.assert_whole()
    assert reembed_space(swapped.engine, swapped.space).changed == 0


def test_space_that_shares_a_text_gets_the_new_vector_too(swapped: Flow) -> None:
    other = swapped.app.add_space(f"{swapped.space.key}-twin")
    source = swapped.app.add_fake_source(other, swapped.memory)
    twin = Flow(swapped.app, other, swapped.memory, source)
    twin.sync()
    swap(swapped, "Paper2")
    reembed_space(swapped.engine, swapped.space)
    assert score(twin, "2.md") > 0.999


def test_noise_of_an_endpoint_is_no_difference(swapped: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = CountingEmbedder.embed_documents

    def noisy(self: CountingEmbedder, texts: Sequence[str]) -> Vectors:
        made = clean(self, texts)
        return made + 1e-4 * np.random.default_rng(1).standard_normal(made.shape).astype(np.float32)

    monkeypatch.setattr(CountingEmbedder, "embed_documents", noisy)
    assert reembed_space(swapped.engine, swapped.space).changed == 0


def test_lost_and_broken_vectors_are_made_again(swapped: Flow) -> None:
    swapped.execute("DELETE FROM kb_embedding WHERE content_hash = (SELECT min(content_hash) FROM kb_embedding)")
    swapped.execute(
        "UPDATE kb_embedding SET vector = decode(repeat('00', octet_length(vector)), 'hex') "
        "WHERE content_hash = (SELECT max(content_hash) FROM kb_embedding)"
    )
    assert reembed_space(swapped.engine, swapped.space).changed == 2
    assert reembed_space(swapped.engine, swapped.space).changed == 0


def test_endpoint_that_goes_away_stops_it_where_it_can_go_on(swapped: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reembed, "TEXTS", 3)
    swap(swapped, "Paper")
    swapped.embedder.refused = {"Paper2": Fatal("the key is refused", code="unauthorized")}
    stopped = reembed_space(swapped.engine, swapped.space)
    assert stopped.stopped is not None and stopped.stopped.code == "unauthorized"
    assert stopped.last_chunk > 0
    swapped.embedder.refused = {}
    asked = len(swapped.embedder.texts)
    rest = reembed_space(swapped.engine, swapped.space, after=stopped.last_chunk)
    assert rest.stopped is None
    assert not any("Paper0" in t for t in swapped.embedder.texts[asked:])
    assert all(score(swapped, name) > 0.999 for name in NAMES)


def test_refused_text_costs_itself(swapped: Flow) -> None:
    swap(swapped, "Paper")
    swapped.embedder.refused = {"Paper1word0x3": Rejected("not this one", code="refused")}
    report = reembed_space(swapped.engine, swapped.space)
    assert (report.failed, report.stopped) == (1, None)
    assert [e.code for e in report.errors or ()] == ["refused"]
    assert score(swapped, "3.md") > 0.999


def test_index_that_is_down_leaves_the_difference_to_be_found_again(make_flow: Callable[..., Flow]) -> None:
    index = WatchedIndex()
    flow = make_flow(documents(), index=index)
    flow.app.embedder = Swapped()
    flow.sync()
    swap(flow, "Paper2")
    index.down = True
    with pytest.raises(Transient):
        reembed_space(flow.engine, flow.space)
    index.down = False
    assert reembed_space(flow.engine, flow.space).changed > 0
    assert score(flow, "2.md") > 0.999


def test_stop_request_ends_it_behind_a_batch(swapped: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reembed, "TEXTS", 3)
    swapped.engine.stop.set()
    report = reembed_space(swapped.engine, swapped.space)
    assert report.stopped is not None and report.stopped.code == "stopped"
    assert report.asked == 3
    swapped.engine.stop.clear()


def test_memory_index_takes_the_new_vector(lying: Flow) -> None:
    """The fake keeps what the port says, as pgvector does above."""
    assert isinstance(lying.app.index, MemoryIndex)
    lying.app.embedder = Swapped()
    lying.memory.put("0.md", documents()["0.md"])
    lying.sync()
    swap(lying, "Paper0")
    reembed_space(lying.engine, lying.space)
    assert score(lying, "0.md") > 0.999


def test_command_tells_what_was_asked_again(kb: Kb, loaded: str) -> None:
    found = kb.json("sync", loaded, "--reembed")
    assert found["reembed"]["asked"] == 2
    assert found["reembed"]["changed"] == 0
    assert found["embedded"] == 0
    assert "embedded again: 2 texts" in kb("sync", loaded, "--reembed").out
