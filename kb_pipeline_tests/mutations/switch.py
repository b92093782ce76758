"""Rules of another index beside the serving one."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

REBUILD = "kb_pipeline/maintenance/rebuild.py"
INDEXES = "kb_pipeline/store/indexes.py"
SQL = "kb_pipeline/store/indexes.sql"
INDEXER = "kb_pipeline/nodes/index.py"
PUBLISH = "kb_pipeline/store/publications.sql"
TESTS = "rebuild/test_rebuild.py::"
MEANWHILE = "rebuild/test_meanwhile.py::"
STORE = "store/test_indexes.py::"

RULES = (
    Rule(
        "switch.barrier",
        "publications that began before the index row are waited for",
        "a version published meanwhile is in no note and not in the base",
        (Edit(REBUILD, "    retried(lambda: _barrier(engine, space), idempotent=True)\n", ""),),
        (TESTS + "test_a_publication_that_began_before_the_row_is_waited_for",),
    ),
    Rule(
        "switch.todo",
        "an index serves only when nothing is noted for it",
        "what was published last is not found after the switch",
        (Edit(INDEXES, '    if one(c.execute(SQL.anything_to_do, {"index": index_id})).yes:\n        return False\n', ""),),
        (TESTS + "test_nothing_serves_that_still_lacks_something",),
    ),
    Rule(
        "switch.base",
        "an index serves only when its base was listed",
        "an empty index serves",
        (Edit(INDEXES, 'target.status != "FOLLOWING" or not target.base_done', 'target.status != "FOLLOWING"'),),
        (TESTS + "test_nothing_serves_that_still_lacks_something",),
    ),
    Rule(
        "switch.seq",
        "a note is removed only as it was read",
        "a chunk that became current again meanwhile is missing",
        (Edit(SQL, " AND t.chunk_id = x.chunk_id AND t.seq = x.seq", " AND t.chunk_id = x.chunk_id"),),
        (TESTS + "test_a_note_that_was_made_again_meanwhile_stays",),
    ),
    Rule(
        "switch.serving_check",
        "a version is published by the index that it was verified in",
        "it is current and not in the index that serves",
        (Edit(INDEXER, "    if spaces.lock_serving_index(c, space.id) != ref.index_id:\n        return {}\n", ""),),
        (TESTS + "test_a_version_that_was_verified_in_the_former_index_is_published_in_the_new_one",),
    ),
    Rule(
        "switch.back_to_embedding",
        "a text without a vector by the model that serves now is embedded again",
        "the task fails until it is DEAD",
        (Edit(INDEXER, "        tasks.give_back(c, back, Node.EMBEDDING)\n", "        back = []\n"),),
        (TESTS + "test_a_version_that_was_verified_in_the_former_index_is_published_in_the_new_one",),
    ),
    Rule(
        "switch.noted",
        "a publication leaves a note for every index that follows",
        "the next index lacks it, or the former one when it serves again",
        (
            Edit(
                PUBLISH,
                "WHERE f.cur AND i.space_id = %(space)s AND i.status = 'FOLLOWING' ORDER BY 1, 2, 3",
                "WHERE false AND f.cur AND i.space_id = %(space)s AND i.status = 'FOLLOWING' ORDER BY 1, 2, 3",
            ),
        ),
        (TESTS + "test_the_former_index_follows_and_serves_again_without_an_embedding",),
    ),
    Rule(
        "switch.follows",
        "the former index is given what is noted for it",
        "nobody can go back",
        (Edit("kb_pipeline/sync.py", "    follow(engine, space)\n", ""),),
        (TESTS + "test_the_former_index_follows_and_serves_again_without_an_embedding",),
    ),
    Rule(
        "switch.verified",
        "what an index was given is asked for before the note is removed",
        "an index that lies serves",
        (
            Edit(
                REBUILD,
                "    still = _missing(port.present(ref, [w.vec_id for w in missing]), missing)\n",
                "    still: list[Wanted] = []\n",
            ),
        ),
        (TESTS + "test_an_index_that_lies_never_serves",),
    ),
    Rule(
        "switch.compared",
        "an index is compared with the database before it serves",
        "what it lost meanwhile is missing",
        (
            Edit(
                REBUILD,
                "    found = reconcile(engine, space, index=index, progress=progress)\n",
                "    found = reconcile(engine, space, index=index, repair=False, progress=progress)\n    found.repaired = found.missing\n",
            ),
        ),
        (TESTS + "test_an_index_that_loses_what_it_had_is_found_out_before_it_serves",),
    ),
    Rule(
        "switch.model",
        "a question is asked by the model of the index that is searched",
        "a vector of one model meets an index of another",
        (
            Edit("kb_pipeline/search.py", "        if ref.model_id not in self._vectors:\n", "        if not self._vectors:\n"),
            Edit(
                "kb_pipeline/search.py",
                "        return self._vectors[ref.model_id]\n\n    def candidates",
                "        return next(iter(self._vectors.values()))\n\n    def candidates",
            ),
        ),
        (TESTS + "test_a_search_that_began_by_one_model_ends_by_the_other",),
    ),
    Rule(
        "switch.one",
        "one index of a space is built at a time",
        "two of them count on being the next",
        (
            Edit("sql/0011_index_changes.sql", "CREATE UNIQUE INDEX kb_index_building", "CREATE INDEX kb_index_building"),
            Edit(
                REBUILD,
                "        if any(i.building for i in others) and not (alike and alike[0].building):\n            raise indexes.already_building()\n",
                "",
            ),
        ),
        (TESTS + "test_one_is_built_at_a_time_and_the_same_wish_goes_on",),
    ),
    Rule(
        "switch.tombstones",
        "what leaves is erased in every living index",
        "the next index, or the former one, keeps what nobody knows any more",
        (
            Edit(
                PUBLISH,
                "WHERE NOT f.cur AND i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, f.vec_id",
                "WHERE NOT f.cur AND i.space_id = %(space)s AND i.status = 'SERVING' ORDER BY i.id, f.vec_id",
            ),
        ),
        (MEANWHILE + "test_what_leaves_while_an_index_is_built_is_erased_in_both",),
    ),
    Rule(
        "switch.current",
        "only what is current when it is given is given",
        "an index is given chunks that were erased meanwhile",
        (
            Edit(
                SQL,
                "AND space_id = %(space)s AND in_current AND id = ANY(%(ids)s::bigint[])",
                "AND space_id = %(space)s AND id = ANY(%(ids)s::bigint[])",
            ),
        ),
        (MEANWHILE + "test_what_was_noted_and_is_not_current_any_more_is_not_given",),
    ),
    Rule(
        "switch.in_place",
        "two indexes of one model in this database are one, with other options",
        "they want the same rows, and the second is never complete",
        (Edit(REBUILD, "return in_place or index.ref.options == made.options", "return index.ref.options == made.options"),),
        (MEANWHILE + "test_an_index_in_this_database_is_taken_up_again_with_other_options",),
    ),
    Rule(
        "switch.options",
        "a space has the options of the index that serves",
        "it says what it will have, and an index is opened by it",
        (
            Edit(
                SQL,
                "WHERE i.id = %(index)s AND i.status = 'SERVING' AND s.id = i.space_id",
                "WHERE i.id = %(index)s AND s.id = i.space_id",
            ),
        ),
        (STORE + "test_options_of_an_index_that_only_follows_are_not_the_spaces",),
    ),
    Rule(
        "switch.given_up",
        "nobody switches to what is given up",
        "an index serves that is being dropped",
        (
            Edit(INDEXES, 'target.status != "FOLLOWING" or not target.base_done', "not target.base_done"),
            Edit(SQL, "AND status IN ('FOLLOWING', 'SERVING') ORDER BY id FOR UPDATE", "ORDER BY id FOR UPDATE"),
            Edit(
                SQL,
                "keep_until = NULL, error = NULL WHERE id = %(index)s AND status = 'FOLLOWING'",
                "keep_until = NULL, error = NULL WHERE id = %(index)s",
            ),
        ),
        (STORE + "test_nobody_switches_to_what_is_given_up",),
    ),
    Rule(
        "switch.retired",
        "vectors of a model are not forgotten while an index of it lives",
        "an index serves whose vectors are cached nowhere: the past cannot be ranked",
        (
            Edit(
                "kb_pipeline/store/retention.sql",
                "AND NOT EXISTS (SELECT FROM kb_index i WHERE i.model_id = %(model)s::int AND i.status IN ('FOLLOWING', 'SERVING'))\n",
                "",
            ),
        ),
        (STORE + "test_the_vectors_of_a_model_that_is_built_again_are_not_forgotten",),
    ),
    Rule(
        "switch.retired_lock",
        "whoever begins an index waits for vectors of its model that are being forgotten",
        "it counts on vectors that are gone a moment later",
        (Edit("kb_pipeline/store/retention.py", '    c.execute(SQL.lock_model, {"model": model_id})\n', ""),),
        (STORE + "test_whoever_builds_a_model_again_waits_for_what_is_being_forgotten",),
    ),
    Rule(
        "switch.past",
        "a past that the model that serves has no vectors for is ranked by a former model",
        "after a change of model nothing before it can be asked for",
        (Edit("kb_pipeline/as_of.py", "        for index in former:\n", "        for index in former[:0]:\n"),),
        (TESTS + "test_the_past_before_a_change_of_model_is_ranked_by_the_former_one",),
    ),
    Rule(
        "switch.replay",
        "an answer is replayed by the model that gave it",
        "scores of two models are compared, and every answer differs",
        (
            Edit(
                "kb_pipeline/as_of.py",
                "        by = indexes.by_id(c, logged.index_id) if logged.index_id is not None else None\n",
                "        by = None\n",
            ),
        ),
        (TESTS + "test_an_answer_is_replayed_by_the_model_that_gave_it",),
    ),
)
