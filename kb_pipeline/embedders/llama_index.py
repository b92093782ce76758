"""Any LlamaIndex embedding model, named by its class: whatever its integration packages reach can fill a knowledge base."""

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kb_pipeline.errors import KbError, Misconfigured, MissingExtra, Transient
from kb_pipeline.http import Reply, error_of, scrub
from kb_pipeline.ports import Vectors

# Arguments that say how a model is reached, not what it computes: a change re-embeds nothing.
_REACH = frozenset(
    {"api_base", "api_version", "base_url", "callback_manager", "default_headers", "device", "embed_batch_size", "endpoint"}
    | {"keep_alive", "max_retries", "num_workers", "parallel_process", "reuse_client", "show_progress", "timeout"}
    | {"azure_endpoint", "cache_folder", "embeddings_cache", "rate_limiter", "region_name"}
)
_SECRET = ("key", "token", "secret", "password", "url")


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str = Field(description="package.module.Class of a LlamaIndex BaseEmbedding")
    arguments: dict[str, Any] = Field(default_factory=dict, repr=False, description="what the class is made with")
    dimension: int | None = Field(default=None, ge=1, description="empty: asked from the model once")


class LlamaIndexEmbedder:
    """The model is made when it is first needed, and sent one request at a time: not every model can do more."""

    max_batch_tokens = 8000
    concurrency = 1

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def max_batch(self) -> int:
        """The model's own: a larger batch would be several requests, all lost with one of them."""
        return int(self._model.embed_batch_size)

    @cached_property
    def dimension(self) -> int:
        return self._config.dimension or int(self.embed_query("dimension").shape[0])

    @cached_property
    def fingerprint(self) -> str:
        """Class, model name and every argument but those that only say how the model is reached."""
        arguments = {k: v for k, v in self._config.arguments.items() if k not in _REACH and not k.lower().endswith(_SECRET)}
        digest = hashlib.sha256(json.dumps(arguments, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return f"llama_index:{self._config.class_name}:{self._model.model_name}:{digest}:{self.dimension}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        model = self._model
        return self._array(lambda: model.get_text_embedding_batch(list(texts)), 2)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        model = self._model
        return self._array(lambda: model.get_query_embedding(text), 1)

    def _array(self, call: Callable[[], Any], axes: int) -> NDArray[np.float32]:
        try:
            answer = call()
        except Exception as e:
            raise self._translated(e) from e
        try:
            array = np.asarray(answer, np.float32)
        except (TypeError, ValueError) as e:
            raise Transient(f"{self._config.class_name}: answered vectors that cannot be read: {e}", code="bad_answer") from e
        if array.ndim != axes:
            raise Transient(f"{self._config.class_name}: answered an array of shape {array.shape}", code="bad_answer")
        return array

    def _translated(self, e: Exception) -> KbError:
        """What an HTTP status or a missing module says is clear; everything else may pass."""
        if isinstance(e, KbError):
            return e
        name, response = self._config.class_name, getattr(e, "response", None)
        status = getattr(e, "status_code", None) or getattr(response, "status_code", None)
        said = scrub(str(e)) or type(e).__name__
        if isinstance(status, int) and status >= 300:
            headers = {str(k).lower(): str(v) for k, v in dict(getattr(response, "headers", None) or {}).items()}
            if error := error_of(Reply(name, status, headers, str(e).encode("utf-8", "replace"))):
                return error
        if isinstance(e, ImportError):
            return MissingExtra(f"{name}: {said}: install the package that it names")
        return Transient(f"{name}: {type(e).__name__}: {said}")

    @cached_property
    def _model(self) -> Any:
        from llama_index.core.base.embeddings.base import BaseEmbedding

        name, found = self._config.class_name, self._class()
        if not (isinstance(found, type) and issubclass(found, BaseEmbedding)):
            raise Misconfigured(f"{name} is no LlamaIndex BaseEmbedding: name a class that is", code="bad_class")
        arguments = dict(self._config.arguments)
        if "max_retries" in found.model_fields:
            arguments.setdefault("max_retries", 0)  # tasks are tried again as a whole; two layers of retries multiply
        try:
            return found(**arguments)
        except ValidationError as e:
            problems = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors(include_input=False))
            raise Misconfigured(f"{name}: arguments are refused: {scrub(problems)}", code="bad_option") from None
        except (TypeError, ValueError) as e:
            raise Misconfigured(f"{name}: arguments are refused: {scrub(str(e))}", code="bad_option") from e
        except ImportError as e:
            raise MissingExtra(f"{name}: {scrub(str(e))}: install the package that it names") from e

    def _class(self) -> Any:
        module_name, _, class_name = self._config.class_name.rpartition(".")
        try:
            return getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError, ValueError) as e:
            raise Misconfigured(
                f"{self._config.class_name!r} cannot be imported: {e}. Install its package, such as "
                "llama-index-embeddings-ollama, beside kb-pipeline and write the class as package.module.Class",
                code="bad_class",
            ) from e
