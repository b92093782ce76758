"""The embed stage: batches, splits, poison, halts and checks, against an embedder in memory that does as it is told."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb_pipeline.canonical import estimate_tokens
from kb_pipeline.errors import Fatal, KbError, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.stages.embed import Embedded, batches, embed_texts

DIMENSION = 4


class Told:
    """An embedder whose requests go through ``behaviour``."""

    fingerprint = "told:1:4"

    def __init__(self, behaviour: Callable[[Sequence[str]], Any] | None = None, **limits: int) -> None:
        self.behaviour = behaviour or vectors_of
        self.dimension = DIMENSION
        self.max_batch = limits.get("max_batch", 4)
        self.max_batch_tokens = limits.get("max_batch_tokens", 1000)
        self.concurrency = limits.get("concurrency", 1)
        self.requests: list[list[str]] = []

    def embed_documents(self, texts: Sequence[str]) -> Any:
        self.requests.append(list(texts))
        return self.behaviour(texts)

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]


def vectors_of(texts: Sequence[str]) -> Any:
    return np.array([[*hashlib.sha256(t.encode()).digest()[:DIMENSION]] for t in texts], np.float32) + 1


def pairs(*texts: str) -> list[tuple[bytes, str]]:
    return [(hashlib.sha256(t.encode()).digest(), t) for t in texts]


def key(text: str) -> bytes:
    return pairs(text)[0][0]


def merged(results: Iterable[Embedded]) -> Embedded:
    total = Embedded()
    for r in results:
        both = set(r.vectors) | set(r.errors)
        assert both.isdisjoint(set(total.vectors) | set(total.errors)), "a hash came back twice"
        total.vectors.update(r.vectors)
        total.errors.update(r.errors)
    return total


def numbered(n: int) -> list[str]:
    return [f"text {i:03}" for i in range(n)]


def refusing(words: set[str], error: type[KbError] = Rejected) -> Callable[[Sequence[str]], Any]:
    def behaviour(texts: Sequence[str]) -> Any:
        if words & set(texts):
            raise error("refused")
        return vectors_of(texts)

    return behaviour


@pytest.mark.parametrize("concurrency", [1, 3])
def test_vectors_are_normalised_half_floats_by_hash(concurrency):
    texts = numbered(10)
    result = merged(embed_texts(Told(concurrency=concurrency), pairs(*texts)))
    assert not result.errors
    for t in texts:
        stored = np.frombuffer(result.vectors[key(t)], "<f2").astype(np.float32)
        expected = vectors_of([t])[0]
        assert stored.shape == (DIMENSION,)
        assert np.allclose(stored, expected / np.linalg.norm(expected), atol=1e-3)


def test_a_text_is_embedded_once_however_often_it_comes():
    told = Told()
    merged(embed_texts(told, pairs("a", "b", "a", "a", "b")))
    assert told.requests == [["a", "b"]]


def test_nothing_to_embed_sends_nothing():
    told = Told()
    assert list(embed_texts(told, [])) == []
    assert told.requests == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab 文字", max_size=60), max_size=30), st.integers(1, 8), st.integers(1, 40))
def test_batches_keep_both_limits_and_every_text(texts, max_batch, max_tokens):
    made = list(batches(pairs(*texts), max_batch, max_tokens))
    assert [p for b in made for p in b] == list(dict(pairs(*texts)).items())
    for b in made:
        assert 1 <= len(b) <= max_batch
        assert len(b) == 1 or sum(estimate_tokens(t) for _, t in b) <= max_tokens


def test_each_finished_request_is_handed_over_before_the_next_is_sent():
    told = Told(max_batch=2)
    results = embed_texts(told, pairs(*numbered(6)))
    next(results)
    assert len(told.requests) == 1
    next(results)
    assert len(told.requests) == 2


def test_a_batch_that_is_too_large_is_halved():
    def at_most_two(texts: Sequence[str]) -> Any:
        if len(texts) > 2:
            raise TooLarge("too many")
        return vectors_of(texts)

    told = Told(at_most_two, max_batch=8)
    result = merged(embed_texts(told, pairs(*numbered(8))))
    assert len(result.vectors) == 8
    assert [len(r) for r in told.requests] == [8, 4, 2, 2, 4, 2, 2]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_one_text_that_is_too_large_costs_only_itself(concurrency):
    told = Told(refusing({"text 005"}, TooLarge), max_batch=8, concurrency=concurrency)
    result = merged(embed_texts(told, pairs(*numbered(8))))
    assert set(result.errors) == {key("text 005")}
    assert isinstance(result.errors[key("text 005")], TooLarge)
    assert len(result.vectors) == 7


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("poison", [{"text 000"}, {"text 007"}, {"text 002", "text 013"}, set(numbered(8))])
def test_poison_texts_are_isolated(concurrency, poison):
    told = Told(refusing(poison), max_batch=8, concurrency=concurrency)
    result = merged(embed_texts(told, pairs(*numbered(16))))
    assert set(result.errors) == {key(t) for t in poison}
    assert all(type(e) is Rejected for e in result.errors.values())
    assert set(result.vectors) == {key(t) for t in numbered(16)} - set(result.errors)


def test_one_poison_text_costs_a_logarithm_of_requests():
    told = Told(refusing({"text 037"}), max_batch=64)
    merged(embed_texts(told, pairs(*numbered(64))))
    assert len(told.requests) <= 1 + 2 * 6 + 1  # the batch, two halves a level, one harmless text


def test_an_endpoint_that_has_answered_is_not_asked_again_with_a_harmless_text():
    told = Told(refusing({"text 005"}), max_batch=4)
    merged(embed_texts(told, pairs(*numbered(8))))
    assert set(sum(told.requests, [])) == set(numbered(8))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_endpoint_that_refuses_everything_is_not_taken_for_poison(concurrency):
    def refuse(_: Sequence[str]) -> Any:
        raise Rejected("model 'x' does not exist")

    told = Told(refuse, max_batch=4, concurrency=concurrency)
    result = merged(embed_texts(told, pairs(*numbered(40))))
    assert {e.code for e in result.errors.values()} == {"refuses_everything"}
    assert all(isinstance(e, Fatal) for e in result.errors.values())
    assert len(result.errors) == 40
    assert len(told.requests) <= 2 * concurrency


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("wait", retry_after=9.0),
        Fatal("wrong key", code="unauthorized"),
        Transient("nobody there", code="endpoint_down"),
        Transient("busy", code="overloaded"),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_error_of_the_endpoint_stops_all_further_requests(error, concurrency):
    def fail(_: Sequence[str]) -> Any:
        raise error

    told = Told(fail, concurrency=concurrency)
    result = merged(embed_texts(told, pairs(*numbered(60))))
    assert set(result.errors) == {key(t) for t in numbered(60)}
    assert set(map(id, result.errors.values())) == {id(error)}
    assert len(told.requests) <= concurrency


def test_a_temporary_error_of_one_request_costs_only_its_texts():
    told = Told(refusing({"text 005"}, Transient), max_batch=4)
    result = merged(embed_texts(told, pairs(*numbered(12))))
    assert set(result.errors) == {key(t) for t in numbered(8)[4:]}
    assert len(told.requests) == 3  # and nothing was tried again


def test_what_was_embedded_before_a_halt_is_kept():
    told = Told(refusing({"text 004"}, RateLimited), max_batch=2)
    result = merged(embed_texts(told, pairs(*numbered(10))))
    assert set(result.vectors) == {key(t) for t in numbered(4)}
    assert set(result.errors) == {key(t) for t in numbered(10)[4:]}


def test_a_refusal_that_arrives_after_a_halt_blames_no_text():
    """Two requests under way: one halts, the other is refused. Its texts must come back with the halt, to be tried again."""
    halted, both = threading.Event(), threading.Barrier(2, timeout=10)

    def behaviour(texts: Sequence[str]) -> Any:
        both.wait()
        if "text 000" in texts:
            raise RateLimited("wait")
        assert halted.wait(10)
        raise Rejected("refused")

    results = embed_texts(Told(behaviour, max_batch=2, concurrency=2), pairs(*numbered(4)))
    first = next(results)
    halted.set()
    result = merged([first, *results])
    assert {type(e) for e in result.errors.values()} == {RateLimited}
    assert len(result.errors) == 4


@pytest.mark.parametrize("concurrency", [1, 2])
def test_unwanted_work_stops_without_error(concurrency):
    told = Told(max_batch=1, concurrency=concurrency)
    asked: list[int] = []
    results = list(embed_texts(told, pairs(*numbered(20)), wanted=lambda: asked.append(len(told.requests)) or len(asked) <= 3))
    assert len(told.requests) <= 3
    assert all(not r.errors for r in results)


def test_unwanted_from_the_start_sends_nothing():
    told = Told()
    assert list(embed_texts(told, pairs("a"), wanted=lambda: False)) == []
    assert told.requests == []


def test_requests_run_at_the_same_time_up_to_the_limit():
    together = threading.Barrier(3, timeout=10)
    lock, running, most = threading.Lock(), 0, 0

    def behaviour(texts: Sequence[str]) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return vectors_of(texts)

    result = merged(embed_texts(Told(behaviour, max_batch=1, concurrency=3), pairs(*numbered(9))))
    assert len(result.vectors) == 9
    assert most == 3


def test_one_at_a_time_uses_no_thread():
    threads = set()
    told = Told(lambda texts: threads.add(threading.current_thread()) or vectors_of(texts), max_batch=1)
    merged(embed_texts(told, pairs(*numbered(3))))
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_bug_in_an_embedder_is_not_swallowed(concurrency):
    def broken(_: Sequence[str]) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(embed_texts(Told(broken, concurrency=concurrency), pairs("a", "b")))


@pytest.mark.parametrize("bad", [[np.nan, 1, 1, 1], [0, 0, 0, 0], [np.inf, 1, 1, 1], [np.nan, 3e38, -3e38, 0]])
@pytest.mark.filterwarnings("error")
def test_a_bad_vector_costs_only_its_text(bad):
    def behaviour(texts: Sequence[str]) -> Any:
        vectors = vectors_of(texts)
        vectors[1] = bad
        return vectors

    told = Told(behaviour)
    result = merged(embed_texts(told, pairs("a", "b", "c")))
    assert set(result.vectors) == {key("a"), key("c")}
    assert result.errors[key("b")].code == "bad_vector"
    assert type(result.errors[key("b")]) is Rejected
    assert len(told.requests) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_vectors_keep_their_direction(scale):
    result = merged(embed_texts(Told(lambda t: np.full((len(t), DIMENSION), scale, np.float32)), pairs("a")))
    assert np.frombuffer(result.vectors[key("a")], "<f2").tolist() == [0.5] * DIMENSION


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda t: vectors_of(t)[:-1], "wrong_count"),
        (lambda t: np.vstack([vectors_of(t), vectors_of(["more"])]), "wrong_count"),
        (lambda t: vectors_of(t)[0], "wrong_count"),
        (lambda t: vectors_of(t)[:, :-1], "wrong_dimension"),
        (lambda t: np.hstack([vectors_of(t), vectors_of(t)]), "wrong_dimension"),
    ],
)
def test_a_wrong_count_or_dimension_stores_nothing(answer, code):
    result = merged(embed_texts(Told(answer), pairs(*numbered(8))))
    assert not result.vectors
    assert len(result.errors) == 8
    assert all(isinstance(e, Fatal) and e.code == code for e in result.errors.values())
