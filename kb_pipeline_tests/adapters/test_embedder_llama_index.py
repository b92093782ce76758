"""Any LlamaIndex model by name: what is passed on, and what its errors become."""

from typing import Any

import numpy as np
import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding

from kb_pipeline.embedders.llama_index import Config, LlamaIndexEmbedder
from kb_pipeline.errors import Fatal, Misconfigured, MissingExtra, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.stages.embed import embed_texts

MODULE = __name__


class StatusError(Exception):
    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status_code = status
        self.response = type("Response", (), {"headers": headers or {}})()


class TinyEmbedding(BaseEmbedding):
    """A vector of the text's length, or the error in FAILS."""

    size: int = 3
    api_key: str = ""
    api_base: str = ""
    max_retries: int = 10

    def _vector(self, text: str, kind: float) -> list[float]:
        if error := FAILS.get("error"):
            raise error
        return [float(len(text)), kind, 1.0][: self.size]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text, 1.0)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query, 2.0)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class NoEmbedding:
    pass


FAILS: dict[str, Exception] = {}


@pytest.fixture(autouse=True)
def _nothing_fails():
    FAILS.clear()


def tiny(**arguments: Any) -> LlamaIndexEmbedder:
    return LlamaIndexEmbedder(Config(class_name=f"{MODULE}.TinyEmbedding", arguments=arguments))


def failing(error: Exception) -> LlamaIndexEmbedder:
    FAILS["error"] = error
    return LlamaIndexEmbedder(Config(class_name=f"{MODULE}.TinyEmbedding", dimension=3))


def test_documents_and_questions_go_to_their_own_methods():
    assert tiny().embed_documents(["a", "bcd"]).tolist() == [[1, 1, 1], [3, 1, 1]]
    assert tiny().embed_query("ab").tolist() == [2, 2, 1]
    assert tiny().embed_documents(["a"]).dtype == np.float32


def test_the_models_own_batch_size_is_the_limit():
    assert tiny(embed_batch_size=3).max_batch == 3
    assert tiny().max_batch == 10


def test_the_dimension_is_asked_from_the_model_unless_configured():
    assert tiny(size=2).dimension == 2
    assert LlamaIndexEmbedder(Config(class_name=f"{MODULE}.TinyEmbedding", dimension=7)).dimension == 7


def test_the_fingerprint_names_what_changes_vectors_and_no_secret():
    first = tiny(model_name="m", api_key="sk-1", api_base="http://a", embed_batch_size=2).fingerprint
    assert first == tiny(model_name="m", api_key="sk-2", api_base="http://b").fingerprint
    assert "sk-1" not in first
    assert len({first, tiny(model_name="n").fingerprint, tiny(model_name="m", size=2).fingerprint}) == 3


def test_the_models_own_retries_are_off_unless_asked_for():
    assert tiny()._model.max_retries == 0
    assert tiny(max_retries=2)._model.max_retries == 2


def test_arguments_are_in_no_representation():
    assert "topsecret" not in repr(Config(class_name="a.B", arguments={"api_key": "topsecret"}))


@pytest.mark.parametrize("name", ["nowhere.To.BeFound", "llama_index.core.embeddings.NoSuch", "Bare", "", ".x"])
def test_an_unknown_name_is_misconfigured_with_the_way_out(name):
    with pytest.raises(Misconfigured, match=r"package\.module\.Class"):
        LlamaIndexEmbedder(Config(class_name=name)).embed_query("a")


@pytest.mark.parametrize("name", ["NoEmbedding", "FAILS"])
def test_a_name_that_is_no_embedding_is_misconfigured(name):
    with pytest.raises(Misconfigured, match="no LlamaIndex BaseEmbedding"):
        LlamaIndexEmbedder(Config(class_name=f"{MODULE}.{name}")).embed_query("a")


def test_refused_arguments_are_misconfigured_and_not_shown():
    with pytest.raises(Misconfigured, match="size") as caught:
        tiny(size="topsecret").embed_query("a")
    assert "topsecret" not in caught.value.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("boom"), Transient),
        (ConnectionError("gone"), Transient),
        (ImportError("No module named 'torch'"), MissingExtra),
        (StatusError(429, "slow down"), RateLimited),
        (StatusError(401, "who are you"), Fatal),
        (StatusError(400, "bad text"), Rejected),
        (StatusError(400, "maximum context length is 512"), TooLarge),
        (StatusError(500, "oops"), Transient),
        (RateLimited("ours"), RateLimited),
    ],
)
def test_errors_of_the_model_become_ours(error, kind):
    with pytest.raises(kind) as caught:
        failing(error).embed_documents(["a"])
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error or caught.value is error


def test_the_waiting_time_of_a_vendors_error_is_kept():
    with pytest.raises(RateLimited) as caught:
        failing(StatusError(429, "slow down", {"Retry-After": "4"})).embed_query("a")
    assert caught.value.retry_after == 4


def test_secrets_in_a_models_error_are_not_shown():
    with pytest.raises(Transient) as caught:
        failing(RuntimeError("call with api_key=verysecret1 failed")).embed_query("a")
    assert "verysecret1" not in caught.value.message


def test_the_stage_runs_over_it():
    (result,) = embed_texts(tiny(), [(b"1", "a"), (b"2", "bcd")])
    assert set(result.vectors) == {b"1", b"2"}
