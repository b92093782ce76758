"""Every cause is told once to every channel, what is over as well, and never with a secret. The other end is a real server."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread

import apprise
import apprise.decorators
import pytest

from kb_pipeline import notify
from kb_pipeline.errors import Fatal, Misconfigured, Rejected
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.model import AlertKind
from kb_pipeline.notify import Report, channels, compose, deliver, send_test
from kb_pipeline.settings import Settings
from kb_pipeline.store import deliveries, schedules, sources
from kb_pipeline.store.alerts import Alert
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.deliveries import News
from kb_pipeline.store.schedules import Kind
from kb_pipeline_tests.fakes import MemoryIndex, MemorySource
from kb_pipeline_tests.flow.conftest import make_flow  # noqa: F401
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.webhook import Webhook, listening

PLANTED = "pl4nted5ecret"
NAMES = [f"{n}{n}.md" for n in "abcdefgh"]


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with listening() as made:
        yield made


@pytest.fixture
def flow(make_flow: Callable[..., Flow], pool: Pool) -> Flow:  # noqa: F811
    """Eight published documents, and no other space: the tests of a file share a database."""
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_alert")
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE status <> 'DELETED'")
        c.execute("DELETE FROM kb_alert_channel")
    made = make_flow({name: article(name[:2], 1) for name in NAMES}, index=MemoryIndex())
    made.sync()
    return made


def told(flow: Flow, *urls: str, **settings: str) -> Report:
    return deliver(flow.app.pool, replace(flow.app.settings, alert_urls=",".join(urls), **settings))


# --- causes and cures -------------------------------------------------------------------------------------------------


def fail_sync(flow: Flow) -> None:
    flow.memory.page_errors[0] = Fatal(f"https://u:{PLANTED}@host/x?sig={PLANTED}: HTTP 401", code="unauthorized")
    flow.sync()


def sync_again(flow: Flow) -> None:
    flow.memory.page_errors.clear()
    flow.memory.fetch_errors.clear()
    flow.sync()


def kill_task(flow: Flow) -> None:
    flow.memory.put("aa.md", article("new", 1))
    flow.memory.fetch_errors["aa.md"] = Rejected(f"closed, api_key={PLANTED}", code="forbidden")
    flow.sync()
    assert flow.task("aa.md").status == "DEAD"


def retry_task(flow: Flow) -> None:
    assert flow.retry(flow.task("aa.md").id)
    sync_again(flow)


def remove_many(flow: Flow) -> None:
    flow.memory.remove(*NAMES[:5])
    assert flow.sync().waiting_deletions == 5


def lose_a_vector(flow: Flow) -> None:
    lost = min(flow.current_ids())
    for rows in flow.index.indexes.values():
        rows.pop(lost, None)


def differ(flow: Flow) -> None:
    lose_a_vector(flow)
    assert reconcile(flow.engine, flow.space, repair=False).remaining == 1


def fail_a_vector(flow: Flow) -> None:
    lose_a_vector(flow)
    flow.index.drops_upserts = True
    for _ in range(5):
        reconcile(flow.engine, flow.space)
        flow.execute("UPDATE vector_retry SET next_at = '-infinity' WHERE space_id = %(space)s")


def repair(flow: Flow) -> None:
    flow.index.drops_upserts = False
    assert reconcile(flow.engine, flow.space, retry_failed=True).remaining == 0


def miss_schedule(flow: Flow) -> None:
    with transaction(flow.app.pool) as c:
        for _ in range(schedules.MISSES):
            schedules.failed(c, flow.space.key, Kind.SWEEP)


def keep_schedule(flow: Flow) -> None:
    with transaction(flow.app.pool) as c:
        schedules.succeeded(c, flow.space.id, Kind.SWEEP)


KINDS = {
    AlertKind.SYNC_FAILED: (fail_sync, sync_again, "kb sync {} --source memory", "source_snapshot"),
    AlertKind.TASK_DEAD: (kill_task, retry_task, "kb task list {} --status DEAD", "vector_index"),
    AlertKind.APPROVAL_WAITING: (
        remove_many,
        lambda f: f.approve(5),
        "kb source approve {} memory --up-to 5",
        "source_snapshot",
    ),
    AlertKind.RECONCILIATION_FAILED: (differ, repair, "kb reconcile {}", "index_reconciliation"),
    AlertKind.SCHEDULE_MISSED: (miss_schedule, keep_schedule, "kb sync {} --full", "runs"),
    AlertKind.VECTOR_FAILED: (fail_a_vector, repair, "kb reconcile {} --retry-failed", "index_reconciliation"),
}


@pytest.mark.parametrize("kind", list(AlertKind))
def test_every_kind_arrives_once_with_command_and_page_and_once_more_when_it_is_over(
    flow: Flow, hook: Webhook, kind: AlertKind
) -> None:
    cause, cure, command, page = KINDS[kind]
    told(flow, hook.url)
    assert hook.take() == []
    cause(flow)
    told(flow, hook.url, alert_link="https://kb.example.com/")
    (message,) = hook.take()
    (line,) = [x for x in message["message"].split("\n\n") if x.startswith(f"{kind} in {flow.space.key}, since ")]
    text, link = line.split("\n")
    assert text.endswith(command.format(flow.space.key))
    assert link.startswith("https://kb.example.com/") and page in link and flow.space.key in link
    assert "new alert" in message["title"] and message["type"] == "warning"
    told(flow, hook.url)
    assert hook.take() == []
    cure(flow)
    told(flow, hook.url)
    (message,) = hook.take()
    assert f"resolved: {kind} in {flow.space.key}: " in message["message"]
    assert "resolved" in message["title"] and message["type"] == "success"
    told(flow, hook.url)
    assert hook.take() == []


def test_a_cause_that_comes_back_is_told_again(flow: Flow, hook: Webhook) -> None:
    for _ in range(2):
        miss_schedule(flow)
        told(flow, hook.url)
        keep_schedule(flow)
        told(flow, hook.url)
    assert [m["title"] for m in hook.messages] == ["kb: 1 new alert", "kb: 1 resolved"] * 2


def test_what_persists_is_told_again_after_a_day(flow: Flow, hook: Webhook) -> None:
    miss_schedule(flow)
    told(flow, hook.url)
    for hours, reminded in ((23, 0), (1.1, 1), (0, 0)):
        flow.execute("UPDATE kb_alert_delivery SET sent_at = sent_at - %(hours)s * interval '1 hour'", hours=hours)
        (delivery,) = told(flow, hook.url).deliveries
        assert (delivery.opened, delivery.reminded) == (0, reminded)
    first, second = hook.messages
    assert second["title"] == "kb: 1 still open" and "still open, since " in second["message"]


def test_a_burst_is_one_message_with_the_first_twenty_and_a_count(flow: Flow, hook: Webhook) -> None:
    _thousand(flow)
    report = told(flow, hook.url)
    assert report.opened == report.deliveries[0].opened == 1000
    (message,) = hook.take()
    assert message["title"] == "kb: 1000 new alerts"
    assert message["message"].count("TASK_DEAD") == 20
    assert message["message"].endswith("and 980 more. All that is open: kb alerts")
    told(flow, hook.url)
    assert hook.take() == []


def _thousand(flow: Flow) -> None:
    flow.execute(
        "INSERT INTO kb_doc (space_id, source_id, external_id, title, uri) "
        "SELECT %(space)s, %(source)s, 'm' || n, 't', 'u' FROM generate_series(1, 1000) n"
    )
    flow.execute(
        "INSERT INTO ingestion_task (space_id, doc_id, version, status, error_code) "
        "SELECT space_id, id, 1, 'DEAD', 'code_' || external_id FROM kb_doc WHERE space_id = %(space)s AND title = 't'"
    )


# --- several channels, and channels that fail ---------------------------------------------------------------------------


def test_a_channel_that_was_down_is_told_later_and_only_that_one(flow: Flow, hook: Webhook) -> None:
    with listening() as other:
        other.status = 503
        miss_schedule(flow)
        good, bad = told(flow, hook.url, other.url).deliveries
        assert (good.opened, good.problem) == (1, "")
        assert bad.opened == 0 and "503" in bad.problem
        told(flow, hook.url, other.url)
        assert other.refused == 2
        other.status = 200
        told(flow, hook.url, other.url)
        told(flow, hook.url, other.url)
        assert len(hook.messages) == len(other.messages) == 1
        keep_schedule(flow)
        told(flow, hook.url, other.url)
        assert (
            [m["title"] for m in hook.messages] == [m["title"] for m in other.messages] == ["kb: 1 new alert", "kb: 1 resolved"]
        )


def test_a_receiver_that_is_not_there_is_told_when_it_comes(flow: Flow) -> None:
    with listening() as hook:
        port, url = hook.port, hook.url
    miss_schedule(flow)
    (delivery,) = told(flow, url).deliveries
    assert delivery.problem
    with listening(port) as hook:
        told(flow, url)
        assert [m["title"] for m in hook.messages] == ["kb: 1 new alert"]


def test_a_channel_that_is_added_hears_what_is_open_and_no_old_story(flow: Flow, hook: Webhook) -> None:
    miss_schedule(flow)
    kill_task(flow)
    told(flow, hook.url)
    keep_schedule(flow)
    with listening() as other:
        told(flow, hook.url, other.url)
        (message,) = other.messages
        assert "TASK_DEAD" in message["message"] and "SCHEDULE_MISSED" not in message["message"]


def test_two_that_deliver_at_once_send_one_message(flow: Flow, hook: Webhook) -> None:
    miss_schedule(flow)
    hook.gate.close()
    reports: list[Report] = []
    first = Thread(target=lambda: reports.append(told(flow, hook.url)))
    first.start()
    hook.gate.await_caller()  # its message is on its way, and nothing is written down yet
    (second,) = told(flow, hook.url).deliveries
    assert (second.busy, second.opened, second.problem) == (True, 0, "")
    hook.gate.open()
    first.join()
    assert reports[0].deliveries[0].opened == 1
    told(flow, hook.url)
    assert len(hook.messages) == 1


def test_no_transaction_is_open_while_a_message_is_on_its_way(flow: Flow, hook: Webhook) -> None:
    miss_schedule(flow)
    hook.gate.close()
    first = Thread(target=told, args=(flow, hook.url))
    first.start()
    hook.gate.await_caller()
    held = flow.execute(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%%' "
    )[0].n
    hook.gate.open()
    first.join()
    assert held == 0


def test_who_dies_before_the_message_is_noted_leaves_it_to_the_next(
    flow: Flow, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(Exception):
        pass

    def die(*_: object) -> None:
        raise Died

    miss_schedule(flow)
    with monkeypatch.context() as patched:
        patched.setattr(deliveries, "note_told", die)
        with pytest.raises(Died):
            told(flow, hook.url)
    assert told(flow, hook.url).deliveries[0].busy
    flow.execute("UPDATE kb_alert_channel SET until = clock_timestamp() - interval '1 second'")  # its claim runs out
    assert told(flow, hook.url).deliveries[0].opened == 1
    told(flow, hook.url)
    assert len(hook.messages) == 2


def test_channels_that_cannot_be_used_say_so_and_hold_up_no_other(flow: Flow, hook: Webhook, logged: list[str]) -> None:
    miss_schedule(flow)
    report = told(flow, "env:KB_SECRET_NOT_SET", f"nosuch://{PLANTED}", f"https://chat.example.com/hook/{PLANTED}", hook.url)
    *bad, good = report.deliveries
    assert good.opened == 1
    assert "KB_SECRET_NOT_SET: the variable is not set" in bad[0].problem
    assert [d.channel for d in bad[1:]] == ["channel 2 (nosuch)", "channel 3 (https)"]
    assert all("apprise knows no such address" in d.problem for d in bad[1:])
    assert [line.split(" was ")[0] for line in logged] == [f"alerts: {d.channel}" for d in bad]
    assert PLANTED not in repr(logged)


def test_without_a_channel_alerts_are_opened_and_nobody_is_told(flow: Flow) -> None:
    miss_schedule(flow)
    assert told(flow) == Report(1, ())
    with pytest.raises(Misconfigured, match="KB_ALERT_URLS is empty"):
        send_test(flow.app.settings)


def test_an_alert_that_leaves_with_its_space_while_it_is_told_is_passed_over(flow: Flow, hook: Webhook) -> None:
    miss_schedule(flow)
    hook.gate.close()
    reports: list[Report] = []
    first = Thread(target=lambda: reports.append(told(flow, hook.url)))
    first.start()
    hook.gate.await_caller()
    delete_space(flow.engine, flow.space)
    hook.gate.open()
    first.join()
    assert reports[0].deliveries[0].opened == 1
    assert flow.execute("SELECT count(*) AS n FROM kb_alert_delivery")[0].n == 0
    assert told(flow, hook.url).deliveries[0].problem == ""


# --- secrets ------------------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """What an operator's log shows: what reaches the root logger. (caplog also hears loggers that keep to themselves.)"""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    handler, root = Lines(), logging.getLogger()
    root.addHandler(handler)
    yield handler.lines
    root.removeHandler(handler)


def test_no_secret_of_a_source_or_an_address_is_in_a_message_a_log_or_a_table(
    flow: Flow, hook: Webhook, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(flow.app.pool) as c:
        source = sources.add_source(c, flow.space.id, "second", "memory", {"token": PLANTED})
    broken = MemorySource({})
    broken.page_errors[0] = Fatal(f"https://me:{PLANTED}@host/list?signature={PLANTED}: HTTP 403", code="unauthorized")
    flow.app.connectors[source.id] = broken
    kill_task(flow)
    monkeypatch.setenv("KB_SECRET_HOOK", f"json://me:{PLANTED}@127.0.0.1:{hook.port}/{PLANTED}?+X-Token={PLANTED}")
    urls = ("env:KB_SECRET_HOOK", f"json://127.0.0.1:1/{PLANTED}", f"feishu://{PLANTED}!")
    report = told(flow, *urls)
    (body,) = hook.accepted
    assert "SYNC_FAILED" in body and "TASK_DEAD" in body
    hook.status = 500
    miss_schedule(flow)
    down = told(flow, *urls)
    assert "500" in down.deliveries[0].problem
    rows = flow.execute("SELECT h::text FROM kb_alert_channel h UNION ALL SELECT d::text FROM kb_alert_delivery d")
    assert len(rows) >= 3
    settings = replace(flow.app.settings, alert_urls=",".join(urls))
    shown = (body, repr(report), repr(down), repr(logged), repr(rows), repr(channels(settings)), repr(send_test(settings)))
    assert [text for text in shown if PLANTED in text] == []
    assert [c.name for c in channels(settings)] == [
        f"channel 1 (json://127.0.0.1:{hook.port})", "channel 2 (json://127.0.0.1:1)", "channel 3 (feishu)",
    ]  # fmt: skip


def test_a_reason_is_told_without_the_address() -> None:
    @apprise.decorators.notify(on="refusing")
    def refuse(body: str, title: str, notify_type: str, **_: object) -> bool:
        logging.getLogger("apprise").warning(f"no robot has the token {PLANTED}, nor the key a/{PLANTED}?x")
        return False

    (delivery,) = send_test(Settings(alert_urls=f"refusing://{PLANTED}/path"))
    assert delivery.channel == "channel 1 (refusing)"
    assert delivery.problem.startswith("no robot has the token ...") and PLANTED not in delivery.problem


@pytest.mark.parametrize(
    "url",
    [
        "feishu://0a1b2c3d-4e5f-6789-abcd-ef0123456789",
        "dingtalk://SEC0a1b2c3d4e5f@0a1b2c3d4e5f6789/",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#alerts",
        "mailtos://kb:password@smtp.example.com:465?from=kb@example.com&to=oncall@example.com,second@example.com",
        "jsons://user:password@hooks.example.com/alerts",
    ],
)
def test_the_documented_services_exist_and_show_no_token(url: str) -> None:
    one, two = channels(Settings(alert_urls=f" {url} , json://127.0.0.1/x,"))
    scheme = url.partition(":")[0]
    assert one.problem == two.problem == ""
    host = {"mailtos": "://smtp.example.com:465", "jsons": "://hooks.example.com"}.get(scheme, "")
    assert (one.name, two.name) == (f"channel 1 ({scheme}{host})", "channel 2 (json://127.0.0.1)")


# --- messages -----------------------------------------------------------------------------------------------------------


def news(message: str, n: int = 1) -> list[News]:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    return [News(Alert(i, "空间", AlertKind.TASK_DEAD, "corrupt", message, at), told=False, resolved=False) for i in range(n)]


def test_a_message_stays_below_what_the_services_take() -> None:
    _, body, _ = compose(news("文" * 2000 + ": kb task list 空间", 30), "http://127.0.0.1:3000")
    assert len(json.dumps(body)) < 19_000
    shown = body.count("TASK_DEAD")
    assert 1 < shown < 20 and body.endswith(f"and {30 - shown} more. All that is open: kb alerts")
    assert body.count("kb task list 空间\nhttp://") == shown  # what is left out is not the command
    _, short, _ = compose(news("x" * 2000), "http://127.0.0.1:3000", longest=256)
    assert 60 < len(short) < 256


def test_names_of_documents_call_nobody_and_break_no_line() -> None:
    _, body, _ = compose(news('1 document (<!channel>\n<at user_id="all">\x1b[31m.md) failed: kb task list x'), "http://h")
    assert "<" not in body and "\x1b" not in body and len(body.split("\n")) == 2


def test_the_page_of_a_space_is_quoted() -> None:
    assert notify.link(news("m")[0].alert, Settings(web_port=4000)) == (
        "http://127.0.0.1:4000/assets/vector_index?view=partitions&partition=%E7%A9%BA%E9%97%B4"
    )


def test_apprise_is_loaded_where_there_is_a_channel_only() -> None:
    code = "import sys, kb_pipeline.notify; assert 'apprise' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
