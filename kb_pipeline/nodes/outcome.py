"""How a node ends for a batch of tasks: outputs for those that advance, failures for the rest."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

from kb_pipeline.engine import Engine, Limits
from kb_pipeline.errors import Fatal, KbError, Rejected, StateError, Transient
from kb_pipeline.model import Json
from kb_pipeline.states import Node, next_node
from kb_pipeline.store import tasks
from kb_pipeline.store.database import Connection, briefly, retried, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Failure

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """``done`` stand at the next node now; claims in neither list were lost to somebody else."""

    done: list[Claim] = field(default_factory=list)
    failed: list[tuple[Claim, Failure]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    error: KbError | None = None  # the last one that is not about a single document

    def add(self, **counts: int) -> None:
        for name, n in counts.items():
            self.counts[name] = self.counts.get(name, 0) + n


class OutputLost(Transient):
    """What an earlier node stored is not in the object store any more: ``node`` has to make it again."""

    code = "blob_missing"

    def __init__(self, message: str, node: Node) -> None:
        super().__init__(message)
        self.node = node


def each(claims: Sequence[Claim], work: Callable[[Claim], None]) -> list[tuple[Claim, KbError]]:
    """Run ``work`` per claim; one document's error is its own. What is not a KbError is a bug: pipeline.py isolates it."""
    errors = []
    for claim in claims:
        try:
            work(claim)
        except KbError as e:
            errors.append((claim, e))
    return errors


def commit(
    engine: Engine,
    space: Space,
    started: datetime,
    claims: Sequence[Claim],
    errors: Sequence[tuple[Claim, KbError]],
    save: Callable[[Connection, tasks.Fence], dict[int, Json]],
    *,
    give_up: Callable[[Connection, tasks.Fence], None] | None = None,
    brief: bool = False,
) -> Outcome:
    """The node's one transaction: fence, ``save`` for the claims that still hold and did not fail, advance, fail.

    ``give_up`` gets the claims that hold and failed. ``brief``: with short limits, since readers feel it.
    """
    bad = {c.task_id: e for c, e in errors}

    def write(c: Connection) -> Outcome:
        held = tasks.fence(c, space, claims, documents=True)
        good = [x for x in held.claims if x.task_id not in bad]
        outputs = save(c, tasks.Fence(held.shard, good)) if good else {}
        going = [x for x in good if x.task_id in outputs]
        tasks.advance(c, going, started, outputs)
        tasks.release(c, [x for x in good if x.task_id not in outputs], started)
        failures = [(x, failure(bad[x.task_id], x, engine.limits)) for x in held.claims if x.task_id in bad]
        if give_up is not None and failures:
            give_up(c, tasks.Fence(held.shard, [x for x, _ in failures]))
        tasks.fail(c, space.id, held.shard, failures, started)
        return Outcome([replace(x, node=next_node(x.node) or x.node) for x in going], failures)

    def run() -> Outcome:
        with transaction(engine.pool) as c:
            return write(c)

    outcome = briefly(engine.pool, write, idempotent=True) if brief else retried(run, idempotent=True)
    outcome.error = next((e for e in bad.values() if isinstance(e, Transient | Fatal)), None)
    return outcome


def failure(error: KbError, claim: Claim, limits: Limits) -> Failure:
    """Temporary errors are due again after a back-off, min(max, base * 2^n) + jitter, or what the server asked for.

    A Fatal concerns the endpoint, not the document: it waits for the operator as a retry, like a temporary one.
    """
    message = f"{claim.external_id}: {error.message}" if claim.external_id not in error.message else error.message
    message = message.replace("\0", "")[:2000]
    if isinstance(error, Rejected | StateError) or claim.retry_count >= claim.max_retry_count:
        return Failure(error.code, message, None)
    asked = error.retry_after if isinstance(error, Transient) else None
    wait = min(limits.retry_max_seconds, limits.retry_base_seconds * 2**claim.retry_count)
    wait = max(wait, asked or 0.0) + random.uniform(0, limits.retry_base_seconds / 2)
    node = error.node if isinstance(error, OutputLost) else None
    return Failure(error.code, message, datetime.now(UTC) + timedelta(seconds=wait), node)


def open_output(engine: Engine, space: Space, claim: Claim, path: str, maker: Node) -> BinaryIO:
    """An object that ``maker`` stored. Raises OutputLost where it can be made again, from this version's own content."""
    try:
        return engine.blobs.open(path)
    except Rejected as e:
        own = path.startswith(f"spaces/{space.id}/docs/{claim.doc_id}/v{claim.version}/")
        if e.code != "blob_missing" or (maker is Node.FETCHER and not own):
            raise  # the source does not have any more what an older version says
        raise OutputLost(f"{e.message}. It is made again by the next try, from {maker} on", maker) from e


def object_key(space: Space, claim: Claim) -> str:
    """Names are never used again: the attempt is in them."""
    return f"spaces/{space.id}/docs/{claim.doc_id}/v{claim.version}/{claim.node.value.lower()}-a{claim.attempt}"
