-- name: record
INSERT INTO vector_retry AS r (shard, chunk_id, space_id, doc_id, attempts, next_at, error)
SELECT %(shard)s::int, s.id, %(space)s, s.doc_id, 1, clock_timestamp() + least(%(longest)s::float8, %(base)s::float8) * interval '1 second', x.error
FROM kb_chunk_state s JOIN unnest(%(chunks)s::bigint[], %(errors)s::text[]) x (id, error) ON x.id = s.id
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = ANY(%(chunks)s::bigint[]) AND (s.in_current OR NOT %(current)s::boolean)
ORDER BY s.id
ON CONFLICT (shard, chunk_id) DO UPDATE SET attempts = r.attempts + 1, error = excluded.error, seen_at = clock_timestamp(),
    next_at = clock_timestamp() + least(%(longest)s::float8, %(base)s::float8 * 2 ^ least(r.attempts, 30)) * interval '1 second'

-- name: forget
DELETE FROM vector_retry WHERE space_id = %(space)s AND doc_id = ANY(%(docs)s::bigint[])

-- name: reset
DELETE FROM vector_retry WHERE space_id = %(space)s

-- name: postponed
UPDATE vector_retry SET seen_at = clock_timestamp()
WHERE shard = %(shard)s::int AND space_id = %(space)s AND chunk_id = ANY(%(chunks)s::bigint[])
  AND (attempts >= %(most)s OR next_at > clock_timestamp()) RETURNING chunk_id

-- name: touch
UPDATE vector_retry SET seen_at = clock_timestamp()
WHERE shard = %(shard)s::int AND space_id = %(space)s AND chunk_id = ANY(%(chunks)s::bigint[])

-- name: settle
DELETE FROM vector_retry r WHERE r.shard = %(shard)s::int AND r.space_id = %(space)s AND r.seen_at < %(since)s::timestamptz
  AND NOT EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = r.chunk_id AND s.space_id = %(space)s AND NOT s.in_current)
