"""``k=v`` arguments: split, and given the types that an adapter's ``Config`` declares."""

import importlib
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Json

_SECRET_WORDS = ("secret", "password", "token", "api_key", "access_key")


def pairs(arguments: Sequence[str], what: str) -> dict[str, str]:
    """Raises Misconfigured for an argument without ``=``, or a key that is given twice."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise Misconfigured(f"{what} {argument!r}: write key=value", code="bad_option")
        if key in found:
            raise Misconfigured(f"{what} {key!r} is given twice", code="bad_option")
        found[key] = value
    return found


def adapter_options(adapters: Mapping[str, str], name: str, given: Mapping[str, str]) -> Json:
    """Lists split at commas, JSON for objects, paths made absolute, where the adapter's ``Config`` declares such a field.

    Everything else stays text, which pydantic converts. An adapter that is unknown or not installed is left to the caller.
    """
    try:
        config: type[BaseModel] = importlib.import_module(adapters[name].partition(":")[0]).Config
    except (KeyError, ModuleNotFoundError):
        return dict(given)
    return {k: _typed(k, v, f.annotation) if (f := config.model_fields.get(k)) else v for k, v in given.items()}


def masked(options: Mapping[str, Any]) -> Json:
    """Without the secrets that somebody wrote out instead of a reference."""
    return {k: "********" if _is_secret(k) and not str(v).startswith(("env:", "file:")) else v for k, v in options.items()}


def whole_number(key: str, value: str, least: int) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise Misconfigured(f"{key}={value}: must be a whole number from {least}", code="bad_option")
    return int(value)


def truth(key: str, value: str) -> bool:
    if (lower := value.lower()) not in ("true", "false", "yes", "no", "1", "0"):
        raise Misconfigured(f"{key}={value}: must be true or false", code="bad_option")
    return lower in ("true", "yes", "1")


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRET_WORDS)


def _typed(key: str, value: str, annotation: Any) -> Any:
    if not value or value.startswith(("env:", "file:")):
        return value  # a secret's reference, or what the adapter must refuse: an empty path is no wish for this folder
    kinds = _kinds(annotation)
    if kinds & {list, tuple, set, frozenset}:
        return [part.strip() for part in value.split(",") if part.strip()]
    if dict in kinds or Mapping in kinds:
        try:
            return json.loads(value)
        except ValueError as e:
            raise Misconfigured(f"{key}={value}: must be a JSON object, as in {key}='{{\"a\": 1}}'", code="bad_option") from e
    if Path in kinds:
        return str(Path(value).expanduser().absolute())  # relative to where the command is typed
    return value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types of a field, ``X | None`` taken apart."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    origin = get_origin(annotation) or annotation
    return {dict if origin is not None and getattr(origin, "__name__", "") == "Mapping" else origin}
