"""Qdrant: what a server's answers mean, what local mode does with its folder, and the same calls on the server's own engine."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from qdrant_client import models as q
from qdrant_client.http.models import QueryResponse

from kb_pipeline.errors import (
    Fatal,
    KbError,
    Misconfigured,
    MissingExtra,
    RateLimited,
    Rejected,
    StateError,
    TooLarge,
    Transient,
)
from kb_pipeline.indexes import qdrant
from kb_pipeline.indexes.qdrant import Config, QdrantIndex
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.registry import open_adapter
from kb_pipeline_tests.adapters.embedding_server import EmbeddingServer, Said, embedding_server
from kb_pipeline_tests.indexes.bench import DIMENSION, best, entries, vec_id, vectors

REF = IndexRef(1, 1, 1, "kb_1_1", DIMENSION, "qdrant")


@contextmanager
def opened(**said: Any) -> Iterator[tuple[QdrantIndex, EmbeddingServer]]:
    """An adapter of a server that gives one answer to everything."""
    with embedding_server() as server:
        server.behaviour = lambda _: Said(**said)
        yield QdrantIndex(Config(url=server.url.removesuffix("/v1"), timeout_seconds=5)), server


def error(text: str) -> dict[str, Any]:
    return {"status": {"error": text}, "time": 0.0}


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"url": "http://here:6333", "path": "/folder"}])
def test_one_place_must_be_named(options: dict[str, str]) -> None:
    with pytest.raises(Misconfigured, match="give url .of a server. or path"):
        open_adapter("index", "qdrant", options)


def test_opening_asks_nobody_and_shows_no_key() -> None:
    index = open_adapter("index", "qdrant", {"url": "http://nowhere.invalid:6333", "api_key": "s3cret"})
    assert index.capabilities.named and index.capabilities.conditional and not index.capabilities.digest
    assert "s3cret" not in repr(index._config)


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kb_pipeline.indexes.qdrant")
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingExtra, match=r"kb-pipeline\[qdrant\]"):
        open_adapter("index", "qdrant", {"url": "http://nowhere:6333"})


def test_what_a_collection_is_made_of_follows_the_options() -> None:
    layout = QdrantIndex(Config(url="http://x", replicas=3, quantization="scalar", m=8, on_disk=True))._layout(REF)
    assert (layout["replication_factor"], layout["write_consistency_factor"]) == (3, 3)  # every replica has what is confirmed
    assert layout["vectors_config"].datatype == q.Datatype.FLOAT16 and layout["vectors_config"].on_disk
    assert layout["quantization_config"].scalar.type == q.ScalarType.INT8
    assert layout["hnsw_config"].m == 8
    fewer = QdrantIndex(Config(url="http://x", replicas=3, write_consistency=2, quantization="binary"))._layout(REF)
    assert fewer["write_consistency_factor"] == 2 and fewer["quantization_config"].binary is not None


# --- answers of a server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "text", "expected", "code"), [
    (404, "Not found: Collection `kb_1_1` doesn't exist!", StateError, "index_gone"),
    (404, "no such page", Misconfigured, "not_qdrant"),
    (401, "Must provide an API key", Misconfigured, "forbidden"),
    (403, "Forbidden: Global manage access is required", Misconfigured, "forbidden"),
    (400, "Wrong input: Vector dimension error", Rejected, "index_refused"),
    (413, "payload too large", TooLarge, "too_large"),
    (429, "rate limit", RateLimited, "index_busy"),
    (500, "Service internal error: No space left on device", Fatal, "index_full"),
    (500, "Service internal error: a replica failed", Transient, "index_down"),
    (503, "starting", Transient, "index_down"),
])  # fmt: skip
def test_a_status_becomes_the_error_of_its_consequence(status: int, text: str, expected: type[KbError], code: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"upsert": (entries(vectors(1)),), "present": ([vec_id(1)],), "ids": (1,),
        "delete": ([vec_id(1)],), "search": (vectors(1)[0], 5, None)}  # fmt: skip
    with opened(status=status, body=error(text)) as (index, _):
        for call in ("upsert", "present", "delete", "search", "digest", "ids", "settle"):
            with pytest.raises(KbError) as e:
                getattr(index, call)(REF, *arguments.get(call, ()))
            assert (type(e.value), e.value.code) == (expected, code), call


def test_a_server_that_asks_to_wait_says_how_long() -> None:
    with opened(status=429, body=error("slow down"), headers={"Retry-After": "7"}) as (index, _):
        with pytest.raises(RateLimited) as e:
            index.delete(REF, [vec_id(1)])
    assert e.value.retry_after == 7


def test_a_server_that_is_away_breaks_off_or_talks_nonsense_is_asked_again_later() -> None:
    with opened(body={"result": None}) as (index, server):
        pass
    with pytest.raises(Transient, match="127.0.0.1 cannot be reached") as e:
        index.present(REF, [vec_id(1)])
    assert e.value.code == "index_down"
    for said in ({"body": b"<html>", "headers": {}}, {"body": error("x"), "cut": 100}):
        with opened(**said) as (index, _), pytest.raises(Transient):
            index.present(REF, [vec_id(1)])


@pytest.mark.parametrize("status", ["acknowledged", "wait_timeout"])
def test_a_write_that_is_not_applied_yet_is_not_taken_for_done(status: str) -> None:
    with opened(body={"result": {"operation_id": 1, "status": status}, "status": "ok", "time": 0.0}) as (index, _):
        for write in (lambda: index.upsert(REF, entries(vectors(1))), lambda: index.delete(REF, [vec_id(1)])):
            with pytest.raises(Transient) as e:
                write()
            assert e.value.code == "index_slow"


def test_a_server_that_would_ignore_the_condition_is_refused() -> None:
    with opened(body={"title": "qdrant", "version": "1.15.4"}) as (index, _), pytest.raises(Misconfigured) as e:
        index.ensure(REF)
    assert e.value.code == "qdrant_too_old" and "1.16" in e.value.message


def test_a_batch_is_cut_by_bytes_and_grouped_by_acl_seq_under_a_condition() -> None:
    wide = replace(REF, dimension=400_000)
    vector = np.zeros(4, "<f2").tobytes()
    made = [VectorEntry(vec_id(n), n, 0, vector, (), n % 2, 0, 0) for n in range(6)]
    done = {"result": {"operation_id": 1, "status": "completed"}, "status": "ok", "time": 0.0}
    with opened(body=done) as (index, server):
        index.upsert(wide, made)
    sent = [(len(r["batch"]["ids"]), r["update_filter"]["must"][0]["range"]["lte"]) for r in server.requests]
    assert sent == [(2, 0.0), (1, 0.0), (2, 1.0), (1, 1.0)]
    assert all(r["update_filter"]["must"][0]["key"] == "acl_seq" for r in server.requests)


# --- local mode ---------------------------------------------------------------------------------------------------------


def test_a_collection_of_another_installation_is_not_taken_over(tmp_path: Path) -> None:
    index = QdrantIndex(Config(path=str(tmp_path)))
    index.ensure(REF)
    with pytest.raises(Misconfigured) as e:
        index.ensure(replace(REF, dimension=DIMENSION + 1))
    assert e.value.code == "index_name_taken"
    other = QdrantIndex(Config(path=str(tmp_path), prefix="two-"))
    other.ensure(replace(REF, dimension=DIMENSION + 1))
    assert index.names() == other.names() == ["kb_1_1"]
    assert other.drop(REF) == 0
    assert index.names() == ["kb_1_1"] and other.names() == []


def test_an_entry_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    index = QdrantIndex(Config(path=str(tmp_path)))
    index.ensure(REF)
    with pytest.raises(Rejected):
        index.upsert(REF, [replace(entries(vectors(1))[0], vector=b"\x00\x3c")])


def test_a_folder_serves_one_process_and_keeps_what_it_got(tmp_path: Path) -> None:
    index, made = QdrantIndex(Config(path=str(tmp_path))), entries(vectors(3))
    index.ensure(REF)
    index.upsert(REF, made)
    program = (
        "import sys\nfrom uuid import UUID\nfrom kb_pipeline.errors import Transient\nfrom kb_pipeline.indexes.qdrant import *\n"
        f"ref = IndexRef(1, 1, 1, 'kb_1_1', {DIMENSION})\n"
        "try:\n    print(sorted(map(str, QdrantIndex(Config(path=sys.argv[1])).present(ref, [UUID(sys.argv[2])]))))\n"
        "except Transient as e:\n    print(e.code)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(vec_id(1))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "index_busy\n"
    qdrant._local.pop(str(tmp_path))[0].close()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert second.stdout == f"['{vec_id(1)}']\n" and second.stderr == ""


# --- the server's own engine, in process ----------------------------------------------------------------------------------


class Engine:
    """Carries the adapter's own requests to one shard of the engine that a server is made of."""

    def __init__(self, folder: Path, datatype: str) -> None:
        import qdrant_edge as edge

        self.edge = edge
        vectors_of = edge.EdgeVectorParams(
            size=DIMENSION, distance=edge.Distance.Cosine, datatype=getattr(edge.VectorStorageDatatype, datatype)
        )
        folder.mkdir()
        self.shard = edge.EdgeShard.create(str(folder), edge.EdgeConfig(vectors=vectors_of))

    def where(self, given: q.Filter | None) -> Any:
        return None if given is None else self.edge.Filter(must=[self.condition(c) for c in given.must or []])

    def condition(self, given: Any) -> Any:
        edge = self.edge
        if given.range is not None:
            return edge.FieldCondition(key=given.key, range=edge.RangeFloat(lte=given.range.lte))
        if isinstance(given.match, q.MatchAny):
            return edge.FieldCondition(key=given.key, match=edge.MatchAny(given.match.any))
        return edge.FieldCondition(key=given.key, match=edge.MatchValue(given.match.value))

    def upsert(self, _: str, batch: q.Batch, *, update_filter: q.Filter, **__: Any) -> q.UpdateResult:
        columns = zip(batch.ids, batch.vectors, batch.payloads or [])
        points = [self.edge.Point(id=UUID(str(i)), vector=v, payload=p) for i, v, p in columns]
        self.shard.update(self.edge.UpdateOperation.upsert_points(points, condition=self.where(update_filter)))
        return q.UpdateResult(status=q.UpdateStatus.COMPLETED)

    def delete(self, _: str, selector: q.PointIdsList, **__: Any) -> q.UpdateResult:
        self.shard.update(self.edge.UpdateOperation.delete_points([UUID(str(i)) for i in selector.points]))
        return q.UpdateResult(status=q.UpdateStatus.COMPLETED)

    def retrieve(self, _: str, ids: list[str], **__: Any) -> list[q.Record]:
        found = self.shard.retrieve([UUID(i) for i in ids], with_payload=True, with_vector=False)
        return [q.Record(id=str(r.id), payload=r.payload) for r in found]

    def scroll(self, _: str, where: q.Filter | None, *, limit: int, offset: Any, **__: Any) -> tuple[list[q.Record], Any]:
        request = self.edge.ScrollRequest(offset=offset, limit=limit, filter=self.where(where), with_payload=True)
        records, following = self.shard.scroll(request)
        return [q.Record(id=str(r.id), payload=r.payload) for r in records], following

    def query_points(self, _: str, *, query: list[float], limit: int, query_filter: q.Filter | None, **__: Any) -> Any:
        request = self.edge.QueryRequest(
            query=self.edge.Query.Nearest(query), limit=limit, filter=self.where(query_filter), with_payload=True
        )
        points = [q.ScoredPoint(id=str(p.id), version=0, score=p.score, payload=p.payload) for p in self.shard.query(request)]
        return QueryResponse(points=points)


@pytest.fixture(params=["Float16", "Float32"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[QdrantIndex, QdrantIndex]:
    """The adapter on the engine, and on the client's local mode."""
    from contextlib import nullcontext

    engine, local = QdrantIndex(Config(url="http://nowhere")), QdrantIndex(Config(path=":memory:", prefix=f"{tmp_path.name}-"))
    engine.__dict__["_opened"] = (Engine(tmp_path / "shard", request.param), nullcontext())
    local.ensure(REF)
    return engine, local


def test_the_engine_of_a_server_gives_the_same_answers_as_local_mode(pair: tuple[QdrantIndex, QdrantIndex]) -> None:
    made, few = vectors(500), range(7, 500, 40)
    given = entries(made, lambda n: (1,) if n in few else (2, 3))
    newer = replace(given[0], acl=(9,), acl_seq=5, checksum=5)
    answers: list[Any] = []
    for index in pair:
        index.upsert(REF, given)
        index.upsert(REF, [newer])
        index.upsert(REF, [replace(newer, acl=(8,), acl_seq=4, checksum=4), replace(given[1], checksum=77)])
        index.delete(REF, [vec_id(2), vec_id(999)])
        found = [index.search(REF, query, 5, acl) for query in vectors(5, seed=8) for acl in (None, [1], [9], [8])]
        answers.append(
            {
                "present": index.present(REF, [vec_id(n) for n in range(4)]),
                "digest": index.digest(REF),
                "ids": [index.ids(REF, given[n].bucket) for n in range(3)],
                "search": [[c.chunk_id for c in hits] for hits in found],
            }
        )
    assert answers[0] == answers[1]
    assert answers[0]["present"] == {vec_id(0): 5, vec_id(1): 0, vec_id(3): 0}
    assert answers[0]["search"][1] == best(made, vectors(5, seed=8)[0], 5, list(few))


def test_fields_that_filters_look_up_are_indexed_on_a_server() -> None:
    vectors_of = {"size": DIMENSION, "distance": "Cosine"}
    held = {"status": "green", "optimizer_status": "ok", "segments_count": 1, "payload_schema": {},
        "config": {"params": {"vectors": vectors_of}, "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 1},
            "optimizer_config": {"deleted_threshold": 0.2, "vacuum_min_vector_number": 1, "default_segment_number": 0,
                "flush_interval_sec": 5}, "wal_config": None}}  # fmt: skip

    def behave(body: dict[str, Any]) -> Said:
        if "field_name" in body:
            return Said(body={"result": {"operation_id": 1, "status": "completed"}, "status": "ok", "time": 0.0})
        answer = {"title": "qdrant", "version": "1.16.0", "result": {**held, "exists": True}, "status": "ok", "time": 0.0}
        return Said(body=answer)

    with opened() as (index, server):
        server.behaviour = behave
        index.ensure(REF)
    assert [r["field_name"] for r in server.requests if "field_name" in r] == ["acl", "bucket"]
