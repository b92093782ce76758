"""Vectors that nothing needs, what reconciliation may call so, and what a search may show."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

DIGESTS = "kb_pipeline/store/digests.sql"
DOCUMENTS = "kb_pipeline/store/documents.sql"
ERASURE = "kb_pipeline/store/erasure.sql"
ERASE = "kb_pipeline/store/erasure.py"
GC = "kb_pipeline/maintenance/vector_gc.py"
RECONCILE = "kb_pipeline/maintenance/reconcile.py"
SEARCH = "kb_pipeline/search.py"

RULES = (
    Rule(
        "ingest.gc_current",
        "the GC spares what is current again",
        "a chunk that left and came back is erased from the index",
        (
            Edit(
                ERASE,
                "for statement in (SQL.drop_living, SQL.mark_erasing, SQL.mark_dead):",
                "for statement in (SQL.mark_erasing, SQL.mark_dead):",
            ),
        ),
        ("store/test_erasure.py::test_a_chunk_that_is_current_again_loses_its_tombstone",),
        ("ingest.gc_mark",),
        redundant="mark_erasing asks for it, too; a tombstone of what is current would be looked at by every GC",
    ),
    Rule(
        "ingest.gc_mark",
        "the GC marks nothing that is current",
        "a chunk that left and came back is erased from the index",
        (
            Edit(
                ERASURE,
                "AND s.vec_id = t.vec_id AND NOT s.in_current\n  AND NOT EXISTS",
                "AND s.vec_id = t.vec_id\n  AND NOT EXISTS",
            ),
        ),
        ("store/test_erasure.py::test_a_chunk_that_is_current_again_loses_its_tombstone",),
        ("ingest.gc_current",),
        redundant="drop_living removes the tombstones of what is current, in the same transaction; it keeps each statement right by itself",
    ),
    Rule(
        "ingest.gc_guard",
        "the GC spares what a version in flight has verified",
        "the version is published, and its vector erased",
        (
            Edit(
                ERASURE,
                "AND NOT s.in_current\n  AND NOT EXISTS (SELECT FROM busy WHERE busy.id = s.id)",
                "AND NOT s.in_current",
            ),
        ),
        ("store/test_erasure.py::test_a_chunk_of_a_version_in_flight_is_left_alone",),
    ),
    Rule(
        "ingest.gc_lock",
        "the GC locks the document before it decides",
        "a version takes the chunk up between the decision and the mark",
        (Edit(GC, "                documents.lock_deleted(c, due)\n", ""),),
        ("flow/test_interleavings.py::test_the_gc_waits_for_the_document_and_then_sees_who_takes_the_chunk_up",),
    ),
    Rule(
        "ingest.gc_verify",
        "a tombstone goes when the index says that the vector is gone",
        "a deletion that the index only pretends leaves a ghost that nothing knows",
        (Edit(GC, "[v for v in dead if v not in still], sorted(still))", "dead, [])"),),
        ("flow/test_deletion.py::test_a_deletion_that_the_index_only_pretends_stays_a_tombstone",),
    ),
    Rule(
        "ingest.gc_cas",
        "only the row that still has the dead name is renamed",
        "a chunk that came back under a new name, and is current, gets a third one that no index holds",
        (
            Edit(
                ERASURE, "AND s.id = gone.chunk_id AND s.vec_id = gone.vec_id AND s.vec_status = 3", "AND s.id = gone.chunk_id"
            ),
        ),
        ("store/test_erasure.py::test_a_late_gc_does_not_rename_a_row_that_was_revived",),
    ),
    Rule(
        "ingest.dead_ids",
        "a name that was erased is never used again",
        "a late deletion of the old vector hits the one that came back",
        (
            Edit(
                ERASURE,
                "UPDATE kb_chunk_state s SET vec_status = 0, incarnation = incarnation + 1, vec_id = kb_vec_id(id, hash, incarnation + 1),\n"
                "    ck = kb_checksum(kb_vec_id(id, hash, incarnation + 1), acl), bucket = kb_bucket(kb_vec_id(id, hash, incarnation + 1))\n",
                "UPDATE kb_chunk_state s SET vec_status = 0\n",
            ),
        ),
        ("store/test_erasure.py::test_a_chunk_that_left_is_declared_dead_and_gets_a_new_name_when_it_is_gone",),
    ),
    Rule(
        "ingest.gc_gone",
        "a tombstone whose row is gone is dead",
        "its vector is never erased",
        (
            Edit(
                ERASURE,
                "AND s.id = t.chunk_id\n                  AND s.vec_id = t.vec_id AND s.vec_status <> 3)",
                "AND s.id = t.chunk_id\n                  AND s.vec_id = t.vec_id AND s.vec_status <> 3)\n  AND EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = t.chunk_id)",
            ),
        ),
        ("store/test_erasure.py::test_a_tombstone_without_a_row_is_dead",),
    ),
    Rule(
        "ingest.rec_order",
        "the index is listed first, rows are read after it",
        "a row and its vector that came in between are taken for an orphan",
        (
            Edit(
                RECONCILE,
                "    held: dict[UUID, int] = {}\n",
                "    old = engine.pool.getconn()\n"
                '    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")\n'
                "    shard = spaces.lock_shared(old, space) or 0\n"
                "    held: dict[UUID, int] = {}\n",
            ),
            Edit(
                RECONCILE,
                "    wanted, strays = with_rows(engine, space, read)\n",
                "    wanted, strays = read(old, shard)\n    old.rollback()\n    engine.pool.putconn(old)\n",
            ),
        ),
        ("maintenance/test_reconcile.py::test_a_row_that_came_after_the_listing_began_saves_its_vector",),
        ("ingest.rec_twice",),
        redundant="the second look knows every row that the first listing had; with it a single look is already right",
    ),
    Rule(
        "ingest.rec_tomb",
        "what has a row is left to the GC's decision",
        "a vector that a version in flight has verified is erased as an orphan",
        (Edit(DIGESTS, "CASE WHEN x.chunk_id = 0 THEN 'E' ELSE 'W' END", "'E'"),),
        ("maintenance/test_reconcile.py::test_a_vector_of_a_retained_version_is_left_to_the_gc",),
    ),
    Rule(
        "ingest.rec_processing",
        "vectors of a version in flight are no orphans",
        "they are reported as differences that nobody can repair",
        (
            Edit(
                DIGESTS,
                " OR EXISTS (SELECT FROM kb_doc_version v WHERE v.doc_id = s.doc_id AND v.status = 'PROCESSING' AND s.id = ANY(v.chunk_ids)) AS needed",
                " AS needed",
            ),
        ),
        ("maintenance/test_reconcile.py::test_vectors_of_a_version_that_is_being_worked_on_are_no_orphans",),
    ),
    Rule(
        "ingest.rec_twice",
        "what is reported was so at a second look",
        "everything that moves while the sides are compared is called a difference",
        (Edit(RECONCILE, "last = found = _look(engine, space, ref, buckets).of(last)", "found = last"),),
        ("maintenance/test_reconcile.py::test_what_a_second_look_does_not_show_is_not_reported",),
    ),
    Rule(
        "search.reask",
        "a candidate that was replaced meanwhile makes the search ask again",
        "neither the old nor the new version is among the hits",
        (Edit(SEARCH, "        if joined.republished and not last:\n            return None\n", ""),),
        ("flow/test_search.py::test_a_publish_between_index_and_join_is_asked_again",),
    ),
    Rule(
        "search.current",
        "only what is current is shown",
        "old and new text of one document stand side by side",
        (
            Edit(
                "kb_pipeline/store/answers.sql",
                "t.id = x.chunk_id AND t.space_id = %(space)s AND t.in_current\n         LEFT JOIN",
                "t.id = x.chunk_id AND t.space_id = %(space)s\n         LEFT JOIN",
            ),
        ),
        ("flow/test_search.py::test_until_it_is_published_a_new_version_is_not_shown_and_the_old_one_is",),
    ),
    Rule(
        "search.ghost",
        "a vector under a dead name shows nothing",
        "one chunk is found twice, or by a vector that is being erased",
        (Edit("kb_pipeline/store/answers.sql", "WHERE x.own AND x.status", "WHERE x.own IS NOT NULL AND x.status"),),
        ("faults/test_index_faults.py::test_foreign_entries_are_never_shown_and_go_with_the_next_gc",),
    ),
    Rule(
        "search.visible",
        "what is hidden or deleted is not shown",
        "a deletion does not hold at once",
        (
            Edit(
                "kb_pipeline/store/answers.sql",
                "AND x.status = 'AVAILABLE' AND x.hidden_at IS NULL\n",
                "AND x.status = 'AVAILABLE'\n",
            ),
        ),
        ("flow/test_search.py::test_hidden_and_deleted_documents_are_never_shown",),
    ),
    Rule(
        "acl.join",
        "the join decides who may see a chunk",
        "a permission that was taken away holds until the index learns of it",
        (
            Edit(
                "kb_pipeline/store/answers.sql",
                "WHERE NOT clause ?| %(principals)s::text[])\n",
                "WHERE NOT clause ?| %(principals)s::text[] AND false)\n",
            ),
        ),
        ("flow/test_search.py::test_every_clause_must_be_met",),
    ),
    Rule(
        "acl.own",
        "audience and the document's own clauses hold together",
        "a document with an ACL of its own is shown to people outside the space's audience",
        (
            Edit(
                "kb_pipeline/store/answers.sql",
                "coalesce(sp.audience, '[]') || coalesce(x.acl, '[]')",
                "coalesce(x.acl, sp.audience, '[]')",
            ),
        ),
        ("flow/test_search.py::test_audience_and_own_clauses_hold_together",),
    ),
    Rule(
        "acl.restate",
        "an ACL that changed at the source draws a new acl_seq",
        "a version that is being published keeps the payloads of before",
        (Edit(DOCUMENTS, "acl = x.acl, acl_seq = d.acl_seq + (d.acl IS DISTINCT FROM x.acl)::int,", "acl = x.acl,"),),
        ("flow/test_interleavings.py::test_an_acl_that_changed_at_the_source_is_another_one_for_every_worker",),
    ),
    Rule(
        "acl.ext_ver",
        "an index refuses an older payload",
        "an upsert that lands late brings the old ACL back",
        (Edit("kb_pipeline/indexes/pgvector.sql", "\nWHERE excluded.acl_seq >= t.acl_seq", ""),),
        ("contracts/test_vector_index.py::test_an_older_acl_never_replaces_a_newer_one_and_the_same_may",),
    ),
)
