-- name: spaces
SELECT x.id, x.id > coalesce(q.last_value, 0) AS foreign FROM unnest(%(ids)s::int[]) x (id)
CROSS JOIN (SELECT pg_sequence_last_value(pg_get_serial_sequence('kb_space', 'id')::regclass) AS last_value) q
WHERE NOT EXISTS (SELECT FROM kb_space s WHERE s.id = x.id AND s.status <> 'DELETED') ORDER BY x.id

-- name: indexes
SELECT x.id, x.id > coalesce(q.last_value, 0) AS foreign FROM unnest(%(ids)s::int[]) x (id)
CROSS JOIN (SELECT pg_sequence_last_value(pg_get_serial_sequence('kb_index', 'id')::regclass) AS last_value) q
WHERE NOT EXISTS (SELECT FROM kb_index i JOIN kb_space s ON s.id = i.space_id WHERE i.id = x.id AND i.status <> 'DROPPED' AND s.status <> 'DELETED')
ORDER BY x.id

-- name: index_kinds
SELECT DISTINCT ON (i.kind, i.options) i.id, i.space_id, i.model_id, i.name, m.dimension, i.kind, i.options
FROM kb_index i JOIN kb_model m ON m.id = i.model_id ORDER BY i.kind, i.options, i.id
