"""A bucket that is walked folder by folder, several at a time, from its listing to answers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from kb_pipeline.model import Verdict
from kb_pipeline.search import search
from kb_pipeline.settings import Settings
from kb_pipeline.store import sources
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.sync import SyncReport, sync_space
from kb_pipeline_tests import s3
from kb_pipeline_tests.adapters.conftest import moto, proxy
from kb_pipeline_tests.fakes import CountingEmbedder, FakedApp, MemoryBlobs
from kb_pipeline_tests.flow.scenario import article

__all__ = ["moto", "proxy"]
FOLDERS = ("ash", "birch", "cedar", "durian", "elm")
_number = count(1)


class BucketFlow:
    """Three documents in each folder, and one beside them. Pages hold two: a folder has more than one."""

    def __init__(self, settings: Settings, pool: Pool, moto: str, between: s3.Proxy) -> None:
        self.proxy, self.client, self.bucket = between, s3.client(moto), s3.new_bucket(moto)
        self.embedder = CountingEmbedder()
        self.app = FakedApp(
            replace(settings, page_size=2), pool, migrations()[-1].version, embedder=self.embedder, blobs=MemoryBlobs()
        )
        self.space = self.app.add_space(f"bucket-{next(_number)}")
        options = s3.options(between.endpoint, self.bucket, prefix="docs", scope_depth=1)
        self.put("loose.md", article("loose", 1))
        self.source = self.app.add_source(self.space, "docs", "s3", options)
        for folder in FOLDERS:
            for n in range(3):
                self.put(f"{folder}/{n}.md", article(f"{folder}{n}", 2))

    def put(self, name: str, text: str) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"docs/{name}", Body=text.encode())

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"docs/{name}")

    def sync(self, **options: bool) -> SyncReport:
        return sync_space(self.app.engine, self.space, **options)

    def approve(self) -> None:
        with transaction(self.app.pool) as c:
            sources.approve(c, self.source.id, 100)

    def shown(self, word: str) -> set[str]:
        hits = search(self.app.engine, self.space, word, k=5).hits
        return {h.external_id for h in hits if word in h.text}

    def documents(self) -> set[str]:
        with transaction(self.app.pool) as c:
            query = "SELECT external_id FROM kb_doc WHERE space_id = %s AND status = 'AVAILABLE' AND hidden_at IS NULL"
            return {r.external_id for r in c.execute(query, [self.space.id])}


@pytest.fixture
def flow(settings: Settings, pool: Pool, moto: str, proxy: s3.Proxy) -> Iterator[BucketFlow]:
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_embedding")
    yield BucketFlow(settings, pool, moto, proxy)


def lists(folder: str) -> str:
    return f"prefix=docs%2F{folder}%2F"


def test_every_folder_is_walked_and_changes_are_found_in_each(flow: BucketFlow) -> None:
    report = flow.sync()
    assert (report.errors, report.ingest.published, report.passes[0].verdict) == ({}, 16, Verdict.COMPLETE)
    assert flow.shown("birch1word1x5") == {"birch/1.md"} and flow.shown("looseword0x3") == {"loose.md"}
    asked = len(flow.embedder.texts)
    flow.put("cedar/1.md", article("cedar1", 2).replace("cedar1word1x5", "novelty"))
    flow.remove("elm/2.md")
    flow.put("gum/0.md", article("gum0", 2))
    flow.approve()
    report = flow.sync(full=True)
    assert report.errors == {} and flow.shown("novelty") == {"cedar/1.md"} and flow.shown("gum0word0x1") == {"gum/0.md"}
    assert "elm/2.md" not in flow.documents() and len(flow.documents()) == 16
    assert len(flow.embedder.texts) == asked + 3


def test_a_folder_that_may_not_be_listed_deletes_nothing_and_the_others_go_on(flow: BucketFlow) -> None:
    flow.sync()
    flow.remove("ash/0.md")
    flow.remove("birch/0.md")
    flow.put("cedar/0.md", article("cedar0", 2).replace("cedar0word1x5", "novelty"))
    flow.approve()
    denied = s3.Trouble(403, "AccessDenied")
    flow.proxy.rule = lambda seen: denied if lists("birch") in seen.query else None
    report = flow.sync(full=True)
    assert report.passes[0].verdict is Verdict.PARTIAL and report.ingest.published == 1
    assert flow.shown("novelty") == {"cedar/0.md"}
    assert len(flow.documents()) == 16, "what a listing does not know may be in the folder that it could not see"
    flow.proxy.rule = lambda seen: None
    assert flow.sync(full=True).passes[0].verdict is Verdict.COMPLETE
    assert len(flow.documents()) == 14


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_whose_listing_breaks_costs_itself_and_is_made_up_for(flow: BucketFlow, folder: str) -> None:
    broken = s3.Trouble(503, "SlowDown", headers=(("Retry-After", "3600"),))
    flow.proxy.rule = lambda seen: broken if lists(folder) in seen.query else None
    report = flow.sync()
    assert (report.passes[0].verdict, report.ingest.published) == (Verdict.PARTIAL, 13)
    assert {d.partition("/")[0] for d in flow.documents()} == {*FOLDERS, "loose.md"} - {folder}
    flow.proxy.rule = lambda seen: None
    report = flow.sync()
    assert (report.errors, report.passes[0].verdict, len(flow.documents())) == ({}, Verdict.COMPLETE, 16)
    assert len(flow.embedder.texts) == len(set(flow.embedder.texts)) == 31
