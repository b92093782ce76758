-- name: alone
SELECT pg_advisory_xact_lock(3, 0)

-- name: failed_syncs
-- The newest closed job of each source, by its index. What ran at the same time and was started earlier may have ended well since.
SELECT s.id AS space_id, s.key, r.name AS source, j.error, j.finished_at, l.until < clock_timestamp() AS idle
FROM kb_source r JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE' JOIN sync_lease l ON l.source_id = r.id
CROSS JOIN LATERAL (SELECT j.status, j.verdict, j.error, j.finished_at FROM sync_job j
                    WHERE j.source_id = r.id AND j.status NOT IN ('PENDING', 'RUNNING') ORDER BY j.id DESC LIMIT 1) j
WHERE r.status = 'ACTIVE' AND j.status IN ('FAILED', 'ROLLBACK') AND j.verdict <> 'UNTRUSTED'
  AND NOT EXISTS (SELECT FROM sync_job o WHERE o.source_id = r.id AND o.status IN ('SUCCESS', 'GC_CLEAN') AND o.finished_at > j.finished_at)

-- name: dead_tasks
SELECT s.id AS space_id, s.key, t.code, t.n, ARRAY(SELECT d.external_id FROM kb_doc d WHERE d.id = ANY(t.some) ORDER BY d.id) AS names
FROM (SELECT space_id, coalesce(error_code, 'unknown') AS code, count(*) AS n, (array_agg(doc_id ORDER BY doc_id))[1:3] AS some
      FROM ingestion_task WHERE status = 'DEAD' GROUP BY space_id, error_code) t
JOIN kb_space s ON s.id = t.space_id AND s.status = 'ACTIVE'

-- name: waiting_approvals
SELECT s.id AS space_id, s.key, r.name AS source, r.waiting_deletions AS n FROM kb_source r JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE'
WHERE r.status = 'ACTIVE' AND r.waiting_deletions > 0 AND r.approved < r.waiting_deletions

-- name: differences
SELECT s.id AS space_id, s.key, r.remaining, r.at FROM kb_space s
CROSS JOIN LATERAL (SELECT r.remaining, r.at FROM kb_reconciliation r WHERE r.space_id = s.id ORDER BY r.id DESC LIMIT 1) r
WHERE s.status = 'ACTIVE' AND r.remaining > 0

-- name: failed_vectors
SELECT v.space_id, v.key, v.index, v.n, v.docs, ARRAY(SELECT d.external_id FROM kb_doc d WHERE d.id = ANY(v.some) ORDER BY d.id) AS names
FROM (SELECT s.id AS space_id, s.key, i.name AS index, sum(r.n)::bigint AS n, count(*) AS docs, (array_agg(r.doc_id ORDER BY r.doc_id))[1:3] AS some
      FROM (SELECT space_id, shard, doc_id, count(*) AS n FROM vector_retry WHERE attempts >= 5 GROUP BY space_id, shard, doc_id) r
      JOIN kb_space s ON s.id = r.space_id AND s.shard = r.shard AND s.status = 'ACTIVE'
      JOIN kb_index i ON i.space_id = s.id AND i.status = 'SERVING'
      JOIN kb_doc d ON d.id = r.doc_id AND d.status <> 'DELETED'
      GROUP BY s.id, s.key, i.name) v

-- name: note
-- A row that a notifier holds is left for the next time. Only what is new locks its space, so that no deletion misses it.
WITH f AS (SELECT * FROM unnest(%(spaces)s::int[], %(kinds)s::text[], %(subjects)s::text[], %(messages)s::text[], %(opens)s::boolean[])
                         f (space_id, kind, subject, message, opens)),
     held AS (SELECT a.id, a.space_id, a.kind, a.subject FROM kb_alert a
              WHERE a.resolved_at IS NULL AND a.kind = ANY(%(observed)s::text[]) ORDER BY a.id FOR UPDATE SKIP LOCKED),
     same AS (UPDATE kb_alert a SET last_at = clock_timestamp(), message = f.message FROM held h
              JOIN f ON coalesce(f.space_id, 0) = coalesce(h.space_id, 0) AND f.kind = h.kind AND f.subject = h.subject WHERE a.id = h.id),
     gone AS (UPDATE kb_alert a SET resolved_at = clock_timestamp() FROM held h WHERE a.id = h.id AND NOT EXISTS (
                  SELECT FROM f WHERE coalesce(f.space_id, 0) = coalesce(h.space_id, 0) AND f.kind = h.kind AND f.subject = h.subject)),
     fresh AS (SELECT f.* FROM f WHERE f.opens AND NOT EXISTS (
                  SELECT FROM kb_alert a WHERE coalesce(a.space_id, 0) = coalesce(f.space_id, 0) AND a.kind = f.kind AND a.subject = f.subject
                    AND a.resolved_at IS NULL)),
     living AS (SELECT s.id FROM kb_space s WHERE s.id IN (SELECT space_id FROM fresh) AND s.status = 'ACTIVE' ORDER BY s.id FOR SHARE)
INSERT INTO kb_alert AS a (space_id, kind, subject, message)
SELECT space_id, kind, subject, message FROM fresh WHERE space_id IS NULL OR space_id IN (SELECT id FROM living)
ON CONFLICT DO NOTHING
RETURNING a.id, (SELECT s.key FROM kb_space s WHERE s.id = a.space_id) AS space, a.kind, a.subject, a.message, a.first_at AS since

-- name: open
SELECT a.id, s.key AS space, a.kind, a.subject, a.message, a.first_at AS since FROM kb_alert a LEFT JOIN kb_space s ON s.id = a.space_id
WHERE a.resolved_at IS NULL AND (%(space)s::int IS NULL OR a.space_id = %(space)s::int) ORDER BY a.first_at, a.id

-- name: mark_sent
UPDATE kb_alert SET notified_at = clock_timestamp() WHERE id = ANY(%(ids)s::bigint[]) AND notified_at IS NULL

-- name: reconciled
INSERT INTO kb_reconciliation (space_id, chunks, vectors, missing, orphaned, wrong, repaired, remaining)
VALUES (%(space)s, %(chunks)s, %(vectors)s, %(missing)s, %(orphaned)s, %(wrong)s, %(repaired)s, %(remaining)s)

-- name: forget_reconciliations
DELETE FROM kb_reconciliation r WHERE r.space_id = %(space)s AND r.at < %(before)s::timestamptz
  AND r.id < (SELECT max(n.id) FROM kb_reconciliation n WHERE n.space_id = %(space)s)

-- name: forget_resolved
DELETE FROM kb_alert WHERE space_id = %(space)s AND resolved_at < %(before)s::timestamptz
