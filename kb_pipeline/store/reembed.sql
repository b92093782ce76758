-- name: texts
SELECT s.id AS chunk_id, c.content_hash, c.prefix, c.content, e.vector FROM kb_chunk_state s
JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = s.id AND c.space_id = %(space)s
LEFT JOIN kb_embedding e ON e.model_id = %(model)s::int AND e.content_hash = c.content_hash
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id > %(after)s AND (s.in_current OR s.vec_status = 0)
ORDER BY s.id LIMIT %(limit)s

-- name: holders
SELECT s.id, s.doc_id, s.vec_id, s.ck, s.bucket, s.acl, s.acl_seq, c.content_hash FROM kb_chunk_state s
JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = s.id AND c.space_id = %(space)s
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.in_current AND s.hash = ANY(%(names)s::uuid[])

-- name: replace
INSERT INTO kb_embedding (model_id, content_hash, vector)
SELECT %(model)s::int, x.* FROM unnest(%(hashes)s::bytea[], %(vectors)s::bytea[]) x (content_hash, vector) ORDER BY x.content_hash
ON CONFLICT (model_id, content_hash) DO UPDATE SET vector = excluded.vector, last_used = clock_timestamp(), owner = NULL, lease_until = NULL
