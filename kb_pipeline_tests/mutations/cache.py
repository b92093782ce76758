"""The cache of embeddings: a text is embedded once, and kept as long as somebody needs it."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/embeddings.sql"
PY = "kb_pipeline/store/embeddings.py"
EMBED = "kb_pipeline/nodes/embed.py"
RETENTION = "kb_pipeline/store/retention.sql"
REMOVAL = "kb_pipeline/store/removal.sql"

RULES = (
    Rule(
        "cache.pin",
        "a vector that is found is marked as used now",
        "a purge takes the vector between the look and the upsert",
        (Edit(SQL, "SET last_used = clock_timestamp() FROM k\n", "SET last_used = e.last_used FROM k\n"),),
        ("store/test_embeddings.py::test_a_pin_finds_vectors_only_and_marks_them_as_used_now",),
    ),
    Rule(
        "cache.pin_guard",
        "a purge asks the row itself when it was last used",
        "it saw no chunk of the text, a new version pinned the vector meanwhile, and it is gone",
        (Edit(RETENTION, " AND e.last_used < %(before)s::timestamptz\n  AND (e.vector", "\n  AND (e.vector"),),
        ("maintenance/test_purge.py::test_a_pin_wins_against_a_purge_that_saw_no_chunk",),
    ),
    Rule(
        "cache.living",
        "a purge spares texts that a chunk of any space has",
        "a chunk that is current has no vector to repair the index, or to rank the past, with",
        (Edit("kb_pipeline/maintenance/purge.py", "        retention.spare_living(c)\n", ""),),
        ("maintenance/test_purge.py::test_an_embedding_that_another_space_uses_stays",),
    ),
    Rule(
        "cache.claim",
        "a text is claimed before it is embedded",
        "two workers embed it",
        (Edit(PY, "    return token, mine\n", "    return token, set(hashes)\n"),),
        ("store/test_embeddings.py::test_a_text_is_claimed_by_one_of_many",),
    ),
    Rule(
        "cache.claim_over",
        "a claim whose lease ran out is taken over",
        "the text of a process that died elsewhere is never embedded",
        (Edit(SQL, "AND vector IS NULL AND (lease_until < clock_timestamp() OR token", "AND vector IS NULL AND (token"),),
        ("store/test_embeddings.py::test_a_claim_is_taken_over_when_its_lease_is_over_and_not_before",),
    ),
    Rule(
        "cache.claim_living",
        "a living claim is left alone",
        "two workers embed one text",
        (
            Edit(
                SQL,
                "AND vector IS NULL AND (lease_until < clock_timestamp() OR token = %(token)s OR owner = ANY(%(dead)s::text[]))",
                "AND vector IS NULL",
            ),
        ),
        ("store/test_embeddings.py::test_a_claim_is_taken_over_when_its_lease_is_over_and_not_before",),
    ),
    Rule(
        "cache.claim_dead",
        "the claim of a process of this host that is dead is taken over at once",
        "after a kill the next pass waits for the lease",
        (Edit(PY, "if is_dead(r.owner)]", "if False]"),),
        ("store/test_embeddings.py::test_the_claim_of_a_process_that_is_known_to_be_dead_is_taken_over_at_once",),
    ),
    Rule(
        "cache.claim_again",
        "a claim whose answer was lost is ours again by its token",
        "the process waits for its own claim",
        (Edit(SQL, "OR token = %(token)s OR owner", "OR owner"),),
        ("store/test_embeddings.py::test_a_claim_whose_answer_was_lost_is_had_again_with_its_token",),
    ),
    Rule(
        "cache.store_token",
        "a vector is stored by whoever holds the claim",
        "a worker that lost its claim writes over the next one's work",
        (
            Edit(
                SQL,
                "AND e.content_hash = s.content_hash AND e.token = %(token)s AND e.vector IS NULL",
                "AND e.content_hash = s.content_hash AND e.vector IS NULL",
            ),
        ),
        ("store/test_embeddings.py::test_a_claim_is_taken_over_when_its_lease_is_over_and_not_before",),
    ),
    Rule(
        "cache.store_once",
        "a stored vector is never replaced",
        "index and cache hold different bits of one text",
        (Edit(SQL, "AND e.token = %(token)s AND e.vector IS NULL", "AND e.token = %(token)s"),),
        ("store/test_embeddings.py::test_a_stored_vector_is_never_replaced",),
    ),
    Rule(
        "cache.store_fence",
        "a vector is stored behind the fence of its task",
        "the space was deleted, its vectors with it, and a worker that comes back stores one",
        (Edit(EMBED, "        if not tasks.fence(c, space, claims).claims:\n            return False\n", ""),),
        ("faults/test_embedder_faults.py::test_a_call_whose_result_nobody_wants_ends_and_is_not_written",),
    ),
    Rule(
        "cache.claim_fence",
        "a text is claimed in a living space",
        "a worker of a deleted space leaves claims, and reads a shard that is another's",
        (
            Edit(
                EMBED,
                "        if shard is None:\n            return set(), []\n",
                "        shard = 0 if shard is None else shard\n",
            ),
        ),
        (),
        redundant="what is claimed is given back, and nothing is stored without the fence (cache.store_fence): it saves the embedding",
    ),
    Rule(
        "cache.give_back",
        "a claim that comes to nothing is given back",
        "whoever tries the text next waits for the lease",
        (Edit(EMBED, "            _give_back(engine, space, token)  # whoever", "            pass  # whoever"),),
        ("flow/test_failures.py::test_a_bug_in_the_embedder_costs_its_document_and_leaves_no_claim",),
    ),
    Rule(
        "cache.give_back_own",
        "whoever gives back gives back his own",
        "the claims of others are lost, and their texts embedded twice",
        (
            Edit(
                SQL,
                "DELETE FROM kb_embedding WHERE model_id = %(model)s::int AND token = %(token)s AND vector IS NULL",
                "DELETE FROM kb_embedding WHERE model_id = %(model)s::int AND vector IS NULL",
            ),
        ),
        ("store/test_embeddings.py::test_giving_back_leaves_the_claims_of_others",),
    ),
    Rule(
        "cache.give_back_claims",
        "only claims are given back, never vectors",
        "what was embedded is embedded again",
        (
            Edit(
                SQL,
                "DELETE FROM kb_embedding WHERE model_id = %(model)s::int AND token = %(token)s AND vector IS NULL",
                "DELETE FROM kb_embedding WHERE model_id = %(model)s::int AND token = %(token)s",
            ),
        ),
        ("store/test_embeddings.py::test_what_will_not_be_embedded_now_is_given_back_and_what_was_stays",),
    ),
    Rule(
        "cache.purge_claim",
        "a purge spares a living claim",
        "the text is embedded twice, and the first result is thrown away",
        (Edit(RETENTION, "\n  AND (e.vector IS NOT NULL OR e.lease_until < clock_timestamp())", ""),),
        ("maintenance/test_purge.py::test_a_claim_in_work_is_not_taken_away",),
    ),
    Rule(
        "cache.other_spaces",
        "a space takes only those vectors with it whose text no other space has",
        "another space's chunks lose their vectors",
        (
            Edit(
                "kb_pipeline/store/retention.py",
                '        c.execute(SQL.spare_elsewhere, {"shard": other, "space": space_id})\n',
                "        pass\n",
            ),
        ),
        ("flow/test_delete_space.py::test_cached_vectors_go_with_their_space_unless_another_has_the_text",),
    ),
    Rule(
        "cache.moved",
        "a look at the chunks of all shards begins again when a space has moved meanwhile",
        "the moved space's chunks lose their vectors",
        (
            Edit(
                "kb_pipeline/store/retention.py",
                "        before, now = now, one(c.execute(SQL.places)).of_all\n",
                "        before = now\n",
            ),
        ),
        ("maintenance/test_purge.py::test_a_space_that_moves_to_its_own_shard_during_the_look_is_looked_at_again",),
    ),
    Rule(
        "cache.clock_first",
        "a deleted space takes the time before it looks at other spaces' chunks",
        "a text that another space takes up after the look loses its vector",
        (
            Edit(
                "kb_pipeline/maintenance/delete_space.py",
                "retention.forget_staged(c, model, before)",
                "retention.forget_staged(c, model, retention.clock(c))",
            ),
        ),
        ("flow/test_delete_space.py::test_a_vector_that_somebody_takes_up_while_its_space_is_deleted_stays",),
    ),
    Rule(
        "cache.model",
        "vectors of a model that a living space uses are kept",
        "every space of the model is embedded again",
        (
            Edit(
                REMOVAL,
                "\n  AND NOT EXISTS (SELECT FROM kb_index i JOIN kb_space s ON s.id = i.space_id\n"
                "                  WHERE i.model_id = %(model)s::int AND i.status IN ('FOLLOWING', 'SERVING') AND s.status = 'ACTIVE')",
                "",
            ),
        ),
        ("store/test_embeddings.py::test_vectors_of_a_model_that_a_living_space_uses_are_kept",),
    ),
    Rule(
        "cache.removal_pin",
        "the last space of a model spares what was pinned meanwhile",
        "a new space pinned a vector, and it is gone",
        (Edit(REMOVAL, " AND e.last_used < statement_timestamp()", ""),),
        ("store/test_embeddings.py::test_a_pin_wins_over_a_purge_that_began_before_it",),
    ),
)
