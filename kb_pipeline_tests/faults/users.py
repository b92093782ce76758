"""The people who edit a source in the storm, and how a reader tells from the text alone whether a document is whole."""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from kb_pipeline.model import Hit
from kb_pipeline_tests.faults.weather import SharedSource

NEVER_GONE = ("e0.md", "e1.md")  # edited all the time, and never removed, renamed, restricted or deleted
SECRET = "s0.md"  # for the staff only, from its first day
NAMES = (*NEVER_GONE, SECRET, *(f"d{n}.md" for n in range(5)))
HOT = (*NEVER_GONE, "d0.md", "d1.md")  # most edits hit these
STAFF = (("staff",),)
PARTS = "abcdef"
_PIECE = re.compile(r"(\w+) (manifest|part) (\w+) ")


def text_of(title: str, parts: Iterable[str]) -> str:
    """Sections that are a chunk each. The first one says which others there are."""
    parts = "".join(parts)
    sections = [_section(title, "manifest", parts), *(_section(title, "part", p) for p in parts)]
    return f"# {title}\n\n" + "\n\n".join(sections) + "\n"


def _section(title: str, kind: str, letters: str) -> str:
    body = " ".join(f"{title}{kind}{letters}x{i}" for i in range(60))
    return f"## {kind} {letters}\n\n{title} {kind} {letters} {body}."


def torn(hits: Iterable[Hit]) -> list[str]:
    """Documents of which something is missing, too much, or of another version."""
    pieces: dict[int, list[tuple[str, str]]] = defaultdict(list)
    names: dict[int, str] = {}
    for hit in hits:
        names[hit.document_id] = hit.external_id
        pieces[hit.document_id] += [(kind, letters) for _, kind, letters in _PIECE.findall(hit.text)]
    return [f"{names[d]} ({d}): {sorted(found)}" for d, found in pieces.items() if not _is_whole(found)]


def _is_whole(found: list[tuple[str, str]]) -> bool:
    manifests = [letters for kind, letters in found if kind == "manifest"]
    return len(manifests) == 1 and sorted(x for kind, x in found if kind == "part") == sorted(manifests[0])


class Users:
    """Of one source. Texts are made of few parts, so that old ones come back, in this document and in other spaces."""

    def __init__(self, source: SharedSource, done: Counter[str]) -> None:
        self.source, self.done = source, done
        for name in NAMES:
            source.put(name, text_of(name.removesuffix(".md"), PARTS[:2]), acl=STAFF if name == SECRET else None)

    def act(self, chance: random.Random) -> None:
        with self.source.lock:
            act = chance.choice([self._edit] * 6 + [self._remove, self._move, self._restrict])
            act(chance, chance.choice(HOT if chance.random() < 0.8 else NAMES))

    def edit_all(self, names: Iterable[str], mark: str) -> None:
        """A text that no document has had yet."""
        for name in names:
            item, _ = self.source.items[name]
            self.source.put(name, text_of(name.removesuffix(".md"), f"xyz{mark}"), acl=item.acl)

    def _edit(self, chance: random.Random, name: str) -> None:
        """Also of what is not there: it is new, or back again."""
        there = self.source.items.get(name)
        kind = "edited" if there else ("reappeared" if chance.random() < 0.5 else "added")
        acl = there[0].acl if there else (STAFF if name == SECRET else None)
        parts = PARTS[:2] if kind == "reappeared" else chance.sample(PARTS, chance.randint(1, 4))
        self.source.put(name, text_of(name.removesuffix(".md"), parts), acl=acl)
        self.done[kind] += 1

    def _remove(self, chance: random.Random, name: str) -> None:
        if name in self.source.items and name not in NEVER_GONE:
            self.source.remove(name)
            self.done["removed"] += 1

    def _move(self, chance: random.Random, name: str) -> None:
        """There and back: a file keeps what it says of itself."""
        moved = f"moved-{name}"
        for old, new in ((name, moved), (moved, name)):
            if old in self.source.items and new not in self.source.items and name not in NEVER_GONE:
                self.source.rename(old, new)
                self.done["moved"] += 1
                return

    def _restrict(self, chance: random.Random, name: str) -> None:
        if name in self.source.items and name not in (*NEVER_GONE, SECRET):
            item, raw = self.source.items[name]
            self.source.put(name, raw, acl=None if item.acl else STAFF)
            self.done["acl_changed"] += 1
