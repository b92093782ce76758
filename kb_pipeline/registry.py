"""Adapter name -> "module:Class", per kind. Imported on use, so that optional SDKs stay unloaded.

Beside its class each module has a frozen pydantic ``Config`` with ``extra="forbid"``; the class takes it first.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from kb_pipeline.errors import Misconfigured, MissingExtra

CONNECTORS: Mapping[str, str] = {
    "local_dir": "kb_pipeline.connectors.local_dir:LocalDir",
    "s3": "kb_pipeline.connectors.s3:S3Objects",
}
PARSERS: Mapping[str, str] = {
    "markdown": "kb_pipeline.parsers.markdown:MarkdownParser",
    "html": "kb_pipeline.parsers.html:HtmlParser",
    "text": "kb_pipeline.parsers.text:TextParser",
    "csv": "kb_pipeline.parsers.csv:CsvParser",
}
EMBEDDERS: Mapping[str, str] = {
    "local": "kb_pipeline.embedders.local:LocalEmbedder",
    "hashing": "kb_pipeline.embedders.hashing:HashingEmbedder",
    "openai": "kb_pipeline.embedders.openai:OpenAIEmbedder",
    "llama_index": "kb_pipeline.embedders.llama_index:LlamaIndexEmbedder",
}
INDEXES: Mapping[str, str] = {
    "pgvector": "kb_pipeline.indexes.pgvector:PgVectorIndex",
    "qdrant": "kb_pipeline.indexes.qdrant:QdrantIndex",
    "milvus": "kb_pipeline.indexes.milvus:MilvusIndex",
    "elasticsearch": "kb_pipeline.indexes.elasticsearch.adapter:ElasticsearchIndex",
}
BLOBS: Mapping[str, str] = {
    "file": "kb_pipeline.blobs.folder:FolderBlobs",
    "s3": "kb_pipeline.blobs.s3:S3Blobs",
}
KINDS: Mapping[str, Mapping[str, str]] = {
    "connector": CONNECTORS,
    "parser": PARSERS,
    "embedder": EMBEDDERS,
    "index": INDEXES,
    "blobs": BLOBS,
}
# Top-level module of an optional SDK -> the extra that installs it.
EXTRAS: Mapping[str, str] = {"qdrant_client": "qdrant", "pymilvus": "milvus"}


def open_adapter(kind: str, name: str, options: Mapping[str, Any] | None = None, *dependencies: Any) -> Any:
    """The adapter ``name`` of a ``kind`` ("connector", "parser", "embedder", "index", "blobs"), made from its options.

    Raises Misconfigured for an unknown name or option, MissingExtra for an SDK that is not installed.
    """
    names = KINDS[kind]
    if name not in names:
        raise Misconfigured(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(names))}", code=f"unknown_{kind}")
    module_name, class_name = names[name].split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        missing = (e.name or "").split(".")[0]
        if missing not in EXTRAS:
            raise
        raise MissingExtra(f"{kind} {name!r} needs: pip install 'kb-pipeline[{EXTRAS[missing]}]'") from e
    return getattr(module, class_name)(_configured(module.Config, f"{kind} {name!r}", options or {}), *dependencies)


def _configured(config: type[BaseModel], what: str, options: Mapping[str, Any]) -> BaseModel:
    try:
        return config.model_validate(dict(options))
    except ValidationError as e:
        known = ", ".join(sorted(config.model_fields)) or "none"
        problems = "; ".join(
            _problem(x["type"], ".".join(map(str, x["loc"])) or "options", x["msg"]) for x in e.errors(include_input=False)
        )
        raise Misconfigured(f"{what}: {problems} (options: {known})", code="bad_option") from None


def _problem(kind: str, option: str, message: str) -> str:
    known = {"extra_forbidden": f"there is no option {option!r}", "missing": f"option {option!r} is needed"}
    return known.get(kind, f"option {option!r}: {message}")
