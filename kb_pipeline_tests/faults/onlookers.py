"""Readers in the storm. Each knows from the rows before and after its question what the answer had to say."""

import random
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from kb_pipeline.as_of import SETTLED_SECONDS, as_of
from kb_pipeline.model import Answer
from kb_pipeline.search import search
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.faults.users import torn

if TYPE_CHECKING:
    from kb_pipeline_tests.faults.storm import Storm

ALL = 200  # more than any of the spaces shows
BORDER = timedelta(seconds=SETTLED_SECONDS)  # a publish is stamped before it commits: so near, it may stand on either side
DIARY, EVERY = 40, timedelta(seconds=0.25)  # entries, and how far they are apart
DOCUMENTS = """
SELECT d.id, d.xmin::text AS row, d.external_id, d.acl, d.current_ver,
       d.status = 'AVAILABLE' AND d.hidden_at IS NULL AS visible, clock_timestamp() AS now FROM kb_doc d WHERE d.space_id = %s
"""
PUBLISHED = """
SELECT EXISTS (SELECT FROM kb_publication p WHERE p.doc_id = %(doc)s AND p.version = %(version)s AND p.from_at <= %(until)s
               AND (p.to_at IS NULL OR p.to_at >= %(since)s)) AS yes
"""
MOVED = """
SELECT DISTINCT doc_id FROM kb_publication
WHERE space_id = %(space)s AND (from_at BETWEEN %(since)s AND %(until)s OR to_at BETWEEN %(since)s AND %(until)s)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was shown, of which version, between two moments."""

    asked: datetime
    answered: datetime
    versions: dict[int, int]


class Onlooker:
    def __init__(self, storm: "Storm", space: Space) -> None:
        self.storm, self.space = storm, space
        self.diary: deque[Entry] = deque(maxlen=DIARY)

    def look_at(self, app: FakedApp, chance: random.Random) -> Answer:
        """One answer, every document in it whole."""
        principals = chance.choice([(), ("staff",)])
        answer = search(app.engine, self.space, f"part {chance.choice('abcdef')}", k=ALL, principals=principals)
        self.storm.done["searched"] += 1
        self.storm.find(*(f"a search shows a torn document: {x}" for x in torn(answer.hits)))
        return answer

    def search(self, app: FakedApp, chance: random.Random) -> None:
        """What did not move meanwhile is shown exactly if it is to be shown; what moved, in a version that was current then."""
        self.storm.rest(0.03)
        before = self._documents(app)
        principals = chance.choice([(), ("staff",)])
        answer = search(app.engine, self.space, f"part {chance.choice('abcdef')}", k=ALL, principals=principals)
        after = self._documents(app)
        self.storm.done["searched"] += 1
        shown = {h.document_id: h.version for h in answer.hits}
        found = [f"a search shows a torn document: {x}" for x in torn(answer.hits)]
        stood = {d for d, row in before.items() if after.get(d) is not None and after[d].row == row.row}
        for doc in stood:
            row = before[doc]
            permitted = all(set(clause) & set(principals) for clause in row.acl or [])
            expected = row.current_ver if row.visible and permitted else None
            if shown.get(doc) != expected:
                found.append(
                    f"a search by {principals} shows version {shown.get(doc)} of {row.external_id} ({doc}), not {expected}"
                )
        found += self._unpublished(app, before, after, {d: v for d, v in shown.items() if d not in stood})
        self.storm.find(*found)
        if after and (not self.diary or answer.at - self.diary[-1].asked > EVERY):
            self.diary.append(Entry(answer.at, next(iter(after.values())).now, shown))

    def _documents(self, app: FakedApp) -> dict[int, Any]:
        with transaction(app.pool) as c:
            return {r.id: r for r in c.execute(DOCUMENTS, [self.space.id])}

    def _unpublished(self, app: FakedApp, before: dict[int, Any], after: dict[int, Any], shown: dict[int, int]) -> list[str]:
        if not before or not after:
            return []
        values = {"since": next(iter(before.values())).now - BORDER, "until": next(iter(after.values())).now}
        with transaction(app.pool) as c:
            known = {d: c.execute(PUBLISHED, {**values, "doc": d, "version": v}).fetchone() for d, v in shown.items()}
        return [
            f"a search shows version {shown[d]} of document {d}, which was not current"
            for d, row in known.items()
            if not row.yes
        ]  # type: ignore[union-attr]

    def ask_the_past(self, app: FakedApp, chance: random.Random) -> None:
        """What a search showed is what the past shows, once it is settled, but for what moved at that very moment."""
        if not self.diary:
            self.storm.rest(EVERY.total_seconds())
            return
        self.storm.rest(EVERY.total_seconds())
        entry = self.diary.popleft()
        self.storm.rest(SETTLED_SECONDS + 0.5 - (self._now(app) - entry.asked).total_seconds())
        then = as_of(app.engine, self.space, "part a", entry.asked, k=ALL, principals=("staff",))
        self.storm.done["asked_the_past"] += 1
        found = [f"the past shows a torn document: {x}" for x in torn(then.hits)]
        shown = {h.document_id: h.version for h in then.hits}
        moved = self._moved(app, entry)
        both = {d: (v, shown[d]) for d, v in entry.versions.items() if d in shown and d not in moved}
        found += [f"document {d} was shown as of version {v}, the past shows {w}" for d, (v, w) in both.items() if v != w]
        self.storm.done["compared_with_the_past"] += bool(both)
        self.storm.find(*found)

    def _now(self, app: FakedApp) -> datetime:
        with transaction(app.pool) as c:
            now: datetime = c.execute("SELECT clock_timestamp() AS now").fetchone().now  # type: ignore[union-attr]
        return now

    def _moved(self, app: FakedApp, entry: Entry) -> set[int]:
        values = {"space": self.space.id, "since": entry.asked - BORDER, "until": entry.answered}
        with transaction(app.pool) as c:
            return {r.doc_id for r in c.execute(MOVED, values)}
