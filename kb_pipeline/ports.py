"""The five ports. One file in the adapter packages = one adapter; the contract suites in the tests say what each must keep.

Adapters raise the errors of ``errors.py`` only, and never hold state that another process would need.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.model import Bucket, Candidate, Fetched, IndexRef, Json, Page, Parsed, Presence, VectorEntry

Vectors = NDArray[np.float32]  # shape (n, dimension)
WHOLE = "*"  # the one scope of a source that names none


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a connector can do, as data."""

    # Listings are keysets (pages: over external_id; changed_since: over stamp, external_id): a resumed walk is a whole one.
    order_stable: bool = False
    lag_seconds: float = 0.0  # how long the listing may lag behind its items
    probe: bool = True  # presence() can tell GONE
    digest: bool = False  # content_digest() is cheap: a second gate before a version is made, and finds moves
    snapshot_digest: bool = False  # listing_digest() is much cheaper than listing and storing
    changes: bool = False  # it is a ChangeFeed: an incremental walk asks for what changed since the watermark
    # Stamps are truncated to this, and two edits of an item within it may show the same revision. 0 where every edit shows
    # another revision, whatever the stamps are: their truncation is part of skew_seconds then.
    resolution_seconds: float = 0.0
    # The longest time, in the source's clock, from a stamp until listings show it: late commits, index lag, clock error.
    skew_seconds: float = 0.0
    scopes: bool = False  # it is Scoped: parts that are listed side by side, each with a watermark of its own
    token: bool = False  # it is a ChangeProbe: whether anything may have changed is cheap to ask


class Connector(Protocol):
    """A source system, opened for one configured source. Raises Fatal when the source as a whole cannot be read."""

    capabilities: Capabilities

    def check(self) -> Json:
        """Is the source reachable with these settings? What a person wants to know about it. Raises Fatal."""
        ...

    def clock(self) -> float:
        """The source's own time now, seconds since the epoch."""
        ...

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        """The whole listing in constant memory, at most ``limit`` entries a page, from behind ``checkpoint``."""
        ...

    def listing_digest(self) -> str | None:
        """A digest over (external_id, revision) of everything that ``pages`` would yield, or None when the listing is not
        complete, holds a provisional item, or the connector has none."""
        ...

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        """(revision, sha256 of the content) as read now, or None when it is gone. Raises Rejected, Transient."""
        ...

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        """The content. Raises Rejected (code ``gone``, ``forbidden``, ``too_large`` ...) or Transient."""
        ...

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        """A point probe per id, in order. Never raises for a single id: that one is UNKNOWN."""
        ...


class ChangeFeed(Connector, Protocol):
    """A connector whose capabilities say ``changes``."""

    def changed_since(self, since: float, checkpoint: Json | None, limit: int, scope: str) -> Iterator[Page]:
        """Items of ``scope`` (WHOLE without scopes) whose stamp is ``since`` or later, in the source's clock, from behind
        ``checkpoint``. Listing an item twice is allowed, leaving one out is not; an empty page does not end the listing.

        Where the source asks in coarser units or in a zone, ``since`` is rounded down. Deleted items are not in it.
        """
        ...


class Scoped(Connector, Protocol):
    """A connector whose capabilities say ``scopes``. Different scopes are listed by different threads at the same time."""

    def scopes(self) -> list[str]:
        """Names that stay the same from pass to pass. An item is listed in one of them."""
        ...

    def scope_pages(self, scope: str, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        """As ``pages``, of one scope."""
        ...


class ChangeProbe(Connector, Protocol):
    """A connector whose capabilities say ``token``."""

    def change_token(self, budget_seconds: float) -> str | None:
        """Differs from every earlier one whenever an item may have come, changed or gone since; equal tokens prove that none
        did. None: it could not be told in this time. Raises Fatal, Transient."""
        ...


class Parser(Protocol):
    """Bytes of one format to blocks. Raises Rejected with a code for content that cannot be read."""

    version: str  # part of the recipe fingerprint: a change re-parses

    def parse(self, raw: BinaryIO, name: str) -> Parsed: ...


class Embedder(Protocol):
    """Texts to vectors. One call = one request; the embed stage batches, retries, splits and checks."""

    @property
    def fingerprint(self) -> str:
        """Everything that changes the vectors: model, revision, prefixes, dimension."""
        ...

    @property
    def dimension(self) -> int: ...

    @property
    def max_batch(self) -> int:
        """Texts a request."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Estimated tokens a request."""
        ...

    @property
    def concurrency(self) -> int:
        """Requests at a time that help."""
        ...

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Raises TooLarge (split it), Rejected (a text is refused), Transient, Fatal."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Shape (dimension,)."""
        ...


@dataclass(frozen=True, slots=True)
class IndexCapabilities:
    """What a vector index can do, as data."""

    digest: bool = True  # digest() is computed by the store; where not, it reads every id
    keyword: bool = False  # it is a KeywordIndex: entries need their text
    conditional: bool = True  # an older acl_seq never replaces a newer one; where not, reconciliation repairs that
    named: bool = False  # each index is a thing of its own that names() lists; where not, entries are told apart by their index
    filters: tuple[str, ...] = ("acl",)  # kinds of filter that search() applies before it takes the best k
    max_batch: int = 2000  # entries or ids a call that are worth it; more are allowed, and cut by the adapter


class VectorIndex(Protocol):
    """A vector store. Writing never creates anything; every read sees what search sees.

    Every method raises StateError (code ``index_gone``) for an index that was dropped or never made, Transient for a store that
    is down, slow or asks to wait, Rejected for an entry it refuses (the caller narrows it down), Fatal and Misconfigured for
    what an operator has to change. ``ensure`` and ``drop`` raise no StateError.
    """

    @property
    def capabilities(self) -> IndexCapabilities: ...

    def ensure(self, ref: IndexRef) -> None:
        """Create what the index needs. Called when a space or a rebuild is made, never by a worker. Idempotent."""
        ...

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        """Idempotent; an entry with an older acl_seq never replaces a newer one. Raises Transient; StateError if dropped."""
        ...

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        """Of these, the ones that search can find now, with their acl_seq."""
        ...

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        """Idempotent: what is not there is deleted."""
        ...

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """Best first. ``acl``: interned principals of the asker as a filter hint; None: no filter."""
        ...

    def settle(self, ref: IndexRef) -> bool:
        """After a load: build what makes search fast, if it is missing. Beside readers and writers; True if it did."""
        ...

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        """Count and checksum sum per bucket (the first 12 bits of the id)."""
        ...

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        """Everything in one bucket, with its checksum."""
        ...

    def drop(self, ref: IndexRef) -> int:
        """Remove everything of this index by its exact name. Idempotent. Returns what is left (0)."""
        ...


class KeywordIndex(VectorIndex, Protocol):
    """An index whose capabilities say ``keyword``: it also finds by words, in Chinese and English."""

    def keyword(self, ref: IndexRef, text: str, k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """Entries that share words with ``text``, best first. Scores are the store's own and compare within one answer only."""
        ...


class BlobStore(Protocol):
    """Objects under keys such as ``spaces/7/docs/12/v3/FETCHER-a1``. A written object is durable when the call returns."""

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        """Write and make durable, as one batch. Raises Transient (code ``blob_store_full`` when there is no space)."""
        ...

    def get(self, key: str) -> bytes:
        """Raises Rejected (code ``blob_missing``)."""
        ...

    def open(self, key: str) -> BinaryIO:
        """For reading piece by piece. Raises Rejected (code ``blob_missing``)."""
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Idempotent."""
        ...

    def clear(self, folder: str) -> None:
        """Delete everything below ``folder`` (a key that ends with a slash), what killed writers left half-written included."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix``, in order, in constant memory."""
        ...
