"""Elasticsearch: what its server refuses, shares and forgets, and what an operator is told."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from elasticsearch import Elasticsearch

from kb_pipeline.errors import Fatal, KbError, Misconfigured, Rejected, StateError, TooLarge, Transient
from kb_pipeline.indexes.elasticsearch.bulk import MOST_OPERATIONS, cut, put
from kb_pipeline.indexes.elasticsearch.layout import Place
from kb_pipeline.model import Bucket, IndexRef
from kb_pipeline.registry import open_adapter
from kb_pipeline_tests.elasticsearch.node import Node
from kb_pipeline_tests.elasticsearch.proxy import Proxy
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.indexes.bench import DIMENSION, Bench, bench_maker, best, entries, vec_id, vectors

REF = IndexRef(1, 1, 1, "kb_1_1", DIMENSION, "elasticsearch")


@pytest.fixture
def make_benches(make_app: Callable[..., FakedApp], request: pytest.FixtureRequest) -> Callable[..., Callable[[], Bench]]:
    """Benches of one adapter; keywords are options of it."""
    return lambda **options: bench_maker("elasticsearch", make_app(), request, **options)


@pytest.fixture
def bench(make_benches: Callable[..., Callable[[], Bench]]) -> Bench:
    return make_benches()()


@pytest.fixture
def cluster(elasticsearch_url: str) -> Elasticsearch:
    return Elasticsearch(elasticsearch_url)


def alias(bench: Bench) -> str:
    return f"{bench.ref.options['prefix']}{bench.ref.name}"


def held(bench: Bench, n: int) -> set[int]:
    present = bench.index.present(bench.ref, [vec_id(i) for i in range(n)])
    return {i for i in range(n) if vec_id(i) in present}


# --- without a server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "option 'url' is needed"),
        ({"url": "localhost:9200"}, "url must be https"),
        ({"url": "http://a, "}, None),
        ({"url": "http://a", "api_key": "k", "username": "u", "password": "p"}, "api_key, or username"),
        ({"url": "http://a", "username": "u"}, "go together"),
        ({"url": "http://a", "prefix": "Big*"}, "small letters"),
        ({"url": "http://a", "quantization": "int3"}, "quantization"),
        ({"url": "http://a", "ca_certs": "nowhere.pem"}, None),
    ],
)
def test_options_are_checked_before_anything_is_asked(options: dict[str, str], problem: str | None) -> None:
    if problem is None:
        open_adapter("index", "elasticsearch", options)
        return
    with pytest.raises(Misconfigured, match=problem):
        open_adapter("index", "elasticsearch", options)


def test_a_file_of_authorities_that_is_missing_is_named_as_an_option() -> None:
    index = open_adapter("index", "elasticsearch", {"url": "https://127.0.0.1:9", "ca_certs": "nowhere.pem"})
    with pytest.raises(Misconfigured, match="ca_certs"):
        index.ensure(REF)


def test_opening_an_index_does_not_load_the_client() -> None:
    code = (
        "import sys; from kb_pipeline.registry import open_adapter\n"
        "open_adapter('index', 'elasticsearch', {'url': 'http://a'})\n"
        "assert not {'elasticsearch', 'elastic_transport'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bulk_is_cut_by_bytes_and_by_number_and_loses_nothing() -> None:
    place = Place("a", "b", False)
    made = [replace(e, text="文" * 500) for e in entries(vectors(40))]
    operations = [put(place, REF, e) for e in made]
    parts = list(cut(operations, 10_000))
    assert [o for part in parts for o in part] == operations
    assert len(parts) > 5 and all(sum(len(line) + 1 for o in part for line in o) <= 10_000 for part in parts)
    assert [len(p) for p in cut(operations, 10)] == [1] * 40
    assert [len(p) for p in cut([(b"x",)] * (MOST_OPERATIONS + 1), 2**30)] == [MOST_OPERATIONS, 1]


def test_a_vector_is_sent_as_exactly_the_numbers_that_are_stored() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    (entry,) = entries(vectors(1))
    _, body = put(Place("a", "b", False), REF, replace(entry, vector=finite.astype("<f2").tobytes(), text='"\ud800 \n'))
    assert np.array_equal(np.asarray(json.loads(body)["vector"], np.float32), finite.astype(np.float32))


# --- one entry ----------------------------------------------------------------------------------------------------------


def test_an_entry_that_is_refused_inside_a_200_is_named_and_costs_no_other(bench: Bench) -> None:
    made = entries(vectors(5))
    made[2] = replace(made[2], vector=bytes(2 * DIMENSION))
    with pytest.raises(Rejected, match=f"refuses {made[2].vec_id}: .*zero magnitude"):
        bench.index.upsert(bench.ref, made)
    bench.index.upsert(bench.ref, made[:1])
    assert held(bench, 5) == {0, 1, 3, 4}


def test_a_deleted_entry_is_not_brought_back_by_a_write_that_comes_late(bench: Bench) -> None:
    made = [replace(e, acl_seq=7) for e in entries(vectors(2))]
    bench.index.upsert(bench.ref, made)
    bench.index.delete(bench.ref, [made[0].vec_id, vec_id(1000)])
    bench.index.upsert(bench.ref, [*made, replace(made[0], acl_seq=0), replace(made[0], vec_id=vec_id(1000), acl_seq=0)])
    assert held(bench, 2) == {1}
    assert bench.index.present(bench.ref, [vec_id(1000)]) == {}


def test_a_narrow_filter_over_a_large_index_still_gives_k(bench: Bench) -> None:
    made = vectors(3000, seed=3)
    few = [n for n in range(3000) if n % 100 == 7]
    bench.index.upsert(bench.ref, entries(made, lambda n: (1,) if n in few else (2,)))
    for query in vectors(5, seed=5):
        assert [x.chunk_id for x in bench.index.search(bench.ref, query, 30, [1])] == best(made, query, 30, few)
        assert [x.chunk_id for x in bench.index.search(bench.ref, query, 10, [2])] == best(
            made, query, 10, sorted(set(range(3000)) - set(few))
        )


def test_a_graph_that_gave_too_few_is_asked_at_its_widest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.index.upsert(bench.ref, entries(vectors(50)))
    nearest, asked = bench.index._nearest, []  # type: ignore[attr-defined]

    def short(ref: IndexRef, vector: Any, k: int, width: int, filters: Any) -> Any:
        asked.append(width)
        return nearest(ref, vector, k, width, filters)[: 3 if width < 10_000 else None]

    monkeypatch.setattr(bench.index, "_nearest", short)
    assert len(bench.index.search(bench.ref, vectors(1)[0], 20, None)) == 20
    assert asked == [200, 10_000]


@pytest.mark.parametrize("quantization", ["int8", "flat"])
def test_other_forms_of_vectors_find_nearly_the_same(
    make_benches: Callable[..., Callable[[], Bench]], cluster: Elasticsearch, quantization: str
) -> None:
    bench = make_benches(quantization=quantization, refresh="wait_for")()
    made = vectors(300)
    bench.index.upsert(bench.ref, entries(made))
    found = [x.chunk_id for x in bench.index.search(bench.ref, made[3], 10, None)]
    assert len(set(found) & set(best(made, made[3], 10))) >= 9
    mapping = next(iter(cluster.indices.get_mapping(index=alias(bench)).body.values()))["mappings"]
    assert mapping["properties"]["vector"]["index_options"]["type"] == {"int8": "int8_hnsw", "flat": "flat"}[quantization]
    assert mapping["_meta"]["kb_pipeline"] == {"analyzer": "standard", "quantization": quantization}


def test_options_that_the_server_refuses_are_named_and_make_no_index(bench: Bench) -> None:
    options = {**bench.ref.options, "quantization": "bbq"}
    index = open_adapter("index", "elasticsearch", options)
    with pytest.raises(Misconfigured, match="refuses these options .*64"):
        index.ensure(replace(bench.ref, name="kb_7_777777"))
    assert set(index.names()) == {bench.ref.name}


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_that_knew_an_index_before_another_process_dropped_it_makes_none(
    make_benches: Callable[..., Callable[[], Bench]], cluster: Elasticsearch, shared: bool
) -> None:
    bench = make_benches(shared=shared)()
    bench.index.upsert(bench.ref, entries(vectors(3)))
    assert open_adapter("index", "elasticsearch", bench.ref.options).drop(bench.ref) == 0
    for late in (
        lambda: bench.index.upsert(bench.ref, entries(vectors(3))),
        lambda: bench.index.delete(bench.ref, [vec_id(0)]),
        lambda: bench.index.present(bench.ref, [vec_id(0)]),
        lambda: bench.index.search(bench.ref, vectors(1)[0], 5, None),
        lambda: bench.index.ids(bench.ref, 0),
    ):
        with pytest.raises(StateError) as e:
            late()
        assert e.value.code == "index_gone"
    assert list(cluster.indices.get_alias(name=f"{alias(bench)}*").body) == []
    assert set(cluster.indices.get(index=f"{bench.ref.options['prefix']}*").body) <= set(
        cluster.indices.get(index=f"{bench.ref.options['prefix']}kb-shared.*").body
    )


# --- one index for several spaces ---------------------------------------------------------------------------------------


def test_spaces_in_a_shared_index_do_not_meet_even_with_equal_ids(
    make_benches: Callable[..., Callable[[], Bench]], cluster: Elasticsearch
) -> None:
    make = make_benches(shared=True, shards=2)
    one, two = make(), make()
    one.index.upsert(one.ref, entries(vectors(40), lambda _: (1,)))
    two.index.upsert(two.ref, [replace(e, chunk_id=e.chunk_id + 1000) for e in entries(vectors(25, seed=1), lambda _: (1,))])
    assert len(list(cluster.indices.get(index=f"{one.ref.options['prefix']}kb-shared.*"))) == 1
    query = vectors(1)[0]
    for bench, n, first in ((one, 40, 0), (two, 25, 1000)):
        assert {x.chunk_id for x in bench.index.search(bench.ref, query, 100, [1])} == set(range(first, first + n))
        assert held(bench, 50) == set(range(n))
        assert sum(b.count for b in bench.index.digest(bench.ref).values()) == n
        assert bench.index.ids(bench.ref, int(vec_id(0).hex[:3], 16))[vec_id(0)] == -1000
    two.index.delete(two.ref, [vec_id(0)])
    assert (held(one, 1), held(two, 1)) == ({0}, set())
    assert two.drop() == 0
    assert held(one, 50) == set(range(40))
    with pytest.raises(StateError):
        two.index.upsert(two.ref, entries(vectors(1)))
    assert set(one.index.names()) == {one.ref.name}  # type: ignore[attr-defined]


def test_an_index_stays_as_it_was_made_whatever_the_options_say_later(make_benches: Callable[..., Callable[[], Bench]]) -> None:
    make = make_benches(shared=True)
    bench = make()
    bench.index.upsert(bench.ref, entries(vectors(5)))
    later = open_adapter("index", "elasticsearch", {**bench.ref.options, "shared": False, "quantization": "flat"})
    later.ensure(bench.ref)
    later.upsert(bench.ref, entries(vectors(8)))
    assert held(bench, 10) == set(range(8))
    assert later.drop(bench.ref) == 0
    with pytest.raises(StateError):
        bench.index.present(bench.ref, [vec_id(0)])


def test_what_arrived_late_in_a_shared_index_is_listed_and_removed(
    make_benches: Callable[..., Callable[[], Bench]], cluster: Elasticsearch
) -> None:
    """A bulk that had found its way before the alias went."""
    make = make_benches(shared=True)
    bench, neighbour = make(), make()
    bench.index.upsert(bench.ref, entries(vectors(3)))
    neighbour.index.upsert(neighbour.ref, entries(vectors(3)))
    (physical,) = cluster.indices.get_alias(name=alias(bench))
    cluster.indices.delete_alias(index=physical, name=alias(bench))
    assert bench.ref.name in set(bench.index.names())  # type: ignore[attr-defined]
    assert bench.index.drop(bench.ref) == 0
    assert set(bench.index.names()) == {neighbour.ref.name}  # type: ignore[attr-defined]
    assert held(neighbour, 3) == {0, 1, 2}


def test_installations_with_prefixes_share_a_cluster_and_do_not_see_each_other(
    make_benches: Callable[..., Callable[[], Bench]],
) -> None:
    one = make_benches()()
    other = open_adapter("index", "elasticsearch", {**one.ref.options, "prefix": f"other-{one.ref.options['prefix']}"})
    one.index.upsert(one.ref, entries(vectors(3)))
    assert (set(other.names()), other.drop(one.ref)) == (set(), 0)
    assert held(one, 3) == {0, 1, 2}


# --- a server that refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "code"), [("blocks.read_only_allow_delete", "index_full"), ("blocks.write", "index_blocked")]
)
def test_an_index_that_takes_no_writes_stops_the_work_and_says_why(
    bench: Bench, cluster: Elasticsearch, setting: str, code: str
) -> None:
    """What a server does by itself when its disk is nearly full, and what an administrator may do."""
    bench.index.upsert(bench.ref, entries(vectors(2)))
    cluster.indices.put_settings(index=alias(bench), settings={f"index.{setting}": True})
    with pytest.raises(Fatal) as e:
        bench.index.upsert(bench.ref, entries(vectors(4)))
    assert e.value.code == code
    assert len(bench.index.search(bench.ref, vectors(1)[0], 5, None)) == 2
    cluster.indices.put_settings(index=alias(bench), settings={f"index.{setting}": None})
    bench.index.upsert(bench.ref, entries(vectors(4)))
    assert held(bench, 4) == {0, 1, 2, 3}


def test_requests_that_the_server_finds_too_large_are_halved_and_one_entry_that_is_too_large_is_refused(
    elasticsearch_node: Node,
) -> None:
    elasticsearch_node.settings = "http.max_content_length: 100kb\n"
    elasticsearch_node.start()
    index = open_adapter("index", "elasticsearch", {"url": elasticsearch_node.url, "replicas": 0})
    index.ensure(REF)
    made = [replace(e, text="word " * 1000) for e in entries(vectors(60))]
    index.upsert(REF, made)
    assert len(index.present(REF, [e.vec_id for e in made])) == 60
    with pytest.raises(TooLarge, match="max_bytes"):
        index.upsert(REF, [replace(made[0], text="word " * 30_000)])


@pytest.mark.parametrize(
    ("status", "kind", "error", "code"),
    [
        (401, "security_exception", Misconfigured, "unauthorized"),
        (403, "security_exception", Misconfigured, "forbidden"),
        (429, "es_rejected_execution_exception", Transient, "overloaded"),
        (503, "no_shard_available_action_exception", Transient, "overloaded"),
        (404, "index_not_found_exception", StateError, "index_gone"),
        (404, "search_context_missing_exception", Transient, "index_down"),
        (400, "media_type_header_exception", Misconfigured, "elasticsearch_too_old"),
        (400, "illegal_argument_exception", Fatal, "index_error"),
    ],
)
def test_an_answer_of_the_server_becomes_an_error_of_ours(status: int, kind: str, error: type[KbError], code: str) -> None:
    with answering(status, {"error": {"type": kind, "reason": "because"}, "status": status}) as url:
        index = open_adapter("index", "elasticsearch", {"url": url, "api_key": "geheimnis"})
        with pytest.raises(error) as e:
            index.ensure(REF) if status != 404 else list(index.names())
    assert e.value.code == code
    assert "geheimnis" not in str(e.value)
    if status == 429:
        assert isinstance(e.value, Transient) and e.value.retry_after == 3


def test_a_server_of_another_kind_and_one_without_tls_are_told_apart() -> None:
    with answering(200, {"hello": "world"}, product="") as url:
        with pytest.raises(Misconfigured, match="no Elasticsearch") as e:
            open_adapter("index", "elasticsearch", {"url": url}).ensure(REF)
        assert e.value.code == "no_elasticsearch"
        with pytest.raises(Misconfigured, match="ca_certs") as e:
            open_adapter("index", "elasticsearch", {"url": url.replace("http", "https")}).ensure(REF)
        assert e.value.code == "bad_certificate"


@pytest.mark.parametrize(
    "call", ["ensure", "present", "search", "keyword", "digest", "ids", "upsert", "delete", "settle", "drop"]
)
def test_a_server_that_went_away_is_a_temporary_error(bench: Bench, call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    index = open_adapter("index", "elasticsearch", {**bench.ref.options, "url": url})
    index._places.update({bench.ref.name: Place("a", "b", False)} if call != "settle" else {})
    arguments: dict[str, tuple[Any, ...]] = {"present": ([vec_id(1)],), "search": (vectors(1)[0], 5, None), "ids": (1,),
        "upsert": (entries(vectors(1)),), "delete": ([vec_id(1)],), "keyword": ("word", 5, None)}  # fmt: skip
    with pytest.raises(Transient) as e:
        getattr(index, call)(bench.ref, *arguments.get(call, ()))
    assert e.value.code == "index_down"


# --- answers that are lost ------------------------------------------------------------------------------------------------


def test_a_write_whose_answer_is_lost_is_a_timeout_and_its_retry_changes_nothing(bench: Bench) -> None:
    made = entries(vectors(20))
    with Proxy(bench.ref.options["url"]) as proxy:
        index = open_adapter("index", "elasticsearch", {**bench.ref.options, "url": proxy.url, "timeout": 2.0})
        assert index.present(bench.ref, [vec_id(0)]) == {}
        proxy.swallowing = True
        with pytest.raises(Transient) as e:
            index.upsert(bench.ref, made)
        assert e.value.code == "index_timeout"
        proxy.swallowing = False
        index.upsert(bench.ref, made)
        assert held(bench, 20) == set(range(20))
        proxy.swallowing = True
        with pytest.raises(Transient):
            index.delete(bench.ref, [vec_id(0)])
        proxy.swallowing = False
        index.delete(bench.ref, [vec_id(0)])
    assert held(bench, 20) == set(range(1, 20))
    assert sum(b.count for b in bench.index.digest(bench.ref).values()) == 19


@contextmanager
def answering(status: int, body: dict[str, Any], product: str = "Elasticsearch") -> Iterator[str]:
    """A server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            said = json.dumps(body).encode()
            self.send_response(status)
            for name, value in (("content-type", "application/json"), ("x-elastic-product", product), ("retry-after", "3")):
                if value:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            return

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_the_digest_adds_up_to_what_a_bucket_may_hold(bench: Bench) -> None:
    made = [
        replace(e, vec_id=UUID(int=5 << 116 | n), bucket=5, checksum=2**31 - 1 - n % 2)
        for n, e in enumerate(entries(vectors(900)))
    ]
    bench.index.upsert(bench.ref, made)
    assert bench.index.digest(bench.ref) == {5: Bucket(900, 900 * (2**31 - 1) - 450)}
