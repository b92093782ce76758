"""The OpenAI-compatible embedder and the embed stage, against a real endpoint that misbehaves."""

import base64
import hashlib
import threading
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kb_pipeline.embedders.openai import Config, OpenAIEmbedder
from kb_pipeline.errors import Fatal, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.stages.embed import Embedded, embed_texts
from kb_pipeline_tests.adapters.embedding_server import (
    DIMENSION,
    Behaviour,
    EmbeddingServer,
    Said,
    embedding_server,
    entries_of,
    vector_of,
    well_behaved,
)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    with embedding_server() as s:
        yield s


def embedder(server: EmbeddingServer, **options: Any) -> OpenAIEmbedder:
    return OpenAIEmbedder(Config(**{"base_url": server.url, "model": "m", "dimension": DIMENSION} | options))


def key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def run(server: EmbeddingServer, texts: list[str], **options: Any) -> Embedded:
    total = Embedded()
    for r in embed_texts(embedder(server, **options), [(key(t), t) for t in texts]):
        total.vectors.update(r.vectors)
        total.errors.update(r.errors)
    return total


def entries(change: Any) -> Behaviour:
    """The good answer with its list of entries changed."""
    return lambda body: Said(body={"data": change(entries_of(body))})


TEXTS = [f"text {i}" for i in range(6)]


def test_the_answer_is_put_in_order_by_index(server):
    server.behaviour = entries(lambda e: e[::-1])
    assert embedder(server).embed_documents(TEXTS).tolist() == [vector_of(t) for t in TEXTS]


def test_an_answer_without_indexes_is_in_order(server):
    server.behaviour = entries(lambda e: [{"embedding": x["embedding"]} for x in e])
    assert embedder(server).embed_documents(TEXTS).tolist() == [vector_of(t) for t in TEXTS]


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e[:-1],
        lambda e: [*e, e[-1]],
        lambda e: [*e[:-1], e[0]],
        lambda e: [{**x, "index": 0} for x in e],
        lambda e: [{**x, "index": x["index"] + 1} for x in e],
        lambda e: [],
    ],
)
def test_a_short_or_ambiguous_answer_is_refused(server, change):
    server.behaviour = entries(change)
    with pytest.raises(Fatal) as caught:
        embedder(server).embed_documents(TEXTS)
    assert caught.value.code == "wrong_count"


def test_base64_and_float_answers_are_the_same(server):
    plain = embedder(server).embed_documents(TEXTS)
    server.behaviour = entries(
        lambda e: [{**x, "embedding": base64.b64encode(np.array(x["embedding"], "<f4").tobytes()).decode()} for x in e]
    )
    assert np.array_equal(embedder(server).embed_documents(TEXTS), plain)


@pytest.mark.parametrize("value", ["abc", "AAAA", "!AAAAAA==", ["a", "b"], {"x": 1}])
def test_a_vector_that_cannot_be_read_is_temporary(server, value):
    server.behaviour = entries(lambda e: [{**x, "embedding": value} for x in e])
    with pytest.raises(Transient) as caught:
        embedder(server).embed_documents(["a"])
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize("value", [float("nan"), None])
def test_not_a_number_costs_only_its_text(server, value):
    server.behaviour = entries(lambda e: [e[0], {**e[1], "embedding": [value] * DIMENSION}, *e[2:]])
    result = run(server, TEXTS)
    assert set(result.errors) == {key(TEXTS[1])}
    assert result.errors[key(TEXTS[1])].code == "bad_vector"
    assert len(result.vectors) == 5


@pytest.mark.parametrize(
    "change", [lambda e: [{**x, "embedding": [1.0] * 9} for x in e], lambda e: [{**e[0], "embedding": [1.0]}, *e[1:]]]
)
def test_another_dimension_stores_nothing(server, change):
    server.behaviour = entries(change)
    result = run(server, TEXTS)
    assert not result.vectors
    assert {e.code for e in result.errors.values()} == {"wrong_dimension"}


@pytest.mark.parametrize("body", [{}, [], {"data": {}}, {"data": [1]}, {"object": "list", "results": []}])
def test_json_that_holds_no_embeddings_is_fatal(server, body):
    server.behaviour = lambda _: Said(body=body)
    with pytest.raises(Fatal) as caught:
        embedder(server).embed_documents(["a"])
    assert caught.value.code == "bad_answer"


def test_an_error_inside_a_200_is_temporary(server):
    server.behaviour = lambda _: Said(body={"error": {"message": "upstream is gone"}})
    with pytest.raises(Transient, match="upstream is gone"):
        embedder(server).embed_documents(["a"])


def test_an_unknown_model_or_path_is_fatal(server):
    server.behaviour = lambda _: Said(404, {"error": {"message": "model m does not exist"}})
    with pytest.raises(Fatal, match="model m does not exist.*base_url"):
        embedder(server).embed_documents(["a"])


def test_a_used_up_quota_is_not_a_rate_limit(server):
    server.behaviour = lambda _: Said(429, {"error": {"code": "insufficient_quota", "message": "You exceeded your quota"}})
    result = run(server, TEXTS)
    assert {type(e) for e in result.errors.values()} == {Fatal}


def test_model_prefixes_and_dimensions_are_sent_as_configured(server):
    e = embedder(server, query_prefix="Q: ", document_prefix="D: ", send_dimensions=True, api_key="k" * 20)
    e.embed_documents(["a", "b"])
    e.embed_query("c")
    sent = {"model": "m", "dimensions": DIMENSION}
    assert server.requests == [{**sent, "input": ["D: a", "D: b"]}, {**sent, "input": ["Q: c"]}]
    assert {h["authorization"] for h in server.headers} == {f"Bearer {'k' * 20}"}


def test_without_a_key_nothing_is_sent_in_its_place(server):
    embedder(server).embed_documents(["a"])
    assert "authorization" not in server.headers[0]
    assert set(server.requests[0]) == {"model", "input"}


def test_the_key_is_in_no_representation(server):
    assert "topsecret" not in repr(Config(base_url=server.url, model="m", api_key="topsecret"))


def test_send_dimensions_needs_a_dimension(server):
    with pytest.raises(ValidationError, match="needs dimension"):
        Config(base_url=server.url, model="m", send_dimensions=True)


def test_the_dimension_is_asked_once_and_only_when_needed(server):
    e = embedder(server, dimension=None)
    assert server.requests == []
    assert (e.dimension, e.dimension) == (DIMENSION, DIMENSION)
    assert e.fingerprint == f"openai:m:{DIMENSION}"
    assert len(server.requests) == 1


def test_a_failed_question_for_the_dimension_is_asked_again(server):
    server.behaviour = lambda _: Said(500, {})
    e = embedder(server, dimension=None)
    with pytest.raises(Transient):
        e.dimension
    server.behaviour = well_behaved
    assert e.dimension == DIMENSION


def test_the_fingerprint_names_what_changes_vectors_and_nothing_else(server):
    same = [embedder(server), embedder(server, api_key="x", base_url="http://elsewhere/v1", max_batch=2, concurrency=1)]
    other = [
        embedder(server, model="n"),
        embedder(server, dimension=4),
        embedder(server, query_prefix="a"),
        embedder(server, document_prefix="a"),
    ]
    assert len({e.fingerprint for e in same}) == 1
    assert len({e.fingerprint for e in same + other}) == 5


# --- together with the embed stage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["30", formatdate(4_000_000_000, usegmt=True)])
def test_a_rate_limit_reaches_every_text_with_its_waiting_time(server, value):
    server.behaviour = lambda _: Said(429, {}, {"Retry-After": value})
    result = run(server, TEXTS, max_batch=1, concurrency=2)
    assert len(server.requests) <= 2
    assert len(result.errors) == 6
    for e in result.errors.values():
        assert isinstance(e, RateLimited)
        assert e.retry_after == 30 or e.retry_after > 1e6


@pytest.mark.parametrize(("status", "message"), [(413, "payload"), (400, "batch size must not be larger than 2")])
def test_a_batch_above_the_vendors_limit_is_split_until_it_fits(server, status, message):
    server.behaviour = lambda body: (
        Said(status, {"error": {"message": message}}) if len(body["input"]) > 2 else well_behaved(body)
    )
    result = run(server, TEXTS, concurrency=1)
    assert len(result.vectors) == 6
    assert server.sizes == [6, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_one_poison_text_fails_alone(server, concurrency):
    def behaviour(body: dict[str, Any]) -> Said:
        poisoned = "text 4" in body["input"]
        return Said(400, {"error": {"message": "invalid input"}}) if poisoned else well_behaved(body)

    server.behaviour = behaviour
    result = run(server, TEXTS, concurrency=concurrency)
    assert set(result.errors) == {key("text 4")}
    assert type(result.errors[key("text 4")]) is Rejected
    assert len(result.vectors) == 5


def test_a_text_above_the_context_fails_alone(server):
    def behaviour(body: dict[str, Any]) -> Said:
        long = any(len(t) > 100 for t in body["input"])
        return Said(400, {"error": {"message": "maximum context length is 100"}}) if long else well_behaved(body)

    server.behaviour = behaviour
    result = run(server, [*TEXTS, "x" * 200])
    assert len(result.vectors) == 6
    assert isinstance(result.errors[key("x" * 200)], TooLarge)


@pytest.mark.parametrize(
    ("said", "code"),
    [(Said(500, {}), "server_error"), (Said(body=b'{"data": [{"index"'), "truncated"), (Said(body=[]), "bad_answer")],
)
def test_a_failed_request_leaves_its_texts_to_the_next_try(server, said, code):
    failed = threading.Event()

    def behaviour(body: dict[str, Any]) -> Said:
        if failed.is_set():
            return well_behaved(body)
        failed.set()
        return said

    server.behaviour = behaviour
    first = run(server, TEXTS)
    assert {e.code for e in first.errors.values()} == {code}
    assert len(run(server, TEXTS).vectors) == 6
    assert len(server.requests) == 2


def test_a_wrong_key_stops_after_one_round(server):
    server.behaviour = lambda _: Said(401, {"error": {"message": "Incorrect API key provided: sk-abcdefghijklmnop"}})
    result = run(server, [f"t{i}" for i in range(50)], max_batch=1, concurrency=2)
    assert len(server.requests) <= 2
    assert {e.code for e in result.errors.values()} == {"unauthorized"}
    assert all("abcdefgh" not in e.message for e in result.errors.values())
