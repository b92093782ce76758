"""What every embedder of the registry must keep."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kb_pipeline.errors import Misconfigured
from kb_pipeline.ports import Embedder
from kb_pipeline.registry import EMBEDDERS, open_adapter
from kb_pipeline.stages.embed import embed_texts
from kb_pipeline_tests.adapters.embedding_server import embedding_server

TEXTS = ["a cat on a mat", "知识库", "Überraschung!", "a cat on a mat", "x"]

Open = Callable[[], Embedder]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with embedding_server() as server:
        yield server.url


@pytest.fixture(params=sorted(EMBEDDERS))
def opened(request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    options: dict[str, dict[str, Any]] = {
        "openai": {"base_url": endpoint, "model": "stub"},
        "llama_index": {"class_name": "llama_index.core.embeddings.MockEmbedding", "arguments": {"embed_dim": 8}},
    }
    return lambda: open_adapter("embedder", request.param, options.get(request.param, {}))


def test_the_fingerprint_is_stable_and_shows_the_dimension(opened):
    first, second = opened(), opened()
    assert first.fingerprint == second.fingerprint
    assert str(first.dimension) in first.fingerprint


def test_limits_are_usable(opened):
    e = opened()
    assert min(e.max_batch, e.max_batch_tokens, e.concurrency, e.dimension) >= 1


def test_documents_have_a_row_each_of_the_promised_length(opened):
    e = opened()
    vectors = e.embed_documents(TEXTS)
    assert vectors.shape == (len(TEXTS), e.dimension)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    assert (np.linalg.norm(vectors, axis=1) > 0).all()


def test_a_question_is_one_vector(opened):
    e = opened()
    vector = e.embed_query("what is a cat?")
    assert vector.shape == (e.dimension,)
    assert vector.dtype == np.float32
    assert np.isfinite(vector).all()


def test_no_texts_are_no_vectors(opened):
    e = opened()
    assert e.embed_documents([]).shape == (0, e.dimension)


def test_the_same_text_has_the_same_vector_in_any_batch_and_instance(opened):
    e = opened()
    batch = e.embed_documents(TEXTS)
    assert np.array_equal(batch[0], batch[3])
    assert np.array_equal(batch, opened().embed_documents(TEXTS))
    assert np.array_equal(batch[::-1], e.embed_documents(TEXTS[::-1]))
    assert np.array_equal(batch[1:2], e.embed_documents(TEXTS[1:2]))


@pytest.mark.parametrize("odd", ["", " ", "\0", "a\ud800b", "\n\n"])
def test_an_odd_text_harms_no_neighbour(opened, odd):
    e = opened()
    results = list(embed_texts(e, [(b"odd", odd), (b"good", "a cat")]))
    assert {h for r in results for h in r.vectors} >= {b"good"}
    assert {h for r in results for h in (*r.vectors, *r.errors)} == {b"odd", b"good"}


def test_unknown_options_are_refused(opened, request):
    name = request.node.callspec.params["opened"]
    with pytest.raises(Misconfigured, match="no_such_option"):
        open_adapter("embedder", name, {"no_such_option": 1})
