"""The values that flow: Item -> Document -> Version -> Block -> Chunk -> Vector. Ids come from content or from PostgreSQL.

All times are timezone-aware UTC. ``_id`` is ours, ``external_id`` theirs.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, BinaryIO
from uuid import UUID

Json = dict[str, Any]
Acl = tuple[tuple[str, ...], ...]  # clauses of principals, every one of which must be met; an empty clause is met by nobody


# --- source ---------------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """How far a listing can be trusted. Only COMPLETE may lead to deletions."""

    COMPLETE = "COMPLETE"
    PARTIAL = "PARTIAL"  # something could not be listed: what is missing may still exist
    UNTRUSTED = "UNTRUSTED"  # listed without an error, but it shrank beyond the guard


class Presence(StrEnum):
    """What a point probe says about one item."""

    PRESENT = "PRESENT"
    GONE = "GONE"
    FORBIDDEN = "FORBIDDEN"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a listing, in the source's own words."""

    external_id: str
    revision: str  # differs whenever the content may differ
    title: str  # for people; not necessarily what the content names itself
    uri: str
    size_bytes: int | None = None
    modified_at: datetime | None = None  # the source's clock
    identity: str | None = None  # survives a rename or move (an inode, a node token); None where the source has none
    provisional: bool = False  # read within its own clock tick: read again next time
    acl: Acl | None = None  # None: nothing beyond the space's audience


@dataclass(frozen=True, slots=True)
class BadItem:
    """An entry that was listed but cannot be read. It costs itself only, and goes to the ledger as a FAILED task."""

    external_id: str  # storable text, escaped where the source's own id is not
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing: at most ``limit`` entries, and where to go on."""

    items: tuple[Item, ...]
    bad: tuple[BadItem, ...] = ()
    checkpoint: Json = field(default_factory=dict)  # pass it back to go on behind this page
    verdict: Verdict = Verdict.COMPLETE  # of this page; one PARTIAL page makes the listing PARTIAL
    reasons: tuple[str, ...] = ()  # why it is not COMPLETE, and what was skipped and reported


@dataclass(frozen=True, slots=True)
class Fetched:
    """The content of one item, with the revision it was read at (not the listing's).

    ``data`` is complete and at its start: in memory when small, a temporary file when large. Whoever takes it closes it.
    """

    data: BinaryIO
    size_bytes: int
    revision: str
    media_type: str | None = None  # only where the source knows better than the bytes


@dataclass(frozen=True, slots=True)
class Known:
    """A living document with its newest version's fingerprint: what "unchanged" is compared with."""

    doc_id: int
    external_id: str
    identity: str | None
    version: int
    version_status: str | None
    revision: str | None  # "" = look again at every walk
    raw_sha256: bytes | None
    hidden: bool
    seen_seq: int
    title: str
    uri: str
    error_code: str | None  # of the newest version's task
    acl: Acl | None


# --- document -------------------------------------------------------------------------------------------------------


class BlockKind(StrEnum):
    HEADING = "heading"
    TEXT = "text"  # a paragraph, a list, a quote: whatever stands between two blank lines
    TABLE = "table"  # Markdown pipe rows; the first row is the header
    CODE = "code"  # fenced, the fences included
    TAG = "tag"  # a line that is only an opening or closing HTML or component tag


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a parsed document, as Markdown, with links kept. Blocks are separated by a blank line."""

    kind: BlockKind
    text: str
    level: int = 0  # 1-6 for headings
    page: int = 0  # 1-based; 0 where the format has no pages


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document as blocks in reading order. ``blocks`` is consumed once."""

    blocks: Iterator[Block]
    title: str | None = None  # only a title that the content itself names
    meta: Mapping[str, Any] = field(default_factory=dict)  # encoding, pages, front matter ...: JSON values


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """How a space cuts. Sizes in estimated tokens (see stages/chunk.py)."""

    max_tokens: int = 448
    min_tokens: int = 96
    sections: bool = True  # a heading that no stronger heading is near always cuts
    context: str = "title"  # what is prefixed to the embedded text: none | title | path


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a version. ``embedded`` is exactly what is embedded and hashed."""

    text: str  # stripped slice of the canonical text
    display: str  # the same slice as the source has it, links kept
    prefix: str = ""  # title or path, and a table's header row where the chunk starts inside a table
    title_path: tuple[str, ...] = ()  # headings above the first line
    tokens: int = 0  # estimate of ``embedded``
    page_from: int = 0
    page_to: int = 0
    occurrence: int = 0  # 0 for the first chunk of this hash in the document, 1 for its first copy ...

    @property
    def embedded(self) -> str:
        return f"{self.prefix}\n\n{self.text}" if self.prefix else self.text

    @property
    def content_hash(self) -> bytes:
        """sha256 over exactly what is embedded (32 bytes)."""
        return hashlib.sha256(self.embedded.encode("utf-8")).digest()


# --- index ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexRef:
    """One vector index of a space. ``name`` holds the row's id, so a name is never used twice."""

    index_id: int
    space_id: int
    model_id: int
    name: str
    dimension: int
    kind: str = "pgvector"  # the adapter's name in the registry
    options: Json = field(default_factory=dict, hash=False)  # of the adapter, secrets as references


@dataclass(frozen=True, slots=True)
class VectorEntry:
    """What an index stores for one chunk. ``vector`` is float16, little-endian, L2-normalised."""

    vec_id: UUID
    chunk_id: int
    doc_id: int
    vector: bytes
    acl: tuple[int, ...]  # interned principals, a filter hint only; empty = everybody
    acl_seq: int
    checksum: int  # signed 32 bit
    bucket: int  # the first 12 bits of vec_id
    text: str = ""  # what keyword search reads; filled in only for an index whose capabilities say ``keyword``
    title: str = ""  # of the document, and the headings above the chunk, a line each


@dataclass(frozen=True, slots=True)
class Candidate:
    """A hit as the index sees it, before PostgreSQL decides whether it may be shown."""

    vec_id: UUID
    chunk_id: int
    doc_id: int
    score: float  # cosine similarity, 1 is identical


@dataclass(frozen=True, slots=True)
class Bucket:
    count: int
    checksum_sum: int


# --- search ---------------------------------------------------------------------------------------------------------


class Mode(StrEnum):
    """How a search finds: by meaning, by words, or by both, fused by rank."""

    VECTOR = "vector"
    KEYWORD = "keyword"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Hit:
    document_id: int
    external_id: str
    uri: str
    title: str
    title_path: tuple[str, ...]
    version: int
    chunk_id: int
    score: float  # cosine similarity; by words the index's own; fused: the sum of 1 / (60 + rank)
    text: str  # the display slice, links kept


@dataclass(frozen=True, slots=True)
class Answer:
    answer_id: int | None  # None where the answer log is off
    question: str
    at: datetime
    hits: tuple[Hit, ...]
    mode: Mode = Mode.VECTOR
    withheld: int = 0  # as of an earlier time: what would have been shown then, and is deleted, hidden or not permitted now


# --- operation ------------------------------------------------------------------------------------------------------


class AlertKind(StrEnum):
    """What an operator is told about, until its cause is gone."""

    SYNC_FAILED = "SYNC_FAILED"
    TASK_DEAD = "TASK_DEAD"
    APPROVAL_WAITING = "APPROVAL_WAITING"
    RECONCILIATION_FAILED = "RECONCILIATION_FAILED"
    SCHEDULE_MISSED = "SCHEDULE_MISSED"
    VECTOR_FAILED = "VECTOR_FAILED"
