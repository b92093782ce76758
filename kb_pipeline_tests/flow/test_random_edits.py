"""Whatever users and failures do, an incremental space ends as a fresh one would, and no text is embedded twice."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kb_pipeline.errors import KbError, RateLimited, Transient
from kb_pipeline.ports import Vectors
from kb_pipeline.states import FLOW
from kb_pipeline_tests.fakes import CountingEmbedder, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow

WORDS = [f"word{n}" for n in range(40)]
STEPS, SYNCS = 8, 7


class RecordingEmbedder(CountingEmbedder):
    """Knows which texts it has really turned into vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        vectors = super().embed_documents(texts)
        self.embedded += texts
        return vectors


class Users:
    """Seeded edits of a source: sections come, go, repeat, change a word; documents are moved, copied, deleted."""

    def __init__(self, flow: Flow, rng: random.Random) -> None:
        self.flow, self.rng, self.made = flow, rng, 0
        self.shelf: list[str] = []  # what was deleted and may come back

    def section(self) -> str:
        words = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(60, 200)))
        target = self.rng.randint(1, 5)
        return f"## {self.rng.choice(WORDS)}\n\n{words} [link](https://example.org/{target})."

    def text_of(self, name: str) -> str:
        return self.flow.memory.items[name][1].decode()

    def put(self, name: str, sections: list[str]) -> None:
        self.flow.memory.put(name, "\n\n".join(sections) + "\n")

    def some(self) -> str:
        return self.rng.choice(sorted(self.flow.memory.items))

    def new_name(self) -> str:
        self.made += 1
        return f"{self.rng.choice('abc')}/{self.made:03}.md"

    def add(self) -> None:
        self.put(self.new_name(), [f"# {self.rng.choice(WORDS)}", *(self.section() for _ in range(self.rng.randint(1, 5)))])

    def edit(self) -> None:
        name = self.some()
        sections = self.text_of(name).rstrip("\n").split("\n\n")
        at = self.rng.randrange(len(sections))
        kind = self.rng.randrange(6)
        if kind == 0:
            sections.insert(at, self.section())
        elif kind == 1 and len(sections) > 2:
            del sections[at]
        elif kind == 2:
            sections.append(sections[at])
        elif kind == 3:
            sections[at] = sections[at].replace("example.org/", "example.org/x", 1)
        elif kind == 4:
            sections[at] = sections[at].replace("## ", "### ", 1)
        else:
            sections[at] = sections[at].replace(self.rng.choice(WORDS), self.rng.choice(WORDS), 1)
        self.put(name, sections)

    def touch(self) -> None:
        name = self.some()
        self.flow.memory.put(name, self.text_of(name))

    def rename(self) -> None:
        self.flow.memory.rename(self.some(), self.new_name())

    def copy(self) -> None:
        self.flow.memory.put(self.new_name(), self.text_of(self.some()))

    def delete(self) -> None:
        if len(self.flow.memory.items) > 3:
            name = self.some()
            self.shelf.append(self.text_of(name))
            self.flow.memory.remove(name)

    def bring_back(self) -> None:
        if self.shelf:
            self.flow.memory.put(self.new_name(), self.shelf.pop())

    def swap(self) -> None:
        one, two = self.some(), self.some()
        first, second = self.text_of(one), self.text_of(two)
        self.flow.memory.put(one, second)
        self.flow.memory.put(two, first)

    def act(self) -> None:
        self.rng.choice(
            [
                self.add,
                self.edit,
                self.edit,
                self.edit,
                self.touch,
                self.rename,
                self.copy,
                self.delete,
                self.bring_back,
                self.swap,
            ]
        )()


def _trouble(flow: Flow, rng: random.Random) -> None:
    """A sync under one of these, whatever comes of it."""
    error: KbError = rng.choice(
        [Transient("timeout", code="timeout"), RateLimited("slow down"), Transient("down", code="endpoint_down")]
    )
    kind = rng.randrange(7)
    if kind == 0:
        flow.memory.page_errors[rng.randrange(3)] = error
    elif kind == 1:
        flow.memory.partial = {rng.randrange(3)}
    elif kind == 2:
        flow.memory.fetch_errors[rng.choice(sorted(flow.memory.items))] = error
    elif kind == 3:
        flow.embedder.failures = [error]
    elif kind == 4:
        flow.index.down = True
    elif kind == 5:
        flow.blobs.full = True
    else:
        flow.walk()
        flow.ingest(nodes=FLOW[: rng.randint(1, 4)], limit=rng.randint(1, 5))
        return
    flow.sync()
    flow.memory.page_errors.clear()
    flow.memory.fetch_errors.clear()
    flow.memory.partial = set()
    flow.embedder.failures.clear()
    flow.index.down = flow.blobs.full = False


def _converge(flow: Flow) -> None:
    flow.approve(10_000)
    flow.due()
    for dead in flow.execute("SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'DEAD'"):
        flow.retry(dead.id)
    report = flow.sync(full=True)
    assert (report.errors, report.incomplete, report.failed) == ({}, False, 0)


def _unfinished(flow: Flow) -> list[Any]:
    return flow.execute(
        "SELECT id, status FROM ingestion_task WHERE space_id = %(space)s AND status NOT IN ('SUCCESS', 'CANCELED')"
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_any_edits_and_failures_a_space_equals_a_fresh_one(make_flow: Callable[..., Flow], seed: int) -> None:
    rng = random.Random(seed)
    flow = make_flow(index=MemoryIndex(), page_size=4, batch_size=6, max_retries=50)
    flow.app.embedder = recorder = RecordingEmbedder()
    users = Users(flow, rng)
    for _ in range(8):
        users.add()
    flow.sync()
    for _ in range(SYNCS):
        for _ in range(STEPS):
            users.act()
        if rng.random() < 0.6:
            _trouble(flow, rng)
            users.act()
        _converge(flow)
        assert _unfinished(flow) == []
        assert {e for e, *_ in flow.chunks()} == set(flow.memory.items)
        flow.assert_whole()
        assert flow.rows()["vector_tombstone"] == flow.rows()["kb_chunk_restated"] == 0
        fresh = make_flow(index=MemoryIndex(), memory=flow.memory)
        fresh.sync()
        assert flow.chunks() == fresh.chunks()
        assert fresh.embedder.calls == []  # every text of today was embedded on the way here
    assert len(recorder.embedded) == len(set(recorder.embedded))
