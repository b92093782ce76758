"""Answers of the server that are none, as errors of ours."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kb_pipeline.errors import Fatal, KbError, Misconfigured, Rejected, StateError, TooLarge, Transient
from kb_pipeline.http import scrub
from kb_pipeline.indexes.elasticsearch.layout import Config

_ABSENT = ("index_not_found_exception", "aliases_not_found_exception")


@contextmanager
def translated(config: Config, name: str) -> Iterator[None]:
    """A request about index ``name``. A time-out may have had its effect: the same call again is safe."""
    from elastic_transport import ConnectionError, ConnectionTimeout, TlsError, TransportError
    from elasticsearch import ApiError, UnsupportedProductError

    try:
        yield
    except ConnectionTimeout as e:
        raise Transient(
            f"vector index {name}: no answer within {config.timeout:g} s (option 'timeout')", code="index_timeout"
        ) from e
    except TlsError as e:
        raise Misconfigured(
            f"vector index: no trusted TLS connection to {shown(config)}: name the file of its certificate's "
            "authority in option 'ca_certs', or http:// in option 'url'",
            code="bad_certificate",
        ) from e
    except ConnectionError as e:
        raise Transient(
            f"vector index: {shown(config)} does not answer ({type(e).__name__}): does it run, can it be reached from here?",
            code="index_down",
        ) from e
    except UnsupportedProductError as e:
        raise Misconfigured(f"{shown(config)} is no Elasticsearch server: check option 'url'", code="no_elasticsearch") from e
    except TransportError as e:  # half an answer, or a proxy's page
        raise Transient(f"vector index: {shown(config)} answered {type(e).__name__}", code="index_down") from e
    except ApiError as e:
        raise _of_status(config, name, e.meta.status, e.body, e.meta.headers) from e


def _of_status(config: Config, name: str, status: int, body: Any, headers: Mapping[str, str]) -> KbError:
    error = body.get("error") if isinstance(body, dict) else None
    kind, said = (error.get("type", ""), reason(error)) if isinstance(error, dict) else ("", scrub(str(error or body or "")))
    if kind == "media_type_header_exception":
        return Misconfigured(f"{shown(config)} is too old: Elasticsearch 9 is needed", code="elasticsearch_too_old")
    if status == 401:
        option = "'api_key'" if config.api_key else "'username' and 'password'" if config.username else "'api_key' is missing"
        return Misconfigured(
            f"vector index: {shown(config)} refuses the credential: check option {option}", code="unauthorized"
        )
    if status == 413:
        return TooLarge(f"vector index {name}: a request is too large for {shown(config)}: lower option 'max_bytes'")
    if status == 404 and (kind in _ABSENT or isinstance(error, str)):
        return StateError(f"index {name} is gone", code="index_gone")
    if status == 404:  # a point in time that a node has lost
        return Transient(f"vector index {name}: {said}", code="index_down")
    if (failure := _of_kind(name, status, kind, said, _wait(headers))) is not None:
        return failure
    return Fatal(f"vector index {name}: HTTP {status}: {said or 'no explanation'}", code="index_error")


def _of_kind(name: str, status: int, kind: str, said: str, retry_after: float | None = None) -> KbError | None:
    """What means the same of a request and of one item in it."""
    if kind == "cluster_block_exception" and status != 503:
        if "read-only-allow-delete" in said or "read_only_allow_delete" in said:
            return Fatal(
                f"vector index {name} takes no writes, its disk is nearly full: free some space on the server; it opens again "
                "by itself",
                code="index_full",
            )
        return Fatal(f"vector index {name} takes no writes: {said}: take the block off the index", code="index_blocked")
    if status == 403:
        return Misconfigured(
            f"vector index {name}: the credential lacks a privilege: {said}: grant it, or change the options of the login",
            code="forbidden",
        )
    if status in (408, 429, 502, 503, 504):
        return Transient(f"vector index {name} is overloaded: HTTP {status} {said}", code="overloaded", retry_after=retry_after)
    return None


def refuse_failed(name: str, items: Sequence[Mapping[str, Any]]) -> None:
    """Raise what the worst item of a bulk means. An older version that is refused, and a missing id to delete, are no errors.

    What stops everything goes before what may pass, and that before what concerns one entry.
    """
    found: list[KbError] = []
    for item in items:
        ((_, result),) = item.items()
        error, status = result.get("error"), int(result["status"])
        if error is None or status == 409:
            continue
        kind, said = error.get("type", ""), reason(error)
        if status == 404:
            raise StateError(f"index {name} is gone", code="index_gone")
        refused = Rejected(f"vector index {name} refuses {result.get('_id')}: {said}", code="index_refused")
        found.append(_of_kind(name, status, kind, said) or (refused if status == 400 else _unknown(name, status, said)))
    if found:
        raise min(found, key=lambda e: isinstance(e, Transient) + 2 * isinstance(e, Rejected))


def _unknown(name: str, status: int, said: str) -> KbError:
    return Transient(f"vector index {name}: HTTP {status} {said}", code="index_error")


def reason(error: Mapping[str, Any]) -> str:
    """The innermost cause on one line; the outer ones only say where."""
    while isinstance(error.get("caused_by"), dict):
        error = error["caused_by"]
    return scrub(f"{error.get('type', '')}: {error.get('reason', '')}")


def shown(config: Config) -> str:
    return scrub(", ".join(config.urls))


def _wait(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "")
    return float(value) if value.isdigit() else None
