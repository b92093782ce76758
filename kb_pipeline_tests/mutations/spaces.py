"""Spaces: deleting one for good, and moving one to a shard of its own."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/spaces.sql"
PY = "kb_pipeline/store/spaces.py"
REMOVAL = "kb_pipeline/store/removal.sql"
REMOVE = "kb_pipeline/store/removal.py"
DELETE = "kb_pipeline/maintenance/delete_space.py"
REBUILD = "kb_pipeline/maintenance/rebuild.py"
PGVECTOR = "kb_pipeline/indexes/pgvector.sql"

RULES = (
    Rule(
        "space.generation",
        "every write asks for the generation and the status of its space",
        "a worker or walk that lives on writes rows into a space that is deleted",
        (
            Edit(
                SQL,
                "WHERE id = %(space)s AND generation = %(generation)s AND status = 'ACTIVE'\n\n-- name: living",
                "WHERE id = %(space)s\n\n-- name: living",
            ),
        ),
        ("store/test_tasks.py::test_nothing_of_a_space_that_is_being_deleted_is_claimed_or_written",),
    ),
    Rule(
        "space.shared_lock",
        "every write takes the shared lock of its space",
        "a write that had read the shard before a promotion goes to the copy that nobody reads",
        (Edit(PY, '    c.execute(SQL.lock_shared, {"space": space.id})\n', ""),),
        ("store/test_interleavings.py::test_a_promotion_waits_for_a_writer_that_has_read_the_shard",),
    ),
    Rule(
        "space.delete_lock",
        "a deletion begins under the exclusive lock",
        "a write that was fenced before commits after the deletion has counted",
        (Edit(DELETE, "        spaces.lock_exclusive(c, space.id)\n", ""),),
        ("store/test_interleavings.py::test_a_deletion_waits_for_a_page_that_is_being_written",),
    ),
    Rule(
        "space.no_create",
        "an upsert finds its index living, and never makes one",
        "an upsert that lands after the drop leaves vectors of a deleted space",
        (
            Edit(
                PGVECTOR,
                "AND s.id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') AND s.status = 'ACTIVE' FOR SHARE OF i",
                "AND s.id = %(space)s FOR SHARE OF i",
            ),
        ),
        ("contracts/test_vector_index.py::test_a_dropped_index_takes_no_write_and_is_not_made_again_by_one",),
    ),
    Rule(
        "space.upsert_lock",
        "an upsert takes the shared lock of its space",
        "it writes to the shard that the space has just left",
        (Edit("kb_pipeline/indexes/pgvector.py", '            c.execute(SQL.lock_space, {"space": ref.space_id})\n', ""),),
        ("store/test_interleavings.py::test_a_late_upsert_waits_for_a_promotion_and_goes_to_the_new_shard",),
    ),
    Rule(
        "space.unique_names",
        "the name of an index holds an id, not the key of its space",
        "a second deletion drops the index of the next space of that key",
        (
            Edit(
                SQL,
                "SELECT n.id, s.id, s.model_id, 'kb_' || s.id || '_' || n.id, 'FOLLOWING', false,",
                "SELECT n.id, s.id, s.model_id, 'kb_' || s.key, 'FOLLOWING', false,",
            ),
        ),
        ("flow/test_delete_space.py::test_a_space_made_again_under_the_same_key_is_out_of_reach_of_an_old_worker",),
    ),
    Rule(
        "space.prefix",
        "objects are deleted as they are listed, not as rows name them",
        "what an attempt put, and nobody wrote down, stays",
        (
            Edit(
                DELETE,
                '    engine.blobs.clear(f"spaces/{space.id}/")',
                "    with transaction(engine.pool) as c:\n"
                '        q = "SELECT unnest(ARRAY[raw_path, parsed_path]) AS path FROM kb_doc_version WHERE space_id = %s"\n'
                "        paths = [r.path for r in c.execute(q, [space.id]) if r.path]\n"
                "    engine.blobs.delete_many(paths)",
            ),
        ),
        ("store/test_interleavings.py::test_objects_that_no_row_names_go_with_their_space",),
    ),
    Rule(
        "space.resume",
        "whoever finds a space DELETING goes on with it",
        "a deletion that was interrupted is never finished",
        (
            Edit(
                DELETE,
                "    residue: dict[str, int] = {}\n",
                '    if space.status == "DELETING":\n        return {}\n    residue: dict[str, int] = {}\n',
            ),
        ),
        ("store/test_interleavings.py::test_a_space_that_is_being_deleted_is_taken_up_where_it_stands",),
    ),
    Rule(
        "space.count_zero",
        "a space is DELETED when everything of it has been counted, and is none",
        "a store that only pretended to delete keeps documents of a space that is said to be gone",
        (Edit(DELETE, "        if not any(residue.values()):\n", "        if residue:\n"),),
        ("store/test_interleavings.py::test_a_space_whose_index_keeps_something_is_not_deleted",),
    ),
    Rule(
        "space.drop_counted",
        "an index is DROPPED when it says that nothing is left",
        "vectors stay, and no row names their index",
        (
            Edit(
                REBUILD,
                "        if left == 0:\n",
                "        if True:\n",
            ),
        ),
        ("store/test_interleavings.py::test_a_space_whose_index_keeps_something_is_not_deleted",),
    ),
    Rule(
        "space.deleting",
        "a step of a deletion finds its space DELETING",
        "the rows of a living space are deleted",
        (
            Edit(REMOVAL, "ON s.id = h.space_id AND s.status = 'DELETING'\n", "ON s.id = h.space_id\n"),
            Edit(REMOVAL, "WHERE s.id = %(space)s AND s.status = 'DELETING'\n", "WHERE s.id = %(space)s\n"),
        ),
        ("store/test_removal.py::test_the_shard_of_a_living_space_is_never_truncated",),
    ),
    Rule(
        "space.trunc_owner",
        "a shard is emptied under the lock of its row, by its owner",
        "of two deleters the second empties the shard's next space",
        (
            Edit(
                REMOVAL,
                "WHERE h.shard = %(shard)s AND h.space_id = %(space)s AND h.state = 'OWNED' FOR UPDATE OF h",
                "WHERE h.shard = %(shard)s OR h.space_id IS NULL FOR UPDATE OF h",
            ),
            Edit(
                REMOVAL,
                "SELECT h.shard FROM kb_shard h JOIN kb_space s ON s.id = h.space_id AND s.status = 'DELETING'",
                "SELECT h.shard FROM kb_shard h LEFT JOIN kb_space s ON s.id = h.space_id",
            ),
        ),
        ("store/test_removal.py::test_a_late_second_deletion_does_not_empty_the_next_owner_s_shard",),
    ),
    Rule(
        "space.short_wait",
        "a truncation does not wait in the queue of its locks",
        "behind it every reader of the shard waits",
        (Edit(REMOVE, "    c.execute(SQL.short_wait)\n", ""),),
        ("store/test_interleavings.py::test_a_truncation_asks_for_its_locks_for_a_moment_only",),
    ),
    Rule(
        "space.return_shard",
        "a shard goes back to the spares in the transaction that emptied it",
        "shards are used up",
        (Edit(REMOVE, '    c.execute(SQL.return_shard, {"space": space_id, "shard": shard})\n', ""),),
        ("store/test_removal.py::test_a_deleted_space_leaves_nothing_but_its_row",),
    ),
    # --- promotion --------------------------------------------------------------------------------------------------
    Rule(
        "promote.lock",
        "a promotion takes the exclusive lock of its space",
        "a writer that has read the old shard commits after the copy: its rows are lost",
        (Edit(PY, "    lock_exclusive(c, space.id)\n", ""),),
        ("store/test_interleavings.py::test_a_promotion_waits_for_a_writer_that_has_read_the_shard",),
    ),
    Rule(
        "promote.text",
        "a promotion copies the texts",
        "chunks are current and have no text",
        (
            Edit(
                PY,
                "for statement in (SQL.copy_state, SQL.copy_text, SQL.copy_retry):",
                "for statement in (SQL.copy_state, SQL.copy_retry):",
            ),
        ),
        ("store/test_spaces.py::test_promotion_moves_every_row_as_it_is",),
    ),
    Rule(
        "promote.state",
        "a promotion copies the state of every chunk",
        "nothing of the space is found",
        (
            Edit(
                PY,
                "for statement in (SQL.copy_state, SQL.copy_text, SQL.copy_retry):",
                "for statement in (SQL.copy_text, SQL.copy_retry):",
            ),
        ),
        ("store/test_spaces.py::test_promotion_moves_every_row_as_it_is",),
    ),
    Rule(
        "promote.retries",
        "a promotion copies what failed in the index",
        "nobody tries these vectors again",
        (
            Edit(
                PY,
                "for statement in (SQL.copy_state, SQL.copy_text, SQL.copy_retry):",
                "for statement in (SQL.copy_state, SQL.copy_text):",
            ),
        ),
        ("store/test_interleavings.py::test_what_failed_in_the_index_moves_with_its_space",),
    ),
    Rule(
        "promote.vectors",
        "a promotion copies the vectors that are in this database",
        "the index is empty until a reconciliation",
        (
            Edit(
                PY,
                "        c.execute(sql.SQL(SQL.copy_vectors).format(table=sql.Identifier(table)), where)\n",
                "        pass\n",
            ),
        ),
        ("flow/test_search.py::test_a_space_that_moved_to_its_own_shard_is_whole_before_and_after_the_old_rows_go",),
    ),
    Rule(
        "promote.once",
        "a space moves once",
        "the second move forgets where the rows of the first one wait for removal",
        (Edit(SQL, "AND s.status = 'ACTIVE' AND s.left_shard IS NULL AND h.state = 'SHARED'", "AND s.status = 'ACTIVE'"),),
        ("store/test_spaces.py::test_two_promotions_of_one_space_take_one_shard",),
    ),
    Rule(
        "promote.generation",
        "a space that is being deleted is not promoted",
        "its rows are copied to where no deletion looks",
        (
            Edit(
                SQL,
                "WHERE s.id = %(space)s AND s.generation = %(generation)s AND s.status = 'ACTIVE' AND s.left_shard IS NULL",
                "WHERE s.id = %(space)s AND s.left_shard IS NULL",
            ),
        ),
        ("store/test_spaces.py::test_a_space_that_is_being_deleted_is_not_promoted",),
    ),
    Rule(
        "promote.note",
        "a promotion notes where the old rows are",
        "they are never removed",
        (
            Edit(
                SQL,
                "SET shard = %(new)s::int, left_shard = %(old)s::int, left_at = clock_timestamp() WHERE",
                "SET shard = %(new)s::int WHERE",
            ),
        ),
        ("store/test_spaces.py::test_the_left_shard_is_cleared_after_the_grace_and_not_before",),
    ),
    Rule(
        "promote.spare_lock",
        "a spare shard is locked by whoever takes it",
        "two promotions see one spare, and two spaces own one shard",
        (Edit(SQL, "ORDER BY shard LIMIT 1 FOR UPDATE SKIP LOCKED)", "ORDER BY shard LIMIT 1)"),),
        ("store/test_interleavings.py::test_two_promotions_that_see_one_spare_do_not_share_it",),
        ("promote.spare_guard", "promote.spare_made"),
        redundant="the guard and the lock under which spares are made cover it; with it nobody waits",
    ),
    Rule(
        "promote.spare_guard",
        "a shard is taken only while it is a spare",
        "two promotions see one spare, and two spaces own one shard",
        (Edit(SQL, ") AND state = 'SPARE'\nRETURNING shard", ")\nRETURNING shard"),),
        ("store/test_interleavings.py::test_two_promotions_that_see_one_spare_do_not_share_it",),
        ("promote.spare_lock", "promote.spare_made"),
        redundant="whoever takes a spare has locked it; the guard needs no reading of how",
    ),
    Rule(
        "promote.spare_made",
        "spares are made, under one lock, before one is taken",
        "two promotions see one spare, and two spaces own one shard",
        (Edit(PY, '    c.execute(SQL.ensure_spares, {"wanted": 2})\n', ""),),
        ("store/test_interleavings.py::test_two_promotions_that_see_one_spare_do_not_share_it",),
        ("promote.spare_lock", "promote.spare_guard"),
        redundant="a spare that is taken is locked; without it promotions end when the spares do",
    ),
    Rule(
        "promote.grace",
        "the old rows are removed after a grace",
        "a search that began before the move finds no texts",
        (Edit(SQL, "AND left_shard <> shard AND left_at < %(before)s", "AND left_shard <> shard"),),
        ("store/test_spaces.py::test_the_left_shard_is_cleared_after_the_grace_and_not_before",),
    ),
    Rule(
        "promote.reader",
        "a search compares the shard it began with",
        "it joins rows whose flags nobody writes any more",
        (Edit("kb_pipeline/search.py", "        if joined.shard != standing.shard:\n            return None\n", ""),),
        ("flow/test_search.py::test_a_space_that_moves_to_its_own_shard_during_a_search_is_asked_again",),
    ),
    Rule(
        "promote.past",
        "a question to the past compares the shard it began with",
        "it ranks rows whose flags nobody writes any more",
        (
            Edit(
                "kb_pipeline/as_of.py",
                "return found if _require_kept(self.engine, self.space, self.when.at).shard == shard else None",
                "_require_kept(self.engine, self.space, self.when.at)\n        return found",
            ),
        ),
        ("history/test_as_of.py::test_a_space_that_moves_to_its_own_shard_during_the_search_is_asked_again",),
    ),
    Rule(
        "promote.left_deleted",
        "a deletion looks in the shard that the space has left, too",
        "the old rows of a promoted space stay",
        (Edit(REMOVAL, "ON h.shard IN (s.shard, s.left_shard)", "ON h.shard = s.shard"),),
        ("store/test_removal.py::test_a_deleted_space_leaves_nothing_but_its_row",),
    ),
)
