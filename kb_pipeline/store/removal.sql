-- name: begin
UPDATE kb_space SET status = 'DELETING', generation = generation + 1 WHERE id = %(space)s AND status = 'ACTIVE'

-- name: cancel_tasks
-- Status by status, for the partial indexes: users wait for this, and what is done may be a million rows.
UPDATE ingestion_task SET status = 'CANCELED', attempt = attempt + 1, cancel_reason = 'space deleted', claimed_by = NULL, lease_until = NULL
WHERE id = ANY(ARRAY(
    SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'PENDING'
    UNION ALL SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status IN ('INIT', 'CANCELING')
    UNION ALL SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'PROCESSING'
    UNION ALL SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'FAILED'
    UNION ALL SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'DEAD'))
  AND status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'DEAD', 'CANCELING')

-- name: pause_sources
UPDATE kb_source SET status = 'PAUSED' WHERE space_id = %(space)s AND status = 'ACTIVE'

-- name: drop_indexes
UPDATE kb_index SET status = 'DROPPING' WHERE space_id = %(space)s AND status IN ('FOLLOWING', 'SERVING')

-- name: models
SELECT model_id FROM kb_space WHERE id = %(space)s UNION SELECT model_id FROM kb_index WHERE space_id = %(space)s ORDER BY 1

-- name: shards
SELECT h.shard, h.state = 'OWNED' AND h.space_id = s.id AS owned FROM kb_space s JOIN kb_shard h ON h.shard IN (s.shard, s.left_shard)
WHERE s.id = %(space)s AND s.status = 'DELETING'

-- name: delete_chunks
WITH ids AS (SELECT id FROM kb_chunk_state WHERE shard = %(shard)s::int AND space_id = %(space)s ORDER BY id LIMIT %(limit)s),
     s AS (DELETE FROM kb_chunk_state c USING ids WHERE c.shard = %(shard)s::int AND c.id = ids.id AND c.space_id = %(space)s),
     t AS (DELETE FROM kb_chunk c USING ids WHERE c.shard = %(shard)s::int AND c.id = ids.id AND c.space_id = %(space)s)
SELECT count(*) AS n FROM ids

-- name: lock_own_shard
SELECT h.shard FROM kb_shard h JOIN kb_space s ON s.id = h.space_id AND s.status = 'DELETING'
WHERE h.shard = %(shard)s AND h.space_id = %(space)s AND h.state = 'OWNED' FOR UPDATE OF h

-- name: short_wait
SELECT set_config('lock_timeout', '50ms', true)

-- name: truncate
SELECT kb_truncate_shard(%(shard)s::int)

-- name: return_shard
UPDATE kb_shard SET state = 'SPARE', space_id = NULL WHERE shard = %(shard)s AND space_id = %(space)s

-- name: some_documents
SELECT id FROM kb_doc WHERE space_id = %(space)s ORDER BY id LIMIT %(limit)s

-- name: delete_tasks
DELETE FROM ingestion_task WHERE doc_id = ANY(%(docs)s::bigint[])

-- name: delete_versions
DELETE FROM kb_doc_version WHERE doc_id = ANY(%(docs)s::bigint[])

-- name: delete_docs
DELETE FROM kb_doc WHERE id = ANY(%(docs)s::bigint[])

-- name: delete_publications
DELETE FROM kb_publication WHERE space_id = %(space)s

-- name: delete_restated
DELETE FROM kb_chunk_restated WHERE space_id = %(space)s

-- name: delete_alerts
DELETE FROM kb_alert WHERE space_id = %(space)s

-- name: delete_reconciliations
DELETE FROM kb_reconciliation WHERE space_id = %(space)s

-- name: delete_tombstones
DELETE FROM vector_tombstone WHERE space_id = %(space)s

-- name: delete_todo
DELETE FROM kb_index_todo t USING kb_index i WHERE i.id = t.index_id AND i.space_id = %(space)s

-- name: delete_logs
DELETE FROM ingestion_node_log WHERE space_id = %(space)s

-- name: delete_answers
DELETE FROM kb_answer WHERE space_id = %(space)s

-- name: delete_seen
DELETE FROM sync_seen s USING sync_job j WHERE j.walk_id = s.walk_id AND j.space_id = %(space)s

-- name: delete_events
DELETE FROM source_event WHERE space_id = %(space)s

-- name: delete_jobs
DELETE FROM sync_job WHERE space_id = %(space)s

-- name: delete_leases
DELETE FROM sync_lease l USING kb_source s WHERE s.id = l.source_id AND s.space_id = %(space)s

-- name: delete_indexes
DELETE FROM kb_index WHERE space_id = %(space)s AND status = 'DROPPED'

-- name: delete_sources
DELETE FROM kb_source WHERE space_id = %(space)s

-- name: delete_floor
DELETE FROM kb_queue_floor WHERE space_id = %(space)s

-- name: delete_schedules
DELETE FROM kb_schedule WHERE space_id = %(space)s

-- name: forget_embeddings
-- The guard on the row itself: a pin that this statement had to wait for wins.
DELETE FROM kb_embedding e WHERE e.model_id = %(model)s::int AND e.last_used < statement_timestamp()
  AND NOT EXISTS (SELECT FROM kb_index i JOIN kb_space s ON s.id = i.space_id
                  WHERE i.model_id = %(model)s::int AND i.status IN ('FOLLOWING', 'SERVING') AND s.status = 'ACTIVE')

-- name: count_left
SELECT 'documents' AS kind, count(*) AS n FROM kb_doc WHERE space_id = %(space)s
UNION ALL SELECT 'versions', count(*) FROM kb_doc_version WHERE space_id = %(space)s
UNION ALL SELECT 'chunks', count(*) FROM kb_chunk WHERE space_id = %(space)s
UNION ALL SELECT 'chunk_states', count(*) FROM kb_chunk_state WHERE space_id = %(space)s
UNION ALL SELECT 'vectors', count(*) FROM kb_index WHERE space_id = %(space)s
UNION ALL SELECT 'tombstones', count(*) FROM vector_tombstone WHERE space_id = %(space)s
UNION ALL SELECT 'publications', count(*) FROM kb_publication WHERE space_id = %(space)s
UNION ALL SELECT 'tasks', count(*) FROM ingestion_task WHERE space_id = %(space)s
UNION ALL SELECT 'node_logs', count(*) FROM ingestion_node_log WHERE space_id = %(space)s
UNION ALL SELECT 'sync_jobs', count(*) FROM sync_job WHERE space_id = %(space)s
UNION ALL SELECT 'sources', count(*) FROM kb_source WHERE space_id = %(space)s
UNION ALL SELECT 'answers', count(*) FROM kb_answer WHERE space_id = %(space)s
UNION ALL SELECT 'events', count(*) FROM source_event WHERE space_id = %(space)s
UNION ALL SELECT 'vector_retries', count(*) FROM vector_retry WHERE space_id = %(space)s
UNION ALL SELECT 'alerts', count(*) FROM kb_alert WHERE space_id = %(space)s
UNION ALL SELECT 'reconciliations', count(*) FROM kb_reconciliation WHERE space_id = %(space)s

-- name: finish
UPDATE kb_space SET status = 'DELETED' WHERE id = %(space)s AND status = 'DELETING'
