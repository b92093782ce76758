-- name: queue
SELECT s.key AS space, t.status, t.n FROM (
    SELECT space_id, 'PENDING' AS status, count(*) AS n FROM ingestion_task WHERE status = 'PENDING' GROUP BY space_id
    UNION ALL SELECT space_id, 'FAILED', count(*) FROM ingestion_task WHERE status = 'FAILED' GROUP BY space_id
    UNION ALL SELECT space_id, 'PROCESSING', count(*) FROM ingestion_task WHERE status = 'PROCESSING' GROUP BY space_id
    UNION ALL SELECT space_id, status, count(*) FROM ingestion_task WHERE status IN ('INIT', 'CANCELING') GROUP BY space_id, status
    UNION ALL SELECT space_id, 'DEAD', count(*) FROM ingestion_task WHERE status = 'DEAD' GROUP BY space_id) t
JOIN kb_space s ON s.id = t.space_id AND s.status <> 'DELETED'

-- name: oldest
SELECT s.key AS space, extract(epoch FROM clock_timestamp() - t.updated_at)::float8 AS seconds FROM kb_space s
CROSS JOIN LATERAL (SELECT updated_at FROM ingestion_task WHERE space_id = s.id AND status = 'PENDING' ORDER BY ready_seq LIMIT 1) t
WHERE s.status <> 'DELETED'

-- name: lag
SELECT s.key AS space, k.name AS source, extract(epoch FROM clock_timestamp() - j.started_at)::float8 AS seconds FROM kb_source k
JOIN kb_space s ON s.id = k.space_id AND s.status = 'ACTIVE'
CROSS JOIN LATERAL (SELECT started_at FROM sync_job WHERE source_id = k.id AND status IN ('SUCCESS', 'GC_CLEAN') ORDER BY id DESC LIMIT 1) j
WHERE k.status = 'ACTIVE'

-- name: alerts
SELECT kind, count(*) AS n FROM kb_alert WHERE resolved_at IS NULL GROUP BY kind

-- name: size
SELECT pg_database_size(current_database()) AS bytes

-- name: totals
SELECT s.key AS space, c.name, c.total FROM kb_counter c JOIN kb_space s ON s.id = c.space_id AND s.status <> 'DELETED'

-- name: lock
SELECT until, until <= clock_timestamp() - %(every)s::float8 * interval '1 second' AS due FROM kb_counted FOR UPDATE SKIP LOCKED

-- name: bound
SELECT least(statement_timestamp(), min(xact_start)) AS at FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL
  AND xact_start > clock_timestamp() - interval '1 hour'

-- name: add
INSERT INTO kb_counter (space_id, name, total)
SELECT l.space_id, x.name, sum(x.n) FROM ingestion_node_log l CROSS JOIN LATERAL (VALUES
    (CASE WHEN l.status = 'INTERRUPTED' THEN 'interrupted' WHEN l.status = 'FAILED' THEN 'failed'
          WHEN l.node = 'INDEXER' THEN 'published' WHEN l.node = 'CLEANUP' THEN 'canceled' END, 1::bigint),
    ('embedded', CASE WHEN l.node = 'EMBEDDING' THEN (l.output ->> 'embedded')::bigint END),
    ('written', CASE WHEN l.node = 'CHUNKER' THEN (l.output ->> 'new')::bigint END),
    ('reused', CASE WHEN l.node = 'CHUNKER' THEN (l.output ->> 'chunks')::bigint - (l.output ->> 'new')::bigint END)) x (name, n)
WHERE l.finished_at >= %(since)s::timestamptz AND l.finished_at < %(until)s::timestamptz
  AND l.started_at >= %(since)s::timestamptz - interval '8 days' AND l.started_at < %(until)s::timestamptz + interval '8 days' AND x.name IS NOT NULL AND x.n <> 0
GROUP BY l.space_id, x.name
ON CONFLICT (space_id, name) DO UPDATE SET total = kb_counter.total + excluded.total

-- name: advance
UPDATE kb_counted SET until = %(until)s::timestamptz

-- name: forget
DELETE FROM kb_counter c USING kb_space s WHERE s.id = c.space_id AND s.status = 'DELETED'
