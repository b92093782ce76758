"""Options, and what lies on the server: an index and its alias for each space, or one index that small spaces share.

Everything of ours is reached through the alias, which is named as the index's row is; the index behind it never moves. In a
shared index the alias filters, and routes each space to one shard.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from kb_pipeline.model import IndexRef, Json

WINDOW = 10_000  # index.max_result_window, and the most candidates that a kNN search may look at
MOST_TERMS = 65_536  # index.max_terms_count
# For so long a deleted id takes no late write (index.gc_deletes): longer than any request that may still be under way.
DELETES_REMEMBERED = "10m"
_TYPES = {"none": "hnsw", "int8": "int8_hnsw", "bbq": "bbq_hnsw", "flat": "flat"}
_PREFIX = re.compile(r"([a-z0-9][a-z0-9_-]*)?")


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="https://host:9200; several nodes of one cluster separated by commas")
    api_key: SecretStr | None = None
    username: str = ""
    password: SecretStr | None = None
    ca_certs: str = Field(default="", description="file with the certificate authority of the server")
    prefix: str = Field(default="", description="of all names: installations that share a cluster need one each")
    quantization: Literal["none", "int8", "bbq", "flat"] = "none"
    m: int = Field(default=16, ge=2, le=512)
    ef_construction: int = Field(default=100, ge=2, le=3200)
    num_candidates: int | None = Field(default=None, ge=1, le=WINDOW, description="a shard; empty: 3 k, 200 or more")
    shards: int = Field(default=1, ge=1, le=1024)
    replicas: int = Field(default=1, ge=0)
    refresh: Literal["forced", "wait_for"] = "forced"
    analyzer: str = Field(default="auto", min_length=1, description="of text and title; auto: cjk, or standard without it")
    shared: bool = Field(default=False, description="new indexes are parts of one index instead of one each")
    timeout: float = Field(default=60.0, gt=0, description="seconds a request may take")
    max_bytes: int = Field(default=8 * 2**20, ge=2**16, description="a bulk request holds at most")

    @property
    def urls(self) -> list[str]:
        return [part.strip() for part in self.url.split(",") if part.strip()]

    @field_validator("prefix")
    @classmethod
    def _nameable(cls, prefix: str) -> str:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError("small letters, digits, - and _ only, and a letter or digit first")
        return prefix

    @model_validator(mode="after")
    def _reachable(self) -> "Config":
        if not self.urls or not all(re.match(r"https?://[^/]", u) for u in self.urls):
            raise ValueError("url must be https://host:port or http://host:port, several separated by commas")
        if self.api_key and self.username:
            raise ValueError("give api_key, or username and password")
        if bool(self.username) != bool(self.password):
            raise ValueError("username and password go together")
        return self


@dataclass(frozen=True, slots=True)
class Place:
    """Where one index of ours lies."""

    alias: str
    physical: str
    shared: bool

    def key(self, ref: IndexRef, vec_id: UUID) -> str:
        """The document's _id. In a shared index two spaces may hold the same vector id."""
        return f"{ref.index_id}.{vec_id}" if self.shared else str(vec_id)


def vec_id_of(key: str) -> UUID:
    return UUID(key.rpartition(".")[2])


def alias_of(config: Config, name: str) -> str:
    return config.prefix + name


def own_index(config: Config, ref: IndexRef) -> str:
    return f"{alias_of(config, ref.name)}.index"


def shared_index(config: Config, ref: IndexRef, body: Json) -> str:
    """One for each model and form: spaces with other options do not meet in it."""
    form = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:8]
    return f"{shared_prefix(config)}m{ref.model_id}.{form}"


def shared_prefix(config: Config) -> str:
    return f"{config.prefix}kb-shared."


def form(config: Config, dimension: int, analyzer: str) -> Json:
    """Settings and mapping of a new index."""
    graph: Json = {} if config.quantization == "flat" else {"m": config.m, "ef_construction": config.ef_construction}
    kept: Json = {"index": False, "doc_values": True}  # read back, never searched for
    words: Json = {"type": "text", "analyzer": analyzer}
    properties: Json = {
        "vector": {
            "type": "dense_vector",
            "dims": dimension,
            "index": True,
            "similarity": "cosine",
            "index_options": {"type": _TYPES[config.quantization], **graph},
        },
        "index": {"type": "keyword"},
        "chunk_id": {"type": "long", **kept},
        "doc_id": {"type": "long", **kept},
        "acl": {"type": "integer"},
        "acl_seq": {"type": "long", **kept},
        "ck": {"type": "integer", **kept},
        "bucket": {"type": "short"},
        "text": words,
        "title": words,
    }
    settings: Json = {
        "number_of_shards": config.shards,
        "number_of_replicas": config.replicas,
        "gc_deletes": DELETES_REMEMBERED,
        "max_result_window": WINDOW,
        "max_terms_count": MOST_TERMS,
    }
    meta = {"kb_pipeline": {"analyzer": analyzer, "quantization": config.quantization}}
    return {"settings": settings, "mappings": {"dynamic": "strict", "_meta": meta, "properties": properties}}


def permitted(acl: list[int] | None) -> list[Json]:
    """As filters: what the asker may read, or what everybody may."""
    if acl is None:
        return []
    anybody: Json = {"bool": {"must_not": {"exists": {"field": "acl"}}}}
    terms: list[Any] = [{"terms": {"acl": acl[i : i + MOST_TERMS]}} for i in range(0, len(acl), MOST_TERMS)]
    return [{"bool": {"should": [anybody, *terms], "minimum_should_match": 1}}]
