"""Questions to the past: what a search would have found at a time, what an answer was based on, and whether it still comes out.

The index knows only what is current. What was current then and is not now is ranked exactly from cached vectors, so that the
cost is the change since then and not the size of the space. Deleted, hidden or not permitted today: withheld, and counted.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.errors import KbError, Misconfigured, Rejected, StateError, Transient
from kb_pipeline.model import Answer, Hit, Mode
from kb_pipeline.search import ROUNDS, WIDEST, Asked, checked, served
from kb_pipeline.store import answers, embeddings, history, indexes, publications, spaces
from kb_pipeline.store.answers import Logged, Standing
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.history import Moment, Settled, Then
from kb_pipeline.store.indexes import Index
from kb_pipeline.store.spaces import Space

SETTLED_SECONDS = 6.0  # a publish is stamped before it commits: its limit of five seconds, and a second between two clocks
# At a time: documents judged, of those documents opened for all their chunks or for what changed, vectors in memory.
DOCUMENTS, OPENED, COMPARED, VECTORS = 2000, 100, 500, 2000
SAME_SCORE = 1e-3  # an index may round the question or the vectors to float16, or compute in another order


class Ranked(NamedTuple):
    score: float
    chunk_id: int
    doc_id: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where an exact ranking of what was current does not agree with the answer that was given. From 1."""

    position: int
    logged_chunk: int | None
    logged_score: float | None
    replayed_chunk: int | None
    replayed_score: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    hits: tuple[Hit, ...]
    differences: tuple[Difference, ...]


def as_of(engine: Engine, space: Space, question: str, at: datetime, *, k: int = 5, principals: Sequence[str] = ()) -> Answer:
    """The best ``k`` chunks of what was current ``at`` that time and may be shown today. Not logged: it can be asked again.

    Raises Misconfigured for a future time, Rejected for one whose versions were purged, Transient for one that is not settled.
    """
    _require_told(engine, space, at)
    asked = Asked(engine, checked(question))
    try:
        return _as_of(engine, space, asked, Moment(at), principals, k, None)
    except Rejected as e:
        if e.code != "vectors_missing":
            raise
        with transaction(engine.pool) as c:
            former = indexes.former(c, space.id)
        for index in former:
            with suppress(Rejected, Misconfigured):  # its vectors are gone as well, or its model
                return _as_of(engine, space, asked, Moment(at), principals, k, index)
        raise


def _as_of(
    engine: Engine, space: Space, asked: Asked, when: Moment, principals: Sequence[str], k: int, by: Index | None
) -> Answer:
    """``by``: a former index, by whose model everything is ranked from the cache."""
    for last in (False,) * (ROUNDS - 1) + (True,):
        look = _Look(engine, space, asked, when, principals, k, by)
        if by is not None:
            look.rank_exactly(every=True)
        elif not look.search_index(last=last):
            continue
        hits = look.hits()
        if hits is not None:
            return Answer(None, asked.question, when.at, hits, withheld=look.withheld)
    raise Transient(f"space {space.key} moved {ROUNDS} times during the search: ask again", code="search_moved")


def read_answer(engine: Engine, answer_id: int) -> tuple[Space, Logged, Answer]:
    """An answer as it was logged, with the text that is stored. Raises Misconfigured if there is none."""
    with transaction(engine.pool) as c:
        logged = answers.get_answer(c, answer_id)
        space = spaces.space_by_id(c, logged.space_id)
        if space is None:
            raise StateError(f"answer {answer_id} belongs to space {logged.space_id}, which has no row", code="no_row")
        standing = answers.standing(c, space.id)
        shard = standing.shard if standing else -1
        owners = history.owners(c, space.id, shard, logged.chunk_ids)
        ranked = [
            Ranked(score, chunk, owners[chunk])
            for chunk, score in zip(logged.chunk_ids, logged.scores, strict=True)
            if chunk in owners
        ]
        hits = _hits(c, space.id, shard, Moment(logged.at, logged.snapshot), logged.principals, ranked)
    return (
        space,
        logged,
        Answer(logged.id, logged.question, logged.at, hits, Mode(logged.mode), len(logged.chunk_ids) - len(hits)),
    )


def replay(
    engine: Engine, space: Space, logged: Logged, answer: Answer, progress: Callable[[Progress], None] = silent
) -> Replay:
    """Rank everything exactly that the answer's search could see, from cached vectors, and compare. Embeds the question only.

    Raises Rejected where versions of that time were purged.
    """
    if logged.mode != Mode.VECTOR:
        raise Misconfigured(
            f"answer {logged.id} was found by {logged.mode} search: only a search by vectors can be ranked again",
            code="no_replay",
        )
    _require_kept(engine, space, logged.at)
    asked = Asked(engine, checked(logged.question))
    when = Moment(logged.at, logged.snapshot)
    with transaction(engine.pool) as c:
        by = indexes.by_id(c, logged.index_id) if logged.index_id is not None else None
    for _ in range(ROUNDS):
        look = _Look(engine, space, asked, when, logged.principals, logged.k - answer.withheld, by)
        look.watched = {h.chunk_id for h in answer.hits}
        look.rank_exactly(progress=progress, every=True)
        hits = look.hits()
        if hits is not None:
            return Replay(hits, tuple(_differences(answer.hits, hits, look.scores)))
    raise Transient(f"space {space.key} moved {ROUNDS} times during the replay: ask again", code="search_moved")


class _Look:
    """One look at the past: the best ``k`` that may be shown, and the best ``k`` that may not, while batches come by."""

    def __init__(
        self,
        engine: Engine,
        space: Space,
        asked: Asked,
        when: Moment,
        principals: Sequence[str],
        k: int,
        by: Index | None = None,
    ) -> None:
        self.engine, self.space, self.when, self.principals, self.k = engine, space, when, principals, k
        self.standing = served(engine, space)
        if by is not None:
            self.standing = replace(
                self.standing,
                ref=by.ref,
                fingerprint=by.fingerprint,
                embedder=by.embedder,
                embedder_options=by.embedder_options,
            )
        self.vector = asked.of(self.standing, self.standing.ref)
        self.watched: set[int] = set()
        self.scores: dict[int, float] = {}  # of the watched chunks
        self._best: dict[bool, dict[int, Ranked]] = {True: {}, False: {}}  # shown or not
        self._deleted = 0

    @property
    def withheld(self) -> int:
        """Of the best ``k`` then, those not shown today, and every document deleted since: nothing of it is left to rank."""
        best = _best(self.k, [*self._best[True].values(), *self._best[False].values()])
        return sum(r.chunk_id in self._best[False] for r in best) + self._deleted

    # --- candidates -------------------------------------------------------------------------------------------------

    def search_index(self, *, last: bool) -> bool:
        """The index's hits that were current then, and everything that it may not hold. False: the index was dropped meanwhile.

        What became or stopped being current meanwhile is ranked from the cache, so the index is asked first. Where it gives
        fewer than ``k``, it may be small, or approximate and have given up: all that was current then is ranked.
        """
        width, ref = max(4 * self.k, 32), self.standing.ref
        while True:
            try:
                candidates = self.engine.index(ref).search(ref, self.vector, width, None)
            except KbError as e:
                if e.code == "index_gone" and not last:
                    return False
                raise
            self._best = {True: {}, False: {}}
            with transaction(self.engine.pool) as c:
                found = [Ranked(x.score, x.chunk_id, x.doc_id) for x in candidates]
                self._add_current_then(c, found)
            enough = len(self._best[True]) >= self.k
            if enough or len(candidates) < width or width >= WIDEST:
                break
            width *= 4
        self.rank_exactly(every=not enough)
        return True

    def _add_current_then(self, c: Connection, found: Sequence[Ranked]) -> None:
        known = {t.doc_id: t for t in self._then(c, sorted({r.doc_id for r in found})) if not t.deleted}
        ids = publications.chunk_ids(c, list(known), [t.version for t in known.values()])
        held = {d: set(x) for d, x in ids.items()}
        for shown in (True, False):
            self._add((r for r in found if r.chunk_id in held.get(r.doc_id, ()) and known[r.doc_id].shown is shown), shown)

    def rank_exactly(self, *, every: bool, progress: Callable[[Progress], None] = silent) -> None:
        """Rank from the cache what was current then and is not now, or, with ``every``, all that was current then."""
        self._deleted = done = 0
        for page in self._documents(every):
            with transaction(self.engine.pool) as c:
                known = self._then(c, page)
            step = OPENED if every else COMPARED
            for start in range(0, len(known), step):
                self._rank_documents(known[start : start + step], every)
                progress(Progress("ranking documents", done + start, 0))
            done += len(page)

    def _documents(self, every: bool) -> Iterator[list[int]]:
        after = 0
        while True:
            with transaction(self.engine.pool) as c:
                if every:
                    page = history.every_document(c, self.space.id, after, DOCUMENTS)
                else:
                    page = history.ended_documents(c, self.space.id, self.when.at, after, DOCUMENTS)
            if not page:
                return
            yield page
            after = page[-1]

    def _then(self, c: Connection, docs: Sequence[int]) -> list[Then]:
        """The documents that count. Deleted ones are counted where they are met by ``rank_exactly``."""
        found = history.then(c, self.space.id, self.when, docs, self.principals)
        return [t for t in found if t.shown or t.counted]

    def _rank_documents(self, documents: Sequence[Then], every: bool) -> None:
        self._deleted += sum(t.deleted for t in documents)
        shown = {t.doc_id: t.shown for t in documents if not t.deleted}
        versions = [t.version for t in documents if not t.deleted]
        with transaction(self.engine.pool) as c:
            if every:
                ids = publications.chunk_ids(c, list(shown), versions)
                owners = {chunk: doc for doc, chunks in ids.items() for chunk in chunks}
            else:
                owners = history.left(c, list(shown), versions, self.standing.at)
        wanted = list(owners)
        for start in range(0, len(wanted), VECTORS):
            ranked = self._ranked(wanted[start : start + VECTORS], owners)
            self.scores |= {r.chunk_id: r.score for r in ranked if r.chunk_id in self.watched}
            for flag in (True, False):
                self._add((r for r in ranked if shown[r.doc_id] is flag), flag)

    def _ranked(self, ids: list[int], owners: dict[int, int]) -> list[Ranked]:
        """Cosine similarities as the index computes them: of vectors rounded to float16."""
        s: Standing = self.standing
        with transaction(self.engine.pool) as c:
            rows = embeddings.vectors_of(c, self.space.id, s.shard, s.ref.model_id, ids)
            lost = len(history.owners(c, self.space.id, s.shard, sorted(set(ids) - {r.chunk_id for r in rows})))
        if lost:
            raise Rejected(
                f"space {self.space.key}: the cached vectors of {lost} of its chunks of that time are gone, so they cannot "
                "be ranked: ask for a later time",
                code="vectors_missing",
            )
        if not rows:
            return []
        vectors = np.frombuffer(b"".join(r.vector for r in rows), "<f2").astype(np.float32).reshape(len(rows), -1)
        question = self.vector.astype("<f2").astype(np.float32)
        scores = vectors @ question / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(question))
        return [Ranked(float(x), r.chunk_id, owners[r.chunk_id]) for x, r in zip(scores, rows, strict=True)]

    def _add(self, found: Iterable[Ranked], shown: bool) -> None:
        both = {r.chunk_id: r for r in found} | self._best[shown]
        self._best[shown] = {r.chunk_id: r for r in _best(self.k, both.values())}

    # --- the end ----------------------------------------------------------------------------------------------------

    def hits(self) -> tuple[Hit, ...] | None:
        """The best, judged once more. None: the rows moved to another shard meanwhile. Raises Rejected if they were purged."""
        shard = self.standing.shard
        with transaction(self.engine.pool) as c:
            found = _hits(c, self.space.id, shard, self.when, self.principals, _best(self.k, self._best[True].values()))
        # Asked last: what a purge or a move took away before the texts were read shows here.
        return found if _require_kept(self.engine, self.space, self.when.at).shard == shard else None


def _best(k: int, found: Iterable[Ranked]) -> list[Ranked]:
    return heapq.nsmallest(k, found, key=lambda r: (-r.score, r.chunk_id))


def _hits(
    c: Connection, space_id: int, shard: int, when: Moment, principals: Sequence[str], ranked: Sequence[Ranked]
) -> tuple[Hit, ...]:
    """In the order given, without what may not be shown now."""
    known = history.then(c, space_id, when, sorted({r.doc_id for r in ranked}), principals)
    versions = {t.doc_id: t.version for t in known if t.shown}
    texts = history.texts(c, space_id, shard, {r.chunk_id: versions[r.doc_id] for r in ranked if r.doc_id in versions})
    return tuple(
        Hit(x.doc_id, x.external_id, x.uri, x.title, tuple(x.title_path), x.version, x.chunk_id, round(r.score, 6), x.text)
        for r in ranked
        if (x := texts.get(r.chunk_id)) is not None
    )


def _differences(logged: Sequence[Hit], replayed: Sequence[Hit], scores: dict[int, float]) -> Iterator[Difference]:
    """Places are compared by score, as equally near chunks may stand in any order; a logged chunk must come out as near as it
    was."""
    for i in range(max(len(logged), len(replayed))):
        a = logged[i] if i < len(logged) else None
        b = replayed[i] if i < len(replayed) else None
        if a and b and abs(a.score - b.score) <= SAME_SCORE and abs(scores.get(a.chunk_id, 2.0) - a.score) <= SAME_SCORE:
            continue
        yield Difference(
            i + 1, a.chunk_id if a else None, a.score if a else None, b.chunk_id if b else None, b.score if b else None
        )


def _require_told(engine: Engine, space: Space, at: datetime) -> None:
    """The past is settled when no transaction can commit an older stamp any more."""
    if at.tzinfo is None:
        raise Misconfigured(f"{at.isoformat()} has no time zone: write it with one, as in {at.isoformat()}Z", code="bad_time")
    state = _require_kept(engine, space, at)
    ago = (state.now - at).total_seconds()
    if ago < 0:
        raise Misconfigured(
            f"{_shown(at)} is in the future: the database's clock says {_shown(state.now)}", code="time_in_future"
        )
    if ago < SETTLED_SECONDS or state.open:
        raise Transient(
            f"what was current at {_shown(at)} is not settled yet, as a document may still be published as of then: "
            f"ask again in {SETTLED_SECONDS:.0f} seconds, or search without a time",
            code="not_settled",
            retry_after=SETTLED_SECONDS,
        )


def _require_kept(engine: Engine, space: Space, at: datetime) -> Settled:
    """Raises Rejected where versions that were current then are purged."""
    with transaction(engine.pool) as c:
        state = history.settled(c, space.id, at)
    if state is None:
        raise Rejected(f"space {space.key} is being removed", code="no_serving_index")
    if state.purged:
        raise Rejected(
            f"space {space.key} can no longer tell what was current at {_shown(at)}: versions up to "
            f"{_shown(state.horizon) if state.horizon else 'then'} are purged. Ask for a later time; "
            f"kb space set {space.key} retain=N keeps more versions from now on",
            code="purged",
        )
    return state


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
