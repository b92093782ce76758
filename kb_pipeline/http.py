"""The one HTTP client: every answer becomes JSON or an error of ours, and nothing is retried here."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

import httpx

from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, TooLarge, Transient

CONNECT_SECONDS = 10.0
SHOWN_CHARS = 300

# Vendors say "too large" with 400 and 422 as well, each in its own words.
_TOO_LARGE = re.compile(
    r"too (large|long|big|many (tokens|inputs|texts))|maximum (context|input|sequence|allowed|batch)|context[_ ](length|window)"
    r"|max[_ ]?(imum)?[_ ](tokens|length|batch|input)|exceed(s|ed|ing)?\b.{0,60}\b(token|batch|size|length|limit|maximum)"
    r"|batch[_ ]size|(larger|less|more|longer|greater) than \d+|超过|超出|过长",
    re.IGNORECASE | re.DOTALL,
)
_SECRETS = (
    (re.compile(r"(\w://)[^\s/@\"'<>]+@"), r"\1"),  # user:password@
    (re.compile(r"(https?://[^\s?#\"'<>]+)[?#][^\s\"'<>]+"), r"\1?..."),  # signed URLs carry the signature in the query
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), r"\1 ..."),
    (re.compile(r"\b(sk|pk|rk|ghp|xox[abp]|ntn|secret)[-_][\w*.-]{12,}"), "..."),
    (re.compile(r"\bA[KS]IA[0-9A-Z]{12,}"), "..."),
    (
        re.compile(
            r"((?:api|access|app)?[-_ ]?(?:key|token|secret|password|signature|authorization)[\"']?\s*"
            r"(?:[:=]|provided:)\s*[\"']?)"
            r"[^\s\"',;}&]{4,}",
            re.IGNORECASE,
        ),
        r"\1...",
    ),
)


def scrub(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Text of another system on one line, without credentials and signed URLs, at most SHOWN_CHARS characters."""
    text = " ".join(without_secrets(text, secrets).split())
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def without_secrets(text: str, secrets: tuple[str, ...] = ()) -> str:
    """All of it, but for ``secrets`` and what looks like a credential or a signed URL."""
    for secret in secrets:
        text = text.replace(secret, "...")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer before anybody has judged it. ``request`` names it for people: method and URL without its query."""

    request: str
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """What the other side says, fit to be shown."""
        said = _said(self.body)
        return "a web page" if _is_html(said, self.headers) else scrub(said, self.secrets)

    def json(self) -> Any:
        """Raises Transient (``truncated`` or ``not_json``): a proxy's page or half an answer may be whole next time."""
        try:
            return json.loads(self.body)
        except ValueError as e:
            begun = self.body.lstrip()[:1] in (b"{", b"[")
            code, cause = ("truncated", "JSON that ends too early") if begun else ("not_json", "no JSON")
            hint = "try again; if it stays, compare the URL with the vendor's documentation"
            raise Transient(f"{self.request}: answered {cause}: {self.text or 'nothing'}; {hint}", code=code) from e

    @property
    def retry_after(self) -> float | None:
        return seconds_to_wait(self.headers)


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """From Retry-After (seconds or HTTP-date) or a rate-limit reset header; names in lower case. None: they do not say."""
    if (ms := _number(headers.get("retry-after-ms"))) is not None:
        return ms / 1000
    value = headers.get("retry-after") or headers.get("x-ratelimit-reset") or headers.get("ratelimit-reset")
    if value is None:
        return None
    seconds = _number(value)
    if seconds is None:
        seconds = _http_date(value)
    if seconds is None:
        return None
    # Above a billion it is a point in time. The other side's own clock tells how far away it is, where it shows it.
    now = _http_date(headers.get("date")) or time.time()
    return max(0.0, seconds - now if seconds > 1e9 else seconds)


Translate = Callable[[Reply], KbError | None]


def error_of(reply: Reply) -> KbError | None:
    """The usual meaning of a status, None for success. Adapters whose vendor has codes of its own look at those first."""
    status, said = reply.status, f"{reply.request}: HTTP {reply.status}: {reply.text or 'no explanation'}"
    match status:
        case _ if 200 <= status < 300:
            return None
        case _ if 300 <= status < 400:
            target = scrub(reply.headers.get("location", "nowhere"), reply.secrets)
            return Fatal(f"{reply.request}: moved to {target}: put the new address in the configuration", code="redirected")
        case 401 | 403 | 407:
            return Fatal(f"{said}; check the credential and what it may do", code="unauthorized")
        case 402:
            return Fatal(f"{said}; the account must be topped up", code="quota_exceeded")
        case 404 | 410:
            return Rejected(said, code="not_found")
        case 408:
            return Transient(said, code="timeout", retry_after=reply.retry_after)
        case 413:
            return TooLarge(said)
        case 400 | 422 if _TOO_LARGE.search(_said(reply.body)):
            return TooLarge(said)
        case 429:
            return RateLimited(said, retry_after=reply.retry_after)
        case 503 | 529:
            return Transient(said, code="overloaded", retry_after=reply.retry_after)
        case 502 | 504:
            return Transient(said, code="endpoint_down", retry_after=reply.retry_after)
        case 409 | 425 | _ if status >= 500 or status in (409, 425):
            return Transient(said, code="server_error", retry_after=reply.retry_after)
        case _:
            return Rejected(said)


class HttpClient:
    """JSON over pooled connections, from any number of threads. ``translate`` judges each answer, successes included.

    ``timeout_seconds`` is the longest wait for one whole answer.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        translate: Translate = error_of,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._translate = translate
        timeout = httpx.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds))
        self._secrets = _secret_values(headers or {})
        try:
            self._client = httpx.Client(base_url=base_url, headers=dict(headers or {}), timeout=timeout)
        except httpx.InvalidURL as e:
            raise Misconfigured(f"{scrub(base_url)!r} is no URL: {e}", code="bad_url") from e
        except UnicodeEncodeError as e:
            raise Misconfigured(
                f"{scrub(base_url)}: a header is not ASCII: was the key copied whole?", code="bad_header"
            ) from e

    def get_json(self, path: str, params: Mapping[str, str | int] | None = None) -> Any:
        return self._json(self._client.build_request("GET", path, params=params))

    def post_json(self, path: str, body: Any) -> Any:
        return self._json(self._client.build_request("POST", path, json=body))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _json(self, request: httpx.Request) -> Any:
        reply = self._send(request)
        if (error := self._translate(reply)) is not None:
            raise error
        return reply.json()

    def _send(self, request: httpx.Request) -> Reply:
        name = f"{request.method} {scrub(str(request.url.copy_with(query=None)))}"
        deadline = time.monotonic() + self._timeout_seconds
        try:
            response = self._client.send(request, stream=True)
            try:
                body = _read(response, deadline)
            finally:
                response.close()
        except (httpx.RequestError, httpx.InvalidURL) as e:
            raise self._network_error(name, e) from e
        headers = {k.lower(): v for k, v in response.headers.items()}
        return Reply(name, response.status_code, headers, body, self._secrets)

    def _network_error(self, name: str, e: Exception) -> KbError:
        said = f"{name}: {scrub(str(e), self._secrets) or type(e).__name__}"
        if isinstance(e, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL):
            return Misconfigured(f"{said}; check the URL and the key", code="bad_url")
        if "CERTIFICATE_VERIFY_FAILED" in str(e):
            return Fatal(
                f"{said}; install the certificate authority or name the host as its certificate does", code="bad_certificate"
            )
        if isinstance(e, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            return Transient(f"{said}; is it running, and can it be reached from here?", code="endpoint_down")
        if isinstance(e, httpx.TimeoutException):
            return Transient(f"{name}: no whole answer within {self._timeout_seconds:g} s", code="timeout")
        if isinstance(e, httpx.RemoteProtocolError | httpx.DecodingError):
            return Transient(said, code="truncated")
        return Transient(said, code="connection_lost")


def _read(response: httpx.Response, deadline: float) -> bytes:
    # httpx limits the wait for each piece only: an answer that dribbles would never end.
    parts = []
    for part in response.iter_bytes():
        parts.append(part)
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout("the answer dribbles", request=response.request)
    return b"".join(parts)


def _secret_values(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The words of our own headers that a vendor may echo: only long ones, so that ordinary values stay readable."""
    words = (w for v in headers.values() for w in v.split() if len(w) >= 12 and "/" not in w)
    return tuple(sorted(set(words), key=len, reverse=True))


def _said(body: bytes) -> str:
    text = body[:20_000].decode("utf-8", "replace")
    with suppress(ValueError):
        if text.startswith("{"):  # written anew without escapes, which hide what is said in Chinese
            return json.dumps(json.loads(text), ensure_ascii=False)
    return text


def _is_html(said: str, headers: Mapping[str, str]) -> bool:
    return "text/html" in headers.get("content-type", "") or said.lstrip()[:9].lower().startswith(("<!doctype", "<html"))


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _http_date(value: str | None) -> float | None:
    try:
        return parsedate_to_datetime(value or "").timestamp()
    except ValueError:
        return None
