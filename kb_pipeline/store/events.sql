-- name: record
INSERT INTO source_event (space_id, source_id, event_id, external_id, payload)
SELECT r.space_id, r.id, %(event)s, %(external_id)s, %(payload)s FROM kb_source r JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE'
WHERE r.id = %(source)s AND r.status <> 'REMOVED'
ON CONFLICT (source_id, event_id) DO NOTHING

-- name: take
UPDATE source_event SET taken_at = clock_timestamp()
WHERE source_id = %(source)s AND taken_at IS NULL AND received_at < %(before)s::timestamptz

-- name: waiting
SELECT r.id AS source_id, r.space_id, s.key AS space, r.name, n.id::text AS mark, q.mark AS asked, q.tries,
       extract(epoch FROM clock_timestamp() - q.requested_at) AS waited, q.mark IS NULL OR o.id > q.mark::bigint AS done
FROM kb_source r
JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE'
CROSS JOIN LATERAL (SELECT id FROM source_event e WHERE e.source_id = r.id AND e.taken_at IS NULL ORDER BY id LIMIT 1) o
CROSS JOIN LATERAL (SELECT id FROM source_event e WHERE e.source_id = r.id AND e.taken_at IS NULL ORDER BY id DESC LIMIT 1) n
LEFT JOIN kb_source_request q ON q.source_id = r.id AND q.reason = 'event'
WHERE r.status = 'ACTIVE'
ORDER BY r.id

-- name: probed
SELECT r.id, r.space_id, r.name, r.kind, r.config, r.status, r.listing_count, r.listing_at, r.listing_digest, r.approved, r.waiting_deletions, r.watermark,
       r.id AS source_id, s.key AS space, r.change_token AS mark, q.mark AS asked, q.tries,
       extract(epoch FROM clock_timestamp() - q.requested_at) AS waited, q.mark IS NULL OR r.change_token_at > q.requested_at AS done
FROM kb_source r
JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE'
LEFT JOIN kb_source_request q ON q.source_id = r.id AND q.reason = 'change'
WHERE r.status = 'ACTIVE'
ORDER BY r.id <= %(after)s, r.id
LIMIT %(limit)s

-- name: request
INSERT INTO kb_source_request (source_id, reason, mark) VALUES (%(source)s, %(reason)s, %(mark)s)
ON CONFLICT (source_id, reason) DO UPDATE SET mark = excluded.mark, number = kb_source_request.number + 1, requested_at = clock_timestamp(),
    tries = CASE WHEN NOT %(done)s::boolean AND kb_source_request.mark = excluded.mark THEN kb_source_request.tries + 1 ELSE 1 END
RETURNING number

-- name: store_token
UPDATE kb_source SET change_token = %(token)s, change_token_at = clock_timestamp() WHERE id = %(source)s
