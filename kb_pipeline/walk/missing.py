"""What a full listing lacks: whether it may be believed, and what is hidden for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kb_pipeline.engine import Engine
from kb_pipeline.model import Presence, Verdict
from kb_pipeline.ports import Connector
from kb_pipeline.store import sources, walks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.walks import Walk

HIDE_BATCH = 500
SECOND_LISTING_SECONDS = 3600.0  # between hiding and a listing that confirms it, where the source has no probe; and its lag


def between_listings(connector: Connector) -> float:
    return SECOND_LISTING_SECONDS + connector.capabilities.lag_seconds


class Missing:
    """``fence`` begins every transaction. Nothing that was seen or written since the walk began is a candidate."""

    def __init__(
        self, engine: Engine, source: Source, connector: Connector, walk: Walk, fence: Callable[[Connection], None]
    ) -> None:
        self.engine, self.source, self.connector, self.walk, self.fence = engine, source, connector, walk, fence
        self.lag = connector.capabilities.lag_seconds
        self.seen = 0
        self.beyond = 0  # deletions beyond the guard, which somebody has approved
        self.waiting = 0  # deletions beyond the guard, which nobody has
        self.omitted = 0  # not listed, although a probe says that they are there

    def judge(self, space: Space) -> None:
        """Set the verdict of the listing as a whole."""
        walk = self.walk
        with transaction(self.engine.pool) as c:
            self.fence(c)
            self.seen, missing = walks.seen_count(c, walk.walk_id), walks.count_unseen(c, walk, self.lag)
            approved = sources.get_source(c, self.source.space_id, self.source.name).approved
        if walk.verdict is not Verdict.COMPLETE or not missing:
            return
        if walk.resumed and not self.connector.capabilities.probe:
            walk.verdict = Verdict.PARTIAL
            walk.reasons.append("the walk was interrupted and items may have moved behind it: nothing is removed this time")
        elif self.seen >= self.engine.limits.shrink_guard * max(self.source.listing_count or 0, self.seen + missing):
            return
        elif approved >= missing:
            self.beyond = missing
        else:
            walk.verdict, self.waiting = Verdict.UNTRUSTED, missing
            walk.reasons.append(
                f"{missing} of {self.seen + missing} documents were not listed: nothing is removed. If that is right: "
                f"kb source approve {space.key} {self.source.name} --up-to {missing}"
            )

    def hide(self) -> None:
        """In batches."""
        walk, after = self.walk, 0
        while True:
            with transaction(self.engine.pool) as c:
                rows = walks.unseen_docs(c, walk, self.lag, after, HIDE_BATCH)
            if not rows:
                break
            after = rows[-1].id
            ids = self._absent([(r.id, r.external_id) for r in rows])
            retried(lambda ids=ids: self._hide_some(ids))  # type: ignore[misc]
        if self.omitted:
            walk.reasons.append(
                f"{self.omitted} documents were not listed although they are there: the next listing may show them"
            )

    def confirm(self) -> None:
        """Note what an earlier walk has hidden and this one misses, too: the word of a source that cannot be asked for one
        item. A resumed walk is none: items may have moved behind it."""
        if self.connector.capabilities.probe or self.walk.resumed:
            return
        apart, after = between_listings(self.connector), 0
        while True:
            with transaction(self.engine.pool) as c:
                ids = walks.missed_docs(c, self.walk, apart, after, HIDE_BATCH)
            if not ids:
                return
            after = ids[-1]
            retried(lambda ids=ids: self._confirm_some(ids, apart), idempotent=True)  # type: ignore[misc]

    def _confirm_some(self, ids: list[int], apart: float) -> None:
        with transaction(self.engine.pool) as c:
            self.fence(c)
            walks.miss_again(c, self.walk, apart, ids)

    def _absent(self, rows: Sequence[tuple[int, str]]) -> list[int]:
        """Of what was not listed, what is hidden: everything where the next pass lists everything in a stable order again.

        Else a probe has to say so, GONE behind a resumed walk and anything but PRESENT behind another: items may have moved
        to a page that was read already, and what is hidden by mistake would stay so until the next full listing.
        """
        can = self.connector.capabilities
        if not can.probe or (can.order_stable and not can.changes):
            return [d for d, _ in rows]
        answers = self.connector.presence([external_id for _, external_id in rows])
        self.omitted += sum(a is Presence.PRESENT for a in answers)
        hidden = {Presence.GONE} if self.walk.resumed else set(Presence) - {Presence.PRESENT}
        return [d for (d, _), answer in zip(rows, answers, strict=True) if answer in hidden]

    def _hide_some(self, ids: list[int]) -> None:
        walk = self.walk
        with transaction(self.engine.pool) as c:
            self.fence(c)
            hidden = {**walk.counts, "hidden": walk.counts.get("hidden", 0) + self._hide(c, ids)}
            walks.save_progress(c, replace(walk, counts=hidden))
        walk.counts = hidden

    def _hide(self, c: Connection, ids: list[int]) -> int:
        return walks.hide_unseen(c, self.walk, self.lag, ids, beyond_guard=bool(self.beyond))
