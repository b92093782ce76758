"""Rules of another index beside the serving one."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

REBUILD = "kb_pipeline/maintenance/rebuild.py"
INDEXES = "kb_pipeline/store/indexes.py"
SQL = "kb_pipeline/store/indexes.sql"
INDEXER = "kb_pipeline/nodes/index.py"
PUBLISH = "kb_pipeline/store/publications.sql"
TESTS = "rebuild/test_rebuild.py::"

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
            Edit(REBUILD, "        if any(i.building for i in others):\n            raise indexes.already_building()\n", ""),
        ),
        (TESTS + "test_one_is_built_at_a_time_and_the_same_wish_goes_on",),
    ),
)
