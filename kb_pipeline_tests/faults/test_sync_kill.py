"""kill -9 of `kb sync` at any moment: the next pass ends where an uninterrupted one would have ended, and repeats little.

A helper process that has loaded everything forks a child per pass, so that a kill costs milliseconds and not an import. The
child counts what it embeds and fetches in a file, and shoots itself at a commit or after some time.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kb_pipeline
from kb_pipeline.model import Json
from kb_pipeline.settings import Settings
from kb_pipeline.states import FLOW, Node
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp

DOCUMENTS = 150
EMBED_BATCH, CLAIM_BATCH = 16, 60
KILLS = 12

FORKER = """
import json, os, signal, sys, threading, traceback
import psycopg
from kb_pipeline.connectors.local_dir import LocalDir
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.indexes import pgvector
from kb_pipeline.parsers import csv, html, markdown, text
from kb_pipeline.settings import load_settings
from kb_pipeline.store import tasks
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import open_app


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def rig(job, log):
    def note(kind, items):
        os.write(log, "".join(json.dumps([kind, x]) + "\\n" for x in items).encode())

    embed, fetch = HashingEmbedder.embed_documents, LocalDir.fetch
    HashingEmbedder.max_batch = job["embed_batch"]

    def embedding(self, texts):
        state["requests"] += 1
        if state["requests"] == job.get("request"):
            die()
        note("embedded", texts)
        return embed(self, texts)

    HashingEmbedder.embed_documents = embedding
    LocalDir.fetch = lambda self, name, limit: (note("fetched", [name]), fetch(self, name, limit))[1]
    state = {"commits": 0, "requests": 0, "armed": False}

    def commit(do):
        state["commits"] += 1
        here = state["commits"] == job.get("commit") or state["armed"]
        if here and job["when"] == "before":
            die()
        result = do()
        if here:
            die()
        return result

    leave, plain = psycopg.Transaction.__exit__, psycopg.Connection.commit

    def exit_transaction(self, kind, value, trace):
        return leave(self, kind, value, trace) if kind else commit(lambda: leave(self, kind, value, trace))

    def commit_connection(self):
        idle = self.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return plain(self) if idle else commit(lambda: plain(self))

    psycopg.Transaction.__exit__, psycopg.Connection.commit = exit_transaction, commit_connection
    advance = tasks.advance

    def advancing(c, claims, started, outputs):
        advance(c, claims, started, outputs)
        state["armed"] = state["armed"] or bool(claims) and claims[0].node.value == job.get("node")

    tasks.advance = advancing
    if job.get("seconds") is not None:
        timer = threading.Timer(job["seconds"], die)
        timer.daemon = True
        timer.start()
    return state


def work(job):
    state = rig(job, os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    with open_app(load_settings({}, **job["settings"])) as app:
        report = sync_space(app.engine, app.space(job["space"]))
    errors = {name: e.message for name, e in report.errors.items()}
    failures = [f.message for _, f in report.ingest.failures]
    return {"commits": state["commits"], "errors": errors, "failures": failures}


for line in sys.stdin:
    job = json.loads(line)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(work(job)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"code": code, "said": json.loads(said) if said else None}), flush=True)
"""


@dataclass
class Bench:
    """A folder, a space that is killed over it, and one that never is. The two have different models, so no cache in common."""

    folder: Path
    app: FakedApp
    killed: Space
    whole: Space
    log: Path
    process: "subprocess.Popen[str]"
    kills: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    def sync(self, space: Space, **job: Any) -> Json:
        """One pass in a child. Returns how it ended."""
        s = self.app.settings
        settings = {"home": str(s.home), "database_url": s.database_url, "embedder": "hashing", "batch_size": CLAIM_BATCH}
        order = {
            "space": space.key,
            "settings": settings,
            "log": str(self.log) + space.key,
            "embed_batch": EMBED_BATCH,
            "when": "after",
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**order, **job}) + "\n")
        self.process.stdin.flush()
        answer: Json = json.loads(self.process.stdout.readline())
        assert answer["code"] in (0, -9), answer
        self.kills += answer["code"] == -9
        if answer["said"]:
            assert answer["said"]["errors"] == {} and answer["said"]["failures"] == [], answer
        return answer

    def noted(self, space: Space, kind: str) -> Counter[str]:
        """What children embedded or fetched, and how often."""
        lines = Path(str(self.log) + space.key).read_text(encoding="utf-8").splitlines()
        return Counter(what for k, what in map(json.loads, lines) if k == kind)

    # --- the folder's users ----------------------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.texts[name] = text

    def load(self, documents: int = DOCUMENTS) -> None:
        for n in range(documents):
            shared = "\n\nA paragraph that stands in every tenth document." if n % 10 == 0 else ""
            sections = "\n\n".join(f"## Part {p} of {n}\n\n{f'Words {n} {p} of this part. ' * 12}" for p in range(1 + n % 3))
            self.write(f"f{n % 5}/d{n:03}.md", f"# Document {n}\n\n{sections}{shared}\n")

    def edit(self) -> None:
        for name in sorted(self.texts)[::4]:
            self.write(name, self.texts[name].replace("Part 0", "Chapter 0").replace("of this part", "of that part", 3))
        for n in range(10):
            self.write(f"new/n{n}.md", f"# New {n}\n\nIts own words {n}.\n")

    def remove(self) -> None:
        names = sorted(self.texts)
        for name in names[::5]:
            (self.folder / name).unlink()
            del self.texts[name]
        (self.folder / "moved").mkdir(exist_ok=True)
        for name in sorted(self.texts)[::20]:
            new = f"moved/{name.replace('/', '-')}"
            (self.folder / name).rename(self.folder / new)
            self.texts[new] = self.texts.pop(name)

    # --- what is left -----------------------------------------------------------------------------------------------------

    def rows(self, query: str, space: Space) -> list[Any]:
        with transaction(self.app.pool) as c:
            shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [space.id]).fetchone().shard  # type: ignore[union-attr]
            return c.execute(query, {"space": space.id, "shard": shard}).fetchall()

    def content(self, space: Space) -> list[tuple[Any, ...]]:
        """Every current chunk: document, place, hash, and what is shown of it."""
        query = """SELECT d.external_id, u.seq, encode(c.content_hash, 'hex'), c.occurrence, c.title_path, coalesce(c.display, c.content)
                   FROM kb_doc d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
                   CROSS JOIN LATERAL unnest(v.chunk_ids) WITH ORDINALITY u (id, seq)
                   LEFT JOIN kb_chunk c ON c.shard = %(shard)s AND c.id = u.id
                   LEFT JOIN kb_chunk_state s ON s.shard = %(shard)s AND s.id = u.id
                   WHERE d.space_id = %(space)s AND d.status <> 'DELETED' AND d.hidden_at IS NULL AND s.in_current ORDER BY 1, 2"""
        return [tuple(r) for r in self.rows(query, space)]

    def check(self, space: Space) -> None:
        """Nothing lost, nothing twice, no ghost, nothing stuck, every object there."""
        current = [r.vec_id for r in self.rows(
            "SELECT vec_id FROM kb_chunk_state WHERE shard = %(shard)s AND space_id = %(space)s AND in_current", space)]  # fmt: skip
        held = [
            r.vec_id for r in self.rows(f"SELECT vec_id FROM kb_vector_m{space.model_id} WHERE space_id = %(space)s", space)
        ]
        assert sorted(held) == sorted(current)
        assert len(current) == len(set(current)) == len(self.content(space))
        documents = self.rows("SELECT external_id FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED'", space)
        assert sorted(r.external_id for r in documents) == sorted(self.texts)
        stuck = "SELECT status, count(*) FROM ingestion_task WHERE space_id = %(space)s AND status NOT IN ('SUCCESS', 'CANCELED') GROUP BY 1"
        assert self.rows(stuck, space) == []
        assert self.rows("SELECT * FROM vector_tombstone WHERE space_id = %(space)s", space) == []
        assert self.rows("SELECT * FROM kb_chunk_restated WHERE space_id = %(space)s", space) == []
        claimed = "SELECT content_hash FROM kb_embedding WHERE model_id = (SELECT model_id FROM kb_space WHERE id = %(space)s) AND vector IS NULL"
        assert self.rows(claimed, space) == []
        paths = "SELECT unnest(ARRAY[raw_path, parsed_path]) AS path FROM kb_doc_version WHERE space_id = %(space)s AND status = 'READY'"
        assert {r.path for r in self.rows(paths, space)} <= set(self.app.engine.blobs.keys(f"spaces/{space.id}/"))

    def compare(self) -> None:
        """The killed space after one more pass, with the one that never was."""
        assert self.sync(self.killed)["code"] == 0
        assert self.sync(self.whole)["code"] == 0
        self.check(self.whole)
        self.check(self.killed)
        assert self.content(self.killed) == self.content(self.whole)
        embedded, once = self.noted(self.killed, "embedded"), self.noted(self.whole, "embedded")
        assert set(embedded) == set(once) and max(once.values()) == 1
        assert embedded.total() - once.total() <= self.kills * EMBED_BATCH
        fetched, needed = self.noted(self.killed, "fetched"), self.noted(self.whole, "fetched")
        assert set(needed) <= set(fetched)
        # One batch a kill, and once more what was so young when it was listed that the next walk looks at it again.
        assert fetched.total() - needed.total() <= self.kills * 2 * CLAIM_BATCH


@pytest.fixture(scope="module")
def forker() -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": str(Path(kb_pipeline.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@pytest.fixture
def bench(
    settings: Settings, pool: Pool, tmp_path: Path, forker: "subprocess.Popen[str]", request: pytest.FixtureRequest
) -> Bench:
    app = FakedApp(settings, pool, migrations()[-1].version)
    folder = tmp_path / "folder"
    folder.mkdir()
    number = abs(hash(request.node.name)) % 10**9
    spaces = []
    for kind in ("killed", "whole"):
        # Another dimension is another model.
        dimension = 8 + 8 * len(spaces) + 32 * len(app.spaces())
        space = app.add_space(f"{kind}-{number}", embedder_options={"dimension": dimension})
        app.add_source(space, "docs", "local_dir", {"path": str(folder)})
        spaces.append(space)
    return Bench(folder, app, *spaces, tmp_path / "log-", forker)


def test_kills_at_random_moments_lose_nothing_and_repeat_little(bench: Bench) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    changes: list[Callable[[], None]] = [bench.load, bench.edit, bench.remove]
    for change in changes:
        change()
        commits = 12
        for n in range(KILLS // 3):
            job: Json = {"commit": chance.randint(1, commits), "when": chance.choice(["before", "after"])}
            if n == 1:
                job = {"seconds": chance.uniform(0.02, 0.5)}
            answer = bench.sync(bench.killed, **job)
            commits = 40 if answer["code"] else commits
        bench.compare()
    assert bench.kills >= KILLS // 2


@pytest.mark.parametrize("node", FLOW)
def test_a_kill_at_the_boundary_of_a_node_loses_nothing(bench: Bench, node: Node) -> None:
    bench.load(50)
    assert bench.sync(bench.killed, node=node.value, when="before")["code"] == -9
    bench.compare()
    bench.edit()
    assert bench.sync(bench.killed, node=node.value, when="after")["code"] == -9
    bench.compare()


def test_the_texts_that_a_killed_pass_had_claimed_are_embedded_by_the_next_one(bench: Bench) -> None:
    """Not when their lease is over: the claim's owner is known to be dead."""
    bench.load(50)
    assert bench.sync(bench.killed, request=3)["code"] == -9
    claimed = "SELECT content_hash FROM kb_embedding WHERE model_id = (SELECT model_id FROM kb_space WHERE id = %(space)s) AND vector IS NULL"
    assert bench.rows(claimed, bench.killed)
    bench.compare()
    assert max(bench.noted(bench.killed, "embedded").values()) == 1


def test_a_kill_at_any_commit_of_a_deletion_is_made_up_for(bench: Bench) -> None:
    bench.load(50)
    bench.compare()
    bench.remove()
    commit = 1
    while bench.sync(bench.killed, commit=commit, when="after")["code"] == -9:
        commit += 1
    bench.compare()
    assert bench.kills == commit - 1 >= 5


def test_a_deletion_that_was_found_but_not_confirmed_is_confirmed_by_the_next_pass(bench: Bench) -> None:
    """The walk ended and the process died: the next listing equals the last one, and nothing new would lead there."""
    bench.load(20)
    bench.compare()
    bench.remove()
    hidden = "SELECT id FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED' AND hidden_sync IS NOT NULL"
    commit = 1
    while not bench.rows(hidden, bench.killed):
        assert bench.sync(bench.killed, commit=commit, when="after")["code"] == -9
        commit += 1
    while bench.rows("SELECT id FROM sync_job WHERE space_id = %(space)s AND status = 'RUNNING'", bench.killed):
        assert bench.sync(bench.killed, commit=2, when="after")["code"] == -9
    bench.compare()
