"""States, events and the transition tables, of tasks and of walks. Whoever changes a status asks the table first."""

from enum import StrEnum

from kb_pipeline.errors import StateError


class Node(StrEnum):
    """A step of a task, in the order of the flow. CLEANUP stands apart: it removes what a given-up version left."""

    FETCHER = "FETCHER"
    PARSER = "PARSER"
    CHUNKER = "CHUNKER"
    EMBEDDING = "EMBEDDING"
    INDEXER = "INDEXER"
    CLEANUP = "CLEANUP"


FLOW: tuple[Node, ...] = (Node.FETCHER, Node.PARSER, Node.CHUNKER, Node.EMBEDDING, Node.INDEXER)


class TaskStatus(StrEnum):
    INIT = "INIT"  # not claimable yet: queued behind the document's live task
    PENDING = "PENDING"
    PROCESSING = "PROCESSING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"  # waits for its next try
    DEAD = "DEAD"  # retries used up, permanent, or three dead processes
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"


LIVE = frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING, TaskStatus.FAILED, TaskStatus.CANCELING})


class Event(StrEnum):
    ADMIT = "admit"  # queued task gets its turn
    CLAIM = "claim"
    ADVANCE = "advance"  # one node done, go on
    PUBLISH = "publish"
    FAIL = "fail"
    GIVE_UP = "give_up"
    DUE = "due"
    INTERRUPT = "interrupt"  # the lease ran out: not a failed try
    RELEASE = "release"  # given back by a process that stops in order
    RETRY = "retry"  # by an operator
    CANCEL = "cancel"
    SUPERSEDE = "supersede"  # newer content of the same document
    CLEANED = "cleaned"


_S, _E = TaskStatus, Event
TRANSITIONS: dict[tuple[TaskStatus, Event], TaskStatus] = {
    (_S.INIT, _E.ADMIT): _S.PENDING,
    (_S.PENDING, _E.CLAIM): _S.PROCESSING,
    (_S.PROCESSING, _E.ADVANCE): _S.PROCESSING,
    (_S.PROCESSING, _E.PUBLISH): _S.SUCCESS,
    (_S.PROCESSING, _E.FAIL): _S.FAILED,
    (_S.PROCESSING, _E.GIVE_UP): _S.DEAD,
    (_S.PROCESSING, _E.INTERRUPT): _S.PENDING,
    (_S.PROCESSING, _E.RELEASE): _S.PENDING,
    (_S.FAILED, _E.DUE): _S.PENDING,
    (_S.FAILED, _E.RETRY): _S.PENDING,
    (_S.DEAD, _E.RETRY): _S.PENDING,
    (_S.INIT, _E.CANCEL): _S.CANCELED,  # CANCELING is live, and a document has one live task: the one it waits behind
    (_S.PENDING, _E.CANCEL): _S.CANCELING,
    (_S.PROCESSING, _E.CANCEL): _S.CANCELING,
    (_S.FAILED, _E.CANCEL): _S.CANCELING,
    (_S.DEAD, _E.CANCEL): _S.CANCELED,
    (_S.INIT, _E.SUPERSEDE): _S.CANCELED,  # it has written nothing yet
    (_S.DEAD, _E.SUPERSEDE): _S.CANCELED,  # what it left was given up when it died
    (_S.PENDING, _E.SUPERSEDE): _S.CANCELING,
    (_S.FAILED, _E.SUPERSEDE): _S.CANCELING,
    (_S.CANCELING, _E.CLEANED): _S.CANCELED,
}


def next_state(status: TaskStatus, event: Event) -> TaskStatus:
    """The state after ``event``. Raises StateError where the table has no such transition."""
    try:
        return TRANSITIONS[status, event]
    except KeyError:
        raise StateError(f"a task that is {status} cannot {event}", code="bad_transition") from None


def sources_of(event: Event) -> list[str]:
    """Every status that ``event`` may start from: the guard of the UPDATE that carries it out."""
    return sorted(status.value for status, e in TRANSITIONS if e is event)


def next_node(node: Node) -> Node | None:
    """The node behind ``node`` in the flow, None behind the last."""
    i = FLOW.index(node)
    return FLOW[i + 1] if i + 1 < len(FLOW) else None


# --- walks (sync_job) -----------------------------------------------------------------------------------------------


class WalkKind(StrEnum):
    FULL = "FULL"  # a listing of everything: what it lacks may be gone
    INCREMENTAL = "INCREMENTAL"  # what changed since the watermark: it says nothing about what it lacks


class SyncStatus(StrEnum):
    """Of one walk. It outlives its process: PENDING or RUNNING without a living owner is resumed by the next pass."""

    PENDING = "PENDING"  # kind, window and the source's clock are fixed, no page is stored yet
    RUNNING = "RUNNING"  # pages are stored with their tasks, up to the checkpoint
    SUCCESS = "SUCCESS"  # the walk completed: its watermark is stored, what it lacks is hidden
    GC_CLEAN = "GC_CLEAN"  # and nothing hidden by it waits: confirmed and erased, vectors too, or shown again
    FAILED = "FAILED"  # it could not complete; never committed alone, ROLLBACK is part of the same transaction
    ROLLBACK = "ROLLBACK"  # watermark and checkpoint are what they were before it; nothing published is undone


class SyncEvent(StrEnum):
    LIST = "list"  # a page is stored
    COMPLETE = "complete"
    CLEAN = "clean"
    FAIL = "fail"
    ROLL_BACK = "roll_back"


_W, _V = SyncStatus, SyncEvent
SYNC_TRANSITIONS: dict[tuple[SyncStatus, SyncEvent], SyncStatus] = {
    (_W.PENDING, _V.LIST): _W.RUNNING,
    (_W.PENDING, _V.FAIL): _W.FAILED,
    (_W.RUNNING, _V.LIST): _W.RUNNING,
    (_W.RUNNING, _V.COMPLETE): _W.SUCCESS,
    (_W.RUNNING, _V.FAIL): _W.FAILED,
    (_W.SUCCESS, _V.CLEAN): _W.GC_CLEAN,
    (_W.FAILED, _V.ROLL_BACK): _W.ROLLBACK,
}
OPEN = frozenset({SyncStatus.PENDING, SyncStatus.RUNNING})


def sync_change(event: SyncEvent) -> tuple[SyncStatus, list[str]]:
    """The status that ``event`` leads to, and every status that it may start from: value and guard of its UPDATE."""
    (after,) = {target for (_, e), target in SYNC_TRANSITIONS.items() if e is event}
    return after, sorted(status.value for status, e in SYNC_TRANSITIONS if e is event)
