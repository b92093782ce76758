"""Milvus: what its codes mean, how a collection is made, and what Milvus Lite does with its file."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
from pymilvus import DataType
from pymilvus.exceptions import MilvusException, ParamError

from kb_pipeline.errors import Fatal, KbError, Misconfigured, MissingExtra, RateLimited, Rejected, StateError, Transient
from kb_pipeline.indexes import milvus
from kb_pipeline.indexes.milvus import Config, MilvusIndex
from kb_pipeline.model import IndexRef, VectorEntry
from kb_pipeline.registry import open_adapter
from kb_pipeline_tests.indexes.bench import DIMENSION, best, entries, vec_id, vectors

REF = IndexRef(1, 1, 1, "kb_1_1", DIMENSION, "milvus")


@pytest.fixture
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"path": str(tmp_path_factory.getbasetemp() / "milvus.db"), "prefix": f"t{uuid4().hex[:8]}_"}


@pytest.fixture
def index(options: dict[str, str]) -> MilvusIndex:
    made = MilvusIndex(Config(**options))
    made.ensure(REF)
    return made


class Failing:
    """A client each of whose calls raises, or is told what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if self.error is not None:
                raise self.error
            return [[]] if name == "search" else []

        return call


def faked(client: Failing, **options: Any) -> MilvusIndex:
    made = MilvusIndex(Config(url="http://nowhere:19530", **options))
    made.__dict__["_client"] = client
    return made


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"url": "http://here:19530", "path": "x.db"}, {"path": "no-suffix"}])
def test_one_place_must_be_named(options: dict[str, str]) -> None:
    with pytest.raises(Misconfigured, match="give url|must end with .db"):
        open_adapter("index", "milvus", options)


def test_opening_asks_nobody_and_shows_no_token() -> None:
    index = open_adapter("index", "milvus", {"url": "http://nowhere.invalid:19530", "token": "root:s3cret"})
    assert index.capabilities.named and not index.capabilities.conditional and not index.capabilities.digest
    assert "s3cret" not in repr(index._config)


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kb_pipeline.indexes.milvus")
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(MissingExtra, match=r"kb-pipeline\[milvus\]"):
        open_adapter("index", "milvus", {"url": "http://nowhere:19530"})


def test_what_a_collection_is_made_of_follows_the_options() -> None:
    half, whole = (
        MilvusIndex(Config(url="http://x")),
        MilvusIndex(Config(url="http://x", datatype="float32", index_type="FLAT")),
    )
    types = [{f.name: f.dtype for f in i._schema(REF).fields}["vector"] for i in (half, whole)]
    assert types == [DataType.FLOAT16_VECTOR, DataType.FLOAT_VECTOR]
    by_field = {i.field_name: i.get_index_configs() for i in half._indexes([])}
    assert by_field["vector"]["index_type"] == "HNSW" and set(by_field) == {"vector", "bucket", "acl"}
    assert [i.field_name for i in whole._indexes(["vector", "bucket"])] == ["acl"]


def test_vectors_are_sent_in_the_datatype_of_the_collection() -> None:
    for options, kind in (({}, np.float16), ({"datatype": "float32"}, np.float32)):
        index = faked(client := Failing(), **options)
        index.upsert(REF, entries(vectors(1)))
        index.search(REF, vectors(1)[0], 5, None)
        (_, (_, rows), _), (_, _, asked) = client.calls
        assert rows[0]["vector"].dtype == kind and asked["data"][0].dtype == kind


# --- answers of a server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "text", "expected", "ours"), [
    (100, "collection not found", StateError, "index_gone"),
    (1401, "permission deny", Misconfigured, "forbidden"),
    (65535, "auth check failure, please check username and password are correct", Misconfigured, "forbidden"),
    (800, "database not found", Misconfigured, "no_database"),
    (3, "memory limit exceeded", Fatal, "index_full"),
    (7, "disk limit exceeded", Fatal, "index_full"),
    (9, "quota exceeded", Fatal, "index_full"),
    (102, "exceeded the limit number of collections", Fatal, "index_full"),
    (6, "cross cluster routing", Transient, "index_down"),
    (8, "rate limit exceeded", RateLimited, "index_busy"),
    (1100, "invalid parameter: dimension", Rejected, "index_refused"),
    (2, "service unavailable", Transient, "index_down"),
    (65535, "some bug", Transient, "index_down"),
    (grpc.StatusCode.UNAVAILABLE, "retry run out", Transient, "index_down"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", Transient, "index_slow"),
    (grpc.StatusCode.UNAUTHENTICATED, "token", Misconfigured, "forbidden"),
])  # fmt: skip
def test_a_code_becomes_the_error_of_its_consequence(code: Any, text: str, expected: type[KbError], ours: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"upsert": (REF, entries(vectors(1))), "present": (REF, [vec_id(1)]),
        "delete": (REF, [vec_id(1)]), "search": (REF, vectors(1)[0], 5, None), "ids": (REF, 1), "names": ()}  # fmt: skip
    index = faked(Failing(MilvusException(code, text)))
    for call in ("upsert", "present", "delete", "search", "digest", "ids", "settle", "drop", "names"):
        with pytest.raises(KbError) as e:
            getattr(index, call)(*arguments.get(call, (REF,)))
        assert (type(e.value), e.value.code) == (expected, ours), call


def test_what_the_client_refuses_is_refused_and_not_tried_again() -> None:
    with pytest.raises(Rejected):
        faked(Failing(ParamError(message="no such field"))).upsert(REF, entries(vectors(1)))


def test_a_server_that_is_away_is_asked_again_later() -> None:
    index = MilvusIndex(Config(url="http://127.0.0.1:9", timeout_seconds=0.2))
    with pytest.raises(Transient) as e:
        index.present(REF, [vec_id(1)])
    assert e.value.code == "index_down"


def test_every_read_and_the_search_are_strong() -> None:
    index = faked(client := Failing())
    index.present(REF, [vec_id(1)])
    index.search(REF, vectors(1)[0], 5, [1])
    with pytest.raises(AttributeError):  # the iterator that it would get
        index.digest(REF)
    assert [(name, kwargs["consistency_level"]) for name, _, kwargs in client.calls] == [
        ("query", "Strong"), ("search", "Strong"), ("query_iterator", "Strong"),
    ]  # fmt: skip
    assert all(kwargs["timeout"] == 60.0 for _, _, kwargs in client.calls)


def test_no_more_hits_are_asked_for_than_the_server_gives() -> None:
    index = faked(client := Failing())
    index.search(REF, vectors(1)[0], 10**6, None)
    ((_, _, asked),) = client.calls
    assert asked["limit"] == 16384 and asked["search_params"]["params"]["ef"] == 16384


def test_asking_for_nothing_asks_nothing() -> None:
    """A query for no ids would be one for all."""
    index = faked(client := Failing())
    assert index.present(REF, []) == {}
    index.delete(REF, [])
    index.upsert(REF, [])
    assert client.calls == []


def test_a_batch_is_cut_by_bytes() -> None:
    index, wide = faked(client := Failing()), replace(REF, dimension=2 * 2**20)
    made = [VectorEntry(vec_id(n), n, 0, b"\x00\x3c" * 4, (), 0, 0, 0) for n in range(5)]
    index.upsert(wide, made)
    assert [len(args[1]) for _, args, _ in client.calls] == [2, 2, 1]


# --- Milvus Lite --------------------------------------------------------------------------------------------------------


def test_the_last_write_wins_whatever_its_acl_is_and_nothing_is_there_twice(index: MilvusIndex) -> None:
    """What ``conditional`` denies: reconciliation sees the other checksum and repairs it."""
    old = entries(vectors(1), lambda _: (1,))[0]
    index.upsert(REF, [replace(old, acl=(2,), acl_seq=5, checksum=7)])
    index.upsert(REF, [old])
    assert index.present(REF, [old.vec_id]) == {old.vec_id: 0}
    assert index.ids(REF, old.bucket) == {old.vec_id: old.checksum}
    assert len(index.search(REF, vectors(1)[0], 5, [1])) == 1
    assert index.search(REF, vectors(1)[0], 5, [2]) == []


def test_more_principals_than_a_field_holds_are_everybodys(index: MilvusIndex) -> None:
    made = entries(vectors(2), lambda n: tuple(range(1, milvus.MOST_PRINCIPALS + 1 + n)))
    index.upsert(REF, made)
    assert [c.chunk_id for c in index.search(REF, vectors(2)[1], 5, [10**6])] == [1]
    assert {c.chunk_id for c in index.search(REF, vectors(2)[1], 5, [4096])} == {0, 1}


def test_a_released_collection_is_loaded_again_by_a_search(index: MilvusIndex, options: dict[str, str]) -> None:
    index.upsert(REF, entries(vectors(3)))
    index._client.release_collection(options["prefix"] + REF.name)
    assert len(index.search(REF, vectors(1)[0], 5, None)) == 3
    index._client.release_collection(options["prefix"] + REF.name)
    assert sum(b.count for b in index.digest(REF).values()) == 3


@pytest.mark.parametrize("kind", ["FLAT", "AUTOINDEX"])
def test_other_kinds_of_index_find_the_same(options: dict[str, str], kind: str) -> None:
    index, made = MilvusIndex(Config(**options, index_type=kind)), vectors(300)
    index.ensure(REF)
    index.upsert(REF, entries(made))
    query = vectors(1, seed=3)[0]
    assert [c.chunk_id for c in index.search(REF, query, 10, None)] == best(made, query, 10)
    assert index.drop(REF) == 0


def test_a_collection_of_another_installation_is_not_taken_over(index: MilvusIndex, options: dict[str, str]) -> None:
    with pytest.raises(Misconfigured) as e:
        index.ensure(replace(REF, dimension=DIMENSION + 1))
    assert e.value.code == "index_name_taken"
    other = MilvusIndex(Config(path=options["path"], prefix="other_" + options["prefix"]))
    other.ensure(replace(REF, dimension=DIMENSION + 1))
    assert index.names() == other.names() == ["kb_1_1"]
    assert other.drop(REF) == 0
    assert index.names() == ["kb_1_1"] and other.names() == []


def test_an_index_that_was_made_by_half_is_made_whole(index: MilvusIndex, options: dict[str, str]) -> None:
    name = options["prefix"] + REF.name
    index._client.release_collection(name)
    index._client.drop_index(name, "bucket")  # Milvus Lite drops them all
    assert index._client.list_indexes(name) == []
    index.ensure(REF)
    assert set(index._client.list_indexes(name)) == {"vector", "bucket"}
    assert index.search(REF, vectors(1)[0], 5, None) == []


def test_an_entry_of_the_wrong_size_is_refused(index: MilvusIndex) -> None:
    with pytest.raises(Rejected):
        index.upsert(REF, [replace(entries(vectors(1))[0], vector=b"\x00\x3c")])


def test_a_file_that_cannot_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file.db").write_text("not a folder")
    with pytest.raises(Transient):
        MilvusIndex(Config(path=str(tmp_path / "file.db"))).present(REF, [vec_id(1)])
