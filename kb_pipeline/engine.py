"""What the core works with: the database, the opened ports, and the numbers that bound its work. wiring.py makes one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kb_pipeline.errors import Transient
from kb_pipeline.model import IndexRef, Json
from kb_pipeline.ports import BlobStore, Connector, Embedder, Parser, VectorIndex
from kb_pipeline.store.database import Pool
from kb_pipeline.store.sources import Source


@dataclass(frozen=True, slots=True)
class Limits:
    max_file_bytes: int = 100 * 2**20
    page_size: int = 50
    batch_size: int = 200
    batch_bytes: int = 16 * 2**20
    lease_seconds: int = 120
    max_retries: int = 3
    retry_base_seconds: float = 30.0
    retry_max_seconds: float = 3600.0
    shrink_guard: float = 0.8
    own_shard_chunks: int = 20_000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far long work is. ``total`` is 0 while it is not known."""

    phase: str
    done: int
    total: int


def silent(_: Progress) -> None:
    """For callers that show nothing."""


class Modelled(Protocol):
    """Whatever says by which model its vectors are made: a space, one of its indexes."""

    @property
    def embedder(self) -> str: ...
    @property
    def embedder_options(self) -> Json: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Engine:
    """Ports are opened per source, model or index kind, and kept by whoever made the engine."""

    pool: Pool
    blobs: BlobStore
    connector: Callable[[Source], Connector]
    parser: Callable[[str], Parser]
    embedder: Callable[[Modelled], Embedder]
    index: Callable[[IndexRef], VectorIndex]
    limits: Limits = field(default_factory=Limits)
    answer_log: bool = True
    stop: threading.Event = field(default_factory=threading.Event)  # set: end soon and in order, between two units of work


class Stopped(Transient):
    """Work ended early because it was asked to: what was done is stored, what is left waits for whoever comes next."""

    code = "stopped"

    def __init__(self) -> None:
        super().__init__("stopped in order before all was done: run the same command again to go on")
