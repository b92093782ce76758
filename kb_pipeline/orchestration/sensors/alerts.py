"""What needs a person is told to people, once, on the channels of ``KB_ALERT_URLS``."""

from dagster import DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from kb_pipeline.notify import Report, deliver
from kb_pipeline.orchestration.requests import told
from kb_pipeline.orchestration.resources import KbResource


@sensor(
    minimum_interval_seconds=30,
    default_status=DefaultSensorStatus.RUNNING,
    description="Looks for what needs a person (failed passes, dead documents, deletions that wait, differences of the index, "
    "missed schedules) and sends what is new, and what is resolved, to every channel of KB_ALERT_URLS: one message a channel, "
    "each alert once, and again after 24 hours if it persists. A channel that fails is tried again with the next tick. "
    "If it is off, alerts are shown by `kb alerts` and `kb status` only.",
)
def alerts(context: SensorEvaluationContext, kb: KbResource) -> SensorResult:
    app = kb.app()
    return SensorResult(skip_reason=SkipReason(_words(deliver(app.pool, app.settings))))


def _words(report: Report) -> str:
    sent = [
        f"{d.channel}: " + told((d.opened, "alerts"), (d.reminded, "reminders"), (d.resolved, "resolved"), nothing="")
        for d in report.deliveries
        if d.opened or d.reminded or d.resolved
    ]
    sent += [f"{d.channel} was told nothing: {d.problem}" for d in report.deliveries if d.problem]
    sent += [f"{d.channel}: another process is telling it" for d in report.deliveries if d.busy]
    if not report.deliveries:
        return f"{report.opened} alerts opened; KB_ALERT_URLS is empty, so nobody is told"
    return "; ".join(sent) or "nothing to tell"
