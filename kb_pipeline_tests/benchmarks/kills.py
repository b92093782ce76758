"""SIGKILL at random instructions of everything that writes, and what is wrong afterwards.

    python -m kb_pipeline_tests.benchmarks.kills [KILLS=1000] [SEED=1]

Each round edits a folder and forks a process that loads, syncs, cleans up or deletes the space; it is killed after a random
part of the time that such work takes. Looked at at once: is every document shown whole? Every few kills one pass and one GC run
undisturbed, and then every chunk is compared with what the files say.
"""

import io
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.purge import purge
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import ChunkParams
from kb_pipeline.parsers.markdown import Config, MarkdownParser
from kb_pipeline.settings import load_settings
from kb_pipeline.stages.chunk import chunk_blocks
from kb_pipeline.store import spaces, tasks
from kb_pipeline.store.database import transaction
from kb_pipeline.store.documents import lock_documents
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests.benchmarks.corpus import scratch
from kb_pipeline_tests.flow.scenario import TABLES

DOCUMENTS, EMBED_BATCH, CLAIM_BATCH = 40, 16, 12
LONG_AGO = 1_600_000_000  # modification times move on from here: never within the clock's own tick
KINDS = ("load", "sync", "clean", "delete")

TORN = """
SELECT count(*) FROM kb_doc d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
WHERE d.space_id = %(space)s AND d.status = 'AVAILABLE'
  AND (SELECT array_agg(DISTINCT x ORDER BY x) FROM unnest(v.chunk_ids) x) IS DISTINCT FROM
      (SELECT array_agg(t.id ORDER BY t.id) FROM kb_chunk_state t WHERE t.space_id = d.space_id AND t.doc_id = d.id AND t.in_current)
"""
SHOWN = """
SELECT d.id, d.external_id, c.content_hash FROM kb_chunk_state t JOIN kb_chunk c ON c.shard = t.shard AND c.id = t.id
JOIN kb_doc d ON d.id = t.doc_id AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL WHERE t.space_id = %(space)s AND t.in_current
"""
WITHOUT_VECTOR = """
SELECT count(*) FROM kb_chunk_state t WHERE t.space_id = %(space)s AND t.in_current
AND NOT EXISTS (SELECT FROM {vectors} v WHERE v.vec_id = t.vec_id AND v.space_id = t.space_id)
"""
GHOSTS = """
SELECT count(*) FROM {vectors} v WHERE v.space_id = %(space)s
AND NOT EXISTS (SELECT FROM kb_chunk_state t WHERE t.vec_id = v.vec_id AND t.space_id = v.space_id AND t.in_current)
"""
UNFINISHED = "SELECT count(*) FROM ingestion_task WHERE space_id = %(space)s AND status NOT IN ('SUCCESS', 'CANCELED')"


class Folder:
    """Markdown files whose users never write the same section twice, so that each text is new or was never gone."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng, self.written = root, rng, 0
        root.mkdir()

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*.md"))

    def add(self) -> None:
        sections = "\n\n".join(self._section() for _ in range(self.rng.randint(1, 5)))
        self._write(self.root / f"{self.written:06}.md", f"# Title {self.written}\n\n{sections}\n")

    def edit(self) -> None:
        path = self.rng.choice(self.files())
        parts = path.read_text().rstrip("\n").split("\n\n## ")
        at = self.rng.randrange(1, len(parts)) if len(parts) > 1 else 1
        parts[at : at + self.rng.randint(0, 1)] = [self._section().removeprefix("## ")]
        self._write(path, "\n\n## ".join(parts) + "\n")

    def move(self) -> None:
        path = self.rng.choice(self.files())
        self.written += 1
        path.rename(self.root / f"{self.written:06}-moved.md")

    def copy(self) -> None:
        text = self.rng.choice(self.files()).read_text()
        self.written += 1
        self._write(self.root / f"{self.written:06}-copy.md", text)

    def delete(self) -> None:
        if len(self.files()) > DOCUMENTS // 2:
            self.rng.choice(self.files()).unlink()

    def act(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.rng.choice([self.edit, self.edit, self.edit, self.add, self.move, self.copy, self.delete, self.delete])()

    def chunks(self) -> Counter[tuple[str, bytes]]:
        """What has to be shown, by the stages alone."""
        found: Counter[tuple[str, bytes]] = Counter()
        for path in self.files():
            parsed = MarkdownParser(Config()).parse(io.BytesIO(path.read_bytes()), path.name)
            hashes = {
                (path.name, c.content_hash, c.occurrence) for c in chunk_blocks(parsed.blocks, parsed.title, ChunkParams())
            }
            found.update((name, content_hash) for name, content_hash, _ in hashes)
        return found

    def _section(self) -> str:
        self.written += 1
        return f"## Section {self.written}\n\n" + " ".join(f"w{self.written}x{i}" for i in range(70))

    def _write(self, path: Path, text: str) -> None:
        self.written += 1
        path.write_text(text)
        os.utime(path, (LONG_AGO + self.written, LONG_AGO + self.written))


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # before they could be killed
    wrong: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    again: int = 0
    poison: int = 0
    temporary: int = 0  # files below deleted spaces
    looks: int = 0

    def line(self) -> str:
        n = sum(self.kills.values())
        kinds = " ".join(f"{k}={self.kills[k]}" for k in KINDS)
        wrong = " ".join(
            f"{k}={self.wrong[k]}" for k in ("torn", "ghosts", "duplicates", "lost", "unfinished", "left_by_deletion")
        )
        rate = self.again / max(n, 1)
        return (
            f"kills={n} ({kinds}) {wrong} embedded={self.asked} embedded_again={self.again} per_kill={rate:.2f} "
            f"held_for_poison={self.poison} temporary_files={self.temporary} comparisons={self.looks}"
        )


class Range:
    """Where the shooting takes place."""

    def __init__(self, work: Path, url: str, seed: int) -> None:
        self.work, self.url, self.rng = work, url, random.Random(seed)
        self.settings = load_settings(
            {}, home=work / "home", database_url=url, embedder="hashing", shrink_guard=0.0, batch_size=CLAIM_BATCH, page_size=10,
            retry_base_seconds=0.0,
        )  # fmt: skip
        self.folder = Folder(work / "docs", self.rng)
        self.poisoned = os.open(work / "poisoned", os.O_CREAT | os.O_RDWR | os.O_APPEND)
        self.tally, self.usual = Tally(), dict.fromkeys(KINDS, 1.0)
        self.spaces = 0
        for _ in range(DOCUMENTS):
            self.folder.add()
        self.renew()

    # --- what is killed -------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """The space is made anew; the log of embedded texts too, for its cache went with the old one."""
        self.spaces += 1
        self.key, self.log, self.loaded = f"space-{self.spaces}", self.work / f"asked-{self.spaces}", False
        self.log.touch()

        def make(app: App) -> None:
            space = app.add_space(self.key, retained_versions=2)
            app.add_source(space, "docs", "local_dir", {"path": str(self.folder.root)})

        self.undisturbed(make)
        with psycopg.connect(self.url) as c:
            self.space, self.model = c.execute("SELECT id, model_id FROM kb_space WHERE key = %s", (self.key,)).fetchone()  # type: ignore[misc]

    def job(self, kind: str) -> Callable[[App], None]:
        def sync(app: App) -> None:
            sync_space(app.engine, app.space(self.key))

        def clean(app: App) -> None:
            space = app.space(self.key)
            reconcile(app.engine, space)
            purge(app.engine, space, keep=timedelta(0))

        return {"load": sync, "sync": sync, "clean": clean, "delete": self._delete}[kind]

    def _delete(self, app: App) -> None:
        for space in [s for s in app.spaces() if s.key == self.key] or self._half_deleted(app):
            assert not any(delete_space(app.engine, space).values())

    def _half_deleted(self, app: App) -> list[Any]:
        with transaction(app.pool) as c:
            space = spaces.space_by_id(c, self.space)
        return [space] if space else []

    def recover(self, app: App) -> None:
        space = app.space(self.key)
        resumed = True
        while resumed:  # a walk that goes on where a killed one stopped does not see what was edited behind it meanwhile
            report = sync_space(app.engine, space)
            assert not report.errors and not report.failed, report
            resumed = any(p.resumed for p in report.passes)
        reconcile(app.engine, space)
        collect_vectors(app.engine, space)

    def free_poison(self, app: App) -> None:
        """Three deaths at one node bury a document: here they were the benchmark's doing."""
        with transaction(app.pool) as c:
            tasks.sweep(c, app.space(self.key))
        with transaction(app.pool) as c:
            dead = tasks.list_tasks(c, self.space, "DEAD", 1000)
            for row in dead:
                lock_documents(c, [row.document_id])
                assert row.error_code == "poison" and tasks.retry(c, row.task_id), row
        os.write(self.poisoned, b"." * len(dead))

    # --- a round --------------------------------------------------------------------------------------------------------

    def round(self) -> None:
        if not self.loaded:
            kind = "load"
        else:
            kind = self.rng.choices(["sync", "clean", "delete"], [75, 20, 5])[0]
            self.folder.act()
        if kind == "clean":
            self._vandalise()
        if not self.fork(self.job(kind), kind):
            self.tally.ended[kind] += 1
        else:
            self.tally.kills[kind] += 1
        if kind == "delete":
            self.undisturbed(self._delete)
            self._count_left()
            self._count_asked()
            self.renew()
            return
        self._look_at_once(vectors=kind != "clean")
        if kind == "clean" or self.rng.random() < 0.3:
            self.compare()

    def compare(self) -> None:
        """An undisturbed pass and GC; then the truth."""
        self.undisturbed(self.free_poison)
        self.undisturbed(self.recover)
        self.loaded = True
        self.tally.looks += 1
        expected = self.folder.chunks()
        with psycopg.connect(self.url) as c:
            rows = c.execute(SHOWN, {"space": self.space}).fetchall()
            shown = Counter((name, bytes(h)) for _, name, h in rows)
            living = Counter(name for _, name in {(doc, name) for doc, name, _ in rows})
            self.tally.wrong["lost"] += (expected - shown).total() + self._number(c, WITHOUT_VECTOR)
            self.tally.wrong["ghosts"] += len(set(shown) - set(expected)) + self._number(c, GHOSTS)
            self.tally.wrong["duplicates"] += sum(n - 1 for n in living.values()) + sum((shown - expected)[k] for k in expected)
            self.tally.wrong["unfinished"] += self._number(c, UNFINISHED)

    def _look_at_once(self, *, vectors: bool) -> None:
        with psycopg.connect(self.url) as c:
            self.tally.wrong["torn"] += self._number(c, TORN) + (self._number(c, WITHOUT_VECTOR) if vectors else 0)

    def _vandalise(self) -> None:
        """The index loses some vectors, so that reconciliation has something to do."""
        lose = "DELETE FROM {vectors} WHERE vec_id IN (SELECT vec_id FROM {vectors} WHERE space_id = %(space)s ORDER BY random() LIMIT 5)"
        with psycopg.connect(self.url) as c:
            c.execute(sql.SQL(lose).format(vectors=self._vectors), {"space": self.space})

    def _count_left(self) -> None:
        with psycopg.connect(self.url) as c:
            for table in TABLES:
                self.tally.wrong["left_by_deletion"] += self._number(
                    c, f"SELECT count(*) FROM {table} WHERE space_id = %(space)s"
                )
            self.tally.wrong["left_by_deletion"] += self._number(c, "SELECT count(*) FROM {vectors} WHERE space_id = %(space)s")
        objects = self.settings.home / "objects" / "spaces" / str(self.space)
        files = [p for p in objects.rglob("*") if p.is_file()]
        unfinished = sum(p.name.startswith(".tmp-") for p in files)  # of killed writers: the store removes them after a day
        self.tally.temporary += unfinished
        self.tally.wrong["left_by_deletion"] += len(files) - unfinished

    def _count_asked(self) -> None:
        asked = self.log.read_text().split()
        self.tally.asked += len(asked)
        self.tally.poison = os.fstat(self.poisoned).st_size
        self.tally.again += len(asked) - len(set(asked))
        self.log.write_text("")

    @property
    def _vectors(self) -> sql.Identifier:
        return sql.Identifier(f"kb_vector_m{self.model}")

    def _number(self, c: psycopg.Connection[Any], statement: str) -> int:
        query = sql.SQL(statement).format(vectors=self._vectors)  # type: ignore[arg-type]
        return int(c.execute(query, {"space": self.space}).fetchone()[0])  # type: ignore[index]

    # --- processes ------------------------------------------------------------------------------------------------------

    def undisturbed(self, work: Callable[[App], None]) -> None:
        assert not self.fork(work, None)

    def fork(self, work: Callable[[App], None], kind: str | None) -> bool:
        """Run ``work`` in a process of its own. True if it was killed; a kind gives the time after which that is tried."""
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._child(work)
        if kind is not None:
            time.sleep(self.rng.uniform(0.0, 1.1 * self.usual[kind]))
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"a process ended with {code}: seed and number of kills so far: {self.tally.line()}")
        if kind is not None:
            took = time.monotonic() - began
            self.usual[kind] = 0.8 * self.usual[kind] + 0.2 * took if code == 0 else max(self.usual[kind] * 1.02, 0.1)
        return code != 0

    def _child(self, work: Callable[[App], None]) -> None:
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            embed = HashingEmbedder.embed_documents
            HashingEmbedder.max_batch = EMBED_BATCH

            def logged(embedder: HashingEmbedder, texts: Any) -> Any:
                os.write(log, "".join(f"{sha256(t.encode()).hexdigest()}\n" for t in texts).encode())
                return embed(embedder, texts)

            HashingEmbedder.embed_documents = logged  # type: ignore[method-assign]
            with open_app(self.settings) as app:
                work(app)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    began = time.monotonic()
    with scratch() as work:
        postgres = EmbeddedPostgres(work / "server")
        try:
            shooting = Range(work, postgres.start(), seed)
            shown = 0
            while (n := sum(shooting.tally.kills.values())) < kills:
                shooting.round()
                if n // 100 > shown:
                    shown = n // 100
                    print(f"{time.monotonic() - began:6.0f} s  {shooting.tally.line()}", flush=True)
            shooting.compare()
            shooting._count_asked()
        finally:
            postgres.stop(mode="immediate")
    print(f"seed={seed} seconds={time.monotonic() - began:.0f} {shooting.tally.line()}")
    sys.exit(1 if shooting.tally.wrong.total() else 0)


if __name__ == "__main__":
    main()
