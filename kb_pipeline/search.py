"""Question to hits: ANN in the serving index, then one join in PostgreSQL that shows only what is current, visible, permitted.

So no index needs transactions, and a revoked permission or a deletion holds at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.engine import Engine, Modelled
from kb_pipeline.errors import Fatal, KbError, Misconfigured, Rejected, Transient
from kb_pipeline.model import Answer, Candidate, Hit, IndexRef, Mode
from kb_pipeline.ports import KeywordIndex
from kb_pipeline.store import answers
from kb_pipeline.store.answers import Joined, Standing
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space

ROUNDS = 3  # looks at a space that is being published into meanwhile
WIDEST = 4096  # candidates asked for at most
RANK_CONSTANT = 60


def search(
    engine: Engine,
    space: Space,
    question: str,
    *,
    k: int = 5,
    principals: Sequence[str] = (),
    mode: Mode = Mode.VECTOR,
) -> Answer:
    """The best ``k`` chunks for a question. Without principals what everybody may read.

    Raises Rejected for no question, Misconfigured for a mode that the space's index does not have.
    """
    asked = Asked(engine, checked(question), mode)
    for last in (False,) * (ROUNDS - 1) + (True,):
        found = _look(engine, space, asked, k, principals, last)
        if found is not None:
            standing, joined = found
            return _answer(engine, space, asked, k, principals, standing, joined)
    raise Transient(f"space {space.key} moved {ROUNDS} times during the search: ask again", code="search_moved")


def checked(question: str) -> str:
    """The question as it can be stored. Raises Rejected for none."""
    if not question.strip():
        raise Rejected("the question is empty", code="empty_question")
    return question.replace("\0", "")


class Asked:
    """A question, and its vector by each model that it was asked of: one model a look, once each."""

    def __init__(self, engine: Engine, question: str, mode: Mode = Mode.VECTOR) -> None:
        self.question, self.mode = question, mode
        self._engine = engine
        self._vectors: dict[int, NDArray[np.float32]] = {}

    def of(self, model: Modelled, ref: IndexRef) -> NDArray[np.float32]:
        """Of length 1, shape (dimension,)."""
        if ref.model_id not in self._vectors:
            vector = np.asarray(self._engine.embedder(model).embed_query(self.question), dtype=np.float32)
            norm = float(np.linalg.norm(vector))
            if vector.shape != (ref.dimension,) or not np.isfinite(norm) or norm == 0:
                raise Fatal(
                    f"embedder {model.embedder!r} answered the question with an unusable vector {vector.shape}",
                    code="bad_vector",
                )
            self._vectors[ref.model_id] = vector / np.float32(norm)
        return self._vectors[ref.model_id]

    def candidates(self, standing: Standing, width: int) -> tuple[list[Candidate], bool]:
        """What the index finds, best first, and whether it has more."""
        ref = standing.ref
        index = self._engine.index(ref)
        lists = []
        if self.mode is not Mode.KEYWORD:
            lists.append(index.search(ref, self.of(standing, ref), width, None))
        if self.mode is not Mode.VECTOR:
            if not index.capabilities.keyword:
                raise Misconfigured(
                    f"the {ref.kind} index of this space does not search by words: search with mode vector, or change it with "
                    f"kb space set SPACE {'' if ref.kind == 'pgvector' else 'index=pgvector '}index.keyword=true",
                    code="no_keyword_search",
                )
            lists.append(cast(KeywordIndex, index).keyword(ref, self.question, width, None))
        return fused(lists)[:width] if len(lists) > 1 else lists[0], any(len(found) >= width for found in lists)


def fused(lists: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Reciprocal rank fusion: the sum of 1 / (60 + rank), ranks from 1. Cormack, Clarke, Buettcher, SIGIR 2009."""
    scores: dict[UUID, float] = {}
    known: dict[UUID, Candidate] = {}
    for found in lists:
        for rank, x in enumerate(found, 1):
            scores[x.vec_id] = scores.get(x.vec_id, 0.0) + 1 / (RANK_CONSTANT + rank)
            known[x.vec_id] = x
    best = sorted(scores, key=lambda i: (-scores[i], i))
    return [replace(known[i], score=scores[i]) for i in best]


def served(engine: Engine, space: Space) -> Standing:
    """What serves the space now. Raises Rejected."""
    with transaction(engine.pool) as c:
        standing = answers.standing(c, space.id)
    if standing is None:
        raise Rejected(f"space {space.key} serves no index: it is being made or removed", code="no_serving_index")
    return standing


def _look(
    engine: Engine, space: Space, asked: Asked, k: int, principals: Sequence[str], last: bool
) -> tuple[Standing, Joined] | None:
    """One consistent look: None if the index or the shard moved, or a candidate was replaced, under it."""
    standing = served(engine, space)
    width = max(4 * k, 32)
    while True:
        try:
            candidates, more = asked.candidates(standing, width)
        except KbError as e:
            if e.code == "index_gone" and not last:
                return None
            raise
        with transaction(engine.pool) as c:
            joined = answers.join_candidates(c, space.id, standing, candidates, principals, k)
        if joined.shard != standing.shard:
            return None
        if joined.republished and not last:
            return None
        if len(joined.rows) >= k or not more or width >= WIDEST:
            return standing, joined
        width *= 4


def _answer(
    engine: Engine, space: Space, asked: Asked, k: int, principals: Sequence[str], standing: Standing, joined: Joined
) -> Answer:
    rows = joined.rows
    hits = tuple(
        Hit(r.doc_id, r.external_id, r.uri, r.title, tuple(r.title_path), r.version, r.chunk_id, round(r.score, 6), r.text)
        for r in rows
    )
    answer_id = None
    if engine.answer_log:
        with transaction(engine.pool) as c:
            answer_id = answers.log_answer(c, standing, asked.question, principals, k, asked.mode, joined, rows)
    return Answer(answer_id, asked.question, standing.at, hits, asked.mode)
