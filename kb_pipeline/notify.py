"""Alerts to people: each channel of ``KB_ALERT_URLS`` is told once what opened, once a day what persists, once what is over.

At least once, never silently dropped: what a channel did not accept is pending for it, and for it alone, at the next call.
Addresses are secrets: they are neither stored nor logged nor part of a message; apprise's own lines may hold them and are kept.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from kb_pipeline.errors import Misconfigured
from kb_pipeline.http import scrub, without_secrets
from kb_pipeline.model import AlertKind
from kb_pipeline.settings import Settings, secret
from kb_pipeline.store import alerts, deliveries, schedules, spaces
from kb_pipeline.store.alerts import Alert, Finding
from kb_pipeline.store.database import Connection, Pool, retried, transaction
from kb_pipeline.store.deliveries import News
from kb_pipeline.store.schedules import Kind, Missed

log = logging.getLogger(__name__)
LISTED = 20  # alerts that one message shows; the others are a number
LONGEST = 700  # characters of one alert
SIZE = 15_000  # of a message as JSON: DingTalk and Feishu refuse 20,000 bytes
SIDE_BY_SIDE = 8  # channels that are told at a time, so that one that does not answer holds up no other

_NEXT = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*://|env:|file:)")  # a comma within an address is its own
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PAGES = {
    AlertKind.SYNC_FAILED: "/assets/source_snapshot?view=partitions&partition={space}",
    AlertKind.APPROVAL_WAITING: "/assets/source_snapshot?view=partitions&partition={space}",
    AlertKind.TASK_DEAD: "/assets/vector_index?view=partitions&partition={space}",
    AlertKind.RECONCILIATION_FAILED: "/assets/index_reconciliation?view=partitions&partition={space}",
    AlertKind.VECTOR_FAILED: "/assets/index_reconciliation?view=partitions&partition={space}",
    AlertKind.SCHEDULE_MISSED: "/runs?q%5B0%5D=tag%3Adagster%2Fpartition%3D{space}",
}
_REPAIRS = {
    Kind.SYNC: "kb sync {space}",
    Kind.SWEEP: "kb sync {space} --full",
    Kind.RECONCILIATION: "kb reconcile {space}",
    Kind.PURGE: "kb purge {space}",
    Kind.GC: "kb gc {space}",
    Kind.QUALITY: "materialise data_quality of the space in the web UI",
}


@dataclass(frozen=True, slots=True)
class Channel:
    """``name`` may be shown. ``problem``: why nothing can be sent to it; empty where it can."""

    name: str
    url: str = field(default="", repr=False)
    service: Any = field(default=None, repr=False)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of one channel's news: all accepted, or none because of ``problem``. ``busy``: another process is at it."""

    channel: str
    opened: int = 0
    reminded: int = 0
    resolved: int = 0
    problem: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    opened: int  # alerts that were not there before
    deliveries: tuple[Delivery, ...]  # one a channel


def deliver(pool: Pool, settings: Settings) -> Report:
    """Look at what is, and tell every channel what it does not know yet. A channel that fails is logged and in the report."""
    opened = observe(pool)
    found = channels(settings)
    if not found:
        return Report(len(opened), ())
    with ThreadPoolExecutor(min(len(found), SIDE_BY_SIDE)) as workers:
        done = tuple(workers.map(lambda channel: _tell(pool, channel, _base(settings)), found))
    for each in done:
        if each.problem:
            log.warning("alerts: %s was told nothing, the next tick tries again: %s", each.channel, each.problem)
    return Report(len(opened), done)


def observe(pool: Pool) -> list[Alert]:
    """Open and resolve alerts of all kinds. The ones that were opened now."""

    def look() -> list[Alert]:
        with transaction(pool) as c:
            return alerts.observe(c, _missed_schedules(c))

    return retried(look, idempotent=True)


def send_test(settings: Settings) -> list[Delivery]:
    """A message that says it is a test, to every channel. Raises Misconfigured where there is none."""
    found = channels(settings)
    if not found:
        raise Misconfigured(
            "KB_ALERT_URLS is empty, so alerts are told to nobody: README has examples of addresses", code="no_channel"
        )
    body = f"A test: alerts of this installation arrive here.\n{_base(settings)}/"
    return [Delivery(c.name, problem=c.problem or _send(c, "kb: test message", body, "info")) for c in found]


def link(alert: Alert, settings: Settings) -> str:
    """The page of the web UI that shows where it comes from."""
    return _link(alert, _base(settings))


def _missed_schedules(c: Connection) -> list[Finding]:
    missed = schedules.missed(c)
    ids = {s.key: s.id for s in spaces.list_spaces(c)} if missed else {}
    return [Finding(AlertKind.SCHEDULE_MISSED, m.kind.value, _missed(m), ids[m.space]) for m in missed]


def _missed(m: Missed) -> str:
    last = f"it last did at {m.last_success_at.astimezone(UTC):%Y-%m-%d %H:%M}Z" if m.last_success_at else "it never did"
    repair = _REPAIRS[m.kind].format(space=m.space)
    return f"the scheduled {m.kind} did not succeed {m.misses} times in a row, {last}. Look at its runs, then: {repair}"


# --- one channel ------------------------------------------------------------------------------------------------------


def channels(settings: Settings) -> list[Channel]:
    """In the order of the setting. One whose secret is missing, or that apprise does not know, is there with its problem."""
    written = [text for text in _NEXT.split(settings.alert_urls.strip()) if text]
    return [_channel(n, text.rstrip(", "), settings) for n, text in enumerate(written, 1)]


def _channel(number: int, written: str, settings: Settings) -> Channel:
    try:
        url = secret(written) if written.startswith(("env:", "file:")) else written
    except Misconfigured as e:
        return Channel(f"channel {number} ({written})", problem=e.message)
    import apprise

    asset = apprise.AppriseAsset(app_id="kb", app_desc="kb_pipeline", app_url=_base(settings), async_mode=False)
    with _overheard():
        service = apprise.Apprise.instantiate(url, asset=asset)
    scheme = m[1].lower() if (m := _SCHEME.match(url)) else "no scheme"
    if service is None:
        problem = "apprise knows no such address: compare it with the examples in README and apprise's documentation"
        return Channel(f"channel {number} ({scheme})", problem=problem)
    return Channel(f"channel {number} ({scheme}{_place(service)})", url, service)


def _place(service: Any) -> str:
    """Only of services whose address has a host: elsewhere a token stands in its place."""
    if not any("{host}" in template for template in service.templates):
        return ""
    return f"://{service.host}:{service.port}" if service.port else f"://{service.host}"


def _tell(pool: Pool, channel: Channel, base: str) -> Delivery:
    """No transaction is open while the message is on its way: the claim on the channel keeps other processes from it."""
    if channel.problem:
        return Delivery(channel.name, problem=channel.problem)
    name = _fingerprint(channel.url)

    def begin() -> tuple[int | None, list[News]]:
        with transaction(pool) as c:
            if not deliveries.pending(c, name):
                return 0, []
            token = deliveries.claim(c, name)
            return token, deliveries.pending(c, name) if token else []  # again: as whoever had the claim has left it

    token, news = retried(begin, idempotent=True)  # a claim whose COMMIT was not answered is one that runs out
    problem = _send(channel, *compose(news, base, channel.service.body_maxlen)) if news else ""

    def end() -> None:
        with transaction(pool) as c:
            if not problem:
                deliveries.note_told(c, name, news)
            deliveries.release(c, name, token or 0)

    if token:
        retried(end, idempotent=True)
    if token is None or problem:
        return Delivery(channel.name, problem=problem, busy=token is None)
    return Delivery(channel.name, len(_fresh(news)), len(_persisting(news)), len(_over(news)))


@lru_cache(maxsize=64)
def _fingerprint(url: str) -> str:
    """What a channel is called in the database. Slow to compute on purpose: a password in it must not be guessed from it."""
    return hashlib.scrypt(url.encode(), salt=b"kb_pipeline alert channel", n=2**14, r=8, p=1, dklen=16).hex()


def _send(channel: Channel, title: str, body: str, kind: str) -> str:
    """Why the channel did not accept it; empty: it did."""
    import apprise

    sender = apprise.Apprise()
    sender.add(channel.service)
    with _overheard() as said:
        accepted = sender.notify(
            body=body, title=title, notify_type=apprise.NotifyType(kind), body_format=apprise.NotifyFormat.TEXT
        )
    if accepted:
        return ""
    return scrub("; ".join(said), _parts(channel)) if said else "it did not accept the message, and did not say why"


def _parts(channel: Channel) -> tuple[str, ...]:
    """Whatever of the address could be a secret, the longest first."""
    pieces = re.split(r"[/:@?&=#,]+", channel.url)[1:]
    shown = {channel.service.host} if _place(channel.service) else set()
    return tuple(sorted({x for p in pieces for x in (p, unquote(p)) if len(x) >= 4 and x not in shown}, key=len, reverse=True))


_said: ContextVar[list[str] | None] = ContextVar("_said", default=None)


class _Ear(logging.Handler):
    """By context and not by thread: apprise sends in a thread of its own, to which it passes the context on."""

    def emit(self, record: logging.LogRecord) -> None:
        if (said := _said.get()) is not None:
            said.append(record.getMessage())


_EAR = _Ear(logging.WARNING)


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """What apprise has to say meanwhile. It goes nowhere else, because some of its lines name a token."""
    logger = logging.getLogger("apprise")
    logger.propagate = False
    logger.addHandler(_EAR)  # added once, however often
    said: list[str] = []
    before = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(before)


# --- one message ------------------------------------------------------------------------------------------------------


def compose(news: Sequence[News], base: str, longest: int = SIZE) -> tuple[str, str, str]:
    """Title, text and apprise's kind of one message for all of it: what opened first, then what persists, then what is over."""
    fresh, persisting, over = _fresh(news), _persisting(news), _over(news)
    counts = (len(fresh), f"new alert{'s' * (len(fresh) != 1)}"), (len(persisting), "still open"), (len(over), "resolved")
    told = [_open(n.alert, base) for n in fresh] + [_open(n.alert, base, "still open, ") for n in persisting]
    blocks = _fitting([*told, *(_resolved(n.alert) for n in over)], max(longest - 100, 60))
    if len(blocks) < len(news):
        blocks.append(f"and {len(news) - len(blocks)} more. All that is open: kb alerts")
    return f"kb: {', '.join(f'{n} {what}' for n, what in counts if n)}", "\n\n".join(blocks), "warning" if told else "success"


def _fitting(blocks: Sequence[str], longest: int) -> list[str]:
    """As many as there is room for, and the beginning of one in any case. As JSON a Chinese character may take six bytes."""
    kept: list[str] = []
    size = characters = 0
    for block in blocks[:LISTED]:
        size, characters = size + len(json.dumps(block)), characters + len(block) + 2
        if size > SIZE or characters > longest:
            break
        kept.append(block)
    return kept or [blocks[0][:longest]]


def _open(a: Alert, base: str, state: str = "") -> str:
    since = f"{a.since.astimezone(UTC):%Y-%m-%d %H:%M}Z"
    return f"{a.kind} in {_where(a)}, {state}since {since}: {_text(a.message)}\n{_link(a, base)}"


def _resolved(a: Alert) -> str:
    return f"resolved: {a.kind} in {_where(a)}: {_text(a.subject)}"


def _text(text: str) -> str:
    """One line that holds no secret and mentions nobody: ``<!channel>`` in the name of a document is a call to Slack's users.

    In the middle something may be missing: at its end is the command.
    """
    line = " ".join("".join(x if x.isprintable() else " " for x in without_secrets(text)).split())
    line = line.replace("<", "‹").replace(">", "›")
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def _where(a: Alert) -> str:
    return a.space or "the installation"


def _link(a: Alert, base: str) -> str:
    return base + _PAGES[a.kind].format(space=quote(a.space, safe="")) if a.space else f"{base}/"


def _base(settings: Settings) -> str:
    return (settings.alert_link or f"http://127.0.0.1:{settings.web_port}").rstrip("/")


def _fresh(news: Sequence[News]) -> list[News]:
    return [n for n in news if not n.told]


def _persisting(news: Sequence[News]) -> list[News]:
    return [n for n in news if n.told and not n.resolved]


def _over(news: Sequence[News]) -> list[News]:
    return [n for n in news if n.resolved]
