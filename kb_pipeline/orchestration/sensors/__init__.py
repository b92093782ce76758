"""What Dagster looks at by itself, one file each. A tick asks tables and cheap probes, never lists a source, and is bounded.

What it decides on is kept in PostgreSQL, so that a lost tick, cursor or daemon delays a run and loses none.
"""

from kb_pipeline.orchestration.sensors.alerts import alerts
from kb_pipeline.orchestration.sensors.due_runs import due_runs
from kb_pipeline.orchestration.sensors.event_inbox import event_inbox
from kb_pipeline.orchestration.sensors.run_ended import run_ended
from kb_pipeline.orchestration.sensors.source_changes import source_changes
from kb_pipeline.orchestration.sensors.space_lifecycle import space_lifecycle
from kb_pipeline.orchestration.sensors.waiting_tasks import waiting_tasks

SENSORS = (source_changes, event_inbox, waiting_tasks, due_runs, run_ended, space_lifecycle, alerts)

__all__ = ["SENSORS", "alerts", "due_runs", "event_inbox", "run_ended", "source_changes", "space_lifecycle", "waiting_tasks"]
