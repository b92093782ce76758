-- name: needed
SELECT c.content_hash, array_agg(DISTINCT s.doc_id) AS docs, min(s.id) AS chunk_id
FROM kb_chunk_state s JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = s.id AND c.space_id = %(space)s
WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s
  AND (NOT s.in_current OR NOT EXISTS (SELECT FROM kb_embedding e
                                       WHERE e.model_id = %(model)s::int AND e.content_hash = c.content_hash AND e.vector IS NOT NULL))
GROUP BY c.content_hash

-- name: pin
WITH k AS (SELECT e.content_hash FROM kb_embedding e WHERE e.model_id = %(model)s::int AND e.content_hash = ANY(%(hashes)s::bytea[])
           AND e.vector IS NOT NULL ORDER BY e.content_hash FOR UPDATE)
UPDATE kb_embedding e SET last_used = clock_timestamp() FROM k
WHERE e.model_id = %(model)s::int AND e.content_hash = k.content_hash AND e.vector IS NOT NULL RETURNING e.content_hash

-- name: token
SELECT nextval('kb_embedding_token') AS token

-- name: insert_claims
INSERT INTO kb_embedding (model_id, content_hash, token, owner, lease_until)
SELECT %(model)s::int, h, %(token)s, %(me)s, clock_timestamp() + %(ttl)s * interval '1 second' FROM unnest(%(hashes)s::bytea[]) h ORDER BY h
ON CONFLICT DO NOTHING RETURNING content_hash

-- name: owners
SELECT DISTINCT owner FROM kb_embedding
WHERE model_id = %(model)s::int AND content_hash = ANY(%(hashes)s::bytea[]) AND vector IS NULL AND owner IS NOT NULL

-- name: take_over
WITH k AS (SELECT content_hash FROM kb_embedding WHERE model_id = %(model)s::int AND content_hash = ANY(%(hashes)s::bytea[])
           AND vector IS NULL AND (lease_until < clock_timestamp() OR token = %(token)s OR owner = ANY(%(dead)s::text[]))
           ORDER BY content_hash FOR UPDATE SKIP LOCKED)
UPDATE kb_embedding e SET token = %(token)s, owner = %(me)s, lease_until = clock_timestamp() + %(ttl)s * interval '1 second' FROM k
WHERE e.model_id = %(model)s::int AND e.content_hash = k.content_hash RETURNING e.content_hash

-- name: texts
SELECT c.content_hash, c.prefix, c.content FROM kb_chunk c
WHERE c.shard = %(shard)s::int AND c.id = ANY(%(ids)s::bigint[]) AND c.space_id = %(space)s

-- name: stage
CREATE TEMP TABLE IF NOT EXISTS stage_vector (content_hash bytea, vector bytea) ON COMMIT DELETE ROWS

-- name: copy
COPY stage_vector (content_hash, vector) FROM STDIN (FORMAT BINARY)

-- name: store
UPDATE kb_embedding e SET vector = s.vector, last_used = clock_timestamp(), owner = NULL, lease_until = NULL FROM stage_vector s
WHERE e.model_id = %(model)s::int AND e.content_hash = s.content_hash AND e.token = %(token)s AND e.vector IS NULL

-- name: give_back
DELETE FROM kb_embedding WHERE model_id = %(model)s::int AND token = %(token)s AND vector IS NULL

-- name: have
SELECT content_hash FROM kb_embedding WHERE model_id = %(model)s::int AND content_hash = ANY(%(hashes)s::bytea[]) AND vector IS NOT NULL

-- name: vectors_and_texts
SELECT c.id AS chunk_id, e.vector, c.content, c.prefix, c.title_path
FROM kb_chunk c JOIN kb_embedding e ON e.model_id = %(model)s::int AND e.content_hash = c.content_hash
WHERE c.shard = %(shard)s::int AND c.space_id = %(space)s AND c.id = ANY(%(ids)s::bigint[]) AND e.vector IS NOT NULL

-- name: vectors
SELECT c.id AS chunk_id, e.vector FROM kb_chunk c JOIN kb_embedding e ON e.model_id = %(model)s::int AND e.content_hash = c.content_hash
WHERE c.shard = %(shard)s::int AND c.space_id = %(space)s AND c.id = ANY(%(ids)s::bigint[]) AND e.vector IS NOT NULL
