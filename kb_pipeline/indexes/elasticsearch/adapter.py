"""Elasticsearch 9: kNN over HNSW and words by BM25, in an index per space or in one that small spaces share.

Writing never creates: only ``ensure`` makes an index, with its alias in the same request, and every write demands the alias.
Every write is followed by a refresh, and what is present is asked by a search, so that it is what search sees; reading by id
would see more. An older acl_seq is refused by the server itself (external versions).
https://www.elastic.co/docs/api/doc/elasticsearch
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kb_pipeline.errors import Misconfigured, StateError, TooLarge, Transient
from kb_pipeline.indexes.elasticsearch.bulk import Operation, cut, put, removal
from kb_pipeline.indexes.elasticsearch.failures import reason, refuse_failed, shown, translated
from kb_pipeline.indexes.elasticsearch.layout import (
    WINDOW,
    Config,
    Place,
    alias_of,
    form,
    own_index,
    permitted,
    shared_index,
    shared_prefix,
    vec_id_of,
)
from kb_pipeline.model import Bucket, Candidate, IndexRef, Json, VectorEntry
from kb_pipeline.ports import IndexCapabilities

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

PAGE = 2000  # ids a request
BUCKETS = 4096
QUESTION_CHARS = 400  # a word or a Chinese character is a clause, and a server takes 1,024 at least
_ITEMS = "errors,items.*.status,items.*._id,items.*.error"


class ElasticsearchIndex:
    """One client for all threads. What it remembers of an index, where it lies, never changes."""

    capabilities = IndexCapabilities(keyword=True, named=True)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._places: dict[str, Place] = {}

    # --- making and removing ----------------------------------------------------------------------------------------------

    def ensure(self, ref: IndexRef) -> None:
        alias = alias_of(self._config, ref.name)
        with self._asking(ref.name):
            if self._holders(alias):
                return
            body = form(self._config, ref.dimension, self._analyzer())
            if not self._config.shared:
                self._create(own_index(self._config, ref), ref, {**body, "aliases": {alias: {}}})
                return
            physical = shared_index(self._config, ref, body)
            self._create(physical, ref, body)
            only: Json = {"term": {"index": ref.name}}
            self._client.indices.put_alias(index=physical, name=alias, filter=only, routing=str(ref.index_id))

    def settle(self, ref: IndexRef) -> bool:
        """HNSW is built as segments are: nothing is missing after a load. Merging them into one would rewrite the whole index
        beside its readers, and again after the next sync."""
        self._place(ref)
        return False

    def names(self) -> Iterator[str]:
        """Exact names of aliases, and of what is left in shared indexes without one."""
        begin = alias_of(self._config, "kb_")
        with self._asking(f"{begin}*"):
            found = self._client.indices.get_alias(name=f"{begin}*").body
            names = {alias for index in found.values() for alias in index["aliases"] if alias.startswith(begin)}
            left = {name for physical in self._shared_indexes() for name in self._held_in(physical)}
        yield from sorted({name.removeprefix(self._config.prefix) for name in names} | left)

    def drop(self, ref: IndexRef) -> int:
        """First the alias, so that no write finds its way any more; then what the space has in shared indexes."""
        from elasticsearch import NotFoundError

        self._places.pop(ref.name, None)
        alias = alias_of(self._config, ref.name)
        with self._asking(ref.name):
            for place in self._holders(alias):
                try:
                    if place.shared:
                        self._client.indices.delete_alias(index=place.physical, name=alias)
                    else:
                        self._client.indices.delete(index=place.physical)
                except NotFoundError:  # another drop was faster
                    continue
            return sum(self._erase(physical, ref) for physical in self._shared_indexes())

    # --- writing ----------------------------------------------------------------------------------------------------------

    def upsert(self, ref: IndexRef, entries: Sequence[VectorEntry]) -> None:
        place = self._place(ref)
        self._write(ref, place, (put(place, ref, e) for e in entries))

    def delete(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> None:
        place = self._place(ref)
        self._write(ref, place, (removal(place, ref, i) for i in vec_ids))

    # --- reading ----------------------------------------------------------------------------------------------------------

    def present(self, ref: IndexRef, vec_ids: Sequence[UUID]) -> dict[UUID, int]:
        place = self._place(ref)
        found: dict[UUID, int] = {}
        for i in range(0, len(vec_ids), PAGE):
            keys = [place.key(ref, v) for v in vec_ids[i : i + PAGE]]
            hits = self._search(ref, query={"ids": {"values": keys}}, size=len(keys), fields=("acl_seq",), sort="_doc")
            found |= {vec_id_of(h["_id"]): _field(h, "acl_seq") for h in hits}
        return found

    def search(self, ref: IndexRef, vector: NDArray[np.float32], k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """10,000 at most. Where the graph gave fewer than ``k`` although more are permitted, it is asked at its widest."""
        self._place(ref)
        k, filters = min(k, WINDOW), permitted(None if acl is None else list(acl))
        if k < 1:
            return []
        width = min(WINDOW, max(self._config.num_candidates or max(3 * k, 200), k))
        hits = self._nearest(ref, vector, k, width, filters)
        if len(hits) < k and width < WINDOW and len(hits) < min(k, self._count(ref, filters)):
            hits = self._nearest(ref, vector, k, WINDOW, filters)
        # The server's score of a cosine is (1 + cosine) / 2.
        return [_candidate(h, 2 * h["_score"] - 1) for h in hits]

    def keyword(self, ref: IndexRef, text: str, k: int, acl: Sequence[int] | None) -> list[Candidate]:
        """BM25 over text and title, by the first 400 characters of the question."""
        self._place(ref)
        words = {"multi_match": {"query": text[:QUESTION_CHARS], "fields": ["text", "title"], "type": "most_fields"}}
        query: Json = {"bool": {"must": words, "filter": permitted(None if acl is None else list(acl))}}
        hits = self._search(ref, query=query, size=min(k, WINDOW), fields=("chunk_id", "doc_id"))
        return [_candidate(h, h["_score"]) for h in hits]

    def digest(self, ref: IndexRef) -> dict[int, Bucket]:
        """Sums are doubles, exact up to 2^53: four million checksums of 31 bits in a bucket."""
        self._place(ref)
        sums: Json = {"b": {"terms": {"field": "bucket", "size": BUCKETS}, "aggs": {"ck": {"sum": {"field": "ck"}}}}}
        with self._asking(ref.name):
            alias = alias_of(self._config, ref.name)
            answer = self._client.search(index=alias, size=0, aggs=sums, allow_partial_search_results=False)
        buckets = answer["aggregations"]["b"]["buckets"]
        return {int(b["key"]): Bucket(int(b["doc_count"]), int(b["ck"]["value"])) for b in buckets}

    def ids(self, ref: IndexRef, bucket: int) -> dict[UUID, int]:
        self._place(ref)
        found: dict[UUID, int] = {}
        with self._point_in_time(ref) as pit:
            after: list[Any] | None = None
            while True:
                request: Json = {"search_after": after} if after else {}
                query: Json = {"bool": {"filter": [{"term": {"bucket": bucket}}]}}
                hits = self._search(ref, pit, query=query, size=PAGE, fields=("ck",), sort="_shard_doc", **request)
                found |= {vec_id_of(h["_id"]): _field(h, "ck") for h in hits}
                if len(hits) < PAGE:
                    return found
                after = hits[-1]["sort"]

    # --- the server -------------------------------------------------------------------------------------------------------

    @cached_property
    def _client(self) -> "Elasticsearch":
        """Nothing is tried again by it: a write's outcome is asked for by whoever wrote."""
        from elasticsearch import Elasticsearch

        c = self._config
        secrets: Json = {"api_key": c.api_key.get_secret_value()} if c.api_key else {}
        if c.password:
            secrets["basic_auth"] = (c.username, c.password.get_secret_value())
        if c.ca_certs:
            if not Path(c.ca_certs).is_file():
                raise Misconfigured(f"vector index: option 'ca_certs': there is no file {c.ca_certs}", code="bad_option")
            secrets["ca_certs"] = c.ca_certs
        try:
            return Elasticsearch(c.urls, request_timeout=c.timeout, max_retries=0, retry_on_timeout=False, **secrets)
        except ValueError as e:
            raise Misconfigured(f"vector index: option 'url': {shown(c)} is no address: {e}", code="bad_option") from e

    def _asking(self, name: str) -> Any:
        return translated(self._config, name)

    def _analyzer(self) -> str:
        from elasticsearch import BadRequestError

        if self._config.analyzer != "auto":
            return self._config.analyzer
        try:
            self._client.indices.analyze(analyzer="cjk", text="x")
        except BadRequestError:
            return "standard"
        return "cjk"

    def _create(self, physical: str, ref: IndexRef, body: Json) -> None:
        from elasticsearch import BadRequestError

        try:
            self._client.indices.create(index=physical, **body)
        except BadRequestError as e:
            if e.error == "resource_already_exists_exception":
                return
            error = e.body["error"] if isinstance(e.body, dict) else {}
            raise Misconfigured(
                f"vector index {ref.name}: the server refuses these options (quantization, m, ef_construction, analyzer, "
                f"shards): {reason(error)}",
                code="bad_option",
            ) from e

    def _holders(self, alias: str) -> list[Place]:
        """What the alias leads to; nothing without one."""
        from elasticsearch import NotFoundError

        try:
            found = self._client.indices.get_alias(name=alias).body
        except NotFoundError:
            return []
        return [Place(alias, physical, "filter" in held["aliases"][alias]) for physical, held in found.items()]

    def _place(self, ref: IndexRef) -> Place:
        """Where it was made, whatever the options say by now. Asked once: an index that is dropped is found out by the call."""
        if ref.name not in self._places:
            with self._asking(ref.name):
                places = self._holders(alias_of(self._config, ref.name))
            if not places:
                raise StateError(f"index {ref.name} is gone", code="index_gone")
            (self._places[ref.name],) = places
        return self._places[ref.name]

    def _write(self, ref: IndexRef, place: Place, operations: Iterator[Operation]) -> None:
        wrote = False
        for part in cut(operations, self._config.max_bytes):
            self._send(ref, place, part)
            wrote = True
        if wrote and self._config.refresh == "forced":
            with self._asking(ref.name):
                done = self._client.indices.refresh(index=place.alias).body["_shards"]
            if done["failed"]:
                raise Transient(f"vector index {ref.name}: {done['failed']} shards were not refreshed", code="index_incomplete")

    def _send(self, ref: IndexRef, place: Place, part: Sequence[Operation]) -> None:
        lines: Any = [line for operation in part for line in operation]
        try:
            with self._asking(ref.name):
                answer = self._client.bulk(
                    operations=lines,
                    index=place.alias,
                    require_alias=True,
                    refresh="wait_for" if self._config.refresh == "wait_for" else False,
                    filter_path=_ITEMS,
                )
        except TooLarge:
            if len(part) == 1:
                raise
            middle = len(part) // 2
            self._send(ref, place, part[:middle])
            self._send(ref, place, part[middle:])
            return
        if answer["errors"]:
            refuse_failed(ref.name, answer["items"])

    def _search(self, ref: IndexRef, pit: Json | None = None, *, fields: Sequence[str], **request: Any) -> list[Json]:
        """Hits with their ids and these fields; all shards answer, or it is an error."""
        where: Json = (
            {"pit": pit} if pit else {"index": alias_of(self._config, ref.name), "allow_partial_search_results": False}
        )
        with self._asking(ref.name):
            answer = self._client.search(
                **where,
                **request,
                source=False,
                docvalue_fields=[{"field": f} for f in fields],
                track_total_hits=False,
                filter_path=_HITS,
            )
        hits: list[Json] = answer.body.get("hits", {}).get("hits", [])
        return hits

    def _nearest(self, ref: IndexRef, vector: NDArray[np.float32], k: int, width: int, filters: list[Json]) -> list[Json]:
        near: Json = {"field": "vector", "query_vector": vector.tolist(), "k": k, "num_candidates": width, "filter": filters}
        return self._search(ref, knn=near, size=k, fields=("chunk_id", "doc_id"))

    def _count(self, ref: IndexRef, filters: list[Json]) -> int:
        with self._asking(ref.name):
            answer = self._client.count(index=alias_of(self._config, ref.name), query={"bool": {"filter": filters}})
        return int(answer["count"])

    @contextmanager
    def _point_in_time(self, ref: IndexRef) -> Iterator[Json]:
        with self._asking(ref.name):
            opened = self._client.open_point_in_time(index=alias_of(self._config, ref.name), keep_alive="2m")
        try:
            yield {"id": opened["id"], "keep_alive": "2m"}
        finally:
            with self._asking(ref.name):
                self._client.close_point_in_time(id=opened["id"])

    # --- shared indexes ---------------------------------------------------------------------------------------------------

    def _shared_indexes(self) -> list[str]:
        begin = shared_prefix(self._config)
        return [name for name in self._client.indices.get_alias(index=f"{begin}*").body if name.startswith(begin)]

    def _held_in(self, physical: str) -> Iterator[str]:
        """Names of the indexes of ours with an entry there."""
        after: Json = {}
        while True:
            pages: Json = {"composite": {"size": 1000, "sources": [{"index": {"terms": {"field": "index"}}}], **after}}
            found = self._client.search(index=physical, size=0, aggs={"names": pages}, allow_partial_search_results=False)
            yield from (b["key"]["index"] for b in found["aggregations"]["names"]["buckets"])
            if "after_key" not in found["aggregations"]["names"]:
                return
            after = {"after": found["aggregations"]["names"]["after_key"]}

    def _erase(self, physical: str, ref: IndexRef) -> int:
        """How many are left."""
        mine: Json = {"term": {"index": ref.name}}
        self._client.indices.refresh(index=physical)
        if self._client.count(index=physical, query=mine)["count"]:
            self._client.delete_by_query(index=physical, query=mine, conflicts="proceed", refresh=True)
        return int(self._client.count(index=physical, query=mine)["count"])


_HITS = "hits.hits._id,hits.hits._score,hits.hits.fields,hits.hits.sort"


def _field(hit: Json, name: str) -> int:
    return int(hit["fields"][name][0])


def _candidate(hit: Json, score: float) -> Candidate:
    return Candidate(vec_id_of(hit["_id"]), _field(hit, "chunk_id"), _field(hit, "doc_id"), score)
