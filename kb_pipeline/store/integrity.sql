-- name: ghosts
(SELECT d.id AS doc_id, d.external_id, 'deleted, but its chunks are current' AS what FROM kb_doc d
 WHERE d.space_id = %(space)s AND d.status = 'DELETED'
   AND EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.doc_id = d.id AND s.space_id = %(space)s AND s.in_current) LIMIT %(limit)s)
UNION ALL
(SELECT d.id, d.external_id, 'its source was removed' FROM kb_doc d JOIN kb_source r ON r.id = d.source_id
 WHERE d.space_id = %(space)s AND d.status <> 'DELETED' AND r.status = 'REMOVED' LIMIT %(limit)s)
UNION ALL
(SELECT d.id, d.external_id, 'version ' || d.current_ver || ' is shown, which is ' || coalesce(v.status, 'not there') FROM kb_doc d
 LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
 WHERE d.space_id = %(space)s AND d.status <> 'DELETED' AND d.current_ver > 0 AND v.status IS DISTINCT FROM 'READY' LIMIT %(limit)s)

-- name: stuck
SELECT d.id AS doc_id, d.external_id, t.id AS task_id, t.status, t.current_node, t.updated_at FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id
WHERE t.space_id = %(space)s AND t.status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'CANCELING')
  AND t.updated_at < clock_timestamp() - %(seconds)s * interval '1 second'
  AND coalesce(t.lease_until, '-infinity') < clock_timestamp() AND coalesce(t.next_attempt_at, '-infinity') < clock_timestamp() - %(seconds)s * interval '1 second'
ORDER BY t.updated_at LIMIT %(limit)s

-- name: given_up
SELECT s.doc_id, d.external_id, r.chunk_id, r.attempts, r.error FROM vector_retry r
JOIN kb_chunk_state s ON s.shard = r.shard AND s.id = r.chunk_id AND s.space_id = r.space_id JOIN kb_doc d ON d.id = s.doc_id
WHERE r.shard = %(shard)s::int AND r.space_id = %(space)s AND r.attempts >= %(attempts)s ORDER BY r.chunk_id LIMIT %(limit)s
