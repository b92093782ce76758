"""Listing against knowledge: what is new, changed, unchanged, and which new item is an old document under another name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from posixpath import basename

from kb_pipeline.model import BadItem, Item, Known, Page

MAX_ID_BYTES = 2000  # a PostgreSQL btree entry holds about 2,700 bytes
PROVISIONAL = "~"  # behind a revision that was read within its own clock tick: it never equals a listed one


@dataclass(slots=True)
class Classified:
    """One page, sorted. An item stands in exactly one list."""

    new: list[Item] = field(default_factory=list)
    changed: list[tuple[Item, Known]] = field(default_factory=list)  # the revision differs: the content may
    unchanged: list[tuple[Item, Known]] = field(default_factory=list)


def storable(page: Page) -> Page:
    """Each id once, as it was listed last. Ids longer than an index entry can be go to the ledger, under a short name that
    stays the same."""
    if len(last := {i.external_id: i for i in page.items}) < len(page.items):
        page = replace(page, items=tuple(last.values()))
    long = [i for i in page.items if len(i.external_id.encode("utf-8")) > MAX_ID_BYTES]
    if not long:
        return page
    bad = tuple(
        BadItem(
            f"{i.external_id[:200]}...{sha256(i.external_id.encode('utf-8')).hexdigest()[:16]}",
            "id_too_long",
            f"{i.external_id[:200]}...: its name in the source is longer than {MAX_ID_BYTES} bytes: give it a shorter path",
        )
        for i in long
    )
    return replace(page, items=tuple(i for i in page.items if i not in long), bad=page.bad + bad)


def stored_revision(item: Item) -> str:
    return item.revision + PROVISIONAL if item.provisional else item.revision


def fetched_revision(listed: str, fetched: str) -> str:
    """What is stored once the content has been read. At another revision than the listed one it may have been read within
    its own tick: provisional, as what was listed so."""
    return fetched if fetched == listed else fetched + PROVISIONAL


def classify(items: Iterable[Item], known: dict[str, Known]) -> Classified:
    """First gate: the revision of the newest version row. A hash on the document never says "done"."""
    page = Classified()
    for item in items:
        old = known.get(item.external_id)
        if old is None:
            page.new.append(item)
        elif old.revision == item.revision and old.error_code != "gone":  # gone when it was read, and here again
            page.unchanged.append((item, old))
        else:
            page.changed.append((item, old))
    return page


def restated(item: Item, old: Known) -> bool:
    """Does the document's row have to say something else now, although its content is the same?"""
    return old.hidden or (item.identity, item.title, item.uri, item.acl) != (old.identity, old.title, old.uri, old.acl)


def moved_by_identity(new: Sequence[Item], gone: Sequence[Known]) -> list[tuple[Item, Known]]:
    """New names of documents that kept identity and revision: a rename, nothing needs to be read."""
    by_identity = {(k.identity, (k.revision or "").removesuffix(PROVISIONAL)): k for k in gone}
    return _paired((i, by_identity.get((i.identity, i.revision))) for i in new)


def moved_by_content(new: Sequence[tuple[Item, bytes]], gone: Sequence[Known]) -> list[tuple[Item, Known]]:
    """New names of documents with the same bytes. Among copies the same file name wins, then the order of names."""
    pairs: list[tuple[Item, Known]] = []
    left = sorted(gone, key=lambda k: k.external_id)
    for same_name in (True, False):
        for item, digest in sorted(new, key=lambda x: x[0].external_id):
            if any(item is i for i, _ in pairs):
                continue
            for k in left:
                if k.raw_sha256 == digest and (not same_name or basename(k.external_id) == basename(item.external_id)):
                    pairs.append((item, k))
                    left.remove(k)
                    break
    return pairs


def _paired(found: Iterable[tuple[Item, Known | None]]) -> list[tuple[Item, Known]]:
    taken: set[int] = set()
    pairs = []
    for item, old in found:
        if old is not None and old.doc_id not in taken:
            taken.add(old.doc_id)
            pairs.append((item, old))
    return pairs
