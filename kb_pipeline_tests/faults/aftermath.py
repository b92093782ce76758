"""After the storm: one pass, one reconciliation, one GC in calm weather; then every space against a fresh load, by ids."""

from collections import Counter
from contextlib import suppress

from kb_pipeline.errors import Misconfigured
from kb_pipeline.maintenance import rebuild
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.reconcile import reconcile
from kb_pipeline.maintenance.vector_gc import collect_vectors
from kb_pipeline.store import indexes, tasks
from kb_pipeline.store.database import retried, transaction
from kb_pipeline.sync import SyncReport, sync_space
from kb_pipeline_tests.faults.invariants import Checker
from kb_pipeline_tests.faults.storm import Place, Storm, StormApp

WRONG = ("lost", "ghosts", "duplicates", "torn", "unfinished", "left_by_deletions")
# Where a person has decided, only new content changes that: the newest version was canceled by hand.
CANCELED = """
SELECT d.external_id FROM kb_doc d JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver
WHERE d.space_id = %s AND d.status <> 'DELETED' AND t.status = 'CANCELED' AND t.cancel_reason = 'by hand'
"""
NEWEST = "SELECT id, last_ver, external_id FROM kb_doc WHERE space_id = %s AND status <> 'DELETED'"


def compare_with_fresh_loads(storm: Storm) -> Counter[str]:
    """What is wrong, in WRONG, and what was found on the way: ``orphans`` that the last reconciliation condemned, ``dead``
    tasks that were tried again by hand, ``settled_by_people``."""
    storm.weather.trouble = 0.0
    storm.done["landed_late"] += storm.weather.land(10**6)
    found: Counter[str] = Counter()
    with storm.process() as app:
        if storm.dying:
            storm.end_life(app)
        for space in storm.gone:
            found["left_by_deletions"] += sum(delete_space(app.engine, space).values())
        checker = storm.checker()
        try:
            for place in (storm.steady, storm.outside, storm.phoenix):
                found += _settle(storm, app, place)
                found += _compare(storm, app, place, checker)
            storm.find(*checker.look())
            found["torn"] += len(storm.findings)
        finally:
            checker.close()
    return found


def _settle(storm: Storm, app: StormApp, place: Place) -> Counter[str]:
    """Two passes: the second has the decisions of people undone, by content that is new."""
    found: Counter[str] = Counter()
    with suppress(Misconfigured):  # there is none
        rebuild.cancel(app.engine, place.space, keep_seconds=3600)
    _pass(app, place)
    with transaction(app.pool) as c:
        dead = tasks.list_tasks(c, place.space.id, "DEAD", 1000)
        by_people = {r.external_id for r in c.execute(CANCELED, [place.space.id])}
        rows = c.execute(NEWEST, [place.space.id]).fetchall()
    by_people |= {r.external_id for r in rows if (r.id, r.last_ver) in storm.rolled_back}
    found["dead"] = sum(retried(lambda row=row: storm.retry_task(app, row)) for row in dead)  # type: ignore[misc]
    place.users.edit_all(sorted(by_people & place.users.source.items.keys()), "w")
    found["settled_by_people"] = len(by_people)
    last = _pass(app, place)
    assert last.ingest.failures == [], last.ingest.failures
    report = reconcile(app.engine, place.space)
    found["lost"], found["orphans"] = report.missing + report.wrong, report.orphaned
    collect_vectors(app.engine, place.space)
    with transaction(app.pool) as c:
        kept = indexes.living(c, place.space.id)[1:]
    for index in kept:
        compared = reconcile(app.engine, place.space, repair=False, index=index)
        found["lost"] += compared.missing + compared.wrong
    return found


def _pass(app: StormApp, place: Place) -> SyncReport:
    """A walk that goes on where an interrupted one stopped does not see what was edited behind it meanwhile."""
    while True:
        report = sync_space(app.engine, place.space)
        assert report.errors == {}, report.errors
        if not any(p.resumed for p in report.passes):
            return report


def _compare(storm: Storm, app: StormApp, place: Place, checker: Checker) -> Counter[str]:
    fresh = app.add_space(f"fresh-{place.space.key}")
    app.add_fake_source(fresh, place.users.source)
    assert sync_space(app.engine, fresh).failed == 0
    return checker.compare(place.space.id, fresh.id)
