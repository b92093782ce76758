"""What becomes of a try: when the next one is due, and when there is none."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/tasks.sql"
PY = "kb_pipeline/store/tasks.py"
OUTCOME = "kb_pipeline/nodes/outcome.py"

RULES = (
    Rule(
        "tasks.retry_attempt",
        "a retry by an operator does not set the attempt back",
        "attempt 1 comes again, and the worker of the first attempt 1 passes the fence",
        (
            Edit(
                SQL,
                "SET retry_count = 0, deaths = 0, error_code = NULL",
                "SET attempt = 0, retry_count = 0, deaths = 0, error_code = NULL",
            ),
        ),
        ("store/test_tasks.py::test_a_dead_task_that_is_tried_again_keeps_its_attempt_and_starts_where_it_can",),
    ),
    Rule(
        "tasks.due",
        "a failed task is due when its time has come",
        "a source that asked for a pause is asked again at once",
        (Edit(SQL, " AND status = 'FAILED' AND next_attempt_at <= clock_timestamp()\n", " AND status = 'FAILED'\n"),),
        ("store/test_tasks.py::test_a_failed_task_waits_for_its_time_and_is_due_then",),
    ),
    Rule(
        "tasks.interrupt",
        "a lease that ran out is no failed try",
        "three restarts of a server make every document DEAD",
        (
            Edit(
                SQL,
                "SET status = 'PENDING', deaths = deaths + 1, ready_seq",
                "SET status = 'PENDING', deaths = deaths + 1, retry_count = retry_count + 1, ready_seq",
            ),
        ),
        ("store/test_tasks.py::test_a_lease_that_ran_out_is_no_failed_try",),
    ),
    Rule(
        "tasks.deaths",
        "a document whose process died is counted",
        "a document that kills every process is worked on for ever",
        (Edit(SQL, "SET status = 'PENDING', deaths = deaths + 1, ready_seq", "SET status = 'PENDING', ready_seq"),),
        ("store/test_tasks.py::test_three_deaths_at_one_node_are_the_document_s_fault",),
    ),
    Rule(
        "tasks.max_deaths",
        "three dead processes at one node are the document's fault",
        "a document that kills every process is worked on for ever",
        (Edit(PY, "MAX_DEATHS = 3", "MAX_DEATHS = 1000"),),
        ("flow/test_interleavings.py::test_the_third_death_at_one_node_is_the_last",),
    ),
    Rule(
        "tasks.deaths_reset",
        "a node that ends well forgets the deaths before it",
        "a large document dies of three unlucky restarts",
        (Edit(SQL, "deaths = CASE WHEN %(advanced)s::boolean THEN 0 ELSE t.deaths END", "deaths = t.deaths"),),
        ("store/test_tasks.py::test_a_node_that_succeeds_forgets_the_deaths_before_it",),
    ),
    Rule(
        "tasks.bury_guard",
        "a task is buried only if its lease is still over when it is locked",
        "a worker that renewed its lease meanwhile loses its task, and the document is DEAD",
        (
            Edit(
                SQL,
                "AND status = 'PROCESSING' AND deaths + 1 >= %(deaths)s\n"
                "             AND (lease_until < clock_timestamp() OR claimed_by = ANY(%(dead)s::text[]))\n",
                "AND status = 'PROCESSING' AND deaths + 1 >= %(deaths)s\n",
            ),
        ),
        ("store/test_interleavings.py::test_a_worker_that_renews_its_lease_before_its_task_is_buried_keeps_it",),
    ),
    Rule(
        "tasks.back_off",
        "the back-off doubles with each try",
        "a service that is down for an hour uses up every try in two minutes",
        (Edit(OUTCOME, "limits.retry_base_seconds * 2**claim.retry_count", "limits.retry_base_seconds"),),
        ("flow/test_failures.py::test_the_back_off_doubles",),
    ),
    Rule(
        "tasks.back_off_limit",
        "the back-off has a limit",
        "a document is tried again in a year",
        (
            Edit(
                OUTCOME,
                "wait = min(limits.retry_max_seconds, limits.retry_base_seconds * 2**claim.retry_count)",
                "wait = limits.retry_base_seconds * 2**claim.retry_count",
            ),
        ),
        ("flow/test_failures.py::test_the_back_off_doubles",),
    ),
    Rule(
        "tasks.retry_after",
        "a pause that the server asked for is kept",
        "whoever ignores a rate limit gets another one",
        (Edit(OUTCOME, "wait = max(wait, asked or 0.0) +", "wait = wait +"),),
        ("flow/test_failures.py::test_a_rate_limit_waits_as_long_as_the_server_asked",),
    ),
    Rule(
        "tasks.max_retries",
        "a task is DEAD when its retries are used up",
        "what can never work is tried for ever",
        (
            Edit(
                OUTCOME,
                "if isinstance(error, Rejected | StateError) or claim.retry_count >= claim.max_retry_count:",
                "if isinstance(error, Rejected | StateError):",
            ),
        ),
        ("flow/test_failures.py::test_retries_back_off_and_end_dead_until_somebody_retries",),
    ),
    Rule(
        "tasks.rejected",
        "what was refused is not tried again",
        "every broken document costs four downloads",
        (Edit(OUTCOME, "if isinstance(error, Rejected | StateError) or claim.retry_count", "if claim.retry_count"),),
        ("flow/test_failures.py::test_content_that_no_parser_takes_is_dead_and_named",),
    ),
    Rule(
        "tasks.retry_count",
        "a failed try is counted",
        "what can never work is tried for ever",
        (
            Edit(
                SQL,
                "retry_count = CASE WHEN %(failed)s::boolean THEN t.retry_count + 1 WHEN",
                "retry_count = CASE WHEN %(failed)s::boolean THEN t.retry_count WHEN",
            ),
        ),
        ("flow/test_failures.py::test_retries_back_off_and_end_dead_until_somebody_retries",),
    ),
    Rule(
        "tasks.retry_guard",
        "only a FAILED or DEAD task is tried again",
        "a superseded version is brought back over newer content",
        (Edit(SQL, "AND t.id = %(task)s AND t.status = ANY(%(from)s::text[])\n", "AND t.id = %(task)s\n"),),
        ("store/test_tasks.py::test_a_finished_task_cannot_be_cancelled_or_tried_again",),
    ),
    Rule(
        "tasks.retry_node",
        "a retry begins where its stored output ends",
        "it resumes at the INDEXER over rows that were erased meanwhile",
        (
            Edit(
                SQL,
                "CASE WHEN v.chunk_ids IS NOT NULL THEN t.current_node WHEN v.parsed_path",
                "CASE WHEN true THEN t.current_node WHEN v.parsed_path",
            ),
        ),
        ("store/test_erasure.py::test_a_failed_version_that_is_tried_again_over_erased_rows_is_chunked_again",),
    ),
    Rule(
        "tasks.bury_attempt",
        "burying and cancelling raise the attempt",
        "the worker that comes back still has the newest attempt",
        (
            Edit(
                SQL,
                "SET status = 'DEAD', deaths = deaths + 1, attempt = attempt + 1, updated_at",
                "SET status = 'DEAD', deaths = deaths + 1, updated_at",
            ),
        ),
        (),
        redundant="the fence asks for PROCESSING as well, and the next claim raises the attempt: it lets a heartbeat and a reader of the log tell them apart",
    ),
)
