-- name: waiting
-- statement_timestamp(): clock_timestamp() is volatile, and no index could be asked for it.
WITH w AS MATERIALIZED (
    SELECT s.id, s.key FROM kb_space s
    LEFT JOIN kb_schedule h ON h.space_id = s.id AND h.kind = 'ingest'
    -- Scalar subqueries on purpose: EXISTS would be planned as one hash over every waiting task there is.
    WHERE s.status = 'ACTIVE' AND (h.due_at IS NULL OR h.due_at <= statement_timestamp()) AND (
        (SELECT 1 FROM ingestion_task t WHERE t.space_id = s.id AND t.status = 'PENDING' LIMIT 1) = 1
        OR (SELECT 1 FROM ingestion_task t WHERE t.space_id = s.id AND t.status = 'FAILED' AND t.next_attempt_at <= statement_timestamp() LIMIT 1) = 1
        OR (SELECT 1 FROM ingestion_task t WHERE t.space_id = s.id AND t.status = 'PROCESSING' AND t.lease_until < statement_timestamp() LIMIT 1) = 1
        OR (SELECT 1 FROM (SELECT t.doc_id, t.status FROM ingestion_task t WHERE t.space_id = s.id AND t.status IN ('INIT', 'CANCELING') LIMIT 200) q
            WHERE q.status = 'CANCELING' OR NOT EXISTS (SELECT FROM ingestion_task l WHERE l.doc_id = q.doc_id
              AND l.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING')) LIMIT 1) = 1)
    ORDER BY s.key <= %(after)s, s.key LIMIT %(spaces)s)
SELECT w.id AS space_id, w.key AS space, p.n + f.n + e.n AS tasks, a.owners, d.silent
FROM w
CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PENDING' LIMIT %(tasks)s) x) p
CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'FAILED'
                                               AND t.next_attempt_at <= statement_timestamp() LIMIT %(tasks)s) x) f
CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PROCESSING'
                                               AND t.lease_until < statement_timestamp() LIMIT %(tasks)s) x) e
CROSS JOIN LATERAL (SELECT array(
    SELECT DISTINCT x.claimed_by FROM (SELECT t.claimed_by FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PROCESSING'
                                       AND t.lease_until >= statement_timestamp() LIMIT %(tasks)s) x
    UNION SELECT l.owner FROM sync_lease l JOIN kb_source r ON r.id = l.source_id WHERE r.space_id = w.id AND r.status <> 'REMOVED' AND l.until >= statement_timestamp()) AS owners) a
CROSS JOIN LATERAL (SELECT array(
    SELECT DISTINCT x.claimed_by FROM (SELECT t.claimed_by FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PROCESSING'
                                       AND t.lease_until < statement_timestamp() LIMIT %(tasks)s) x) AS silent) d
ORDER BY w.key <= %(after)s, w.key

-- name: nodes
-- The newest as well: a task that has passed a node stands behind all that wait for that node.
SELECT w.id AS space_id, x.current_node AS node, count(*) AS n FROM unnest(%(spaces)s::int[]) w (id)
CROSS JOIN LATERAL (
    (SELECT t.id, t.current_node FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PENDING' ORDER BY t.ready_seq LIMIT %(tasks)s)
    UNION (SELECT t.id, t.current_node FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PENDING' ORDER BY t.ready_seq DESC LIMIT %(tasks)s)
    UNION (SELECT t.id, t.current_node FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'FAILED'
           AND t.next_attempt_at <= statement_timestamp() LIMIT %(tasks)s)
    UNION (SELECT t.id, t.current_node FROM ingestion_task t WHERE t.space_id = w.id AND t.status = 'PROCESSING'
           AND t.lease_until < statement_timestamp() LIMIT %(tasks)s)) x
GROUP BY 1, 2

-- name: runs
SELECT DISTINCT split_part(x.owner, '@', 1) AS run FROM (
    SELECT claimed_by AS owner FROM ingestion_task WHERE status = 'PROCESSING'
    UNION SELECT owner FROM sync_lease WHERE owner LIKE '%%@%%') x
WHERE x.owner LIKE '%%@%%' LIMIT %(limit)s
