"""Character n-grams hashed into a vector: no model, no meaning, but fast and the same everywhere. For tests and benchmarks.

Feature hashing with a sign (Weinberger et al., 2009) over bigrams and trigrams, and single ideographs.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from kb_pipeline.ports import Vectors

Codes = NDArray[np.uint32]

_M1, _M2, _M3 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
_S15, _S13, _S31 = np.uint32(15), np.uint32(13), np.uint32(31)
_IDEOGRAPHS = (0x3400, 0x9FFF)


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dimension: int = Field(default=256, ge=8, le=4096)


class HashingEmbedder:
    """Texts that share words are near each other, in any language; nothing else is."""

    max_batch = 512
    max_batch_tokens = 100_000
    concurrency = 1

    def __init__(self, config: Config) -> None:
        self.dimension = config.dimension
        self.fingerprint = f"hashing:2-3-grams:1:{config.dimension}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.embed_query(text)
        return vectors

    def embed_query(self, text: str) -> NDArray[np.float32]:
        codes = _codes(text)
        second = codes[:-1] * _M1 + codes[1:] * _M2
        grams = [second, second[:-1] + codes[2:] * _M3]
        single = codes[(codes >= _IDEOGRAPHS[0]) & (codes <= _IDEOGRAPHS[1])]
        if single.size:
            grams.append(single * _M1)
        hashes = _mixed(np.concatenate(grams))
        signs = 1.0 - 2.0 * (hashes >> _S31)
        sums = np.bincount(hashes % np.uint32(self.dimension), signs, self.dimension)
        # The square root keeps one repeated word from outweighing all others.
        damped = np.sign(sums) * np.sqrt(np.abs(sums))
        norm = np.sqrt(damped @ damped)
        return (damped / norm if norm else damped).astype(np.float32)


def _codes(text: str) -> Codes:
    """Code points of the normalised text between two spaces, so that a single letter has a bigram, too."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    raw = f" {' '.join(folded.split())} ".encode("utf-32-le", "surrogatepass")
    return np.frombuffer(raw, np.dtype("<u4")).astype(np.uint32, copy=False)


def _mixed(h: Codes) -> Codes:
    """Every input bit reaches the sign and the low bits (two rounds of a multiply-xorshift)."""
    h = (h ^ (h >> _S15)) * _M2
    h = (h ^ (h >> _S13)) * _M3
    return h ^ (h >> _S15)
