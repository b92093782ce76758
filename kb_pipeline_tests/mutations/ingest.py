"""From chunks to what is current: versions, publication, giving up and erasing."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

CHUNKS = "kb_pipeline/store/chunks.py"
DOCUMENTS = "kb_pipeline/store/documents.sql"
ERASURE = "kb_pipeline/store/erasure.sql"
ERASE = "kb_pipeline/store/erasure.py"
GC = "kb_pipeline/maintenance/vector_gc.py"
INDEXER = "kb_pipeline/nodes/index.py"
PUBLICATIONS = "kb_pipeline/store/publications.sql"
PURGE = "kb_pipeline/maintenance/purge.py"
TASKS = "kb_pipeline/store/tasks.py"

RULES = (
    Rule(
        "ingest.status_keep",
        "a new version does not hide the one that is shown",
        "while an update is worked on neither the old nor the new content is found",
        (
            Edit(
                DOCUMENTS,
                "status = CASE WHEN d.current_ver = 0 THEN 'INDEXING' ELSE d.status END",
                "status = 'INDEXING'",
            ),
        ),
        ("store/test_publications.py::test_until_it_is_published_the_old_version_is_served",),
    ),
    Rule(
        "ingest.failed_keep",
        "a failed update does not hide the version that is shown",
        "a broken edit takes the document out of the search",
        (
            Edit(
                ERASURE,
                "WHERE d.id = v.doc_id AND d.current_ver = 0 AND d.status <> 'DELETED'",
                "WHERE d.id = v.doc_id AND d.status <> 'DELETED'",
            ),
        ),
        ("flow/test_failures.py::test_a_refused_text_costs_its_document_only",),
    ),
    Rule(
        "ingest.refs_tx",
        "chunk rows and the version's list of them are one transaction",
        "in between they are referred to by nobody: a purge erases them, and the list points to nothing",
        (
            Edit(
                CHUNKS,
                "        c.execute(SQL.insert, where)\n",
                "        c.execute(SQL.insert, where)\n"
                '        c.execute("COMMIT")\n'
                '        c.execute("BEGIN")\n'
                '        copy_rows(c, SQL.copy_keys, ("int8", "int4", "int4", "bytea", "int4", "int4"), keys)\n',
            ),
        ),
        ("store/test_interleavings.py::test_nobody_erases_a_chunk_before_its_version_names_it",),
    ),
    Rule(
        "ingest.rollback",
        "a rollback is a new version, published like any other",
        "a version whose vectors are erased is current at once",
        (
            Edit(
                DOCUMENTS,
                "d AS (UPDATE kb_doc SET last_ver = last_ver + 1 FROM o",
                "d AS (UPDATE kb_doc SET last_ver = last_ver + 1, current_ver = %(version)s FROM o",
            ),
        ),
        ("flow/test_rollback.py::test_a_rollback_is_a_new_version_and_embeds_nothing",),
    ),
    Rule(
        "ingest.look",
        "the index itself is asked what it holds",
        "it accepted a vector and forgot it: whoever believes the note skips the upsert at every try",
        (
            Edit(
                PUBLICATIONS,
                "WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s\n\n-- name: publishable",
                "WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s AND s.vec_status = 0\n\n-- name: publishable",
            ),
        ),
        ("flow/test_interleavings.py::test_an_index_that_forgot_a_vector_is_given_it_again",),
    ),
    Rule(
        "ingest.verify",
        "after the upsert the index is asked again",
        "what it accepted and did not store is published, and not found",
        (
            Edit(
                INDEXER, "for w in _missing(index.present(ref, [w.vec_id for w in missing]), missing):", "for w in missing[:0]:"
            ),
        ),
        ("flow/test_failures.py::test_an_index_that_is_down_or_lies_is_resumed_without_embedding",),
    ),
    Rule(
        "ingest.revive",
        "a chunk whose vector is being erased gets a new name before the index is asked",
        "the vector is found, published, and then erased by the GC that had marked it",
        (Edit("kb_pipeline/store/publications.py", "        c.execute(SQL.revive, values)\n", ""),),
        ("store/test_erasure.py::test_a_name_that_is_being_erased_is_never_waited_for_again",),
    ),
    Rule(
        "ingest.monotone",
        "a version is published over an older one only",
        "of two versions in flight the older one ends last and stays",
        (Edit(PUBLICATIONS, "AND o.id = x.id AND d.current_ver < x.version AND", "AND o.id = x.id AND"),),
        ("store/test_publications.py::test_a_version_below_the_current_one_is_never_published_over_it",),
    ),
    Rule(
        "ingest.overtaken",
        "a version that is overtaken gives itself up",
        "its task is released and comes to the same place, again and again",
        (
            Edit(
                INDEXER,
                "    tasks.supersede(c, [x for x in fence.claims if x.doc_id in now and now[x.doc_id][0] >= x.version])\n",
                "",
            ),
        ),
        ("flow/test_fencing.py::test_an_older_version_is_never_published_over_a_newer_one",),
    ),
    Rule(
        "ingest.publish_deleted",
        "a deleted document is not published",
        "it is found again, and nobody will ever delete it",
        (
            Edit(
                PUBLICATIONS,
                "AND d.current_ver < x.version AND d.status <> 'DELETED'\n           RETURNING",
                "AND d.current_ver < x.version\n           RETURNING",
            ),
        ),
        ("store/test_interleavings.py::test_a_deleted_document_is_not_published_whoever_asks",),
    ),
    Rule(
        "ingest.acl_seq",
        "the ACL that was verified is the one that is published",
        "it changed meanwhile, and the payloads of the new version stay as they were",
        (Edit(INDEXER, "if verified.get(d) == now[d][1]}", "if d in verified}"),),
        ("flow/test_search.py::test_a_permission_revoked_while_a_version_is_published_holds",),
    ),
    Rule(
        "ingest.tombstones",
        "what left a document is put down for the GC",
        "its vectors stay in the index for ever, and take places among the candidates",
        (Edit(PUBLICATIONS, "WHERE NOT f.cur AND i.space_id = %(space)s", "WHERE false AND i.space_id = %(space)s"),),
        ("store/test_publications.py::test_publishing_touches_only_the_chunks_that_come_and_go",),
    ),
    Rule(
        "ingest.following",
        "an index that follows is told what became current",
        "when it is served later, it lacks what was published while it was built",
        (
            Edit(
                PUBLICATIONS,
                "WHERE f.cur AND i.space_id = %(space)s AND i.status = 'FOLLOWING'",
                "WHERE false AND i.space_id = %(space)s AND i.status = 'FOLLOWING'",
            ),
        ),
        ("store/test_publications.py::test_what_a_following_index_has_to_learn_is_noted_with_the_publication",),
    ),
    Rule(
        "ingest.leave",
        "a version that is given up puts its vectors down for the GC",
        "they stay in the index: no row that is current, no tombstone, nobody knows of them",
        (Edit(ERASE, "    c.execute(SQL.leave, values)\n", ""),),
        (
            "store/test_erasure.py::test_a_version_that_fails_leaves_a_tombstone_for_each_of_its_vectors_that_nothing_current_uses",
        ),
    ),
    Rule(
        "ingest.erase_processing",
        "a version that is worked on protects its chunks",
        "they are erased under its hands, and it is published over nothing",
        (
            Edit(
                ERASURE,
                "WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('PROCESSING', 'READY')),",
                "WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('READY')),",
            ),
        ),
        ("store/test_erasure.py::test_erasing_keeps_what_a_ready_or_processing_version_refers_to",),
    ),
    Rule(
        "ingest.erase_ready",
        "a retained version protects its chunks",
        "a kept answer, or the past, cannot be shown any more",
        (
            Edit(
                ERASURE,
                "WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('PROCESSING', 'READY')),",
                "WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('PROCESSING')),",
            ),
        ),
        ("store/test_erasure.py::test_erasing_keeps_what_a_ready_or_processing_version_refers_to",),
    ),
    Rule(
        "ingest.erase_null",
        "whose chunks may be erased has no list of them any more",
        "an operator retries it: it resumes at the INDEXER over erased rows",
        (Edit(ERASE, "    c.execute(SQL.forget_references, values)\n", ""),),
        ("store/test_erasure.py::test_a_failed_version_that_is_tried_again_over_erased_rows_is_chunked_again",),
    ),
    Rule(
        "ingest.erase_dead",
        "the name of an erased row is dead for good",
        "nobody erases its vector",
        (
            Edit(
                ERASURE,
                "     dead AS (INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)\n              SELECT i.id, g.vec_id, %(space)s, g.doc_id, g.id, 'E' FROM gone g CROSS JOIN kb_index i\n              WHERE i.space_id",
                "     dead AS (INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)\n              SELECT i.id, g.vec_id, %(space)s, g.doc_id, g.id, 'E' FROM gone g CROSS JOIN kb_index i\n              WHERE false AND i.space_id",
            ),
        ),
        ("store/test_erasure.py::test_erased_rows_leave_dead_ids_in_every_living_index",),
    ),
    Rule(
        "ingest.erase_decided",
        "ERASE decides what was waiting to be asked about",
        "a tombstone of a row that is gone is asked about again",
        (
            Edit(
                ERASURE,
                "              ON CONFLICT (index_id, vec_id) DO UPDATE SET state = 'E')",
                "              ON CONFLICT (index_id, vec_id) DO NOTHING)",
            ),
        ),
        ("store/test_erasure.py::test_a_waiting_tombstone_of_an_erased_row_is_dead_at_once",),
    ),
    Rule(
        "ingest.clean_lock",
        "cleaning up locks the document before it decides",
        "a version that takes up a chunk meanwhile finds it erased",
        (Edit(TASKS, "    lock_documents(c, [r.doc_id for r in waiting])\n", ""),),
        ("flow/test_fencing.py::test_erase_waits_for_the_document_and_then_sees_who_refers_to_its_chunks",),
    ),
    Rule(
        "ingest.purge_lock",
        "purge locks the document before it decides what is referred to by nobody",
        "a new version takes a row up, and purge deletes it",
        (Edit(PURGE, "        documents.lock_deleted(c, found)\n", ""),),
        ("maintenance/test_purge.py::test_a_chunk_that_a_new_version_takes_up_while_purge_waits_for_the_document_stays",),
    ),
    Rule(
        "ingest.archive_lock",
        "purge locks the document before it archives versions",
        "a version that a rollback copies, or that is being published, is archived meanwhile",
        (Edit(PURGE, "        documents.lock_deleted(c, many)\n", ""),),
        ("flow/test_interleavings.py::test_purge_waits_for_a_rollback_that_shares_the_objects_of_an_old_version",),
    ),
    Rule(
        "ingest.delete_tombstones",
        "a deletion puts every vector of the document down for the GC",
        "its process dies before the rows are erased, and the vectors stay for ever",
        (
            Edit(
                DOCUMENTS,
                "WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = ANY(%(docs)s::bigint[])\n  AND i.space_id",
                "WHERE false AND s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = ANY(%(docs)s::bigint[])\n  AND i.space_id",
            ),
        ),
        ("store/test_erasure.py::test_the_vectors_of_a_deleted_document_are_collected_even_if_nobody_erases_its_rows",),
    ),
    Rule(
        "ingest.decided",
        "a name that was declared dead stays dead",
        "a decided tombstone is asked about again: the name may be spared although its vector is being erased",
        (
            Edit(
                DOCUMENTS,
                "AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, s.vec_id ON CONFLICT DO NOTHING",
                "AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, s.vec_id ON CONFLICT (index_id, vec_id) DO UPDATE SET state = 'W'",
            ),
        ),
        ("store/test_interleavings.py::test_a_name_that_was_declared_dead_stays_so_when_its_document_is_deleted",),
    ),
)
