"""``kb space build`` is killed at random commits: whoever runs it again ends it, and no text is embedded twice beyond a batch a kill.

Builders are forks of one process that has imported everything. Each writes down what it embeds, and shoots itself.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kb_pipeline
from kb_pipeline.maintenance import rebuild
from kb_pipeline.settings import Settings
from kb_pipeline.store.database import Pool
from kb_pipeline_tests.flow.scenario import article
from kb_pipeline_tests.rebuild.conftest import Change
from kb_pipeline_tests.rebuild.test_rebuild import equal

KILLS, BATCH = 8, 7

FORKER = """
import json, os, signal, sys
import psycopg
import kb_pipeline.cli.space_index, kb_pipeline.indexes.pgvector, kb_pipeline.wiring
from kb_pipeline.cli.main import main
from kb_pipeline.embedders.hashing import HashingEmbedder
from kb_pipeline.maintenance import rebuild

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def rig(job):
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    embed, leave, commits = HashingEmbedder.embed_documents, psycopg.Transaction.__exit__, [0]

    def embedding(self, texts):
        os.write(log, "".join(json.dumps(t) + "\\n" for t in texts).encode())
        return embed(self, texts)

    def exit_transaction(self, kind, value, trace):
        commits[0] += kind is None
        here = kind is None and commits[0] == job["commit"]
        if here and job["when"] == "before":
            die()
        result = leave(self, kind, value, trace)
        if here:
            die()
        return result

    HashingEmbedder.max_batch, HashingEmbedder.embed_documents = job["batch"], embedding
    rebuild.BASE, rebuild.BATCH = job["batch"] * 3, job["batch"] * 2
    psycopg.Transaction.__exit__ = exit_transaction

for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)
        rig(job)
        os._exit(main(job["command"]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def command(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Run ``kb`` and return its exit code, -9 where it was killed at the given commit."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("KB_")}
    env = {**own, "PYTHONPATH": str(Path(kb_pipeline.__file__).parents[1]), "KB_HOME": str(settings.home)}
    env |= {"KB_DATABASE_URL": settings.database_url or "", "KB_EMBEDDER": "hashing"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKER], env=env, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(*arguments: str, commit: int = 0, when: str = "after") -> int:
            job = {"command": arguments, "commit": commit, "when": when, "batch": BATCH, "log": str(tmp_path / "embedded")}
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield run
        stdin.close()


def embedded(folder: Path) -> Counter[str]:
    log = folder / "embedded"
    return Counter(json.loads(x) for x in log.read_text(encoding="utf-8").splitlines()) if log.exists() else Counter()


def build_with_kills(command: Callable[..., int], change: Change, chance: random.Random) -> int:
    """Until it has ended, by itself or killed right behind the switch. How often it was killed."""
    for kills in range(KILLS):
        code = command("space", "build", change.key, commit=chance.randint(2, 30), when=chance.choice(["before", "after"]))
        change.again()
        if not any(i.building for i in change.living()):
            assert code in (0, -9)
            return kills + (code == -9)
        assert code == -9
    assert command("space", "build", change.key) == 0
    return KILLS


def test_a_builder_that_is_killed_again_and_again_loses_nothing(
    change: Change, command: Callable[..., int], pool: Pool, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for n in range(20):
        change.memory.put(f"more{n}.md", article(f"more{n}", 4, words=40, tag=f"m{n}"))
    change.sync()
    change.to_model(64)
    kills = build_with_kills(command, change, chance)
    change.again()
    assert change.space.dimension == 64 and [i.status for i in change.living()] == ["SERVING", "FOLLOWING"]
    texts = embedded(tmp_path)
    assert len(texts) == len(change.current())
    assert texts.total() - len(texts) <= kills * BATCH
    equal(change)
    rebuild.back(change.engine, change.space)
    kills += build_with_kills(command, change, chance)
    change.again()
    assert (change.space.dimension, embedded(tmp_path)) == (change.first, texts)
    equal(change)
    assert kills >= KILLS // 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_commit_leaves_one_that_serves(change: Change, command: Callable[..., int], when: str) -> None:
    """One of them is the switch: it happens or it does not."""
    change.to_model(64)
    commit, served = 4, False
    while not served:
        code = command("space", "build", change.key, commit=commit, when=when)
        assert code in (0, -9)
        change.again()
        assert [i.status for i in change.living()] == ["SERVING", "FOLLOWING"]
        assert change.found("word3") >= {"3.md"}
        served = not any(i.building for i in change.living())
        assert served or code == -9
        commit += 5
    assert change.space.dimension == 64
    equal(change)
