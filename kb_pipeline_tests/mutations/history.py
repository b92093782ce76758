"""The past: what was current at a time, how long that can be told, and the objects that it rests on."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

AS_OF = "kb_pipeline/as_of.py"
HISTORY = "kb_pipeline/store/history.sql"
PUBLICATIONS = "kb_pipeline/store/publications.sql"
RETENTION = "kb_pipeline/store/retention.sql"
PURGE = "kb_pipeline/maintenance/purge.py"
SWEEP = "kb_pipeline/maintenance/sweep.py"
FETCH = "kb_pipeline/nodes/fetch.py"
OUTCOME = "kb_pipeline/nodes/outcome.py"

RULES = (
    Rule(
        "as_of.rows",
        "each time a version was current has a row",
        "the past before the last publication cannot be told",
        (
            Edit(
                PUBLICATIONS,
                "UPDATE kb_publication SET to_at = %(at)s, to_xid = pg_current_xact_id() WHERE doc_id",
                "DELETE FROM kb_publication WHERE %(at)s::timestamptz IS NOT NULL AND doc_id",
            ),
        ),
        ("history/test_as_of.py::test_each_time_finds_the_version_that_was_current",),
    ),
    Rule(
        "as_of.lock_stamp",
        "the stamp of a publication is taken behind the lock",
        "a transaction that waited stamps a time at which its predecessor was still current",
        (Edit(PUBLICATIONS, "SELECT clock_timestamp() AS at", "SELECT now() AS at"),),
        ("history/test_as_of.py::test_stamps_are_taken_behind_the_lock_and_not_at_the_begin_of_the_transaction",),
    ),
    Rule(
        "as_of.to_xid",
        "a publication that ended says in which transaction",
        "a replay sees old and new version of one document",
        (
            Edit(
                PUBLICATIONS,
                "SET to_at = %(at)s, to_xid = pg_current_xact_id() WHERE",
                "SET to_at = %(at)s, to_xid = from_xid WHERE",
            ),
        ),
        ("history/test_answers.py::test_a_replay_sees_what_the_answer_saw",),
    ),
    Rule(
        "as_of.to_snapshot",
        "for a replay a publication has ended where its end was visible",
        "stamps have another order than commits: what was deleted later is missing from the answer",
        (
            Edit(
                HISTORY,
                "CASE WHEN %(snapshot)s::pg_snapshot IS NOT NULL THEN NOT pg_visible_in_snapshot(p.to_xid, %(snapshot)s::pg_snapshot)\n               ELSE",
                "CASE WHEN false THEN false\n               ELSE",
            ),
        ),
        ("history/test_interleavings.py::test_for_a_replay_a_deletion_that_had_not_committed_had_not_happened",),
    ),
    Rule(
        "as_of.from_snapshot",
        "for a replay a publication has begun where its beginning was visible",
        "a replay sees what committed after the answer",
        (
            Edit(
                HISTORY,
                "CASE WHEN %(snapshot)s::pg_snapshot IS NULL THEN p.from_at <= %(at)s::timestamptz\n                                   ELSE pg_visible_in_snapshot(p.from_xid, %(snapshot)s::pg_snapshot) END",
                "p.from_at <= %(at)s::timestamptz AND (%(snapshot)s::pg_snapshot IS NULL OR true)",
            ),
        ),
        ("history/test_answers.py::test_the_snapshot_decides_and_not_the_stamps",),
    ),
    Rule(
        "as_of.no_gap",
        "between the end of a version and the beginning of the next the older one counts",
        "at that moment the document had no version",
        (
            Edit(
                HISTORY,
                "\n                    OR EXISTS (SELECT FROM kb_publication n WHERE n.doc_id = d.id AND n.from_xid = p.to_xid) END)",
                " END)",
            ),
        ),
        ("history/test_as_of.py::test_between_the_end_of_a_version_and_the_beginning_of_the_next_the_old_one_counts",),
    ),
    Rule(
        "as_of.same_moment",
        "a publication begins in the moment in which the one before it ends",
        "at that moment the document had no version",
        (Edit("kb_pipeline/store/publications.py", '{**values, "at": at}', '{**values, "at": one(c.execute(SQL.stamp)).at}'),),
        ("store/test_interleavings.py::test_one_document_has_no_moment_without_a_version",),
    ),
    Rule(
        "as_of.horizon",
        "what is archived moves the horizon",
        "a time whose versions are purged is answered with nothing",
        (Edit(RETENTION, "WHERE id = %(space)s AND EXISTS (SELECT FROM old))", "WHERE id = %(space)s AND false)"),),
        ("maintenance/test_purge.py::test_as_of_is_refused_for_the_time_of_what_was_archived",),
    ),
    Rule(
        "as_of.refused",
        "a time before the horizon is refused",
        "a time whose versions are purged is answered with nothing",
        (Edit(AS_OF, "    if state.purged:\n", "    if False:\n"),),
        ("history/test_as_of.py::test_a_time_before_the_horizon_is_refused",),
    ),
    Rule(
        "as_of.settled",
        "a time is answered when no publication can still get an older stamp",
        "one question to one time has two answers",
        (Edit(AS_OF, "    if ago < SETTLED_SECONDS or state.open:", "    if state.open:"),),
        ("history/test_as_of.py::test_the_future_and_what_is_not_settled_are_refused",),
    ),
    Rule(
        "as_of.open",
        "a time is answered when nobody is publishing as of then",
        "one question to one time has two answers",
        (Edit(AS_OF, "    if ago < SETTLED_SECONDS or state.open:", "    if ago < SETTLED_SECONDS:"),),
        ("history/test_as_of.py::test_a_publish_that_is_still_open_makes_its_time_unsettled",),
    ),
    Rule(
        "as_of.today",
        "what is hidden or deleted today is withheld from the past",
        "what somebody had removed is read by asking for yesterday",
        (Edit(HISTORY, "AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL AS shown", "AND d.status = 'AVAILABLE' AS shown"),),
        ("history/test_as_of.py::test_what_is_hidden_since_is_withheld_and_counted",),
    ),
    Rule(
        "as_of.permitted",
        "what is not permitted today is withheld from the past",
        "a permission that was taken away holds for yesterday",
        (Edit(HISTORY, "       acl.invited AND acl.permitted AND d.status", "       acl.invited AND d.status"),),
        ("history/test_as_of.py::test_what_is_not_permitted_any_more_is_withheld_and_counted",),
    ),
    Rule(
        "as_of.judged_again",
        "what may be shown is judged when it is shown",
        "a permission taken away while the past is ranked is shown",
        (
            Edit(
                AS_OF,
                "    versions = {t.doc_id: t.version for t in known if t.shown}",
                "    versions = {t.doc_id: t.version for t in known}",
            ),
        ),
        ("history/test_interleavings.py::test_what_is_revoked_after_it_was_ranked_is_not_shown",),
    ),
    Rule(
        "as_of.vectors",
        "a chunk of then without a vector is told",
        "the ranking passes it over, and looks complete",
        (Edit(AS_OF, "        if lost:\n", "        if False:\n"),),
        ("history/test_as_of.py::test_a_lost_cache_is_told_and_not_passed_over",),
    ),
    # --- purge ------------------------------------------------------------------------------------------------------
    Rule(
        "purge.answers",
        "what a kept answer was based on is kept as long",
        "an answer of yesterday cannot be read or replayed",
        (
            Edit(
                PURGE,
                "    _documents(engine, space, start - keep - min(keep, MARGIN), report, progress)",
                "    _documents(engine, space, start, report, progress)",
            ),
        ),
        ("maintenance/test_purge.py::test_what_was_superseded_within_the_answer_retention_stays",),
    ),
    Rule(
        "purge.margin",
        "purge leaves a margin for answers that are stored late",
        "a search that was under way when a version was replaced stores an answer over nothing",
        (Edit(PURGE, "start - keep - min(keep, MARGIN)", "start - keep"),),
        ("maintenance/test_purge.py::test_a_search_under_way_when_its_version_was_superseded_keeps_it",),
    ),
    Rule(
        "purge.retained",
        "the newest versions are retained, however old",
        "nothing can be rolled back to",
        (
            Edit(RETENTION, "WHERE r.place > %(retained)s AND NOT r.current AND", "WHERE NOT r.current AND"),
            Edit(RETENTION, "HAVING count(*) > %(retained)s", "HAVING count(*) > 1 OR %(retained)s < 0"),
        ),
        ("maintenance/test_purge.py::test_versions_beyond_the_retained_ones_are_archived_with_chunks_and_objects",),
    ),
    Rule(
        "purge.current",
        "the current version stays, however old its number is",
        "what is found has no rows",
        (Edit(RETENTION, "WHERE r.place > %(retained)s AND NOT r.current AND", "WHERE r.place > %(retained)s AND"),),
        ("maintenance/test_purge.py::test_the_current_version_stays_however_old_its_number_is",),
        ("purge.open",),
        redundant="the publication of what is current is open, and so not old (purge.open); the number says it without history",
    ),
    Rule(
        "purge.open",
        "a version that is current now or again is not old",
        "what is found has no rows",
        (
            Edit(
                RETENTION,
                "max(coalesce(p.to_at, 'infinity')) AS superseded_at",
                "max(coalesce(p.to_at, '-infinity')) AS superseded_at",
            ),
        ),
        ("maintenance/test_purge.py::test_the_current_version_stays_however_old_its_number_is",),
        ("purge.current",),
        redundant="the current version is left out by its number as well (purge.current)",
    ),
    Rule(
        "purge.shared_objects",
        "an object goes with the last version that refers to it",
        "a version that was rolled back to loses its original",
        (
            Edit(
                RETENTION,
                "WHERE u.path IS NOT NULL AND NOT EXISTS (\n                 SELECT FROM kb_doc_version o WHERE",
                "WHERE u.path IS NOT NULL AND NOT EXISTS (\n                 SELECT FROM kb_doc_version o WHERE false AND",
            ),
        ),
        ("maintenance/test_purge.py::test_a_rolled_back_version_keeps_the_objects_it_shares",),
    ),
    Rule(
        "purge.open_walk",
        "what an open walk has seen is kept",
        "it is resumed, ends, and hides what it had seen",
        (
            Edit(
                RETENTION,
                "DELETE FROM sync_seen s USING sync_job j WHERE j.walk_id = s.walk_id AND j.space_id = %(space)s AND j.status NOT IN ('PENDING', 'RUNNING')",
                "DELETE FROM sync_seen s USING sync_job j WHERE j.walk_id = s.walk_id AND j.space_id = %(space)s",
            ),
        ),
        ("maintenance/test_purge.py::test_what_an_open_walk_has_seen_stays",),
    ),
    # --- objects ----------------------------------------------------------------------------------------------------
    Rule(
        "blob.attempt_name",
        "the attempt is in the name of an object",
        "an attempt that lost its task writes over the object of the next one",
        (Edit(OUTCOME, "{claim.node.value.lower()}-a{claim.attempt}", "{claim.node.value.lower()}-a0"),),
        ("flow/test_interleavings.py::test_two_attempts_at_one_version_put_two_objects",),
    ),
    Rule(
        "blob.row_fence",
        "the path of an object is stored behind the fence",
        "an attempt that lost its task names its own object, and a sweep takes it",
        (Edit(FETCH, "        kept = [rows[x.doc_id] for x in fence.claims]\n", "        kept = list(rows.values())\n"),),
        ("flow/test_interleavings.py::test_an_attempt_that_lost_its_task_does_not_name_its_object",),
    ),
    Rule(
        "blob.put_first",
        "a path is stored when its object has been put",
        "a version names an object that was never there",
        (Edit(FETCH, "        errors += [(x, e) for x in claims if x.doc_id in rows]\n", "        del e\n"),),
        ("flow/test_failures.py::test_a_full_object_store_loses_nothing",),
    ),
    Rule(
        "blob.list_first",
        "objects are listed first, rows are read after it",
        "an object that was put and named in between is swept",
        (
            Edit(
                SWEEP,
                "    swept = 0\n",
                "    swept = 0\n"
                "    with transaction(engine.pool) as c:\n"
                "        docs = retention.some_documents(c, space.id, 0, 10**6)\n"
                "        running, named = retention.attempts_worked_on(c, docs), retention.referenced_paths(c, docs)\n",
            ),
            Edit(
                SWEEP,
                "        dead = _dead(engine, keys)\n",
                "        found = {k: (int(m[1]), int(m[2]), int(m[3])) for k in keys if (m := _KEY.fullmatch(k))}\n"
                "        dead = [k for k, attempt in found.items() if k not in named and attempt not in running]\n",
            ),
        ),
        ("maintenance/test_sweep.py::test_what_is_written_while_the_sweep_begins_stays",),
    ),
    Rule(
        "blob.young",
        "a sweep spares what a running attempt has put",
        "its next transaction names an object that is gone",
        (Edit(SWEEP, "if key not in referenced and attempt not in running]", "if key not in referenced]"),),
        ("maintenance/test_sweep.py::test_a_put_in_flight_is_not_swept",),
    ),
    Rule(
        "blob.rows_in_order",
        "a sweep asks who is at work before it asks what is named",
        "an attempt commits between the two questions, and its object is swept",
        (
            Edit(
                SWEEP,
                "        running = retention.attempts_worked_on(c, docs)\n        referenced = retention.referenced_paths(c, docs)\n",
                "        referenced = retention.referenced_paths(c, docs)\n        running = retention.attempts_worked_on(c, docs)\n",
            ),
        ),
        ("maintenance/test_sweep.py::test_an_attempt_that_commits_between_the_two_readings_of_rows_keeps_its_object",),
    ),
    Rule(
        "blob.failed_kept",
        "objects of a failed version stay for its retry",
        "a retry that needed nothing from the source has to read it again",
        (
            Edit(
                RETENTION,
                "AND v.status IN ('PROCESSING', 'READY', 'FAILED') AND u.path IS NOT NULL",
                "AND v.status IN ('PROCESSING', 'READY') AND u.path IS NOT NULL",
            ),
        ),
        ("maintenance/test_sweep.py::test_objects_of_a_failed_version_stay_for_its_retry_and_those_of_a_canceled_one_go",),
    ),
)
