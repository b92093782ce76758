"""A source with a clock of its own, and everything about it that real ones are known for.

Its stamps are truncated, many are equal, commits show late, pages fail, come empty with a next token, or list an item twice
because it moved. Nothing waits: time passes when a test says so.
"""

import hashlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from threading import RLock

from kb_pipeline.errors import KbError, Rejected
from kb_pipeline.model import Fetched, Item, Json, Page, Presence
from kb_pipeline.ports import WHOLE, Capabilities

EPOCH = 1_700_006_400.0  # a midnight
LATER = "later"  # an empty page's token


class Killed(BaseException):
    """The process of a walk dies."""


@dataclass(frozen=True, slots=True)
class Nature:
    """``skew``: the longest commit, in seconds. ``ahead``: what its clock shows more than ours."""

    resolution: float = 0.0
    skew: float = 0.0
    stable: bool = True
    ahead: float = 0.0
    probe: bool = True
    digest: bool = False
    scopes: tuple[str, ...] = ()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            order_stable=self.stable,
            probe=self.probe,
            digest=self.digest,
            changes=True,
            resolution_seconds=self.resolution,
            skew_seconds=self.skew,
            scopes=bool(self.scopes),
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """What readers see of an item, ``since`` when; the item itself since it was ``born``."""

    content: int
    stamp: float
    since: float
    born: float


@dataclass(slots=True)
class Commit:
    external_id: str
    content: int
    stamp: float
    shows_at: float


@lru_cache(maxsize=4096)
def _moment(stamp: float) -> datetime:
    return datetime.fromtimestamp(stamp, UTC)


def text_of(external_id: str, content: int) -> str:
    return f"# {external_id}\n\nThe text of {external_id} says {content}.\n"


@dataclass
class SimulatedSource:
    """A connector with changes. ``before_page`` runs before each page: edits under a walk, a failure, the death of a process."""

    nature: Nature
    capabilities: Capabilities = field(init=False)
    now: float = EPOCH
    shown: dict[str, Shown] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # of a listing that is not stable: users move items in it
    commits: list[Commit] = field(default_factory=list)
    contents: int = 0
    exclusive: bool = False  # a broken source: it leaves out what is stamped exactly ``since``
    before_page: Callable[[], None] | None = None
    empty_page: Callable[[], bool] | None = None
    fetched: list[str] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)  # what was asked for by changed_since
    lock: RLock = field(default_factory=RLock)  # scopes are listed by several threads

    def __post_init__(self) -> None:
        self.capabilities = self.nature.capabilities()

    # --- its users --------------------------------------------------------------------------------------------------

    def put(self, external_id: str, *, delay: float = 0.0, content: int | None = None) -> int:
        """A new item or an edit, stamped now, committed ``delay`` later. ``content``: the old one again, a mere touch."""
        if content is None:
            self.contents += 1
            content = self.contents
        resolution = self.nature.resolution
        stamp = self.now // resolution * resolution if resolution else self.now
        before = [c.shows_at for c in self.commits if c.external_id == external_id]  # a row is written by one at a time
        self.commits.append(Commit(external_id, content, stamp, max([self.now + delay, *before])))
        if not delay:
            self.commit(lambda: True)
        return content

    def remove(self, external_id: str) -> None:
        self.shown.pop(external_id, None)
        self.commits = [c for c in self.commits if c.external_id != external_id]
        if external_id in self.order:
            self.order.remove(external_id)

    def move(self, external_id: str, to: int) -> None:
        """Another place in a listing that is not stable. Not a change of the item."""
        self.order.remove(external_id)
        self.order.insert(to, external_id)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.commits:
            self.commit(lambda: False)

    def commit(self, at_this_moment: Callable[[], bool]) -> None:
        """What is overdue shows; what is due right now does or does not."""
        for c in list(self.commits):
            if c.shows_at < self.now or (c.shows_at == self.now and at_this_moment()):
                self.commits.remove(c)
                born = old.born if (old := self.shown.get(c.external_id)) else self.now
                self.shown[c.external_id] = Shown(c.content, c.stamp, self.now, born)
                if c.external_id not in self.order:
                    self.order.append(c.external_id)

    # --- the connector ----------------------------------------------------------------------------------------------

    def check(self) -> Json:
        return {"items": len(self.shown)}

    def clock(self) -> float:
        return self.now

    def scopes(self) -> list[str]:
        return list(self.nature.scopes)

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        return self._pages(checkpoint, limit, lambda _: True, by_stamp=False)

    def scope_pages(self, scope: str, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        return self._pages(checkpoint, limit, lambda n: self.scope_of(n) == scope, by_stamp=False)

    def changed_since(self, since: float, checkpoint: Json | None, limit: int, scope: str) -> Iterator[Page]:
        self.windows.append(since)

        def changed(name: str) -> bool:
            stamp = self.shown[name].stamp
            return (stamp > since if self.exclusive else stamp >= since) and scope in (WHOLE, self.scope_of(name))

        return self._pages(checkpoint, limit, changed, by_stamp=True)

    def scope_of(self, external_id: str) -> str:
        return external_id.split("/", maxsplit=1)[0]

    def _pages(self, checkpoint: Json | None, limit: int, chosen: Callable[[str], bool], *, by_stamp: bool) -> Iterator[Page]:
        walk = self._keyset if self.nature.stable else self._cursor
        return walk(checkpoint, limit, chosen, by_stamp)

    def _keyset(self, checkpoint: Json | None, limit: int, chosen: Callable[[str], bool], by_stamp: bool) -> Iterator[Page]:
        """Behind a key, of what is shown now."""
        after = tuple((checkpoint or {}).get("after", ()))
        key = (lambda n: (self.shown[n].stamp, n)) if by_stamp else (lambda n: (n,))
        while True:
            with self.lock:
                if empty := self._comes_empty():
                    page = Page((), checkpoint={"after": list(after), LATER: 1})
                else:
                    found = [k for k in sorted(key(n) for n in self.shown if chosen(n)) if k > after][:limit]
                    after = found[-1] if found else after
                    page = Page(tuple(self.item(k[-1]) for k in found), checkpoint={"after": list(after)})
            yield page
            if not empty and len(found) < limit:
                return

    def _cursor(self, checkpoint: Json | None, limit: int, chosen: Callable[[str], bool], _: bool) -> Iterator[Page]:
        """A list made when it is asked for, of items as they are when their page comes. A checkpoint is a place in the next
        such list: whoever resumes misses what moved before it, and reads again what moved behind it."""
        at = (checkpoint or {}).get("at", 0)
        with self.lock:
            names = [n for n in self.order if chosen(n)]
        while True:
            with self.lock:
                if empty := self._comes_empty():
                    page = Page((), checkpoint={"at": at, LATER: 1})
                else:
                    part = [n for n in names[at : at + limit] if n in self.shown]
                    at += limit
                    page = Page(tuple(self.item(n) for n in part), checkpoint={"at": at})
            yield page
            if not empty and at >= len(names):
                return

    def _comes_empty(self) -> bool:
        if self.before_page:
            self.before_page()
        return self.empty_page is not None and self.empty_page()

    def item(self, external_id: str) -> Item:
        state = self.shown[external_id]
        return Item(external_id, self._revision(state), external_id, external_id, 1, _moment(state.stamp))

    def _revision(self, state: Shown) -> str:
        """Nothing but the stamp, as most sources have it; exact only where it is not truncated."""
        return f"{state.stamp}" if self.nature.resolution else f"{state.stamp}/{state.content}"

    def read(self, external_id: str) -> tuple[str, int] | None:
        """(revision, content)"""
        self.fetched.append(external_id)
        state = self.shown.get(external_id)
        return None if state is None else (self._revision(state), state.content)

    def listing_digest(self) -> str | None:
        return None

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        found = self.read(external_id)
        return None if found is None else (found[0], hashlib.sha256(text_of(external_id, found[1]).encode()).digest())

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        found = self.read(external_id)
        if found is None:
            raise Rejected(f"{external_id} is gone", code="gone")
        raw = text_of(external_id, found[1]).encode()
        return Fetched(io.BytesIO(raw), len(raw), found[0], "text/markdown")

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        if not self.nature.probe:
            return [Presence.UNKNOWN] * len(external_ids)
        return [Presence.PRESENT if n in self.shown else Presence.GONE for n in external_ids]


def failing(error: KbError | BaseException, page: int) -> Callable[[], None]:
    """A ``before_page`` that raises at the ``page``-th page from now."""
    left = [page]

    def before() -> None:
        if left[0] == 0:
            raise error
        left[0] -= 1

    return before


def edit_any(source: SimulatedSource, rng: random.Random, names: Sequence[str]) -> None:
    """One edit by its users: an item is removed, written again as it was, moved in the listing, or new."""
    name, kind = rng.choice(names), rng.random()
    if kind < 0.12:
        source.remove(name)
    elif kind < 0.24 and name in source.shown:
        source.put(name, content=source.shown[name].content)
    elif kind < 0.36 and name in source.order:
        source.move(name, rng.randrange(len(source.order)))
    else:
        source.put(name, delay=rng.choice((0.0, 0.0, source.nature.skew)))
