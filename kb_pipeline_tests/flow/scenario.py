"""One space with one source in memory, and the questions that the tests of the core ask about it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

from psycopg import sql

from kb_pipeline.model import Hit, IndexRef
from kb_pipeline.pipeline import IngestReport, ingest
from kb_pipeline.ports import Connector
from kb_pipeline.search import search
from kb_pipeline.store import sources, spaces, tasks
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import SyncReport, sync_space, take_snapshot
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemoryBlobs, MemoryIndex, MemorySource

TABLES = (
    "kb_doc",
    "kb_doc_version",
    "kb_chunk",
    "kb_chunk_state",
    "kb_chunk_restated",
    "kb_publication",
    "ingestion_task",
    "ingestion_node_log",
    "vector_tombstone",
    "sync_job",
    "kb_source",
)


class Flow:
    """``memory`` is its source; ``index`` is None where vectors are in PostgreSQL."""

    def __init__(self, app: FakedApp, space: Space, memory: MemorySource, source: Source) -> None:
        self.app, self.space, self.memory, self.source = app, space, memory, source
        self.engine = app.engine

    @property
    def embedder(self) -> CountingEmbedder:
        assert isinstance(self.app.embedder, CountingEmbedder)
        return self.app.embedder

    @property
    def index(self) -> MemoryIndex:
        assert isinstance(self.app.index, MemoryIndex)
        return self.app.index

    @property
    def blobs(self) -> MemoryBlobs:
        assert isinstance(self.app.blobs, MemoryBlobs)
        return self.app.blobs

    def add_source(self, connector: Connector, name: str) -> Source:
        return self.app.add_fake_source(self.space, connector, name)

    # --- to do --------------------------------------------------------------------------------------------------------

    def sync(self, **options: Any) -> SyncReport:
        return sync_space(self.engine, self.space, **options)

    def walk(self, **options: Any) -> SyncReport:
        """Only the source's side of a sync: nothing is ingested or erased."""
        return take_snapshot(self.engine, self.space, **options)

    def ingest(self, **options: Any) -> IngestReport:
        return ingest(self.engine, self.space, **options)

    def approve(self, up_to: int) -> None:
        with transaction(self.app.pool) as c:
            sources.approve(c, self.source.id, up_to)

    def retry(self, task_id: int) -> bool:
        """As ``kb task retry`` does it."""
        with transaction(self.app.pool) as c:
            task, _ = tasks.get_task(c, task_id)
            lock_documents(c, [task.document_id])
            return tasks.retry(c, task_id)

    def cancel(self, task_id: int) -> bool:
        with transaction(self.app.pool) as c:
            return tasks.cancel(c, task_id, "by a test")

    def sweep(self) -> None:
        with transaction(self.app.pool) as c:
            tasks.sweep(c, self.space)

    def execute(self, statement: str, **values: Any) -> list[Any]:
        with transaction(self.app.pool) as c:
            cursor = c.execute(statement, {"space": self.space.id, "source": self.source.id, **values})
            return cursor.fetchall() if cursor.description else []

    def expire_leases(self) -> None:
        """The workers of this space, and whoever walks its source, have been silent for too long."""
        self.execute("UPDATE ingestion_task SET lease_until = '-infinity' WHERE space_id = %(space)s AND status = 'PROCESSING'")
        self.execute("UPDATE kb_embedding SET lease_until = '-infinity' WHERE vector IS NULL")
        self.execute("UPDATE sync_lease SET until = '-infinity' WHERE source_id = %(source)s")

    def due(self) -> None:
        """The back-off of failed tasks is over."""
        self.execute("UPDATE ingestion_task SET next_attempt_at = '-infinity' WHERE space_id = %(space)s AND status = 'FAILED'")

    @contextmanager
    def beside(self, work: Callable[[], Any]) -> Iterator[list[Any]]:
        """Run ``work`` in another thread; its result or error is in the list afterwards."""
        ended: list[Any] = []

        def run() -> None:
            try:
                ended.append(work())
            except BaseException as e:
                ended.append(e)

        thread = Thread(target=run)
        thread.start()
        try:
            yield ended
        finally:
            thread.join()

    # --- to ask -------------------------------------------------------------------------------------------------------

    def hits(self, question: str, k: int = 5, principals: Sequence[str] = ()) -> tuple[Hit, ...]:
        return search(self.engine, self.space, question, k=k, principals=principals).hits

    def showing(self, word: str, principals: Sequence[str] = ()) -> set[str]:
        """Documents that a search for ``word`` shows it in."""
        return {h.external_id for h in self.hits(word, 50, principals) if word in h.text}

    def found(self, question: str, k: int = 5, principals: Sequence[str] = ()) -> set[str]:
        return {h.external_id for h in self.hits(question, k, principals)}

    def rows(self) -> Counter[str]:
        """How many rows of the space each table has, and how many texts have a vector anywhere."""
        counted: Counter[str] = Counter()
        for table in TABLES:
            counted[table] = self.execute(f"SELECT count(*) AS n FROM {table} WHERE space_id = %(space)s")[0].n
        counted["kb_embedding"] = self.execute("SELECT count(*) AS n FROM kb_embedding WHERE vector IS NOT NULL")[0].n
        counted["embedding_claims"] = self.execute("SELECT count(*) AS n FROM kb_embedding WHERE vector IS NULL")[0].n
        return counted

    def untouched(self) -> dict[str, Any]:
        """A digest over row versions: it moves with every write, even of equal values."""
        digest = "SELECT count(*) || '-' || coalesce(sum(hashtextextended(t.xmin::text || t::text, 0)), 0) AS d FROM {} t WHERE space_id = %(space)s"
        with transaction(self.app.pool) as c:
            return {
                t: c.execute(sql.SQL(digest).format(sql.Identifier(t)), {"space": self.space.id}).fetchone().d  # type: ignore[union-attr]
                for t in TABLES
            }

    def document(self, external_id: str) -> Any:
        """The living document; None if there is none."""
        rows = self.execute(
            "SELECT * FROM kb_doc WHERE space_id = %(space)s AND external_id = %(id)s AND status <> 'DELETED'", id=external_id
        )
        assert len(rows) <= 1
        return rows[0] if rows else None

    def task(self, external_id: str) -> Any:
        """Of the newest version of a living document."""
        return self.execute(
            "SELECT t.* FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id AND d.last_ver = t.version "
            "WHERE d.space_id = %(space)s AND d.external_id = %(id)s AND d.status <> 'DELETED'",
            id=external_id,
        )[0]

    def version(self, external_id: str, version: int) -> Any:
        return self.execute(
            "SELECT * FROM kb_doc_version WHERE doc_id = %(doc)s AND version = %(version)s",
            doc=self.document(external_id).id,
            version=version,
        )[0]

    def chunks(self) -> set[tuple[Any, ...]]:
        """What is current, as a reader may see it."""
        rows = self.execute(
            "SELECT d.external_id, c.content_hash, c.occurrence, coalesce(c.display, c.content) AS display, c.title_path "
            "FROM kb_space s JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id AND t.in_current "
            "JOIN kb_chunk c ON c.shard = s.shard AND c.id = t.id JOIN kb_doc d ON d.id = t.doc_id "
            "WHERE s.id = %(space)s AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL"
        )
        return {(r.external_id, bytes(r.content_hash), r.occurrence, r.display, tuple(r.title_path)) for r in rows}

    def current_ids(self) -> set[Any]:
        """Vector ids that search relies on."""
        return {r.vec_id for r in self.execute("SELECT vec_id FROM kb_chunk_state WHERE space_id = %(space)s AND in_current")}

    def indexed_ids(self) -> set[Any]:
        """Vector ids that the index holds, whichever index it is."""
        if isinstance(self.app.index, MemoryIndex):
            return {i for name, held in self.index.indexes.items() if name.startswith(f"kb_{self.space.id}_") for i in held}
        if self.app.index is None and self.space.index_kind == "pgvector":
            rows = self.execute(f"SELECT vec_id FROM kb_vector_m{self.space.model_id} WHERE space_id = %(space)s")
            return {r.vec_id for r in rows}
        port = self.engine.index(self.ref)
        return {i for bucket in port.digest(self.ref) for i in port.ids(self.ref, bucket)}

    @property
    def ref(self) -> IndexRef:
        """Of the index that serves."""
        with transaction(self.app.pool) as c:
            return spaces.serving_index(c, self.space.id)

    def assert_whole(self) -> None:
        """The index holds exactly what is current, and every current chunk has its text."""
        assert self.indexed_ids() == self.current_ids()
        torn = self.execute(
            "SELECT t.id FROM kb_chunk_state t WHERE t.space_id = %(space)s AND t.in_current "
            "AND NOT EXISTS (SELECT FROM kb_chunk c WHERE c.shard = t.shard AND c.id = t.id)"
        )
        assert torn == []


def article(title: str, sections: int = 3, *, words: int = 60, tag: str = "") -> str:
    """Markdown whose every section is a chunk of its own: long enough to stand alone, short enough not to be cut."""
    parts = [f"# {title}"]
    for n in range(sections):
        body = " ".join(f"{title}{tag}word{n}x{i}" for i in range(words))
        parts.append(f"## Section {n} of {title}\n\n{body}.")
    return "\n\n".join(parts) + "\n"


def grown(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """Tables whose number of rows changed, and by how much."""
    return {k: after[k] - before[k] for k in after if after[k] != before[k]}
