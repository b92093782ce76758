"""The whole flow over a real Elasticsearch: answers lost, entries lost, foreign entries, a node that is killed in a sync."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from elasticsearch import Elasticsearch

from kb_pipeline.errors import StateError
from kb_pipeline.indexes.elasticsearch.adapter import ElasticsearchIndex
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.sweep import sweep_removed
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.model import Json, VectorEntry
from kb_pipeline.settings import Settings
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline_tests.elasticsearch.node import Node
from kb_pipeline_tests.elasticsearch.proxy import Proxy
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemoryBlobs, MemorySource
from kb_pipeline_tests.faults.faulty import assert_true, recover, unfinished
from kb_pipeline_tests.flow.scenario import Flow, article

TREES = ("ash", "birch", "cedar", "durian")
_number = count(1)


class ElasticsearchFlow(Flow):
    """Its index is asked through the port."""

    @property
    def held(self) -> ElasticsearchIndex:
        index = self.engine.index(self.ref)
        assert isinstance(index, ElasticsearchIndex)
        return index


Make = Callable[..., ElasticsearchFlow]


@pytest.fixture
def make(settings: Settings, pool: Pool) -> Make:
    """Four documents of three chunks, not yet synced. What fails is due again when the test says so."""
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_embedding")

    def made(url: str, timeout: float = 60.0) -> ElasticsearchFlow:
        changed = replace(settings, max_retries=100, retry_base_seconds=3600.0)
        app = FakedApp(changed, pool, migrations()[-1].version, embedder=CountingEmbedder(), blobs=MemoryBlobs())
        options: Json = {"url": url, "prefix": f"t{uuid4().hex[:8]}-", "replicas": 0, "timeout": timeout}
        space = app.add_space(f"elastic-{next(_number)}", index="elasticsearch", index_options=options)
        memory = MemorySource({f"{n}.md": article(n) for n in TREES})
        return ElasticsearchFlow(app, space, memory, app.add_fake_source(space, memory))

    return made


def test_a_space_is_filled_edited_searched_and_removed(make: Make, elasticsearch_url: str) -> None:
    flow = make(elasticsearch_url)
    assert flow.sync().ingest.published == 4
    assert flow.showing("ashword1x7") == {"ash.md"}
    flow.memory.put("ash.md", flow.memory.items["ash.md"][1].decode().replace("ashword1x7", "novelty", 1))
    flow.memory.remove("birch.md")
    flow.approve(1)
    flow.sync()
    assert flow.showing("novelty") == {"ash.md"} and flow.showing("ashword1x7") == set()
    recover(flow)
    assert_true(flow)
    found = flow.held.keyword(flow.ref, "cedarword2x5", 5, None)
    assert len(found) == 1 and found[0].vec_id in flow.current_ids()
    ref, index = flow.ref, flow.held
    assert set(delete_space(flow.engine, flow.space).values()) == {0}
    assert set(index.names()) == set()
    with pytest.raises(StateError):
        index.upsert(ref, [VectorEntry(uuid4(), 1, 1, bytes(512), (), 0, 0, 0)])
    assert set(index.names()) == set()


def test_an_index_that_was_made_late_for_a_removed_space_is_swept_and_its_neighbour_stays(
    make: Make, elasticsearch_url: str
) -> None:
    flow = make(elasticsearch_url)
    flow.sync()
    gone = flow.app.add_space(f"elastic-gone-{next(_number)}", index="elasticsearch", index_options=flow.ref.options)
    with transaction(flow.app.pool) as c:
        ref = spaces.serving_index(c, gone.id)
    delete_space(flow.engine, gone)
    flow.held.ensure(ref)
    assert set(flow.held.names()) == {flow.ref.name, ref.name}
    assert sweep_removed(flow.engine).indexes == 1
    assert set(flow.held.names()) == {flow.ref.name}
    assert flow.indexed_ids() == flow.current_ids() != set()


def test_a_sync_whose_answers_are_lost_goes_on_when_they_come_again(make: Make, elasticsearch_url: str) -> None:
    with Proxy(elasticsearch_url) as proxy:
        flow = make(proxy.url, timeout=5.0)
        write, writes = flow.held._write, []

        def losing(*arguments: Any) -> None:
            writes.append(arguments)
            proxy.swallowing = True
            try:
                write(*arguments)
            finally:
                proxy.swallowing = False

        flow.held._write = losing  # type: ignore[method-assign]
        flow.sync()
        assert writes and {code for _, code in unfinished(flow)} == {"index_timeout"}
        assert flow.showing("ashword1x7") == set()
        flow.held._write = write  # type: ignore[method-assign]
        recover(flow)
        assert_true(flow)
        assert flow.showing("ashword1x7") == {"ash.md"}


def test_entries_that_are_lost_come_back_and_foreign_ones_go_without_embedding(make: Make, elasticsearch_url: str) -> None:
    flow = make(elasticsearch_url)
    flow.sync()
    calls = len(flow.embedder.calls)
    lost, foreign = sorted(flow.indexed_ids())[::3], uuid4()
    _lose(elasticsearch_url, flow, lost)
    vector = np.ones(256, "<f2") / np.float16(16)
    flow.held.upsert(flow.ref, [VectorEntry(foreign, 1, 1, vector.astype("<f2").tobytes(), (), 0, 7, foreign.int >> 116)])
    assert flow.indexed_ids() == flow.current_ids() - set(lost) | {foreign}
    report = reconcile(flow.engine, flow.space)
    assert (report.missing, report.orphaned, report.remaining) == (len(lost), 1, 0)
    collect_vectors(flow.engine, flow.space)
    assert_true(flow)
    assert len(flow.embedder.calls) == calls


def _lose(url: str, flow: ElasticsearchFlow, ids: Sequence[UUID]) -> None:
    """As a server loses them: without remembering that they were deleted."""
    client, alias = Elasticsearch(url), f"{flow.ref.options['prefix']}{flow.ref.name}"
    client.bulk(operations=[{"delete": {"_id": str(i)}} for i in ids], index=alias, require_alias=True, refresh=True)
    (physical,) = client.indices.get_alias(name=alias)
    client.indices.close(index=physical)
    client.indices.open(index=physical, wait_for_active_shards=1)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_node_that_is_killed_in_a_sync_costs_a_retry_and_nothing_is_missing(
    make: Make, elasticsearch_node: Node, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the bulk arrives, or after it was taken and before it can be searched."""
    elasticsearch_node.start()
    flow = make(elasticsearch_node.url)
    send, killed = ElasticsearchIndex._send, []

    def killing(self: ElasticsearchIndex, *arguments: Any) -> None:
        if moment == "after" and not killed:
            send(self, *arguments)
        if not killed:
            killed.append(True)
            elasticsearch_node.kill()
            if moment == "after":
                return
        send(self, *arguments)

    monkeypatch.setattr(ElasticsearchIndex, "_send", killing)
    flow.sync()
    assert killed and {code for _, code in unfinished(flow)} == {"index_down"}
    elasticsearch_node.start()
    recover(flow)
    assert_true(flow)
    assert flow.showing("ashword1x7") == {"ash.md"}
