"""What one page will write: decided outside of any transaction, because contents are read for it, and written in one."""

import logging
from collections.abc import Sequence

from kb_pipeline.engine import Engine
from kb_pipeline.errors import Rejected, Transient
from kb_pipeline.model import BadItem, Item, Known, Page, Presence
from kb_pipeline.ports import Connector
from kb_pipeline.stages import snapshot
from kb_pipeline.states import WalkKind
from kb_pipeline.store import documents, walks
from kb_pipeline.store.database import Connection, transaction
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.walks import Walk

log = logging.getLogger(__name__)


class Plan:
    """An item of the page stands in one of the lists. ``mark``: what has a higher seen_seq was written since it was read."""

    def __init__(
        self, engine: Engine, space: Space, source: Source, connector: Connector, known: dict[str, Known], mark: int
    ) -> None:
        self.engine, self.space, self.source, self.connector = engine, space, source, connector
        self.known, self.mark = known, mark
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

    def write(self, c: Connection, walk: Walk, max_retries: int) -> int:
        """All of it, in the caller's transaction. Returns how many documents somebody else has written since the page was
        asked for: those are left as they are, and must be listed again."""
        gone = walks.deleted_since(c, self.source.id, [i.external_id for i in self.new], self.mark) if self.new else set()
        new = [i for i in self.new if i.external_id not in gone]
        bad_items = [_as_item(b, None) for b in self.bad if b.external_id not in self.known]
        made = documents.insert_documents(c, self.space.id, self.source.id, [*new, *bad_items])
        touched = self._touched()
        locked = documents.lock_documents(c, sorted(touched))
        fresh = {d for d, seen in locked.items() if seen <= self.mark and seen == touched[d]}
        if walk.kind is WalkKind.FULL:
            pairs = (*self.changed, *self.same, *self.moved, *self.unchanged)
            bad_ids = [k.doc_id for b in self.bad if (k := self.known.get(b.external_id))]
            walks.mark_seen(c, walk.walk_id, [k.doc_id for _, k in pairs] + list(made.values()) + bad_ids)
        self._restate(c, fresh)
        content = [(made[i.external_id], snapshot.stored_revision(i), i.size_bytes or 0) for i in new if i.external_id in made]
        content += [(k.doc_id, snapshot.stored_revision(i), i.size_bytes or 0) for i, k in self.changed if k.doc_id in fresh]
        if content:
            documents.new_versions(c, self.space.id, content, max_retries=max_retries)
        self._record_bad(c, made, fresh)
        self._count(walk)
        return len(gone) + len(new) + len(bad_items) - len(made) + len(touched) - len(fresh)

    def _touched(self) -> dict[int, int]:
        """Documents whose rows are written, with the seen_seq that the decisions were made on."""
        pairs = [*self.changed, *self.same, *self.moved, *(x for x in self.unchanged if snapshot.restated(*x))]
        bad = [k for b in self.bad if (k := self.known.get(b.external_id))]
        return {k.doc_id: k.seen_seq for k in [*(k for _, k in pairs), *bad]}

    def _record_bad(self, c: Connection, made: dict[str, int], fresh: set[int]) -> None:
        ledger = []
        for b in self.bad:
            old = self.known.get(b.external_id)
            doc_id = old.doc_id if old and old.doc_id in fresh else made.get(b.external_id)
            if doc_id and not _recorded(old, b):
                ledger.append((doc_id, b.code, b.message))
        if ledger:
            documents.record_bad(c, self.space.id, ledger)

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
