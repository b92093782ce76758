"""Another index, or another model, without a search that fails or mixes: it is built beside the one that serves, kept up to
date while it grows, compared, and then serves in one step.

What is to be built is a row, what it still lacks are rows: whoever comes next goes on where a process died. The one that served
before goes on following for a time, so that going back is the same step once more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from kb_pipeline.engine import Engine, Progress, Stopped, silent
from kb_pipeline.errors import KbError, Misconfigured, Transient
from kb_pipeline.maintenance.embed_missing import embed_missing
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.rows import with_rows
from kb_pipeline.nodes.entries import entries
from kb_pipeline.nodes.index import ABSENT, upsert_each
from kb_pipeline.ports import IndexCapabilities
from kb_pipeline.store import indexes, spaces
from kb_pipeline.store.database import Connection, briefly, retried, transaction
from kb_pipeline.store.indexes import Index, Made, Todo
from kb_pipeline.store.publications import Wanted
from kb_pipeline.store.spaces import Space

BASE = 50_000  # chunks asked for in one transaction
BATCH = 2000  # todo rows a call of the index
SWITCHES = 100  # tries of the last step: each finds what was published during the one before
CLAIMED_SECONDS = 0.5  # until texts that another process embeds are looked for again
SAMPLE, BEST = 50, 10  # questions that both indexes are asked, and how many answers are compared
QUESTION = 200  # characters of a chunk that make a question


@dataclass(slots=True)
class BuildReport:
    """``agreement``: share of the ten best chunks that both indexes find, over a sample; None for a space without chunks."""

    space: str
    index: str
    kind: str
    model: str
    chunks: int = 0  # that it was given
    embedded: int = 0
    agreement: float | None = None


@dataclass(slots=True)
class Given:
    """What a following index was given; ``left``: rows that stay to be done, and why."""

    entries: int = 0
    embedded: int = 0
    left: int = 0
    claimed: int = 0  # of these, chunks whose text another process is embedding
    error: str | None = None


def begin(engine: Engine, space: Space, made: Made, capabilities: IndexCapabilities) -> bool:
    """The space is to be served by an index like this. True: one is to be built, see ``build``. False: it is so already.

    An index in this database takes other options without being built anew, unless its entries are others, with words or
    without. A former index that is kept is taken up again. Raises Misconfigured while another one is being built.
    """

    def alike_now(index: Index) -> bool:
        if (index.ref.kind, index.ref.model_id) != (made.kind, made.model_id):
            return False
        in_place = not capabilities.named and engine.index(index.ref).capabilities.keyword == capabilities.keyword
        return in_place or index.ref.options == made.options

    _drop_each(engine, space)  # entries in this database may have the names of those that come

    def decide(c: Connection) -> bool:
        serving, *others = indexes.living(c, space.id)
        if alike_now(serving):
            indexes.restate(c, serving.ref.index_id, made)
            return False
        alike = [i for i in others if alike_now(i)]
        if any(i.building for i in others) and not (alike and alike[0].building):
            raise indexes.already_building()
        if not alike:
            indexes.begin(c, space.id, made)
            return True
        if alike[0].ref.options != made.options:  # two of one model in this database would want the same rows
            indexes.restate(c, alike[0].ref.index_id, made)
        if not alike[0].building:
            indexes.want_again(c, alike[0].ref.index_id)
        return True

    return briefly(engine.pool, decide)


def back(engine: Engine, space: Space) -> Index:
    """The index that served last is to serve again. Raises Misconfigured if none is kept."""

    def decide(c: Connection) -> Index:
        kept = [i for i in indexes.living(c, space.id) if i.status == "FOLLOWING" and not i.building]
        if not kept:
            raise Misconfigured(
                f"space {space.key!r}: no former index is kept (KB_KEEP_INDEX_DAYS): make it again with kb space set",
                code="no_index",
            )
        latest = max(kept, key=lambda i: i.keep_until or i.created_at)
        indexes.want_again(c, latest.ref.index_id)
        return latest

    return briefly(engine.pool, decide)


def build(engine: Engine, space: Space, *, keep_seconds: float, progress: Callable[[Progress], None] = silent) -> BuildReport:
    """Take the index that is being built to where it serves. Run it again to go on.

    Raises Misconfigured if there is none, and what hinders it, which is stored as well.
    """
    index = being_built(engine, space)
    report = BuildReport(space.key, index.ref.name, index.ref.kind, index.fingerprint)
    try:
        _build(engine, space, index, keep_seconds, report, progress)
    except KbError as e:
        why = f"{e.code}: {e.message}"
        retried(lambda: _note(engine, index, why), idempotent=True)
        raise
    return report


def being_built(engine: Engine, space: Space) -> Index:
    """Raises Misconfigured."""
    with transaction(engine.pool) as c:
        found = [i for i in indexes.living(c, space.id) if i.building]
    if not found:
        raise Misconfigured(
            f"space {space.key!r}: no index is being built. Begin with: kb space set {space.key} index=KIND or embedder=KIND",
            code="nothing_building",
        )
    return found[0]


def _build(
    engine: Engine,
    space: Space,
    index: Index,
    keep_seconds: float,
    report: BuildReport,
    progress: Callable[[Progress], None],
) -> None:
    if not index.base_done:
        _make(engine, space, index, progress)
    compared, tries = False, 0
    while tries < SWITCHES:
        given = follow_index(engine, space, index, progress)
        report.chunks, report.embedded = report.chunks + given.entries, report.embedded + given.embedded
        if given.left and given.left == given.claimed and not engine.stop.wait(CLAIMED_SECONDS):
            continue
        if given.left:
            raise Transient(f"index {index.ref.name} could not be given {given.left}: {given.error}", code="index_behind")
        tries += 1
        if not compared:
            engine.index(index.ref).settle(index.ref)
            _compare(engine, space, index, report, progress)
            compared = True
        elif briefly(engine.pool, lambda c: _switch(c, space, index, keep_seconds)):
            return
        elif _serves(engine, space, index):
            return  # somebody else was faster
        elif being_built(engine, space).ref.index_id != index.ref.index_id:
            raise Misconfigured(f"index {index.ref.name} was given up meanwhile", code="nothing_building")
    raise Transient(f"space {space.key} is published into without a pause: run it again", code="index_behind")


def _serves(engine: Engine, space: Space, index: Index) -> bool:
    with transaction(engine.pool) as c:
        return indexes.serving(c, space.id).ref.index_id == index.ref.index_id


def _note(engine: Engine, index: Index, error: str | None) -> None:
    with transaction(engine.pool) as c:
        indexes.stands_still(c, index.ref.index_id, error)


# --- the base ---------------------------------------------------------------------------------------------------------


def _make(engine: Engine, space: Space, index: Index, progress: Callable[[Progress], None]) -> None:
    """From a row to an index that knows what it lacks. After a death all of it runs again, and changes nothing twice."""
    engine.index(index.ref).ensure(index.ref)
    retried(lambda: _barrier(engine, space), idempotent=True)
    after = total = 0
    while True:
        n, after = with_rows(
            engine,
            space,
            lambda c, shard: indexes.base(c, space.id, shard, index.ref.index_id, after, BASE),  # noqa: B023
        )
        total += n
        progress(Progress("listing chunks", total, 0))
        if n < BASE:
            break
    with_rows(engine, space, lambda c, _: indexes.base_done(c, index.ref.index_id, total))


def _barrier(engine: Engine, space: Space) -> None:
    """Wait for every publication that began before the row was there, and so could not leave it anything."""
    with transaction(engine.pool) as c:
        spaces.lock_exclusive(c, space.id)


# --- following --------------------------------------------------------------------------------------------------------


def follow(engine: Engine, space: Space) -> None:
    """Keep the former indexes of a space up to date, so that one can go back to them. What one of them lacks stays noted."""
    with transaction(engine.pool) as c:
        kept = [i for i in indexes.living(c, space.id) if i.status == "FOLLOWING" and not i.building]
    for index in kept:
        try:
            error = follow_index(engine, space, index, silent).error
        except KbError as e:
            error = f"{e.code}: {e.message}"
        if error != index.error:
            _note(engine, index, error)


def follow_index(engine: Engine, space: Space, index: Index, progress: Callable[[Progress], None]) -> Given:
    """Give an index everything that is noted for it. Raises what concerns the index or the embedder as a whole."""
    given = Given()
    after, done = (0, 0), 0
    with transaction(engine.pool) as c:
        total = indexes.todo_left(c, index.ref.index_id)
    while True:
        if engine.stop.is_set():
            raise Stopped()
        with transaction(engine.pool) as c:
            batch = indexes.todo(c, index.ref.index_id, after, BATCH)
        if not batch:
            return given
        after = (batch[-1].doc_id, batch[-1].chunk_id)
        _give(engine, space, index, batch, given)
        done += len(batch)
        progress(Progress(f"filling {index.ref.kind}", done, max(total, done)))


def _give(engine: Engine, space: Space, index: Index, batch: Sequence[Todo], given: Given) -> None:
    wanted = with_rows(engine, space, lambda c, shard: indexes.current(c, space.id, shard, batch))
    lacking: set[int] = set()
    for start in range(0, len(wanted), BATCH):
        lacking |= {w.chunk_id for w in _bring(engine, space, index, wanted[start : start + BATCH], given)}
    behind = {w.doc_id for w in wanted if w.chunk_id in lacking}
    settled = [t for t in batch if t.chunk_id not in lacking and not (t.chunk_id == 0 and t.doc_id in behind)]
    given.left += len(batch) - len(settled)
    with_rows(engine, space, lambda c, _: indexes.done(c, index.ref.index_id, settled))


def _bring(engine: Engine, space: Space, index: Index, wanted: Sequence[Wanted], given: Given) -> list[Wanted]:
    """Look, upsert, look again. What it still lacks."""
    ref, port = index.ref, engine.index(index.ref)
    missing = _missing(port.present(ref, [w.vec_id for w in wanted]), wanted)
    if not missing:
        return []
    ready = entries(engine, space, ref, missing)
    if without := [w for w in missing if w.chunk_id not in ready]:
        embedded = embed_missing(engine, space, index, [w.chunk_id for w in without])
        given.embedded += embedded.texts
        if embedded.error is not None:
            given.error = f"{embedded.error.code}: {embedded.error.message}"
        ready |= entries(engine, space, ref, without)
    refused = upsert_each(port, ref, list(ready.values()))
    still = _missing(port.present(ref, [w.vec_id for w in missing]), missing)
    if embedded_elsewhere := [w for w in still if w.chunk_id not in ready and given.error is None]:
        given.claimed += len(embedded_elsewhere)
        return still
    given.entries += len(missing) - len(still)
    if still and given.error is None:
        first = refused.get(still[0].vec_id)
        given.error = f"{first.code}: {first.message}" if first else ABSENT
    return still


def _missing(present: Mapping[UUID, int], wanted: Sequence[Wanted]) -> list[Wanted]:
    return [w for w in wanted if present.get(w.vec_id, -1) < w.acl_seq]


# --- comparison, and the step -------------------------------------------------------------------------------------------


def _compare(engine: Engine, space: Space, index: Index, report: BuildReport, progress: Callable[[Progress], None]) -> None:
    """Exact, with repair; then how much both agree, for people. Raises Transient if it is not what the database says."""
    found = reconcile(engine, space, index=index, progress=progress)
    report.embedded += found.embedded
    if found.remaining:
        raise Transient(
            f"index {index.ref.name} {found.remaining} differences from the database remain",
            code="index_incomplete",
        )
    report.agreement = _agreement(engine, space, index)
    retried(lambda: _agreed(engine, index, report.agreement), idempotent=True)


def _agreed(engine: Engine, index: Index, share: float | None) -> None:
    with transaction(engine.pool) as c:
        indexes.agreed(c, index.ref.index_id, share)


def _agreement(engine: Engine, space: Space, index: Index) -> float | None:
    """Chunks of the space are asked as questions, of each index by its own model."""
    with transaction(engine.pool) as c:
        serving = indexes.serving(c, space.id)
    buckets = np.random.default_rng(index.ref.index_id).choice(4096, 256, replace=False).tolist()
    rows = with_rows(engine, space, lambda c, shard: indexes.sample(c, space.id, shard, buckets, SAMPLE))
    if not rows:
        rows = with_rows(engine, space, lambda c, shard: indexes.sample(c, space.id, shard, range(4096), SAMPLE))
    shares = []
    for row in rows:
        one, other = (_best(engine, i, row.content[:QUESTION]) for i in (serving, index))
        shares.append(len(one & other) / max(len(one), len(other), 1))
    return round(float(np.mean(shares)), 4) if shares else None


def _best(engine: Engine, index: Index, question: str) -> set[int]:
    vector = np.asarray(engine.embedder(index).embed_query(question), dtype=np.float32)
    norm = np.linalg.norm(vector)
    found = engine.index(index.ref).search(index.ref, vector / (norm or np.float32(1)), BEST, None)
    return {x.chunk_id for x in found}


def _switch(c: Connection, space: Space, index: Index, keep_seconds: float) -> bool:
    spaces.lock_exclusive(c, space.id)
    return indexes.switch(c, space.id, index.ref.index_id, keep_seconds)


# --- the end of one -----------------------------------------------------------------------------------------------------


def cancel(engine: Engine, space: Space, *, keep_seconds: float) -> Index:
    """Give up the index that is being built; one that has served before is kept. Raises Misconfigured if there is none."""
    index = being_built(engine, space)

    def give_up(c: Connection) -> bool:
        kept = index.served_at is not None and indexes.keep(c, index.ref.index_id, keep_seconds)
        return kept or indexes.give_up(c, index.ref.index_id)

    if not briefly(engine.pool, give_up):
        raise Misconfigured(
            f"index {index.ref.name} serves space {space.key!r} by now: go back with kb space back {space.key}",
            code="nothing_building",
        )
    _drop_each(engine, space)  # one whose server is down is dropped by the next purge
    return index


def drop_former(engine: Engine, space: Space) -> int:
    """Drop former indexes whose time is over, and what an earlier try left. How many; the others are tried again next time."""
    briefly(engine.pool, lambda c: indexes.expire(c, space.id))
    return _drop_each(engine, space)[0]


def drop_given_up(engine: Engine, space: Space) -> None:
    """Raises what hinders it, when all were tried."""
    _, error = _drop_each(engine, space)
    if error is not None:
        raise error


def _drop_each(engine: Engine, space: Space) -> tuple[int, KbError | None]:
    """How many are gone, and why others are not."""
    with transaction(engine.pool) as c:
        given_up = indexes.dropping(c, space.id)
    dropped, error = 0, None
    for index in given_up:
        try:
            left = engine.index(index.ref).drop(index.ref)
        except KbError as e:
            if index.base_done:
                error = e
                continue
            left = 0  # nothing was ever written to it: where it was made after all, the nightly sweep finds it
        if left == 0:
            with transaction(engine.pool) as c:
                indexes.dropped(c, index.ref.index_id)
            dropped += 1
    return dropped, error
