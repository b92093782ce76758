-- name: claim
INSERT INTO kb_alert_channel AS h (channel, token, until) VALUES (%(channel)s, 1, clock_timestamp() + %(lease)s * interval '1 second')
ON CONFLICT (channel) DO UPDATE SET token = h.token + 1, until = excluded.until WHERE h.until < clock_timestamp()
RETURNING h.token

-- name: release
UPDATE kb_alert_channel SET until = '-infinity' WHERE channel = %(channel)s AND token = %(token)s

-- name: pending
SELECT a.id, s.key AS space, a.kind, a.subject, a.message, a.first_at AS since, d.alert_id IS NOT NULL AS told, false AS resolved
FROM kb_alert a LEFT JOIN kb_alert_delivery d ON d.alert_id = a.id AND d.channel = %(channel)s LEFT JOIN kb_space s ON s.id = a.space_id
WHERE a.resolved_at IS NULL AND (d.alert_id IS NULL OR d.sent_at < clock_timestamp() - %(remind)s * interval '1 second')
UNION ALL
SELECT a.id, s.key, a.kind, a.subject, a.message, a.first_at, true, true
FROM kb_alert_delivery d JOIN kb_alert a ON a.id = d.alert_id LEFT JOIN kb_space s ON s.id = a.space_id
WHERE d.channel = %(channel)s AND d.resolved_sent_at IS NULL AND a.resolved_at IS NOT NULL
ORDER BY id

-- name: told
-- An alert that left with its space in the meantime is passed over.
INSERT INTO kb_alert_delivery AS d (alert_id, channel)
SELECT a.id, %(channel)s FROM kb_alert a WHERE a.id = ANY(%(ids)s::bigint[]) ORDER BY a.id FOR KEY SHARE
ON CONFLICT (alert_id, channel) DO UPDATE SET sent_at = excluded.sent_at

-- name: told_resolved
UPDATE kb_alert_delivery SET resolved_sent_at = clock_timestamp()
WHERE channel = %(channel)s AND alert_id = ANY(%(ids)s::bigint[]) AND resolved_sent_at IS NULL
