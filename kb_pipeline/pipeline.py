"""Claim and commit: takes waiting tasks of a space through the nodes, in batches, under a heartbeat.

The order of the flow is declared once, here. The only module that catches broadly: what a node did not expect costs the
one document that caused it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kb_pipeline.engine import Engine, Progress, Stopped, silent
from kb_pipeline.errors import Fatal, KbError, Rejected, Transient
from kb_pipeline.nodes import chunk, embed, fetch, index, parse
from kb_pipeline.nodes.outcome import Outcome, commit
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import chunks, spaces, tasks
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Failure

log = logging.getLogger(__name__)

NodeRunner = Callable[[Engine, Space, Sequence[Claim], datetime], Outcome]
STAGES: dict[Node, NodeRunner] = {
    Node.FETCHER: fetch.run,
    Node.PARSER: parse.run,
    Node.CHUNKER: chunk.run,
    Node.EMBEDDING: embed.run,
    Node.INDEXER: index.run,
}
MAX_SAMPLES = 50
COUNT_EVERY = 20  # batches
# What every further document would meet as well: work stops, and what was not tried yet keeps its tries.
STOPPING = frozenset(
    {
        "blob_store_full", "blob_store_missing", "database_down", "database_full", "endpoint_down", "index_down",
        "index_full", "missing_extra", "missing_secret", "model_changed", "overloaded", "quota_exceeded", "rate_limited",
        "refuses_everything", "unauthorized", "wrong_dimension",
    }
)  # fmt: skip


@dataclass(slots=True)
class IngestReport:
    """What came of the tasks that were worked on. ``stopped``: why work ended before the queue was empty."""

    tasks: int = 0
    published: int = 0
    failures: list[tuple[Claim, Failure]] = field(default_factory=list)  # the first MAX_SAMPLES
    failed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[Node, float] = field(default_factory=dict)
    stopped: KbError | None = None

    def take(self, node: Node, outcome: Outcome, seconds: float) -> None:
        self.failures += outcome.failed[: MAX_SAMPLES - len(self.failures)]
        self.failed += len(outcome.failed)
        self.seconds[node] = self.seconds.get(node, 0.0) + seconds
        for name, n in outcome.counts.items():
            self.counts[name] = self.counts.get(name, 0) + n
        self.published = self.counts.get("published", 0)


def ingest(
    engine: Engine,
    space: Space,
    *,
    nodes: Sequence[Node] = FLOW,
    limit: int | None = None,
    progress: Callable[[Progress], None] = silent,
) -> IngestReport:
    """Work until nothing of the space waits at one of ``nodes`` (or ``limit`` tasks were taken). Several may run side by side.

    With one node only, finished tasks go back to the queue, where the next node's run finds them.
    """
    report = IngestReport()
    total = batches = 0
    given = space
    retried(lambda: _ensure_log(engine), idempotent=True)
    while limit is None or report.tasks < limit:
        if engine.stop.is_set():
            report.stopped = Stopped()
            return report
        space = retried(lambda: _as_it_is(engine, given), idempotent=True)
        wanted = engine.limits.batch_size if limit is None else min(engine.limits.batch_size, limit - report.tasks)
        claims = retried(lambda wanted=wanted: _claim(engine, given, wanted, nodes))  # type: ignore[misc]
        if not claims:
            return report
        if batches % COUNT_EVERY == 0:
            total = report.tasks + _count(engine, space)
        batches += 1
        report.tasks += len(claims)
        with _heartbeat(engine, claims), _none_left_behind(engine, space, claims):
            for part in _by_bytes(claims, engine.limits.batch_bytes):
                if engine.stop.is_set():
                    break
                _flow(engine, space, part, nodes, report)
                done = report.published + report.failed
                progress(Progress("ingesting", done, max(total, done)))
        if batches == 1:
            retried(lambda: _learn(engine, given), idempotent=True)
        if report.stopped is not None:
            return report
    return report


def _ensure_log(engine: Engine) -> None:
    with transaction(engine.pool) as c:
        tasks.ensure_log(c)


def _as_it_is(engine: Engine, space: Space) -> Space:
    """Its model may have changed since the last batch. A space that is gone stays as it was: the fences say so."""
    with transaction(engine.pool) as c:
        now = spaces.space_by_id(c, space.id)
    return now if now is not None and now.generation == space.generation else space


def _learn(engine: Engine, space: Space) -> None:
    """After a first batch: a space whose shard is new would slow down with each further one."""
    with transaction(engine.pool) as c:
        shard = spaces.lock_shared(c, space)
        if shard is not None:
            chunks.learn(c, shard)


def _claim(engine: Engine, space: Space, wanted: int, nodes: Sequence[Node]) -> list[Claim]:
    """Sweep first, so that what is due or abandoned is claimed now."""
    with transaction(engine.pool) as c:
        tasks.sweep(c, space)
    with transaction(engine.pool) as c:
        return tasks.claim(c, space, wanted, engine.limits.lease_seconds, nodes)


def _count(engine: Engine, space: Space) -> int:
    """Unfinished tasks in all: for the progress display, and too dear at a million to be asked with every claim."""
    with transaction(engine.pool) as c:
        return sum(tasks.waiting(c, space.id).values())


def _flow(engine: Engine, space: Space, claims: list[Claim], nodes: Sequence[Node], report: IngestReport) -> None:
    """Take one part through every node; a task joins at the node it stands at."""
    with _none_left_behind(engine, space, claims) as held:
        for node in nodes:
            here = [c for c in held if c.node is node]
            if not here or engine.stop.is_set():
                continue
            started = datetime.now(UTC)
            outcome = _run(engine, space, here, started)
            report.take(node, outcome, (datetime.now(UTC) - started).total_seconds())
            held[:] = [c for c in held if c.node is not node] + (outcome.done if node is not Node.INDEXER else [])
            if outcome.error is not None and outcome.error.code in STOPPING and not outcome.done:
                report.stopped = outcome.error
        if not engine.stop.is_set():
            _give_back(engine, space, held)


def _run(engine: Engine, space: Space, claims: list[Claim], started: datetime) -> Outcome:
    """A node for a batch. An error that nobody expected is narrowed down to the document that causes it."""
    try:
        return STAGES[claims[0].node](engine, space, claims, started)
    except (Transient, Fatal) as e:
        return _fail(engine, space, claims, started, e)
    except Exception as e:
        if len(claims) == 1:
            log.exception("document %s at %s", claims[0].external_id, claims[0].node)
            cause = e if isinstance(e, KbError) else Rejected(f"{type(e).__name__}: {str(e)[:300]}", code="internal")
            return _fail(engine, space, claims, started, cause)
        outcome = Outcome()
        for claim in claims:
            one = _run(engine, space, [claim], started)
            outcome.done += one.done
            outcome.failed += one.failed
            outcome.add(**one.counts)
        return outcome


def _fail(engine: Engine, space: Space, claims: Sequence[Claim], started: datetime, error: KbError) -> Outcome:
    return commit(engine, space, started, claims, [(c, error) for c in claims], lambda _c, _f: {})


@contextmanager
def _none_left_behind(engine: Engine, space: Space, claims: Sequence[Claim]) -> Iterator[list[Claim]]:
    """Whoever ends early, by request or by force, gives back at once what it still holds: nobody waits for its lease, and it
    is no death. The list is the caller's to keep up to date."""
    held = list(claims)

    def release() -> None:
        with transaction(engine.pool) as c:
            tasks.release(c, tasks.fence(c, space, held).claims, datetime.now(UTC))

    try:
        yield held
    except BaseException:
        retried(release, idempotent=True)
        raise
    if engine.stop.is_set():
        retried(release, idempotent=True)


def _give_back(engine: Engine, space: Space, claims: Sequence[Claim]) -> None:
    """Tasks that stand before a node which is not ours to run."""

    def give_back() -> None:
        with transaction(engine.pool) as c:
            tasks.give_back(c, tasks.fence(c, space, claims).claims)

    if claims:
        retried(give_back, idempotent=True)


def _by_bytes(claims: Sequence[Claim], limit: int) -> Iterator[list[Claim]]:
    """Parts of at most ``limit`` bytes of originals, so that memory does not grow with the documents."""
    part: list[Claim] = []
    size = 0
    for claim in claims:
        if part and size + claim.size_bytes > limit:
            yield part
            part, size = [], 0
        part.append(claim)
        size += claim.size_bytes
    if part:
        yield part


@contextmanager
def _heartbeat(engine: Engine, claims: Sequence[Claim]) -> Iterator[None]:
    """Renews the leases of a batch until its work ends. A lost lease is found out by the fence, not here."""
    stop = threading.Event()
    pairs = [(c.task_id, c.attempt) for c in claims]

    def renew() -> None:
        with transaction(engine.pool) as c:
            tasks.renew(c, pairs, engine.limits.lease_seconds)

    def beat() -> None:
        while not stop.wait(engine.limits.lease_seconds / 3):
            try:
                retried(renew, idempotent=True)
            except Transient as e:
                log.warning("heartbeat: %s", e.message)

    thread = threading.Thread(target=beat, name="kb-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
