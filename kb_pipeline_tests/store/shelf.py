"""Documents, versions and tasks of one space at any point of their life, made by the store's own functions."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from kb_pipeline.model import Chunk, IndexRef, Item
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store import chunks, documents, publications, sources, spaces, tasks
from kb_pipeline.store.chunks import VersionChunks
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.store.tasks import Claim, Failure


def cut(*texts: str, path: str = "") -> list[Chunk]:
    """Texts to chunks; a text that stands twice gets occurrences 0 and 1."""
    seen: dict[str, int] = {}
    made = []
    for text in texts:
        number = seen.get(text, 0)
        seen[text] = number + 1
        made.append(Chunk(text, text, title_path=(path,) if path else (), tokens=len(text), occurrence=number))
    return made


class Shelf:
    """One source of a space. Each method is one transaction, as the walk and the nodes make them."""

    def __init__(self, pool: Pool, space: Space, name: str = "docs") -> None:
        self.pool, self.space = pool, space
        with transaction(pool) as c:
            self.source = sources.add_source(c, space.id, name, "local_dir", {})

    # --- looking --------------------------------------------------------------------------------------------------------

    def rows(self, query: str, **values: Any) -> list[Any]:
        with transaction(self.pool) as c:
            return c.execute(query, {"space": self.space.id, **values}).fetchall()

    def value(self, query: str, **values: Any) -> Any:
        return self.rows(query, **values)[0][0]

    def task(self, doc_id: int, version: int = 1) -> Any:
        query = "SELECT * FROM ingestion_task WHERE doc_id = %(doc)s AND version = %(version)s"
        return self.rows(query, doc=doc_id, version=version)[0]

    def states(self, doc_id: int) -> list[Any]:
        """Of a document's chunks, in every shard, with their text."""
        query = """SELECT s.*, c.content, c.title_path FROM kb_chunk_state s JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id
                   WHERE s.space_id = %(space)s AND s.doc_id = %(doc)s ORDER BY s.id"""
        return self.rows(query, doc=doc_id)

    def tombstones(self) -> dict[UUID, str]:
        return {r.vec_id: r.state for r in self.rows("SELECT vec_id, state FROM vector_tombstone WHERE space_id = %(space)s")}

    @property
    def shard(self) -> int:
        return int(self.value("SELECT shard FROM kb_space WHERE id = %(space)s"))

    def index(self) -> IndexRef:
        with transaction(self.pool) as c:
            return spaces.serving_index(c, self.space.id)

    # --- the walk ---------------------------------------------------------------------------------------------------------

    def add(self, *names: str) -> list[int]:
        """New documents with version 1 and its task each."""
        with transaction(self.pool) as c:
            items = [Item(n, "r1", n, f"memory:{n}", 10) for n in names]
            made = documents.insert_documents(c, self.space.id, self.source.id, items)
            ids = [made[n] for n in names]
            documents.new_versions(c, self.space.id, [(d, "r1", 10) for d in ids], max_retries=3)
            return ids

    def edit(self, doc_id: int) -> None:
        """Newer content was seen."""
        with transaction(self.pool) as c:
            assert documents.lock_documents(c, [doc_id])
            documents.new_versions(c, self.space.id, [(doc_id, "r2", 10)], max_retries=3)

    def delete(self, doc_id: int) -> None:
        with transaction(self.pool) as c:
            shard = spaces.lock_shared(c, self.space)
            assert shard is not None and documents.lock_documents(c, [doc_id])
            documents.delete_documents(c, self.space.id, shard, [doc_id])

    # --- the nodes --------------------------------------------------------------------------------------------------------

    def sweep(self) -> int:
        with transaction(self.pool) as c:
            return tasks.sweep(c, self.space)

    def claim(self, limit: int = 100, *, lease_seconds: int = 120, nodes: Sequence[Node] = FLOW) -> list[Claim]:
        with transaction(self.pool) as c:
            return tasks.claim(c, self.space, limit, lease_seconds, nodes)

    def at(self, node: Node, claims: Sequence[Claim]) -> list[Claim]:
        """Take claims that stand at the first node up to ``node``."""
        for _ in range(FLOW.index(node)):
            with transaction(self.pool) as c:
                held = tasks.fence(c, self.space, claims, documents=True)
                tasks.advance(c, held.claims, datetime.now(UTC), {})
            claims = [replace(x, node=FLOW[FLOW.index(x.node) + 1]) for x in held.claims]
        return list(claims)

    def fail(self, claim: Claim, next_attempt_at: datetime | None) -> None:
        with transaction(self.pool) as c:
            held = tasks.fence(c, self.space, [claim], documents=True)
            failures = [(x, Failure("broken", "it is broken", next_attempt_at)) for x in held.claims]
            tasks.fail(c, self.space.id, held.shard, failures, datetime.now(UTC))

    def chunk(self, claim: Claim, pieces: Sequence[Chunk]) -> tuple[int, int]:
        """(new, reused) chunks of the claim's version."""
        with transaction(self.pool) as c:
            held = tasks.fence(c, self.space, [claim], documents=True)
            assert held.claims
            stored = VersionChunks(claim.doc_id, claim.version, "recipe", pieces)
            return chunks.store_chunks(c, self.space.id, held.shard, [stored])[claim.doc_id]

    def publish(self, claim: Claim) -> publications.Published:
        """The INDEXER's transactions of one claim that stands at INDEXER, without an index."""
        with transaction(self.pool) as c:
            held = tasks.fence(c, self.space, [claim], documents=True)
            assert held.claims
            publications.revive(c, self.space.id, held.shard, [claim.doc_id], [claim.version])
            spaces.lock_serving_index(c, self.space.id)
            published = publications.publish(c, self.space.id, held.shard, {claim.doc_id: claim.version})
            tasks.advance(c, [claim], datetime.now(UTC), {})
            return published

    def bring(self, doc_id: int, pieces: Sequence[Chunk]) -> publications.Published:
        """Work on the document's waiting task until its version is published."""
        self.sweep()
        claims = self.claim()
        (mine,) = [x for x in claims if x.doc_id == doc_id]
        with transaction(self.pool) as c:
            tasks.give_back(c, [x for x in claims if x is not mine])
        self.chunk(mine, pieces)
        return self.publish(self.at(Node.INDEXER, [mine])[0])

    def published(self, name: str, *texts: str) -> int:
        """A new document that is current with these chunks."""
        (doc_id,) = self.add(name)
        self.bring(doc_id, cut(*texts))
        return doc_id

    def edited(self, doc_id: int, *texts: str) -> publications.Published:
        self.edit(doc_id)
        return self.bring(doc_id, cut(*texts))
