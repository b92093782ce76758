-- name: known
SELECT d.id, d.external_id, d.identity, d.last_ver, v.status, v.revision, v.raw_sha256, d.hidden_sync IS NOT NULL AS hidden, d.seen_seq, d.title, d.uri, t.error_code, d.acl
FROM kb_doc d LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.last_ver
LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver
WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.external_id = ANY(%(ids)s::text[])

-- name: by_identity
SELECT d.id, d.external_id, d.identity, d.last_ver, v.status, v.revision, v.raw_sha256, d.hidden_sync IS NOT NULL AS hidden, d.seen_seq, d.title, d.uri, t.error_code, d.acl
FROM kb_doc d LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.last_ver
LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver
WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.identity = ANY(%(identities)s::text[])

-- name: by_content
SELECT d.id, d.external_id, d.identity, d.last_ver, v.status, v.revision, v.raw_sha256, d.hidden_sync IS NOT NULL AS hidden, d.seen_seq, d.title, d.uri, t.error_code, d.acl
FROM kb_doc_version v JOIN kb_doc d ON d.id = v.doc_id AND d.last_ver = v.version
LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver
WHERE v.space_id = %(space)s AND v.raw_sha256 = ANY(%(digests)s::bytea[]) AND d.source_id = %(source)s AND d.status <> 'DELETED'
ORDER BY d.external_id

-- name: any_living
SELECT EXISTS (SELECT FROM kb_doc WHERE source_id = %(source)s AND status <> 'DELETED') AS yes

-- name: lock
SELECT id, seen_seq FROM kb_doc WHERE id = ANY(%(docs)s::bigint[]) AND status <> 'DELETED' ORDER BY id FOR NO KEY UPDATE

-- name: lock_any
SELECT id FROM kb_doc WHERE id = ANY(%(docs)s::bigint[]) ORDER BY id FOR NO KEY UPDATE

-- name: insert
INSERT INTO kb_doc (space_id, source_id, external_id, identity, title, uri, acl)
SELECT %(space)s, %(source)s, x.* FROM unnest(%(ids)s::text[], %(identities)s::text[], %(titles)s::text[], %(uris)s::text[], %(acls)s::jsonb[]) x
ORDER BY 3
ON CONFLICT (source_id, external_id) WHERE status <> 'DELETED' DO NOTHING
RETURNING id, external_id

-- name: restate
UPDATE kb_doc d SET external_id = x.external_id, identity = x.identity, title = x.title, uri = x.uri,
    acl = x.acl, acl_seq = d.acl_seq + (d.acl IS DISTINCT FROM x.acl)::int,
    seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp(), hidden_at = NULL, hidden_sync = NULL
FROM unnest(%(docs)s::bigint[], %(ids)s::text[], %(identities)s::text[], %(titles)s::text[], %(uris)s::text[], %(acls)s::jsonb[])
     x (id, external_id, identity, title, uri, acl)
WHERE d.id = x.id AND d.status <> 'DELETED'

-- name: restate_revision
UPDATE kb_doc_version v SET revision = x.revision
FROM unnest(%(docs)s::bigint[], %(versions)s::int[], %(revisions)s::text[]) x (doc_id, version, revision)
WHERE v.doc_id = x.doc_id AND v.version = x.version

-- name: unhide
UPDATE kb_doc SET hidden_at = NULL, hidden_sync = NULL, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp()
WHERE id = ANY(%(docs)s::bigint[]) AND status <> 'DELETED' AND hidden_sync IS NOT NULL

-- name: supersede
WITH t AS (UPDATE ingestion_task SET status = CASE WHEN status IN ('INIT', 'DEAD') THEN 'CANCELED' ELSE 'CANCELING' END, attempt = attempt + 1,
               cancel_reason = 'superseded by newer content', updated_at = clock_timestamp(), claimed_by = NULL, lease_until = NULL
           WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('INIT', 'PENDING', 'FAILED', 'DEAD') RETURNING doc_id, version, status)
UPDATE kb_doc_version v SET status = 'CANCELED' FROM t
WHERE t.status = 'CANCELED' AND v.doc_id = t.doc_id AND v.version = t.version AND v.status IN ('PROCESSING', 'FAILED')

-- name: new_versions
WITH x AS (SELECT * FROM unnest(%(docs)s::bigint[], %(revisions)s::text[], %(sizes)s::bigint[]) x (doc_id, revision, size)),
     d AS (UPDATE kb_doc d SET last_ver = d.last_ver + 1, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp(),
               hidden_at = NULL, hidden_sync = NULL, status = CASE WHEN d.current_ver = 0 THEN 'INDEXING' ELSE d.status END
           FROM x WHERE d.id = x.doc_id AND d.status <> 'DELETED' RETURNING d.id, d.last_ver, x.revision, x.size),
     v AS (INSERT INTO kb_doc_version (doc_id, version, space_id, revision) SELECT id, last_ver, %(space)s, revision FROM d)
INSERT INTO ingestion_task (space_id, doc_id, version, status, size_bytes, max_retry_count)
SELECT %(space)s, d.id, d.last_ver, CASE WHEN EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = d.id
           AND t.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING', 'INIT')) THEN 'INIT' ELSE 'PENDING' END, d.size, %(max_retries)s
FROM d ORDER BY d.id

-- name: record_bad
WITH x AS (SELECT * FROM unnest(%(docs)s::bigint[], %(codes)s::text[], %(messages)s::text[]) x (doc_id, code, message)),
     d AS (UPDATE kb_doc d SET last_ver = d.last_ver + 1, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp(),
               status = CASE WHEN d.current_ver = 0 THEN 'FAILED' ELSE d.status END
           FROM x WHERE d.id = x.doc_id AND d.status <> 'DELETED' RETURNING d.id, d.last_ver, x.code, x.message),
     v AS (INSERT INTO kb_doc_version (doc_id, version, space_id, status) SELECT id, last_ver, %(space)s, 'FAILED' FROM d)
INSERT INTO ingestion_task (space_id, doc_id, version, status, error_code, error_message)
SELECT %(space)s, id, last_ver, 'DEAD', code, message FROM d

-- name: delete
UPDATE kb_doc SET status = 'DELETED', current_ver = 0, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp()
WHERE id = ANY(%(docs)s::bigint[])

-- name: delete_flags
-- With the tombstones of all that the index may hold: whoever dies before ERASE leaves no vector that nothing knows.
WITH f AS (UPDATE kb_chunk_state SET in_current = false
           WHERE shard = %(shard)s::int AND space_id = %(space)s AND doc_id = ANY(%(docs)s::bigint[]) AND in_current)
INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)
SELECT i.id, s.vec_id, s.space_id, s.doc_id, s.id, 'W' FROM kb_chunk_state s CROSS JOIN kb_index i
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = ANY(%(docs)s::bigint[])
  AND i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, s.vec_id ON CONFLICT DO NOTHING

-- name: delete_tasks
UPDATE ingestion_task SET status = 'CANCELED', attempt = attempt + 1, cancel_reason = 'document deleted', updated_at = clock_timestamp(),
    claimed_by = NULL, lease_until = NULL
WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'DEAD', 'CANCELING')

-- name: delete_versions
UPDATE kb_doc_version SET status = 'ARCHIVED' WHERE doc_id = ANY(%(docs)s::bigint[]) AND status <> 'ARCHIVED'

-- name: still_hidden
SELECT d.id FROM kb_doc d JOIN unnest(%(docs)s::bigint[], %(tokens)s::bigint[]) x (id, token) ON d.id = x.id
WHERE d.hidden_sync = x.token AND d.status <> 'DELETED' ORDER BY d.id FOR NO KEY UPDATE OF d

-- name: lock_of_source
SELECT id FROM kb_doc WHERE source_id = %(source)s AND status <> 'DELETED' ORDER BY id LIMIT %(limit)s FOR NO KEY UPDATE

-- name: list_all
SELECT d.id AS document_id, d.external_id, d.title, d.status, d.current_ver AS version, d.published_at, d.hidden_at IS NOT NULL AS hidden,
       coalesce(array_length(v.chunk_ids, 1), 0) AS chunks, r.name AS source, t.error_code, t.error_message
FROM kb_doc d JOIN kb_source r ON r.id = d.source_id
LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver AND t.status IN ('FAILED', 'DEAD')
WHERE d.space_id = %(space)s AND d.id > %(after)s AND d.status <> 'DELETED' AND (%(status)s::text IS NULL OR d.status = %(status)s)
ORDER BY d.id LIMIT %(limit)s

-- name: get
SELECT d.id, d.space_id, r.name, d.external_id, d.title, d.uri, d.status, d.current_ver, d.last_ver, d.hidden_at, d.published_at
FROM kb_doc d JOIN kb_source r ON r.id = d.source_id WHERE d.id = %(doc)s

-- name: versions
SELECT v.version, v.status, v.version = d.current_ver AS current, v.created_at, p.from_at AS published_at, p.to_at AS superseded_at, v.raw_bytes,
       coalesce(array_length(v.chunk_ids, 1), 0) AS chunks,
       coalesce((SELECT count(*) FROM unnest(v.chunk_ids) n WHERE n = ANY(o.chunk_ids)), 0) AS reused
FROM kb_doc_version v JOIN kb_doc d ON d.id = v.doc_id
LEFT JOIN LATERAL (SELECT from_at, to_at FROM kb_publication p WHERE p.doc_id = v.doc_id AND p.version = v.version ORDER BY id DESC LIMIT 1) p ON true
LEFT JOIN kb_doc_version o ON o.doc_id = v.doc_id AND o.version = v.version - 1
WHERE v.doc_id = %(doc)s ORDER BY v.version DESC

-- name: version
SELECT version, status, raw_path, parsed_path, title, chunk_ids, parse_result FROM kb_doc_version WHERE doc_id = %(doc)s AND version = %(version)s

-- name: copy_version
WITH o AS (SELECT * FROM kb_doc_version WHERE doc_id = %(doc)s AND version = %(version)s AND status = 'READY' AND chunk_ids IS NOT NULL),
     n AS (SELECT v.revision, v.raw_sha256 FROM kb_doc_version v JOIN kb_doc d ON d.id = v.doc_id AND d.last_ver = v.version WHERE d.id = %(doc)s),
     d AS (UPDATE kb_doc SET last_ver = last_ver + 1 FROM o WHERE kb_doc.id = %(doc)s AND kb_doc.status <> 'DELETED' RETURNING kb_doc.id, last_ver),
     v AS (INSERT INTO kb_doc_version (doc_id, version, space_id, revision, raw_sha256, raw_path, raw_bytes, parsed_path, text_sha256, title, parse_result, chunk_ids, recipe)
           SELECT d.id, d.last_ver, o.space_id, n.revision, n.raw_sha256, o.raw_path, o.raw_bytes, o.parsed_path, o.text_sha256, o.title, o.parse_result, o.chunk_ids, o.recipe
           FROM d, o, n RETURNING doc_id, version, space_id)
INSERT INTO ingestion_task (space_id, doc_id, version, status, current_node)
SELECT v.space_id, v.doc_id, v.version, CASE WHEN EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = v.doc_id
           AND t.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING', 'INIT')) THEN 'INIT' ELSE 'PENDING' END,
       CASE WHEN o.recipe = %(recipe)s THEN 'CHUNKER' ELSE 'INDEXER' END
FROM v, o RETURNING version
