"""The same faults done to each index that users may have, on a server of its own: what was lost, late, half done or foreign is
made true by one pass, one reconciliation and one GC, without an embedding."""

import random
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

import numpy as np
import pytest

from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import VectorEntry
from kb_pipeline.ports import VectorIndex
from kb_pipeline.registry import INDEXES, open_adapter
from kb_pipeline.settings import Settings
from kb_pipeline_tests.faults.faulty import assert_true, quietly, recover
from kb_pipeline_tests.faults.reading import Readers
from kb_pipeline_tests.faults.weather import StormyIndex, Weather
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.index_servers import SERVERS

TREES = ("ash", "birch", "cedar", "durian", "elm", "fir")
ROUNDS, TROUBLE = 6, 0.5


@pytest.fixture(params=sorted(INDEXES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def real(kind: str, request: pytest.FixtureRequest) -> VectorIndex:
    server = SERVERS[kind](request)
    made: VectorIndex = open_adapter("index", kind, server.options, *server.dependencies)
    return made


def test_whatever_the_line_did_the_index_is_true_when_it_is_good_again(
    make_flow: Callable[..., Flow], real: VectorIndex
) -> None:
    """Calls that fail before or after their work, do half of it, say it is done when it is not, or land long after."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    weather, chance = Weather(seed, 0.0), random.Random(seed)
    documents = {f"{n}.md": article(n) for n in TREES}
    flow = make_flow(documents, index=StormyIndex(real, weather), max_retries=1000, retry_base_seconds=0.0)
    flow.sync()
    flow.approve(100)
    weather.trouble = TROUBLE
    for n in range(ROUNDS):
        edit(flow, chance, n)
        for step in (flow.sync, lambda: reconcile(flow.engine, flow.space), lambda: collect_vectors(flow.engine, flow.space)):
            quietly(step)
            assert_shown_whole(flow)
        weather.land(chance.randint(0, 2))
    assert sum(n for kind, n in weather.met.items() if kind.startswith(("upsert", "delete"))) >= ROUNDS // 2, weather.met
    weather.trouble = 0.0
    weather.land(10**6)
    recover(flow)
    assert_true(flow)


def edit(flow: Flow, chance: random.Random, n: int) -> None:
    """One is rewritten in a word, one goes, one comes or comes back."""
    name = chance.choice(sorted(flow.memory.items))
    text = flow.memory.items[name][1].decode()
    flow.memory.put(name, text.replace(chance.choice(text.split()[3:]), f"novelty{n}", 1))
    if len(flow.memory.items) > 3:
        flow.memory.remove(chance.choice(sorted(set(flow.memory.items) - {name})))
    tree = chance.choice([*TREES, "gum"])
    flow.memory.put(f"{tree}.md", article(tree, 3, tag=f"v{n}x"))


def assert_shown_whole(flow: Flow) -> None:
    """All that is current is found, of each document one version and every chunk of it."""
    shown = Counter((h.external_id, h.version) for h in flow.hits("ash birch cedar", 100))
    assert shown == {(d, v): n for d, v, n in flow.execute(CURRENT)}


CURRENT = """
SELECT d.external_id, v.version, cardinality(v.chunk_ids) AS n FROM kb_doc d
JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
WHERE d.space_id = %(space)s AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL
"""


@pytest.mark.parametrize("kind", sorted(set(INDEXES) - {"elasticsearch"}))
def test_entries_that_are_lost_come_back_and_foreign_ones_go(make_flow: Callable[..., Flow], real: VectorIndex) -> None:
    """Not Elasticsearch, which remembers what was deleted by a client: see test_elasticsearch_faults."""
    flow = make_flow({f"{n}.md": article(n) for n in TREES}, index=real)
    flow.sync()
    calls, right = len(flow.embedder.calls), flow.indexed_ids()
    lost, foreign = random.Random(5).sample(sorted(right), len(right) // 10 + 1), uuid4()
    real.delete(flow.ref, lost)
    vector = (np.ones(256, "<f4") / 16).astype("<f2").tobytes()
    real.upsert(flow.ref, [VectorEntry(foreign, 1, 1, vector, (), 0, 7, foreign.int >> 116)])
    assert flow.indexed_ids() == right - set(lost) | {foreign}
    assert flow.showing("ashword1x7") <= {"ash.md"}
    found = reconcile(flow.engine, flow.space)
    assert (found.missing, found.orphaned, found.remaining) == (len(lost), 1, 0)
    collect_vectors(flow.engine, flow.space)
    assert flow.indexed_ids() == right
    assert len(flow.embedder.calls) == calls
    assert_true(flow)


def test_every_answer_during_updates_is_one_whole_version(
    settings: Settings, database_url: str, kind: str, real: VectorIndex
) -> None:
    tally = Readers(settings, database_url, f"readers-of-{kind}", real).run(15)
    print(tally.line())
    assert tally.seen == []
    assert (tally.updates, tally.gaps, tally.mixes, tally.back) == (15, 0, 0, 0)
    assert tally.answers["search"] and tally.answers["search_too"] and len(tally.versions) > 1
