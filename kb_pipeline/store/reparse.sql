-- name: some_living
SELECT id FROM kb_doc WHERE space_id = %(space)s AND id > %(after)s AND status <> 'DELETED' ORDER BY id LIMIT %(limit)s

-- name: busy
SELECT count(DISTINCT doc_id) AS n FROM ingestion_task
WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'CANCELING')

-- name: newer
SELECT count(*) AS n FROM kb_doc d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.last_ver
WHERE d.id = ANY(%(docs)s::bigint[]) AND v.created_at >= %(before)s
  AND NOT EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = d.id AND t.status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'CANCELING'))

-- name: enqueue
-- The content is that of the newest version that was fetched and not cancelled. What a walk compares with (revision and sha256)
-- stays the newest version's: parsing again must not make a change at the source look known, nor a known one look new.
WITH x AS (SELECT d.id AS doc_id, n.revision, n.raw_sha256, o.raw_path, o.raw_bytes
           FROM kb_doc d JOIN kb_doc_version n ON n.doc_id = d.id AND n.version = d.last_ver
           JOIN kb_doc_version o ON o.doc_id = d.id AND o.version = CASE WHEN n.status IN ('READY', 'FAILED') THEN d.last_ver ELSE d.current_ver END
           WHERE d.id = ANY(%(docs)s::bigint[]) AND d.status <> 'DELETED' AND n.created_at < %(before)s
             AND o.status IN ('READY', 'FAILED') AND o.raw_path IS NOT NULL
             AND NOT EXISTS (SELECT FROM ingestion_task t WHERE t.doc_id = d.id AND t.status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'CANCELING'))),
     t AS (UPDATE ingestion_task t SET status = 'CANCELED', attempt = t.attempt + 1, cancel_reason = 'parsed again', updated_at = clock_timestamp()
           FROM x WHERE t.doc_id = x.doc_id AND t.status = 'DEAD' RETURNING t.doc_id, t.version),
     c AS (UPDATE kb_doc_version v SET status = 'CANCELED' FROM t WHERE v.doc_id = t.doc_id AND v.version = t.version AND v.status = 'FAILED'),
     d AS (UPDATE kb_doc d SET last_ver = d.last_ver + 1, status = CASE WHEN d.current_ver = 0 THEN 'INDEXING' ELSE d.status END
           FROM x WHERE d.id = x.doc_id RETURNING d.id, d.last_ver, x.revision, x.raw_sha256, x.raw_path, x.raw_bytes),
     v AS (INSERT INTO kb_doc_version (doc_id, version, space_id, revision, raw_path, raw_sha256, raw_bytes)
           SELECT id, last_ver, %(space)s, revision, raw_path, raw_sha256, raw_bytes FROM d)
INSERT INTO ingestion_task (space_id, doc_id, version, status, current_node, size_bytes, max_retry_count)
SELECT %(space)s, id, last_ver, 'PENDING', 'PARSER', coalesce(raw_bytes, 0), %(max_retries)s FROM d ORDER BY id
