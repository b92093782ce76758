"""The hashing embedder: the same vector everywhere, near where words are shared."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.embedders.hashing import Config, HashingEmbedder

EMBEDDER = HashingEmbedder(Config())
MIXED = "Kubernetes 集群 rollout, ÉTÉ"


def test_vectors_never_change():
    """Stored vectors are compared with new ones: a change of the hash must change the fingerprint, and this digest."""
    exact = np.sign(EMBEDDER.embed_query(MIXED)).astype(np.int8).tobytes()
    assert (EMBEDDER.fingerprint, hashlib.sha256(exact).hexdigest()[:16]) == ("hashing:2-3-grams:1:256", "8d7902e9b25b7fdf")


def test_another_process_gets_the_same_vector():
    code = (
        "import sys; from kb_pipeline.embedders.hashing import *;"
        "sys.stdout.write(HashingEmbedder(Config()).embed_query(sys.argv[1]).tobytes().hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", code, MIXED], env=env, capture_output=True, check=True, text=True).stdout
    assert bytes.fromhex(out) == EMBEDDER.embed_query(MIXED).tobytes()


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        ("how to restart the scheduler", "Restart the scheduler with kubectl.", "Volumes are mounted read-only."),
        ("如何重启调度器", "重启调度器需要管理员权限。", "存储卷以只读方式挂载。"),
        ("ＦＵＬＬ　ｗｉｄｔｈ", "full width letters", "half a loaf of bread"),
    ],
)
def test_shared_words_are_near(question, right, wrong):
    q, r, w = (EMBEDDER.embed_query(t) for t in (question, right, wrong))
    assert q @ r > q @ w + 0.1


def test_a_question_finds_its_paragraph_among_many():
    topics = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "sigma", "omega"]
    paragraphs = [f"This page explains how the {a} module talks to the {b} module and why." for a in topics for b in topics]
    vectors = EMBEDDER.embed_documents(paragraphs)
    hits = 0
    for i, p in enumerate(paragraphs):
        a, b = p.split()[5], p.split()[10]
        hits += int(i in np.argsort(-(vectors @ EMBEDDER.embed_query(f"{a} talks to {b}")))[:5])
    assert hits / len(paragraphs) > 0.8


@given(st.text(max_size=50))
def test_every_text_has_a_unit_or_zero_vector(text):
    norm = float(np.linalg.norm(EMBEDDER.embed_query(text)))
    assert norm == 0 or abs(norm - 1) < 1e-5


def test_the_dimension_is_the_configured_one():
    assert HashingEmbedder(Config(dimension=64)).embed_documents(["a"]).shape == (1, 64)
    assert HashingEmbedder(Config(dimension=64)).fingerprint != EMBEDDER.fingerprint
