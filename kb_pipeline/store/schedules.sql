-- name: timed
SELECT s.id AS space_id, s.key, s.schedule, s.time_zone, h.cron FROM kb_space s
LEFT JOIN kb_schedule h ON h.space_id = s.id AND h.kind = 'sync'
WHERE s.status = 'ACTIVE' AND CASE WHEN s.schedule = '' THEN h.due_at IS NOT NULL
                                   ELSE h.cron IS DISTINCT FROM s.schedule || ' ' || s.time_zone OR h.due_at IS NULL END
ORDER BY s.id

-- name: set_due
INSERT INTO kb_schedule (space_id, kind, due_at, cron) VALUES (%(space)s, %(kind)s, %(due)s, %(cron)s)
ON CONFLICT (space_id, kind) DO UPDATE SET due_at = excluded.due_at, cron = excluded.cron

-- name: mark
INSERT INTO kb_schedule (space_id, kind, due_at) SELECT s.id, %(kind)s, clock_timestamp() FROM kb_space s
WHERE s.status = 'ACTIVE' AND (%(kind)s <> 'sweep' OR EXISTS (SELECT FROM kb_source r WHERE r.space_id = s.id AND r.status = 'ACTIVE'))
  AND (%(kind)s <> 'gc' OR EXISTS (SELECT FROM vector_tombstone t WHERE t.space_id = s.id))
ON CONFLICT (space_id, kind) DO UPDATE SET due_at = coalesce(kb_schedule.due_at, excluded.due_at)

-- name: due
SELECT h.space_id, s.key AS space, h.kind, h.due_at, s.schedule, s.time_zone FROM kb_schedule h
JOIN kb_space s ON s.id = h.space_id AND s.status = 'ACTIVE'
WHERE h.due_at <= clock_timestamp() AND h.kind <> 'ingest' ORDER BY h.due_at, h.space_id, h.kind LIMIT %(limit)s

-- name: request
UPDATE kb_schedule SET due_at = %(next)s, last_requested_at = clock_timestamp(),
    misses = misses + CASE WHEN last_requested_at > greatest(last_success_at, last_failure_at, '-infinity') THEN 1 ELSE 0 END
WHERE space_id = %(space)s AND kind = %(kind)s AND due_at = %(due)s

-- name: postpone
UPDATE kb_schedule SET due_at = %(next)s WHERE space_id = %(space)s AND kind = %(kind)s AND due_at = %(due)s

-- name: succeed
UPDATE kb_schedule SET last_success_at = clock_timestamp(), misses = 0, due_at = CASE WHEN kind = 'ingest' THEN NULL ELSE due_at END
WHERE space_id = %(space)s AND kind = %(kind)s

-- name: fail
INSERT INTO kb_schedule (space_id, kind, last_failure_at, misses, due_at)
SELECT s.id, %(kind)s, clock_timestamp(), 1, CASE WHEN %(kind)s = 'ingest' THEN clock_timestamp() + %(base)s * interval '1 second' END
FROM kb_space s WHERE s.key = %(key)s AND s.status = 'ACTIVE'
ON CONFLICT (space_id, kind) DO UPDATE SET last_failure_at = clock_timestamp(), misses = kb_schedule.misses + 1,
    due_at = CASE WHEN kb_schedule.kind = 'ingest'
             THEN clock_timestamp() + least(%(longest)s, %(base)s * 2 ^ least(kb_schedule.misses, 20)) * interval '1 second' ELSE kb_schedule.due_at END

-- name: missed
SELECT s.key AS space, h.kind, h.misses, h.last_requested_at, h.last_success_at, h.due_at FROM kb_schedule h
JOIN kb_space s ON s.id = h.space_id AND s.status = 'ACTIVE'
WHERE h.misses >= %(misses)s AND h.kind <> 'ingest' ORDER BY h.misses DESC, s.key, h.kind
