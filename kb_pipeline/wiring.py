"""Settings to an opened application: the only place where concrete parts meet."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline.engine import Engine, Limits, Modelled, Progress, silent
from kb_pipeline.errors import KbError, Misconfigured
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.model import ChunkParams, IndexRef, Json
from kb_pipeline.ports import BlobStore, Connector, Embedder, Parser, VectorIndex
from kb_pipeline.registry import CONNECTORS, INDEXES, open_adapter
from kb_pipeline.settings import Settings, secret
from kb_pipeline.store import migrations, sources, spaces
from kb_pipeline.store.database import Pool, connection, open_pool, transaction
from kb_pipeline.store.indexes import Made
from kb_pipeline.store.sources import Source
from kb_pipeline.store.spaces import Space

_SECRET = ("env:", "file:")


class App:
    """An opened engine, and what only it can do: make spaces and sources from names and options."""

    def __init__(self, settings: Settings, pool: Pool, database: str, schema_version: int) -> None:
        self.settings, self.pool, self.database, self.schema_version = settings, pool, database, schema_version
        self._kept: dict[tuple[str, str], Any] = {}
        limits = Limits(**{f.name: getattr(settings, f.name) for f in fields(Limits)})
        self.engine = Engine(
            pool,
            self._blobs(),
            self._connector,
            self._parser,
            self._embedder,
            self._index,
            limits,
            answer_log=settings.answer_log,
        )

    def space(self, key: str) -> Space:
        with connection(self.pool) as c:
            return spaces.get_space(c, key)

    def spaces(self) -> list[Space]:
        with connection(self.pool) as c:
            return spaces.list_spaces(c)

    def add_space(
        self,
        key: str,
        *,
        name: str | None = None,
        embedder: str | None = None,
        embedder_options: Json | None = None,
        index: str | None = None,
        index_options: Json | None = None,
        retained_versions: int = 5,
        schedule: str = "",
        time_zone: str = "UTC",
        chunking: Json | None = None,
        audience: list[list[str]] | None = None,
    ) -> Space:
        """A new, empty space with its vector index made and served. Raises Misconfigured, MissingExtra before it is stored.

        Raises what the index raises, and leaves nothing then.
        """
        kind, index_kind = embedder or self.settings.embedder, index or self.settings.index
        if index_kind not in INDEXES:
            raise Misconfigured(
                f"unknown index {index_kind!r}: choose one of {', '.join(sorted(INDEXES))}", code="unknown_index"
            )
        options = embedder_options or {}
        self._open_index(index_kind, index_options or {})
        opened: Embedder = open_adapter("embedder", kind, _revealed(options))
        dimension = opened.dimension
        checked_chunking(chunking or {})
        with transaction(self.pool) as c:
            model_id = spaces.ensure_model(c, opened.fingerprint, dimension)
            values = {
                "key": key, "name": name or key, "model_id": model_id, "embedder": kind, "embedder_options": options,
                "index_kind": index_kind, "index_options": index_options or {}, "chunking": chunking or {},
                "retained_versions": retained_versions, "schedule": schedule, "time_zone": time_zone,
                "audience": audience,
            }  # fmt: skip
            space = spaces.create_space(c, values)
            ref = spaces.living_indexes(c, space.id)[0]
        try:
            self._index(ref).ensure(ref)
        except KbError:
            delete_space(self.engine, space)
            raise
        with transaction(self.pool) as c:
            spaces.serve_index(c, space.id)
        return space

    def change_index(
        self,
        space: Space,
        *,
        index: str | None = None,
        index_options: Json | None = None,
        embedder: str | None = None,
        embedder_options: Json | None = None,
    ) -> bool:
        """What is None stays, but options go with their kind. True: another index is to be built, by ``build_index``.

        Raises Misconfigured, MissingExtra before anything is stored.
        """
        kind, model = index or space.index_kind, embedder or space.embedder
        options = (space.index_options if kind == space.index_kind else {}) if index_options is None else index_options
        of_model = (space.embedder_options if model == space.embedder else {}) if embedder_options is None else embedder_options
        capabilities = self._open_index(kind, options).capabilities
        opened: Embedder = open_adapter("embedder", model, _revealed(of_model))
        with transaction(self.pool) as c:
            model_id = spaces.ensure_model(c, opened.fingerprint, opened.dimension)
        made = Made(kind, options, model_id, model, of_model)
        return rebuild.begin(self.engine, space, made, capabilities)

    def build_index(self, space: Space, progress: Callable[[Progress], None] = silent) -> rebuild.BuildReport:
        """Take the index that is being built to where it serves; see ``rebuild.build``."""
        return rebuild.build(self.engine, space, keep_seconds=self.keep_index_seconds, progress=progress)

    @property
    def keep_index_seconds(self) -> float:
        return self.settings.keep_index_days * 86400

    def add_source(self, space: Space, name: str, kind: str, config: Json) -> Source:
        """A source whose options are valid and which answers. Raises Misconfigured, Fatal before anything is stored."""
        if kind not in CONNECTORS:
            raise Misconfigured(
                f"unknown source kind {kind!r}: choose one of {', '.join(sorted(CONNECTORS))}", code="unknown_connector"
            )
        connector: Connector = open_adapter("connector", kind, _revealed(config))
        connector.check()
        with transaction(self.pool) as c:
            return sources.add_source(c, space.id, name, kind, config)

    # --- opened ports, kept for the life of the application ---------------------------------------------------------

    def _keep(self, kind: str, key: str, make: Callable[[], Any]) -> Any:
        if (kind, key) not in self._kept:
            self._kept[kind, key] = make()
        return self._kept[kind, key]

    def _connector(self, source: Source) -> Connector:
        made: Connector = self._keep(
            "connector", str(source.id), lambda: open_adapter("connector", source.kind, _revealed(source.config))
        )
        return made

    def _parser(self, name: str) -> Parser:
        made: Parser = self._keep("parser", name, lambda: open_adapter("parser", name))
        return made

    def _embedder(self, of: Modelled) -> Embedder:
        made: Embedder = self._keep(
            "embedder",
            _keyed(of.embedder, of.embedder_options),
            lambda: open_adapter("embedder", of.embedder, _revealed(of.embedder_options)),
        )
        if made.fingerprint != of.fingerprint:
            raise Misconfigured(
                f"these vectors were made with {of.fingerprint}, embedder {of.embedder!r} is now {made.fingerprint}: "
                "bring the same model back, or choose the new one with kb space set SPACE embedder=...",
                code="model_changed",
            )
        return made

    def _index(self, ref: IndexRef) -> VectorIndex:
        return self._open_index(ref.kind, ref.options)

    def _open_index(self, kind: str, options: Json) -> VectorIndex:
        dependencies = (self.pool,) if kind == "pgvector" else ()
        made: VectorIndex = self._keep(
            "index", _keyed(kind, options), lambda: open_adapter("index", kind, _revealed(options), *dependencies)
        )
        return made

    def _blobs(self) -> BlobStore:
        return open_blobs(self.settings)


def open_blobs(settings: Settings) -> BlobStore:
    """The object store, which need not exist yet. Raises Misconfigured."""
    scheme, _, rest = settings.blobs_url.partition(":")
    if scheme == "file":
        made: BlobStore = open_adapter("blobs", "file", {"path": rest})
        return made
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    options = {"bucket": bucket, "prefix": prefix, "endpoint": settings.s3_endpoint, "region": settings.s3_region}
    made = open_adapter("blobs", "s3", options)
    return made


@contextmanager
def open_app(settings: Settings, progress: Callable[[Progress], None] = silent) -> Iterator[App]:
    """Database, migrations and object store, made when they are missing. Every command begins here."""
    with open_database(settings, progress) as (pool, shown, version):
        yield App(settings, pool, shown, version)


@contextmanager
def open_database(settings: Settings, progress: Callable[[Progress], None] = silent) -> Iterator[tuple[Pool, str, int]]:
    """Connections to a database with our tables, what to call it, and the version of its schema.

    The embedded server is shared with other processes and stopped by the last that leaves, unless ``kb up`` runs.
    """
    server = None
    if settings.database_url:
        url, shown = settings.database_url, "KB_DATABASE_URL"
    else:
        server = EmbeddedPostgres(settings.home)
        url = server.start(progress=lambda what: progress(Progress(what, 0, 0)))
        shown = f"embedded in {settings.home / 'postgres'}"
    try:
        pool = open_pool(url)
        try:
            version = migrations.migrate(pool)
            yield pool, shown, version
        finally:
            pool.close()
    finally:
        if server is not None:
            server.stop_if_unused()


def checked_chunking(values: Mapping[str, Any]) -> ChunkParams:
    """Raises Misconfigured naming the option."""
    known = {f.name for f in fields(ChunkParams)}
    if unknown := sorted(set(values) - known):
        raise Misconfigured(
            f"chunking: unknown option {', '.join(unknown)} (options: {', '.join(sorted(known))})", code="bad_option"
        )
    params = ChunkParams(**values)
    if params.context not in ("none", "title", "path"):
        raise Misconfigured(f"chunking: context={params.context}: choose none, title or path", code="bad_option")
    if not 16 <= params.min_tokens * 2 <= params.max_tokens <= 8192:
        raise Misconfigured(
            f"chunking: {asdict(params)}: min_tokens from 8, at most half of max_tokens, which is at most 8192",
            code="bad_option",
        )
    return params


def _keyed(name: str, options: Json) -> str:
    return f"{name} {json.dumps(options, sort_keys=True, ensure_ascii=False)}"


def _revealed(options: Json) -> Json:
    """Options with their secret references replaced by the secrets."""
    return {k: secret(v) if isinstance(v, str) and v.startswith(_SECRET) else v for k, v in options.items()}
