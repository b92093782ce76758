"""What a listing may remove."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/walks.sql"
PY = "kb_pipeline/store/walks.py"
WALKER = "kb_pipeline/walk/walker.py"
MISSING = "kb_pipeline/walk/missing.py"
DELETION = "kb_pipeline/maintenance/deletion.py"
DOCUMENTS = "kb_pipeline/store/documents.sql"
SNAPSHOT = "kb_pipeline/stages/snapshot.py"

RULES = (
    Rule(
        "sync.resumed",
        "a walk resumed in an unstable order does not believe what it lacks",
        "what moved behind the checkpoint is hidden, and deleted",
        (Edit(PY, "    if not walk.resumed and not order_stable and any(", "    if False and any("),),
        ("flow/test_walks.py::test_a_resumed_walk_hides_nothing_that_only_moved_in_the_listing",),
    ),
    Rule(
        "sync.resumed_probe",
        "behind a resumed walk only what a probe calls gone is hidden",
        "what moved behind the checkpoint is hidden",
        (
            Edit(
                MISSING,
                "hidden = {Presence.GONE} if self.walk.resumed else set(Presence) - {Presence.PRESENT}",
                "hidden = set(Presence) - {Presence.PRESENT}",
            ),
        ),
        ("flow/test_walks.py::test_a_resumed_walk_still_deletes_what_a_probe_says_is_gone",),
    ),
    Rule(
        "sync.resumed_blind",
        "without a probe a resumed walk removes nothing",
        "what moved behind the checkpoint is hidden",
        (Edit(MISSING, "if walk.resumed and not self.connector.capabilities.probe:", "if False:"),),
        ("flow/test_walks.py::test_a_resumed_walk_hides_nothing_that_only_moved_in_the_listing",),
    ),
    Rule(
        "sync.complete",
        "only a COMPLETE listing hides",
        "a folder that could not be read takes its documents away",
        (
            Edit(
                WALKER,
                "            if walk.verdict is Verdict.COMPLETE:\n                missing.hide()",
                "            if True:\n                missing.hide()",
            ),
        ),
        ("flow/test_deletion.py::test_a_partial_page_deletes_nothing_and_leaves_the_watermark",),
    ),
    Rule(
        "sync.partial_page",
        "one PARTIAL page makes the listing PARTIAL",
        "a folder that could not be read takes its documents away",
        (
            Edit(
                WALKER,
                "                if page.verdict is not Verdict.COMPLETE:\n                    walk.verdict = page.verdict\n",
                "",
            ),
        ),
        ("flow/test_deletion.py::test_a_partial_page_deletes_nothing_and_leaves_the_watermark",),
    ),
    Rule(
        "sync.full_only",
        "an incremental walk hides nothing",
        "whatever did not change is deleted",
        (
            Edit(
                WALKER,
                "        if walk.kind is WalkKind.FULL:\n            missing.judge(self.space)",
                "        if True:\n            missing.judge(self.space)",
            ),
        ),
        ("sources/test_incremental.py::test_after_a_full_listing_only_changes_are_asked_for",),
    ),
    Rule(
        "sync.shrink_guard",
        "a listing that shrank beyond the guard removes nothing",
        "an empty answer without an error empties the space",
        (
            Edit(
                MISSING,
                "        elif self.seen >= self.engine.limits.shrink_guard * max(self.source.listing_count or 0, self.seen + missing):",
                "        elif True:",
            ),
        ),
        ("flow/test_deletion.py::test_a_listing_that_shrank_beyond_the_guard_waits_for_approval",),
    ),
    Rule(
        "sync.approval_ceiling",
        "an approval is a ceiling",
        "whoever approved two deletions has approved two thousand",
        (Edit(MISSING, "        elif approved >= missing:", "        elif approved:"),),
        ("flow/test_deletion.py::test_a_listing_that_shrank_beyond_the_guard_waits_for_approval",),
    ),
    Rule(
        "sync.approval_spent",
        "an approval is spent",
        "it holds for every later listing that shrank",
        (
            Edit(
                DELETION,
                "        if spend and ids and not sources.spend_approval(c, source.id, len(ids)):\n            return []\n",
                "",
            ),
        ),
        ("flow/test_deletion.py::test_a_listing_that_shrank_beyond_the_guard_waits_for_approval",),
    ),
    Rule(
        "sync.approval_guard",
        "an approval that is used up permits nothing",
        "two passes delete more than was approved",
        (
            Edit(
                "kb_pipeline/store/sources.sql",
                "WHERE id = %(source)s AND approved >= %(count)s::bigint",
                "WHERE id = %(source)s",
            ),
        ),
        ("store/test_interleavings.py::test_an_approval_is_taken_whole_or_not_at_all",),
    ),
    Rule(
        "sync.probe_gone",
        "a probe has to say GONE before anything is deleted",
        "a permission that was taken away for an hour deletes documents",
        (Edit(DELETION, "if presence is Presence.GONE]", "if presence is not None]"),),
        ("flow/test_deletion.py::test_only_a_probe_that_says_gone_deletes",),
    ),
    Rule(
        "sync.unhide",
        "what is listed again is shown again",
        "a document that was away for one listing is deleted although it is there",
        (Edit(SNAPSHOT, "    return old.hidden or (item.identity", "    return (item.identity"),),
        ("flow/test_deletion.py::test_only_a_probe_that_says_gone_deletes",),
    ),
    Rule(
        "sync.hide_token",
        "a deletion finds the document as it was hidden before the probe",
        "it was shown again and hidden anew meanwhile: the old probe deletes what a new one may call present",
        (
            Edit(
                DOCUMENTS,
                "WHERE d.hidden_sync = x.token AND d.status <> 'DELETED'",
                "WHERE d.hidden_sync IS NOT NULL AND d.status <> 'DELETED'",
            ),
        ),
        ("flow/test_interleavings.py::test_what_was_hidden_anew_after_the_probe_began_waits_for_a_probe_of_its_own",),
    ),
    Rule(
        "sync.still_hidden",
        "only what is still hidden is deleted",
        "it was shown again after the probe",
        (Edit(DOCUMENTS, "WHERE d.hidden_sync = x.token AND d.status <> 'DELETED'", "WHERE d.status <> 'DELETED'"),),
        ("flow/test_deletion.py::test_a_document_that_was_shown_again_after_the_probe_is_not_deleted",),
    ),
    Rule(
        "sync.terminal",
        "a deleted document stays deleted: what reappears is a new one",
        "an eraser that has selected it erases the chunks of the living",
        (
            Edit(
                DOCUMENTS,
                "WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.external_id = ANY",
                "WHERE d.source_id = %(source)s AND d.external_id = ANY",
            ),
        ),
        ("flow/test_sync.py::test_a_document_that_reappears_is_a_new_document_and_embeds_nothing",),
    ),
    Rule(
        "sync.belt",
        "a walk hides only what was last written before it began",
        "what somebody adds while it runs is hidden, as its listing does not have it",
        (
            Edit(
                SQL,
                "SELECT count(*) AS n FROM (\n    SELECT d.id FROM kb_doc d\n    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'\n",
                "SELECT count(*) AS n FROM (\n    SELECT d.id FROM kb_doc d\n    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL\n",
            ),
            Edit(
                SQL,
                "WHERE d.id = ANY(ARRAY(\n    SELECT d.id FROM kb_doc d\n    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'\n",
                "WHERE d.id = ANY(ARRAY(\n    SELECT d.id FROM kb_doc d\n    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL\n",
            ),
            Edit(
                SQL,
                "AND d.hidden_sync IS NULL AND d.status <> 'DELETED' AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'\n",
                "AND d.hidden_sync IS NULL AND d.status <> 'DELETED'\n",
            ),
        ),
        ("flow/test_deletion.py::test_what_was_written_while_the_walk_ran_is_not_hidden_by_it",),
    ),
    Rule(
        "sync.belt_late",
        "what was written after it was found unseen is not hidden",
        "the candidate was selected, somebody writes it, and the walk hides it",
        (
            Edit(
                SQL,
                "AND d.hidden_sync IS NULL AND d.status <> 'DELETED' AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'\n",
                "AND d.hidden_sync IS NULL AND d.status <> 'DELETED'\n",
            ),
        ),
        ("flow/test_interleavings.py::test_what_is_written_after_it_was_found_missing_is_not_hidden",),
    ),
    Rule(
        "sync.hide_lock",
        "hiding locks first and decides in the next statement",
        "a statement that waited for the row still has its old view of what the walk has seen",
        (
            Edit(
                PY,
                '    c.execute(SQL.lock_unseen, {"ids": list(doc_ids)})\n    return c.execute(SQL.hide',
                "    return c.execute(SQL.hide",
            ),
        ),
        ("sources/test_fences.py::test_hiding_decides_after_it_has_waited_for_the_document",),
    ),
    Rule(
        "sync.hide_unseen",
        "hiding asks again what the walk has seen",
        "a candidate that was seen meanwhile is hidden",
        (
            Edit(
                SQL,
                "SELECT unnest(%(ids)s::bigint[]) EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s))\n  AND d.hidden_sync IS NULL",
                "SELECT unnest(%(ids)s::bigint[])))\n  AND d.hidden_sync IS NULL",
            ),
        ),
        ("sources/test_fences.py::test_hiding_decides_after_it_has_waited_for_the_document",),
    ),
    Rule(
        "sync.hide_seq",
        "hiding draws a place in the order of writes",
        "a page that was read before shows the document again",
        (
            Edit(
                SQL,
                "beyond_guard = %(beyond)s::boolean, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp()\nWHERE",
                "beyond_guard = %(beyond)s::boolean\nWHERE",
            ),
        ),
        ("sources/test_fences.py::test_a_hidden_document_has_a_place_behind_every_page_that_was_asked_for_before",),
    ),
)
