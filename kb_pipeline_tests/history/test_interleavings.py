"""The past while it is asked for: what is taken away before it is shown, and what had not committed then."""

from typing import Any

import pytest

from kb_pipeline import as_of
from kb_pipeline.store import documents, history, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.history import Moment
from kb_pipeline_tests.flow.scenario import Flow, article
from kb_pipeline_tests.history.past import ask, now, restrict, write


def test_what_is_revoked_after_it_was_ranked_is_not_shown(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    write(flow, "a.md", article("maple"))
    write(flow, "b.md", article("oak"))
    at = now(flow)
    real = as_of._hits

    def hits(*args: Any) -> Any:
        restrict(flow, "a.md", [["ann"]])
        return real(*args)

    monkeypatch.setattr(as_of, "_hits", hits)
    assert {h.external_id for h in ask(flow, "maple", at).hits} == {"b.md"}


def test_for_a_replay_a_deletion_that_had_not_committed_had_not_happened(flow: Flow) -> None:
    """Its stamp is older than the answer's; only the snapshot knows."""
    doc = write(flow, "a.md", article("maple"))
    with flow.app.pool.connection() as c:
        shard = spaces.lock_shared(c, flow.space)
        assert shard is not None and documents.lock_documents(c, [doc])
        documents.delete_documents(c, flow.space.id, shard, [doc])
        (then,) = flow.execute("SELECT clock_timestamp() AS at, pg_current_snapshot()::text AS snapshot")
        c.commit()
    with transaction(flow.app.pool) as c:
        found = history.then(c, flow.space.id, Moment(then.at, then.snapshot), [doc], [])
    assert [(t.doc_id, t.version, t.deleted) for t in found] == [(doc, 1, True)]
