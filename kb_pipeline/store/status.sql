-- name: unfinished
SELECT (SELECT count(*) FROM ingestion_task WHERE space_id = %(space)s AND (status IN ('INIT', 'CANCELING', 'PENDING', 'PROCESSING')
          OR (status = 'FAILED' AND next_attempt_at <= clock_timestamp()))) AS tasks,
       (SELECT coalesce(sum(size_bytes), 0)::bigint FROM ingestion_task WHERE space_id = %(space)s AND status = 'PENDING'
          AND current_node IN ('FETCHER', 'PARSER', 'CHUNKER')) AS bytes,
       EXISTS (SELECT FROM vector_tombstone WHERE space_id = %(space)s) AS tombstones,
       (SELECT left_shard IS NOT NULL FROM kb_space WHERE id = %(space)s) AS left_shard

-- name: counts
SELECT 'documents' AS kind, CASE WHEN hidden_at IS NOT NULL THEN 'HIDDEN' ELSE status END AS status, count(*) AS n FROM kb_doc
WHERE space_id = %(space)s AND status <> 'DELETED' GROUP BY 2
UNION ALL SELECT 'tasks', status, count(*) FROM ingestion_task WHERE space_id = %(space)s GROUP BY 2
UNION ALL SELECT 'chunks', CASE WHEN t.in_current THEN 'current' ELSE 'retained' END, count(*) FROM kb_space s
JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id WHERE s.id = %(space)s GROUP BY 2
UNION ALL SELECT 'vectors', CASE WHEN t.vec_status = 3 THEN 'erasing' WHEN r.chunk_id IS NOT NULL THEN 'failed' WHEN t.vec_status = 1 THEN 'indexed'
          ELSE 'waiting' END, count(*) FROM kb_space s JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id
LEFT JOIN vector_retry r ON r.shard = t.shard AND r.chunk_id = t.id AND r.space_id = s.id WHERE s.id = %(space)s GROUP BY 2

-- name: last_jobs
SELECT DISTINCT ON (source_id) source_id, status, verdict, reasons, counts, started_at, finished_at, error FROM sync_job
WHERE space_id = %(space)s ORDER BY source_id, id DESC

-- name: published_state
SELECT count(*) || '-' || coalesce(sum(hashtextextended(id || ':' || current_ver, 0)), 0) AS state FROM kb_doc
WHERE space_id = %(space)s AND status <> 'DELETED' AND hidden_at IS NULL AND current_ver > 0

-- name: reached_state
SELECT count(*) || '-' || coalesce(sum(hashtextextended(d.id || ':' || d.last_ver, 0)), 0) AS state
FROM kb_doc d LEFT JOIN ingestion_task t ON t.doc_id = d.id AND t.version = d.last_ver
WHERE d.space_id = %(space)s AND d.status <> 'DELETED' AND d.hidden_at IS NULL AND d.last_ver > 0
  AND (d.current_ver = d.last_ver OR t.current_node = ANY(%(nodes)s::text[]))
