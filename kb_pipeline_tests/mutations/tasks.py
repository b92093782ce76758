"""The task machine: who may work on a version, and who may write about it."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/tasks.sql"
PY = "kb_pipeline/store/tasks.py"
DOCUMENTS = "kb_pipeline/store/documents.sql"
OUTCOME = "kb_pipeline/nodes/outcome.py"
PIPELINE = "kb_pipeline/pipeline.py"
SCHEMA = "sql/0004_tasks_and_answers.sql"

RULES = (
    Rule(
        "tasks.attempt",
        "the fence compares the attempt",
        "a worker that lost its lease goes on beside its successor and publishes chunks that it did not verify",
        (
            Edit(
                SQL,
                "JOIN unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt) ON t.id = x.id AND t.attempt = x.attempt",
                "JOIN unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt) ON t.id = x.id",
            ),
        ),
        ("store/test_tasks.py::test_a_fence_holds_the_newest_attempt_only",),
    ),
    Rule(
        "tasks.fence_status",
        "the fence asks whether the task is PROCESSING",
        "a worker whose task was taken back, and not claimed again yet, still writes",
        (Edit(SQL, "WHERE t.status = 'PROCESSING' ORDER BY t.id FOR UPDATE OF t", "WHERE true ORDER BY t.id FOR UPDATE OF t"),),
        ("store/test_tasks.py::test_a_fence_holds_the_newest_attempt_only",),
    ),
    Rule(
        "tasks.fence_lock",
        "the fence locks the task until the writing transaction ends",
        "a cancellation comes between the fence and the publication: a cancelled version is current",
        (
            Edit(
                SQL,
                "WHERE t.status = 'PROCESSING' ORDER BY t.id FOR UPDATE OF t",
                "WHERE t.status = 'PROCESSING' ORDER BY t.id",
            ),
        ),
        ("flow/test_interleavings.py::test_a_task_is_published_or_cancelled_and_never_both",),
    ),
    Rule(
        "tasks.fence_tx",
        "the fence belongs to the transaction that writes",
        "between a fence that was asked before and the write the task is cancelled or taken over",
        (
            Edit(
                OUTCOME,
                "held = tasks.fence(c, space, claims, documents=True)\n",
                "held = tasks.fence(c, space, claims, documents=True); c.execute('COMMIT'); c.execute('BEGIN')\n",
            ),
        ),
        ("flow/test_interleavings.py::test_a_task_is_published_or_cancelled_and_never_both",),
    ),
    Rule(
        "tasks.claim_attempt",
        "every claim draws a new attempt",
        "two claims of one task look the same, and the first worker passes the second one's fence",
        (Edit(SQL, "SET status = 'PROCESSING', attempt = attempt + 1, claimed_by", "SET status = 'PROCESSING', claimed_by"),),
        ("store/test_tasks.py::test_a_claim_takes_what_it_asked_for_and_raises_the_attempt",),
    ),
    Rule(
        "tasks.claim_lock",
        "a claim locks the tasks that it takes",
        "two workers that claim at once get the same task",
        (Edit(SQL, "ORDER BY ready_seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED)", "ORDER BY ready_seq LIMIT %(limit)s)"),),
        ("store/test_tasks.py::test_several_claimers_get_each_task_once",),
    ),
    Rule(
        "tasks.claim_skip",
        "a claim passes by what another one is claiming",
        "nothing becomes wrong, but workers stand in a queue",
        (
            Edit(
                SQL,
                "ORDER BY ready_seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED)",
                "ORDER BY ready_seq LIMIT %(limit)s FOR UPDATE)",
            ),
        ),
        ("store/test_tasks.py::test_a_task_that_another_claimer_holds_is_skipped_not_waited_for",),
    ),
    Rule(
        "tasks.claim_status",
        "only PENDING tasks are claimed",
        "a task that waits for its next try, or behind another version, is worked on at once",
        (
            Edit(
                SQL,
                "WHERE space_id = %(space)s AND status = 'PENDING' AND ready_seq > %(floor)s",
                "WHERE space_id = %(space)s AND status IN ('PENDING', 'FAILED') AND ready_seq > %(floor)s",
            ),
        ),
        ("store/test_tasks.py::test_a_failed_task_waits_for_its_time_and_is_due_then",),
    ),
    Rule(
        "tasks.claim_generation",
        "nothing is claimed in a space that is being deleted",
        "workers take up tasks that only their fence would stop",
        (
            Edit(
                SQL,
                "\n      AND EXISTS (SELECT FROM kb_space s WHERE s.id = %(space)s AND s.generation = %(generation)s AND s.status = 'ACTIVE')",
                "",
            ),
        ),
        ("store/test_tasks.py::test_nothing_of_a_space_that_is_being_deleted_is_claimed_or_written",),
    ),
    Rule(
        "tasks.claim_floor",
        "a claim that finds too little looks below the floor",
        "a task whose writer committed late is never claimed",
        (Edit(PY, "    if len(rows) < limit:  # a slow", "    if False:  # a slow"),),
        ("store/test_tasks.py::test_the_floor_rises_behind_what_is_done_and_hides_nothing",),
    ),
    Rule(
        "tasks.renew",
        "a heartbeat renews the lease of its own attempt only",
        "a worker that lost its task keeps the next one's lease alive after that one died",
        (
            Edit(
                SQL,
                "WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = 'PROCESSING'",
                "WHERE t.id = x.id AND t.status = 'PROCESSING'",
            ),
        ),
        ("store/test_tasks.py::test_what_a_zombie_writes_about_its_task_changes_nothing",),
    ),
    Rule(
        "tasks.heartbeat",
        "a worker renews its leases while it works",
        "slow work is taken away from the living",
        (Edit(PIPELINE, "            tasks.renew(c, pairs, engine.limits.lease_seconds)", "            pass"),),
        ("flow/test_interleavings.py::test_a_worker_renews_its_leases_while_it_works",),
    ),
    Rule(
        "tasks.move",
        "a task is moved by its own attempt only",
        "a worker that lost its task ends the next one's try",
        (
            Edit(
                SQL,
                "FROM x WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = ANY(%(from)s::text[])",
                "FROM x WHERE t.id = x.id AND t.status = ANY(%(from)s::text[])",
            ),
        ),
        ("store/test_tasks.py::test_what_a_zombie_writes_about_its_task_changes_nothing",),
    ),
    Rule(
        "tasks.lease",
        "a task is taken back when its lease ran out or its process is dead, and not before",
        "the work of the living is done twice",
        (
            Edit(
                SQL,
                "AND (lease_until < clock_timestamp() OR claimed_by = ANY(%(dead)s::text[])) AND deaths + 1 < %(deaths)s",
                "AND deaths + 1 < %(deaths)s",
            ),
        ),
        ("store/test_tasks.py::test_a_lease_that_ran_out_is_no_failed_try",),
    ),
    Rule(
        "tasks.dead_owner",
        "the tasks of a process of this host that is dead are taken back at once",
        "after a kill everybody waits for the lease",
        (Edit(PY, '"dead": [o for o in owners if o and is_dead(o)]', '"dead": []'),),
        ("store/test_tasks.py::test_a_process_of_this_host_that_is_dead_loses_its_tasks_at_once",),
    ),
    Rule(
        "tasks.one_live",
        "a document has one live task",
        "two versions of a document are worked on at once, and the older one may be published last",
        (Edit(SCHEMA, "CREATE UNIQUE INDEX ingestion_task_one_live", "CREATE INDEX ingestion_task_one_live"),),
        ("flow/test_interleavings.py::test_a_document_has_one_task_at_a_time_whatever_is_written",),
    ),
    Rule(
        "tasks.queue",
        "newer content waits behind the version that is being worked on",
        "the source's page cannot be stored while one of its documents is worked on",
        (
            Edit(
                DOCUMENTS,
                "SELECT %(space)s, d.id, d.last_ver, CASE WHEN EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = d.id\n"
                "           AND t.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING', 'INIT')) THEN 'INIT' ELSE 'PENDING' END, d.size",
                "SELECT %(space)s, d.id, d.last_ver, 'PENDING', d.size",
            ),
        ),
        ("store/test_tasks.py::test_newer_content_waits_for_the_version_that_is_being_worked_on",),
    ),
    Rule(
        "tasks.supersede",
        "newer content takes the place of what nobody works on",
        "every version that was ever seen is embedded, one after the other",
        (
            Edit(
                "kb_pipeline/store/documents.py",
                '    c.execute(SQL.supersede, {"docs": docs})\n    return c.execute(',
                "    return c.execute(",
            ),
        ),
        ("store/test_tasks.py::test_of_several_queued_versions_only_the_newest_is_worked_on",),
    ),
    Rule(
        "tasks.admit",
        "the sweeper admits what is queued, not the worker that was before it",
        "that worker dies after its commit, and the newer version waits for ever",
        (Edit(PY, '            moved += c.execute(SQL.admit, {"space": space.id}).rowcount', "            pass"),),
        ("store/test_tasks.py::test_newer_content_waits_for_the_version_that_is_being_worked_on",),
    ),
    Rule(
        "tasks.admit_guard",
        "a queued task is admitted only behind a task that has ended",
        "one document in work keeps every other one from its turn",
        (
            Edit(
                SQL,
                "\n        AND NOT EXISTS (SELECT FROM ingestion_task l WHERE l.doc_id = i.doc_id AND l.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING'))",
                "",
            ),
        ),
        ("store/test_interleavings.py::test_a_queued_version_that_has_to_wait_keeps_no_other_document_waiting",),
    ),
    Rule(
        "tasks.cleanup",
        "the sweeper cleans up what was cancelled, not the worker",
        "that worker is dead or has not begun: the document is blocked for ever",
        (Edit(PY, "    moved += _clean(c, space.id, shard)", "    pass"),),
        ("store/test_tasks.py::test_a_cancelled_version_is_cleaned_up_by_the_sweeper_and_its_worker_is_fenced_off",),
    ),
    Rule(
        "tasks.cancel_guard",
        "against a publication the task's row decides",
        "a version that is current is given up, and its chunks are erased",
        (
            Edit(
                SQL,
                "WHERE id = %(task)s AND status = ANY(%(from)s::text[]) RETURNING doc_id, version, status)",
                "WHERE id = %(task)s RETURNING doc_id, version, status)",
            ),
        ),
        ("store/test_tasks.py::test_a_finished_task_cannot_be_cancelled_or_tried_again",),
    ),
)
