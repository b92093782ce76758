"""Begin, page by page, end: each a transaction under the lease's token, as many processes as it may take."""

from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from typing import cast

from kb_pipeline.engine import Engine, Progress, Stopped, silent
from kb_pipeline.errors import KbError, Rejected, StateError, Transient
from kb_pipeline.model import Page, Verdict
from kb_pipeline.ports import ChangeProbe, Connector
from kb_pipeline.stages import snapshot, window
from kb_pipeline.states import WalkKind
from kb_pipeline.store import documents, events, retention, sources, spaces, walks
from kb_pipeline.store.database import Connection, retried, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.walks import Walk
from kb_pipeline.walk.listing import Listed, list_pages, scopes_of
from kb_pipeline.walk.missing import Missing, between_listings
from kb_pipeline.walk.plan import Plan
from kb_pipeline.walk.report import LeaseLost, PassReport

MAX_REASONS = 20
TOKEN_SECONDS = 1.0  # for the change token, before anything is listed: longer than whoever compares it may take
NOT_ITS_OWN = frozenset({"database_busy", "database_down", "database_full", "lease_lost", "source_busy", "space_gone"})
OVERTAKEN = "overtaken"  # a count of the job: listed, but written by somebody else meanwhile; they must be listed again


def walk_source(
    engine: Engine, space: Space, source: Source, *, full: bool = False, progress: Callable[[Progress], None] = silent
) -> PassReport:
    """Walk, and hide what is gone. Raises Transient (code ``source_busy``) while another process walks this source.

    ``full``: list everything, although the source could say what changed.
    """
    try:
        connector = engine.connector(source)
        token = change_token(connector, TOKEN_SECONDS)
        clock = connector.clock()  # before anything is listed: what comes later belongs to the next walk
        digest = None
        if connector.capabilities.snapshot_digest:
            with transaction(engine.pool) as c:
                began = retention.clock(c)
            digest = connector.listing_digest()
            if digest is not None and digest == source.listing_digest and not (full or _confirms(engine, source, connector)):
                return _unchanged(engine, space, source, connector, clock, began, token)
    except KbError as e:
        _note(engine, space, source, e)
        raise
    walker = Walker(engine, space, source, connector, clock, digest, token, progress)
    try:
        return walker.run(full=full)
    except LeaseLost:
        raise
    except KbError as e:
        if not isinstance(e, Stopped):
            walker.abandon(e)
        else:
            walker.leave()
        raise
    except BaseException:
        walker.leave()
        raise


def change_token(connector: Connector, budget_seconds: float) -> str | None:
    """What the source's next token is compared with; None where it has none, or none within the budget."""
    return cast(ChangeProbe, connector).change_token(budget_seconds) if connector.capabilities.token else None


def _answered(c: Connection, source: Source, connector: Connector, began: datetime, token: str | None) -> None:
    """A walk that began then has completed: it has seen what every earlier hint was about, unless its listing lags behind."""
    can = connector.capabilities
    events.take_events(c, source.id, began - timedelta(seconds=max(can.lag_seconds, can.skew_seconds)))
    events.store_token(c, source.id, token)


def _confirms(engine: Engine, source: Source, connector: Connector) -> bool:
    """An unchanged listing, too, is the second one that misses what was hidden, where nobody can be asked about it."""
    if connector.capabilities.probe:
        return False
    with transaction(engine.pool) as c:
        return walks.awaits_second_listing(c, source.id, between_listings(connector))


def _note(engine: Engine, space: Space, source: Source, error: KbError) -> None:
    """A pass that failed before there was a walk is known as well, unless the source has nothing to do with it."""
    if isinstance(error, Stopped) or error.code in NOT_ITS_OWN:
        return
    with transaction(engine.pool) as c:
        if spaces.lock_shared(c, space) is not None:
            walks.could_not_begin(c, space.id, source.id, f"{error.code}: {error.message}")


def _unchanged(
    engine: Engine, space: Space, source: Source, connector: Connector, clock: float, began: datetime, token: str | None
) -> PassReport:
    report = PassReport(source.name)
    report.counts["seen"] = report.counts["unchanged"] = source.listing_count or 0
    with transaction(engine.pool) as c:
        walks.unchanged_pass(c, space.id, source.id, clock, report.counts)
        _answered(c, source, connector, began, token)
    return report


class Walker:
    """This process's part of a walk. ``digest``: of the listing as it was at ``clock``, None where none may be stored.

    ``token``: of the source just before that.
    """

    def __init__(
        self,
        engine: Engine,
        space: Space,
        source: Source,
        connector: Connector,
        clock: float,
        digest: str | None,
        token: str | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.engine, self.space, self.source, self.connector = engine, space, source, connector
        self.clock, self.digest, self.token, self.progress = clock, digest, token, progress
        self.report = PassReport(source.name)
        self.opened: Walk | None = None
        self.first = False  # nothing can have moved in a source without documents

    @property
    def walk(self) -> Walk:
        if self.opened is None:
            raise StateError("the walk has not begun")
        return self.opened

    def run(self, *, full: bool) -> PassReport:
        self._begin(scopes_of(self.connector), full)
        walk = self.walk
        total = self.source.listing_count or 0 if walk.kind is WalkKind.FULL else 0
        with closing(list_pages(self.engine, self.connector, walk)) as pages:
            for found in pages:
                self._take(found)
                if self.engine.stop.is_set():
                    raise Stopped
                self.progress(Progress(f"listing {self.source.name}", walk.counts.get("seen", 0), total))
        self._end()
        return self.report

    def _begin(self, scopes: list[str], full: bool) -> None:
        stable = self.connector.capabilities.order_stable
        with transaction(self.engine.pool) as c:
            self._lock_space(c)
            token = walks.take_lease(c, self.source.id, self.engine.limits.lease_seconds)
            if isinstance(token, str):
                raise Transient(f"source {self.source.name} is being walked by {token}: wait for it to end", code="source_busy")
            found = walks.open_walk(c, self.source.id, token, order_stable=stable)
            if found is not None and full and found.kind is not WalkKind.FULL:
                walks.fail_walk(c, found, "given up for a full listing")
                found = None
            self.opened = found or self._new_walk(c, token, scopes, full)
            # In an unstable order an item may be listed twice by one walk: then it is known the second time.
            self.first = stable and not documents.has_documents(c, self.source.id)
        if self.walk.checkpoint is not None:
            self.digest = self.token = None  # of another moment than the pages before the checkpoint
        self.report.add(self.walk.counts)
        self.report.kind, self.report.resumed = self.walk.kind, self.walk.checkpoint is not None

    def _new_walk(self, c: Connection, token: int, scopes: list[str], full: bool) -> Walk:
        found = walks.past_of(c, self.source.id)
        past = window.Past(self.clock, found.watermark, found.listed_ago, found.deletions_approved)
        kind, windows = window.choose(self.connector.capabilities, scopes, past, full=full)
        return walks.begin_walk(c, self.space.id, self.source.id, token, kind, windows, self.clock)

    def abandon(self, error: KbError) -> None:
        """A walk that could not go on is rolled back; nothing is hidden, the watermark stays, the next pass starts anew."""
        if self.opened is None:
            return _note(self.engine, self.space, self.source, error)
        with transaction(self.engine.pool) as c:
            if walks.renew_lease(c, self.opened, self.engine.limits.lease_seconds):
                self.opened.verdict = Verdict.PARTIAL
                walks.fail_walk(c, self.opened, f"{error.code}: {error.message}")
                sources.forget_digest(c, self.source.id)
                walks.release_lease(c, self.source.id, self.opened.token)

    def leave(self) -> None:
        """Asked to end: the walk stays open at its checkpoint, where the next pass goes on without waiting for our lease."""
        if self.opened is not None:
            with transaction(self.engine.pool) as c:
                walks.release_lease(c, self.source.id, self.opened.token)

    # --- one page ---------------------------------------------------------------------------------------------------

    def _take(self, found: Listed) -> None:
        walk = self.walk
        if found.page is not None:
            page = window.provisional(snapshot.storable(found.page), walk.clock, self.connector.capabilities)
            self._page(found.scope, page, found.mark)
            return
        if found.error is not None:
            walk.verdict = Verdict.PARTIAL
            walk.reasons = [*walk.reasons, f"scope {found.scope}: {found.error.message}"][:MAX_REASONS]
        walk.go_on(found.scope, walk.at(found.scope), done=True)  # stored with the next page, or at the end

    def _page(self, scope: str, page: Page, mark: int) -> None:
        with transaction(self.engine.pool) as c:
            ids = [i.external_id for i in page.items] + [b.external_id for b in page.bad]
            known = {} if self.first else documents.known_documents(c, self.source.id, ids)
        plan = Plan(self.engine, self.space, self.source, self.connector, known, mark)
        plan.decide(page, self.first)
        retried(lambda: self._write(scope, page, plan))
        self.report.bad += plan.bad[: max(0, 100 - len(self.report.bad))]
        if plan.bad or plan.open or self.walk.counts.get(OVERTAKEN):
            self.digest = None

    def _write(self, scope: str, page: Page, plan: Plan) -> None:
        walk = self.walk
        before = (dict(walk.counts), walk.verdict, list(walk.reasons), walk.checkpoint)
        try:
            with transaction(self.engine.pool) as c:
                self._fence(c)
                if overtaken := plan.write(c, walk, self.engine.limits.max_retries):
                    walk.counts[OVERTAKEN] = walk.counts.get(OVERTAKEN, 0) + overtaken
                if page.verdict is not Verdict.COMPLETE:
                    walk.verdict = page.verdict
                walk.reasons = (walk.reasons + list(page.reasons))[:MAX_REASONS]
                walk.go_on(scope, page.checkpoint)
                walks.save_progress(c, walk)
        except BaseException:
            walk.counts, walk.verdict, walk.reasons, walk.checkpoint = before
            raise

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        walk, report = self.walk, self.report
        with transaction(self.engine.pool) as c:
            self._fence(c)
            walks.save_progress(c, walk)  # every scope is listed: whoever resumes from here has missed nothing
        missing = Missing(self.engine, self.source, self.connector, walk, self._fence)
        if walk.kind is WalkKind.FULL:
            missing.judge(self.space)
            if walk.verdict is Verdict.COMPLETE:
                missing.hide()
                missing.confirm()
        with transaction(self.engine.pool) as c:
            self._fence(c)
            if walk.verdict is Verdict.COMPLETE:
                self._complete(c, missing)
            else:
                sources.forget_digest(c, self.source.id)
                walks.fail_walk(c, walk, "; ".join(walk.reasons[:3]) or f"the listing is {walk.verdict}")
            if walk.kind is WalkKind.FULL:
                walks.set_waiting(c, self.source.id, missing.waiting)
            walks.release_lease(c, self.source.id, walk.token)
        report.verdict, report.reasons = walk.verdict, walk.reasons
        report.add(walk.counts)
        report.waiting_deletions = missing.waiting

    def _complete(self, c: Connection, missing: Missing) -> None:
        walk, overtaken = self.walk, self.walk.counts.get(OVERTAKEN, 0)
        if walk.kind is WalkKind.FULL:
            walks.complete_listing(c, self.source.id, missing.seen, None if walk.resumed else self.digest)
        if overtaken and walk.kind is WalkKind.FULL:
            walks.store_watermark(c, self.source.id, {})  # only another full listing is sure to show them again
        elif not (overtaken or walk.resumed or missing.omitted):
            walks.store_watermark(c, self.source.id, dict.fromkeys(walk.window_from, walk.clock))
        _answered(c, self.source, self.connector, walk.started_at, None if overtaken else self.token)
        walks.complete_walk(c, walk)

    def _fence(self, c: Connection) -> None:
        self._lock_space(c)
        if not walks.renew_lease(c, self.walk, self.engine.limits.lease_seconds):
            raise LeaseLost(f"source {self.source.name}: another process has taken over this walk")

    def _lock_space(self, c: Connection) -> None:
        if spaces.lock_shared(c, self.space) is None:
            raise Rejected(f"space {self.space.key} is being removed", code="space_gone")
