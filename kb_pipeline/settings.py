"""The one frozen object of settings, and the only reader of the environment.

Every field is an environment variable: ``home`` is ``KB_HOME``. README's settings table is compared with this file by a test.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kb_pipeline.errors import Misconfigured


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True)
class Settings:
    home: Path = _setting(Path(".kb"), "data folder: embedded database, objects, Dagster's files, logs")
    database_url: str = _setting("", "PostgreSQL 15 or later; empty: the embedded server in `home`")
    blobs: str = _setting("", "object store, `file:PATH` or `s3://BUCKET/PREFIX`; empty: `file:` in `home`")
    s3_endpoint: str = _setting("", "endpoint URL of an S3-compatible store; empty: AWS")
    s3_region: str = _setting("us-east-1", "region of the S3 store")
    embedder: str = _setting("local", "embedder of new spaces: `local`, `hashing`, `openai`, `llama_index`")
    index: str = _setting("pgvector", "vector index of new spaces")
    max_file_bytes: int = _setting(100 * 2**20, "larger documents are refused with the code `too_large`")
    page_size: int = _setting(50, "documents a listing page, and so a checkpoint, 1 to 50")
    batch_size: int = _setting(200, "tasks one claim takes at most")
    batch_bytes: int = _setting(16 * 2**20, "bytes of originals worked on at a time; one larger document goes alone")
    lease_seconds: int = _setting(120, "a worker or walk that is silent for longer has lost its work to others")
    max_retries: int = _setting(3, "temporary failures of a task before it is DEAD")
    retry_base_seconds: float = _setting(30.0, "first back-off; doubles with each try")
    retry_max_seconds: float = _setting(3600.0, "longest back-off")
    shrink_guard: float = _setting(0.8, "a listing below this share of the last one deletes nothing")
    own_shard_chunks: int = _setting(20_000, "a space with more chunks gets a shard of its own")
    fanout_tasks: int = _setting(2000, "waiting tasks of a space for which one more run works beside the others")
    fanout_runs: int = _setting(4, "runs that work side by side in one space at most, 1 to 50")
    split_nodes: bool = _setting(False, "waiting documents are embedded and indexed by runs of their own")
    time_zone: str = _setting("UTC", "of the nightly schedules, as in `Europe/Berlin`; a space's own is set with the space")
    keep_index_days: float = _setting(7.0, "how long an index that was replaced is kept up to date, to go back to it")
    run_retention_days: int = _setting(30, "finished Dagster runs and their logs are deleted when they are older")
    answer_log: bool = _setting(True, "keep question, principals and chunk ids of every answer")
    web_port: int = _setting(3000, "port of the Dagster web UI")
    service_port: int = _setting(8080, "port of `/healthz`, `/livez` and `/metrics`")
    drain_seconds: int = _setting(30, "how long `kb up` lets running work end in order, 5 or more")
    child_memory_mb: int = _setting(2048, "`kb up` restarts a code server, daemon or web server that grew beyond it; 0: never")
    alert_urls: str = _setting("", "channels that alerts are sent to: apprise URLs, or references to them, separated by commas")
    alert_link: str = _setting("", "where people reach the web UI, for links in alerts; empty: `http://127.0.0.1:KB_WEB_PORT`")
    log_level: str = _setting("WARNING", "of the log lines on stderr")

    @property
    def blobs_url(self) -> str:
        return self.blobs or f"file:{self.home / 'objects'}"


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from ``KB_*`` variables; ``overrides`` that are not None win. Raises Misconfigured."""
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    known = {variable(f.name) for f in fields(Settings)}
    unknown = sorted(k for k in env if k.startswith("KB_") and k not in known and not k.startswith("KB_SECRET_"))
    if unknown:
        raise Misconfigured(f"unknown setting {', '.join(unknown)}: README has the list", code="unknown_setting")
    for f in fields(Settings):
        if (raw := overrides.pop(f.name, None)) is None:
            raw = env.get(variable(f.name)) or None
        if raw is not None:
            values[f.name] = _parsed(f.name, f.type, raw)
    if overrides:
        raise Misconfigured(f"unknown setting {', '.join(overrides)}", code="unknown_setting")
    settings = Settings(**values)
    return _checked(settings)


def variable(name: str) -> str:
    return f"KB_{name.upper()}"


def as_environment(settings: Settings) -> dict[str, str]:
    """The variables that give a child process these settings."""
    return {variable(f.name): str(getattr(settings, f.name)) for f in fields(Settings)}


def secret(reference: str) -> str:
    """The value behind ``env:NAME`` or ``file:PATH``. Raises Misconfigured naming the reference, never the value."""
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        if (value := os.environ.get(name)) is not None:
            return value
        raise Misconfigured(f"secret {reference}: the variable is not set", code="missing_secret")
    if kind == "file" and name:
        try:
            return Path(name).read_text(encoding="utf-8").strip()
        except OSError as e:
            raise Misconfigured(f"secret {reference}: {e.strerror}", code="missing_secret") from e
    raise Misconfigured(f"{reference!r} is no secret reference: write env:NAME or file:PATH", code="bad_secret")


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment with ``extra`` on top, for processes that we start."""
    return {**os.environ, **extra}


def notify_socket() -> str:
    """Where a service manager wants to hear of us (sd_notify); empty where there is none."""
    return os.environ.get("NOTIFY_SOCKET", "")


def _parsed(name: str, kind: Any, raw: Any) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
                str(raw).strip().lower()
            ]
        return Path(raw).expanduser().absolute() if kind is Path else kind(raw)
    except (ValueError, KeyError):
        raise Misconfigured(f"{variable(name)}={raw}: not {_KINDS[kind]}", code="bad_setting") from None


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def _checked(s: Settings) -> Settings:
    for name, ok, rule in (
        ("page_size", 1 <= s.page_size <= 50, "1 to 50"),
        ("batch_size", 1 <= s.batch_size <= 1000, "1 to 1000"),
        ("shrink_guard", 0 <= s.shrink_guard <= 1, "0 to 1"),
        ("lease_seconds", s.lease_seconds >= 5, "5 or more"),
        ("drain_seconds", s.drain_seconds >= 5, "5 or more"),
        ("child_memory_mb", s.child_memory_mb == 0 or s.child_memory_mb >= 256, "0, or 256 or more"),
        ("fanout_tasks", s.fanout_tasks >= 1, "1 or more"),
        ("fanout_runs", 1 <= s.fanout_runs <= 50, "1 to 50"),
        ("keep_index_days", 0 <= s.keep_index_days <= 365, "0 to 365"),
        ("run_retention_days", s.run_retention_days >= 1, "1 or more"),
        (
            "database_url",
            s.database_url[:13] in ("", "postgresql://") or s.database_url.startswith("postgres://"),
            "postgresql://...",
        ),
        ("alert_link", not s.alert_link or s.alert_link.startswith(("http://", "https://")), "http://... or https://..."),
        ("blobs", s.blobs.split(":")[0] in ("", "file", "s3"), "file:PATH or s3://BUCKET/PREFIX"),
    ):
        if not ok:
            raise Misconfigured(f"{variable(name)}={getattr(s, name)}: must be {rule}", code="bad_setting")
    return (
        s
        if s.home.is_absolute()
        else load_settings({}, **{f.name: getattr(s, f.name) for f in fields(Settings)} | {"home": s.home.absolute()})
    )
