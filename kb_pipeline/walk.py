"""One pass over one source: pages become documents, versions and tasks; what a complete listing lacks is hidden and deleted.

Begin, page and end are transactions under the lease's token, as PROTOCOL section 6 lays them out: the checkpoint moves with
the tasks, a killed walk goes on where it stopped, and only a COMPLETE listing that did not shrink removes anything.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kb_pipeline.engine import Engine, Progress, silent
from kb_pipeline.errors import KbError, Rejected, StateError, Transient
from kb_pipeline.model import BadItem, Item, Known, Page, Presence, Verdict
from kb_pipeline.ports import Connector
from kb_pipeline.stages import snapshot
from kb_pipeline.store import documents, sources, spaces, walks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.walks import Walk

log = logging.getLogger(__name__)
HIDE_BATCH = 500
COUNTS = ("seen", "new", "changed", "unchanged", "moved", "metadata_only", "hidden", "deleted", "failed")
MAX_REASONS = 20


@dataclass(slots=True)
class PassReport:
    """What one pass found and did. ``waiting_deletions``: not seen, but kept until somebody approves."""

    source: str
    verdict: Verdict = Verdict.COMPLETE
    reasons: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    waiting_deletions: int = 0
    resumed: bool = False
    bad: list[BadItem] = field(default_factory=list)
    spend_approval: bool = False  # the deletions that follow go beyond the guard, within what was approved


class LeaseLost(Transient):
    code = "lease_lost"


def walk_source(
    engine: Engine, space: Space, source: Source, *, full: bool = False, progress: Callable[[Progress], None] = silent
) -> PassReport:
    """Walk, and hide what is gone. Raises Transient (code ``source_busy``) while another process walks this source."""
    connector = engine.connector(source)
    clock = connector.clock()
    digest = connector.listing_digest() if connector.capabilities.snapshot_digest else None
    if digest is not None and digest == source.listing_digest and not full:
        return _unchanged(engine, space, source, clock)
    pass_ = _Pass(engine, space, source, connector, clock, digest, progress)
    try:
        return pass_.run()
    except LeaseLost:
        raise
    except KbError as e:
        pass_.abandon(e)
        raise


def _unchanged(engine: Engine, space: Space, source: Source, clock: float) -> PassReport:
    report = PassReport(source.name)
    report.counts["seen"] = report.counts["unchanged"] = source.listing_count or 0
    with transaction(engine.pool) as c:
        walks.unchanged_pass(c, space.id, source.id, clock, report.counts)
    return report


class _Pass:
    def __init__(
        self,
        engine: Engine,
        space: Space,
        source: Source,
        connector: Connector,
        clock: float,
        digest: str | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.engine, self.space, self.source, self.connector = engine, space, source, connector
        self.clock, self.digest, self.progress = clock, digest, progress
        self.report = PassReport(source.name)
        self.walk: Walk | None = None
        self.first = False  # nothing can have moved in a source without documents

    def run(self) -> PassReport:
        self._begin()
        walk = self._walk()
        for page in self.connector.pages(walk.checkpoint, self.engine.limits.page_size):
            self._page(snapshot.storable(page))
            self.progress(Progress(f"listing {self.source.name}", walk.counts.get("seen", 0), self.source.listing_count or 0))
        self._end()
        return self.report

    def _walk(self) -> Walk:
        if self.walk is None:
            raise StateError("the walk has not begun")
        return self.walk

    def _begin(self) -> None:
        with transaction(self.engine.pool) as c:
            if spaces.lock_shared(c, self.space) is None:
                raise Rejected(f"space {self.space.key} is being removed", code="space_gone")
            token = walks.take_lease(c, self.source.id, self.engine.limits.lease_seconds)
            if isinstance(token, str):
                raise Transient(f"source {self.source.name} is being walked by {token}: wait for it to end", code="source_busy")
            stable = self.connector.capabilities.order_stable
            self.walk = walks.begin_walk(c, self.space.id, self.source.id, token, self.clock, order_stable=stable)
            self.first = not documents.has_documents(c, self.source.id)
        if self.walk.checkpoint is not None:
            self.digest = None  # of another moment than the pages before the checkpoint
        self.report.counts |= {k: v for k, v in self.walk.counts.items() if k in COUNTS}
        self.report.resumed = self.walk.checkpoint is not None

    def abandon(self, error: KbError) -> None:
        """A walk that could not go on is FAILED; nothing is hidden, the watermark stays, the next pass starts anew."""
        if self.walk is None:
            return
        with transaction(self.engine.pool) as c:
            if walks.renew_lease(c, self.walk, self.engine.limits.lease_seconds):
                self.walk.verdict = Verdict.PARTIAL
                walks.end_walk(c, self.walk, "FAILED", error=f"{error.code}: {error.message}")
                sources.forget_digest(c, self.source.id)
                walks.release_lease(c, self.source.id, self.walk.token)

    # --- one page ---------------------------------------------------------------------------------------------------

    def _page(self, page: Page) -> None:
        with transaction(self.engine.pool) as c:
            mark = walks.seen_watermark(c)
            ids = [i.external_id for i in page.items] + [b.external_id for b in page.bad]
            known = {} if self.first else documents.known_documents(c, self.source.id, ids)
        plan = _Plan(self.engine, self.space, self.source, self.connector, known)
        plan.decide(page, self.first)
        retried(lambda: self._write(page, plan, mark))
        self.report.bad += plan.bad[: max(0, 100 - len(self.report.bad))]
        if plan.bad or plan.open:
            self.digest = None

    def _write(self, page: Page, plan: "_Plan", mark: int) -> None:
        walk = self._walk()
        before = (dict(walk.counts), walk.verdict, list(walk.reasons), walk.checkpoint)
        try:
            with transaction(self.engine.pool) as c:
                if spaces.lock_shared(c, self.space) is None:
                    raise Rejected(f"space {self.space.key} is being removed", code="space_gone")
                if not walks.renew_lease(c, walk, self.engine.limits.lease_seconds):
                    raise LeaseLost(f"source {self.source.name}: another process has taken over this walk")
                if not plan.write(c, walk, mark, self.engine.limits.max_retries):
                    self.digest = None
                if page.verdict is not Verdict.COMPLETE:
                    walk.verdict = page.verdict
                walk.reasons = (walk.reasons + list(page.reasons))[:MAX_REASONS]
                walk.checkpoint = page.checkpoint
                walks.save_progress(c, walk)
        except BaseException:
            walk.counts, walk.verdict, walk.reasons, walk.checkpoint = before
            raise

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        walk, report = self._walk(), self.report
        lag = self.connector.capabilities.lag_seconds
        with transaction(self.engine.pool) as c:
            self._fence(c)
            seen, missing = walks.seen_count(c, walk.walk_id), walks.count_unseen(c, walk, lag)
            approved = sources.get_source(c, self.source.space_id, self.source.name).approved
        waiting = self._judge(seen, missing, approved)
        if walk.verdict is Verdict.COMPLETE:
            self._hide(lag)
        with transaction(self.engine.pool) as c:
            self._fence(c)
            complete = walk.verdict is Verdict.COMPLETE
            if complete:
                digest = self.digest if not walk.resumed else None
                watermark = {} if walk.resumed else {"started": self.clock}
                walks.complete_listing(c, self.source.id, seen, digest, watermark)
            else:
                sources.forget_digest(c, self.source.id)
            walks.set_waiting(c, self.source.id, report.waiting_deletions)
            walks.end_walk(
                c, walk, "SUCCESS" if complete else "FAILED", error=None if complete else "; ".join(walk.reasons[:3]) or None
            )
            walks.release_lease(c, self.source.id, walk.token)
        report.verdict, report.reasons = walk.verdict, walk.reasons
        report.counts |= {k: v for k, v in walk.counts.items() if k in COUNTS}
        report.spend_approval = complete and bool(waiting)

    def _judge(self, seen: int, missing: int, approved: int) -> int:
        """Set the verdict of the whole listing. Returns how many deletions go beyond the guard."""
        walk, last = self._walk(), self.source.listing_count or 0
        if walk.verdict is not Verdict.COMPLETE or not missing:
            return 0
        if walk.resumed and not self.connector.capabilities.probe:
            walk.verdict = Verdict.PARTIAL
            walk.reasons.append("the walk was interrupted and items may have moved behind it: nothing is removed this time")
            return 0
        if seen >= self.engine.limits.shrink_guard * max(last, seen + missing):
            return 0
        if approved < missing:
            walk.verdict = Verdict.UNTRUSTED
            self.report.waiting_deletions = missing
            walk.reasons.append(
                f"{missing} of {seen + missing} documents were not listed: nothing is removed. If that is right: "
                f"kb source approve {self.space.key} {self.source.name} --up-to {missing}"
            )
        return missing

    def _hide(self, lag: float) -> None:
        """What was not seen, in batches. Behind a resumed walk items may have moved: there only what a probe calls GONE."""
        walk, after = self._walk(), 0
        while True:
            with transaction(self.engine.pool) as c:
                rows = walks.unseen_docs(c, walk, lag, after, HIDE_BATCH)
            if not rows:
                return
            after = rows[-1].id
            ids = [r.id for r in rows]
            if walk.resumed:
                answers = self.connector.presence([r.external_id for r in rows])
                ids = [d for d, presence in zip(ids, answers, strict=True) if presence is Presence.GONE]
            retried(lambda ids=ids: self._hide_some(lag, ids))  # type: ignore[misc]

    def _hide_some(self, lag: float, ids: list[int]) -> None:
        walk = self._walk()
        with transaction(self.engine.pool) as c:
            self._fence(c)
            hidden = {**walk.counts, "hidden": walk.counts.get("hidden", 0) + walks.hide_unseen(c, walk, lag, ids)}
            walks.save_progress(c, replace(walk, counts=hidden))
        walk.counts = hidden

    def _fence(self, c: Connection) -> None:
        if spaces.lock_shared(c, self.space) is None:
            raise Rejected(f"space {self.space.key} is being removed", code="space_gone")
        if not walks.renew_lease(c, self._walk(), self.engine.limits.lease_seconds):
            raise LeaseLost(f"source {self.source.name}: another process has taken over this walk")


class _Plan:
    """What one page will write, decided outside of any transaction (contents are read here)."""

    def __init__(self, engine: Engine, space: Space, source: Source, connector: Connector, known: dict[str, Known]) -> None:
        self.engine, self.space, self.source, self.connector, self.known = engine, space, source, connector, known
        self.new: list[Item] = []
        self.changed: list[tuple[Item, Known]] = []
        self.same: list[tuple[Item, Known]] = []  # content equal, revision or metadata not
        self.moved: list[tuple[Item, Known]] = []
        self.unchanged: list[tuple[Item, Known]] = []
        self.bad: list[BadItem] = []
        self.open = False  # something must be looked at again by the next walk

    def decide(self, page: Page, first: bool) -> None:
        sorted_ = snapshot.classify(page.items, self.known)
        self.unchanged, self.bad = sorted_.unchanged, list(page.bad)
        self.open = any(i.provisional for i in page.items)
        digests = self._digests([i for i, k in sorted_.changed if k.raw_sha256] if not first else [])
        for item, old in sorted_.changed:
            if item.external_id in digests and digests[item.external_id] is None:
                continue  # vanished or bad
            if old.raw_sha256 and digests.get(item.external_id) == old.raw_sha256:
                self.same.append((item, old))
            else:
                self.changed.append((item, old))
        self.new = sorted_.new
        if sorted_.new and not first:
            self._find_moves()

    def _find_moves(self) -> None:
        with transaction(self.engine.pool) as c:
            identities = [i.identity for i in self.new if i.identity]
            found = documents.candidates_by_identity(c, self.source.id, identities)
        self.moved = snapshot.moved_by_identity(self.new, self._gone(found))
        self._drop_moved()
        digests = self._digests(self.new)
        readable = [(i, d) for i in self.new if (d := digests.get(i.external_id)) is not None]
        self.new = [i for i in self.new if digests.get(i.external_id, b"") is not None]
        with transaction(self.engine.pool) as c:
            found = documents.candidates_by_content(c, self.source.id, self.space.id, [d for _, d in readable])
        taken = {k.doc_id for _, k in self.moved}
        self.moved += snapshot.moved_by_content(readable, self._gone([k for k in found if k.doc_id not in taken]))
        self._drop_moved()

    def _drop_moved(self) -> None:
        moved = {i.external_id for i, _ in self.moved}
        self.new = [i for i in self.new if i.external_id not in moved]

    def _gone(self, found: Sequence[Known]) -> list[Known]:
        """Of these candidates, the ones whose old place is known to be empty."""
        here = [k for k in found if k.external_id not in self.known]
        answers = self.connector.presence([k.external_id for k in here])
        return [k for k, presence in zip(here, answers, strict=True) if presence is Presence.GONE]

    def _digests(self, items: Sequence[Item]) -> dict[str, bytes | None]:
        """sha256 by id; None: it vanished or went to the ledger. Absent: left to the fetch (no cheap digest, or a hiccup)."""
        found: dict[str, bytes | None] = {}
        if not self.connector.capabilities.digest:
            return found
        for item in items:
            try:
                read = self.connector.content_digest(item.external_id)
                found[item.external_id] = read[1] if read else None
            except Rejected as e:
                self.bad.append(BadItem(item.external_id, e.code, e.message))
                found[item.external_id] = None
            except Transient as e:
                log.info("%s: %s", item.external_id, e.message)
        return found

    def write(self, c: Connection, walk: Walk, mark: int, max_retries: int) -> bool:
        """All of it, in the caller's transaction. False: somebody wrote one of these documents since ``mark``."""
        bad_items = [_as_item(b, self.known.get(b.external_id)) for b in self.bad]
        made = documents.insert_documents(
            c, self.space.id, self.source.id, [*self.new, *(i for i in bad_items if i.external_id not in self.known)]
        )
        old = [k for pairs in (self.changed, self.same, self.moved, self.unchanged) for _, k in pairs]
        touched = {k.doc_id for pairs in (self.changed, self.same, self.moved) for _, k in pairs}
        touched |= {k.doc_id for i, k in self.unchanged if snapshot.restated(i, k)} | {
            k.doc_id for b in self.bad if (k := self.known.get(b.external_id))
        }
        locked = documents.lock_documents(c, sorted(touched))
        fresh = {d for d, seen in locked.items() if seen <= mark}
        bad_ids = [k.doc_id if (k := self.known.get(b.external_id)) else made.get(b.external_id) for b in self.bad]
        walks.mark_seen(c, walk.walk_id, [k.doc_id for k in old] + list(made.values()) + [d for d in bad_ids if d])
        self._restate(c, fresh)
        content = [
            (made[i.external_id], snapshot.stored_revision(i), i.size_bytes or 0) for i in self.new if i.external_id in made
        ]
        content += [(k.doc_id, snapshot.stored_revision(i), i.size_bytes or 0) for i, k in self.changed if k.doc_id in fresh]
        if content:
            documents.new_versions(c, self.space.id, content, max_retries=max_retries)
        ledger = [
            (d, b.code, b.message)
            for d, b in zip(bad_ids, self.bad, strict=True)
            if d and (d in fresh or d in made.values()) and not _recorded(self.known.get(b.external_id), b)
        ]
        if ledger:
            documents.record_bad(c, self.space.id, ledger)
        self._count(walk)
        return len(fresh) == len(touched) and len(made) == len(self.new) + sum(
            b.external_id not in self.known for b in self.bad
        )

    def _restate(self, c: Connection, fresh: set[int]) -> None:
        rows = [(i, k) for i, k in (*self.moved, *self.same, *self.changed, *self.unchanged) if k.doc_id in fresh]
        rows = [(i, k) for i, k in rows if snapshot.restated(i, k) or i.external_id != k.external_id]
        if rows:
            documents.restate_documents(c, [k.doc_id for _, k in rows], [i for i, _ in rows])
        revisions = [
            (k.doc_id, k.version, snapshot.stored_revision(i)) for i, k in (*self.moved, *self.same) if k.doc_id in fresh
        ]
        if revisions:
            documents.restate_revisions(c, revisions)

    def _count(self, walk: Walk) -> None:
        rereads = sum((k.revision or "").removesuffix(snapshot.PROVISIONAL) == i.revision for i, k in self.same)
        added = {
            "seen": len(self.new) + len(self.changed) + len(self.same) + len(self.moved) + len(self.unchanged) + len(self.bad),
            "new": len(self.new),
            "changed": len(self.changed),
            "unchanged": len(self.unchanged) + rereads,
            "metadata_only": len(self.same) - rereads,
            "moved": len(self.moved),
            "failed": len(self.bad),
        }
        walk.counts = {k: walk.counts.get(k, 0) + added.get(k, 0) for k in {*walk.counts, *added}}


def _recorded(old: Known | None, bad: BadItem) -> bool:
    return old is not None and old.revision == "" and old.error_code == bad.code


def _as_item(bad: BadItem, old: Known | None) -> Item:
    return Item(bad.external_id, "", bad.external_id.rpartition("/")[2], old.uri if old else "")
