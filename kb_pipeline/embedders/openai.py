"""Any endpoint that speaks OpenAI's /embeddings: the vendor's own, a gateway, vLLM, TEI, Ollama, Xinference ...

API: https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kb_pipeline.errors import Fatal, KbError, Transient
from kb_pipeline.http import HttpClient, Reply, error_of
from kb_pipeline.ports import Vectors


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(description="up to and without /embeddings, such as https://api.openai.com/v1")
    model: str = Field(min_length=1)
    api_key: SecretStr | None = None
    dimension: int | None = Field(default=None, ge=1, description="empty: asked from the endpoint once")
    send_dimensions: bool = Field(default=False, description="ask for `dimension`, for models that can shorten their vectors")
    max_batch: int = Field(default=64, ge=1)
    max_batch_tokens: int = Field(default=8000, ge=1)
    concurrency: int = Field(default=4, ge=1, le=64)
    query_prefix: str = ""
    document_prefix: str = ""
    timeout_seconds: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _dimension_to_send(self) -> "Config":
        if self.send_dimensions and self.dimension is None:
            raise ValueError("send_dimensions needs dimension")
        return self


class OpenAIEmbedder:
    """One call is one request; the answer is put in order by its ``index``, and a short one is an error."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.max_batch = config.max_batch
        self.max_batch_tokens = config.max_batch_tokens
        self.concurrency = config.concurrency
        key = config.api_key.get_secret_value() if config.api_key else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(config.base_url, headers, config.timeout_seconds, translate=_error_of)

    @cached_property
    def dimension(self) -> int:
        """As configured, or the length of one vector asked from the endpoint at the first use."""
        return self._config.dimension or int(self._request(["dimension"]).shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Without the URL: the same model behind another address gives the same vectors, and nothing is embedded again."""
        prefixes = f"{self._config.document_prefix}\0{self._config.query_prefix}"
        mark = ":" + hashlib.sha256(prefixes.encode()).hexdigest()[:12] if prefixes != "\0" else ""
        return f"openai:{self._config.model}:{self.dimension}{mark}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        return self._request([self._config.document_prefix + t for t in texts])

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self._request([self._config.query_prefix + text])[0]
        return vector

    def _request(self, texts: Sequence[str]) -> Vectors:
        body: dict[str, Any] = {"model": self._config.model, "input": [_readable(t) for t in texts]}
        if self._config.send_dimensions:
            body["dimensions"] = self._config.dimension
        answer = self._http.post_json("embeddings", body)
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) and "embedding" in e for e in entries):
            raise Fatal(
                f"{self._config.base_url}: model {self._config.model} answered JSON without embeddings: is this the base of an "
                "OpenAI-compatible API, and the model an embedding model?",
                code="bad_answer",
            )
        return self._stacked(self._ordered(entries, len(texts)))

    def _ordered(self, entries: list[dict[str, Any]], count: int) -> list[Any]:
        # Order is promised by ``index`` only; servers that leave it out answer in order.
        indexes = [e.get("index", i) for i, e in enumerate(entries)]
        if len(entries) != count or set(indexes) != set(range(count)):
            raise Fatal(
                f"model {self._config.model} answered {len(set(indexes))} of {count} texts: which vector belongs to which text "
                "is unknown; lower max_batch, or use another endpoint",
                code="wrong_count",
            )
        by_index = dict(zip(indexes, entries, strict=True))
        return [by_index[i]["embedding"] for i in range(count)]

    def _stacked(self, embeddings: list[Any]) -> Vectors:
        try:
            rows = [_floats(e) for e in embeddings]
        except (TypeError, ValueError, binascii.Error) as e:
            raise Transient(f"model {self._config.model} answered a vector that cannot be read: {e}", code="bad_answer") from e
        sizes = sorted({row.size for row in rows})
        if len(sizes) != 1:
            raise Fatal(
                f"model {self._config.model} answered vectors of {sizes} dimensions in one answer", code="wrong_dimension"
            )
        return np.stack(rows)


def _floats(embedding: Any) -> NDArray[np.float32]:
    """Float lists (null is NaN: JSON has no other word for it) or base64 of little-endian float32."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), np.dtype("<f4")).astype(np.float32)
    return np.asarray(embedding, np.float32).reshape(-1)


def _readable(text: str) -> str:
    # A lone surrogate is valid in JSON's escapes, but most servers refuse the request for it.
    return text.encode("utf-8", "replace").decode("utf-8")


def _error_of(reply: Reply) -> KbError | None:
    """Where OpenAI and its likes mean something else than the bare status says."""
    said = f"{reply.request}: HTTP {reply.status}: {reply.text}"
    if reply.status in (404, 405):
        return Fatal(f"{said}; check base_url and model", code="not_found")
    if reply.status == 429 and b"insufficient_quota" in reply.body:
        return Fatal(f"{said}; waiting does not help: raise the account's limit", code="quota_exceeded")
    # Gateways answer 200 with an error inside when the server behind them failed.
    if reply.status == 200 and b'"error"' in reply.body[:200] and b'"data"' not in reply.body:
        return Transient(said, code="server_error", retry_after=reply.retry_after)
    return error_of(reply)
