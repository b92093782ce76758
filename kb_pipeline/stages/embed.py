"""Texts to checked vectors: batched by count and tokens, split where a request is too large, a poison text alone.

Nothing is tried a second time here but a smaller part of a refused request: trying again is the task's business.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from kb_pipeline.canonical import estimate_tokens
from kb_pipeline.errors import Fatal, KbError, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.ports import Embedder, Vectors

Batch = list[tuple[bytes, str]]

# Temporary errors of the endpoint as a whole: further requests would only meet the same.
ENDPOINT_CODES = frozenset({"endpoint_down", "overloaded"})
PROBE = "ok"


@dataclass(frozen=True, slots=True)
class Embedded:
    """What one request settled, by content hash. Vectors are float16, little-endian, L2-normalised."""

    vectors: dict[bytes, bytes] = field(default_factory=dict)
    errors: dict[bytes, KbError] = field(default_factory=dict)


def always() -> bool:
    return True


def never() -> bool:
    return False


def embed_texts(
    embedder: Embedder,
    texts: Sequence[tuple[bytes, str]],
    *,
    wanted: Callable[[], bool] = always,
    last: Callable[[], bool] = never,
) -> Iterator[Embedded]:
    """(content hash, text) pairs to vectors, one result per finished request; every hash comes back exactly once.

    ``wanted`` is asked by the calling thread before each request. Once it says no, nothing more comes: what is under way
    ends on its own and is dropped. ``last``: once it says yes, nothing more is sent, and what is under way still comes.
    """
    run = _Run(embedder, deque(batches(texts, embedder.max_batch, embedder.max_batch_tokens)), last)
    yield from _one_by_one(run, wanted) if embedder.concurrency <= 1 else _concurrently(run, wanted)


def batches(texts: Sequence[tuple[bytes, str]], max_batch: int, max_tokens: int) -> Iterator[Batch]:
    """Each hash once, in order, within both limits; a text above the token limit goes alone."""
    batch: Batch = []
    tokens = 0
    for content_hash, text in dict(texts).items():
        size = estimate_tokens(text)
        if batch and (len(batch) >= max_batch or tokens + size > max_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append((content_hash, text))
        tokens += size
    if batch:
        yield batch


def check_vectors(embedder: Embedder, batch: Batch, vectors: Vectors) -> Embedded:
    """Normalised float16 bytes per text. A bad vector costs its text only; raises Fatal for a wrong count or dimension."""
    if vectors.ndim != 2 or len(vectors) != len(batch):
        raise Fatal(f"{embedder.fingerprint}: {len(vectors)} vectors for {len(batch)} texts", code="wrong_count")
    if vectors.shape[1] != embedder.dimension:
        raise Fatal(
            f"{embedder.fingerprint}: vectors of {vectors.shape[1]} dimensions where {embedder.dimension} are expected: "
            "the model behind the endpoint changed, or the configured dimension is wrong",
            code="wrong_dimension",
        )
    wide = vectors.astype(np.float64)
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    good = np.isfinite(norms) & (norms > 0)
    wide[~good] = 0.0
    halves = (wide / np.where(good, norms, 1.0)[:, None]).astype("<f2")
    result = Embedded()
    for (content_hash, _), vector, ok in zip(batch, halves, good, strict=True):
        if ok:
            result.vectors[content_hash] = vector.tobytes()
        else:
            result.errors[content_hash] = Rejected(
                f"{embedder.fingerprint}: text {content_hash.hex()[:12]} got a vector of zeros or of no numbers",
                code="bad_vector",
            )
    return result


class _Run:
    """What is left to send, and why sending stopped. Touched by the calling thread only."""

    def __init__(self, embedder: Embedder, queue: deque[Batch], last: Callable[[], bool]) -> None:
        self.embedder = embedder
        self.queue = queue
        self._last = last
        self.halted: KbError | None = None
        self._answered = False

    def has_more(self) -> bool:
        if self.queue and self._last():
            self.queue.clear()
        return bool(self.queue)

    def send(self, batch: Batch) -> Embedded | KbError:
        """One request. Runs in any thread, changes nothing here."""
        try:
            return check_vectors(self.embedder, batch, self.embedder.embed_documents([text for _, text in batch]))
        except KbError as e:
            return e

    def settle(self, batch: Batch, outcome: Embedded | KbError) -> Embedded | None:
        """The result for the caller, or None when parts of the batch are sent again. Puts those in front of the queue."""
        if isinstance(outcome, Embedded):
            self._answered = True
            return outcome
        if isinstance(outcome, Rejected):
            if self.halted is not None:
                outcome = self.halted  # there is no telling any more which of the texts was refused
            elif not isinstance(outcome, TooLarge) and (refusal := self._refuses_everything(outcome)) is not None:
                outcome = refusal
            elif len(batch) > 1:
                middle = len(batch) // 2
                self.queue.extendleft([batch[middle:], batch[:middle]])
                return None
        if _concerns_all(outcome):
            self.halted = outcome
        return Embedded(errors=dict.fromkeys((h for h, _ in batch), outcome))

    def give_up(self) -> Embedded:
        """The error that halted, for everything not yet sent."""
        assert self.halted is not None
        left = [h for batch in self.queue for h, _ in batch]
        self.queue.clear()
        return Embedded(errors=dict.fromkeys(left, self.halted))

    def _refuses_everything(self, refusal: Rejected) -> KbError | None:
        # A wrong model name or option is a 400 like a poison text. Before the first success a harmless text tells them
        # apart: otherwise one wrong setting would be taken for the fault of every single document.
        if self._answered:
            return None
        outcome = self.send([(b"", PROBE)])
        if not isinstance(outcome, KbError):
            self._answered = True
            return None
        if isinstance(outcome, Rejected):
            return Fatal(
                f"{refusal.message}; even a harmless text is refused: check model and options", code="refuses_everything"
            )
        return outcome


def _concerns_all(error: KbError) -> bool:
    return isinstance(error, Fatal | RateLimited) or (isinstance(error, Transient) and error.code in ENDPOINT_CODES)


def _one_by_one(run: _Run, wanted: Callable[[], bool]) -> Iterator[Embedded]:
    while run.has_more():
        if run.halted is not None:
            yield run.give_up()
        elif not wanted():
            return
        else:
            batch = run.queue.popleft()
            if (result := run.settle(batch, run.send(batch))) is not None:
                yield result


def _concurrently(run: _Run, wanted: Callable[[], bool]) -> Iterator[Embedded]:
    width = run.embedder.concurrency
    threads = ThreadPoolExecutor(width, thread_name_prefix="embed")
    sent: dict[Future[Embedded | KbError], Batch] = {}
    try:
        while run.has_more() or sent:
            if run.halted is not None and run.queue:
                yield run.give_up()
            while run.has_more() and len(sent) < width:
                if not wanted():
                    return
                batch = run.queue.popleft()
                sent[threads.submit(run.send, batch)] = batch
            if sent:
                done, _ = wait(sent, return_when=FIRST_COMPLETED)
                for future in done:
                    if (result := run.settle(sent.pop(future), future.result())) is not None:
                        yield result
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
