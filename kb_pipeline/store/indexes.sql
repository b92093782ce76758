-- name: find
SELECT i.id, i.space_id, i.model_id, i.name, m.dimension, i.kind, i.options, i.status, i.base_done, i.embedder, i.embedder_options, m.fingerprint,
       i.wanted, i.served_at, i.keep_until, i.agreement, i.error, i.created_at
FROM kb_index i JOIN kb_model m ON m.id = i.model_id
WHERE (i.space_id = %(space)s::int OR i.id = %(index)s::int) AND (%(statuses)s::text[] IS NULL OR i.status = ANY(%(statuses)s::text[]))
ORDER BY i.status DESC, i.keep_until NULLS FIRST, i.id

-- name: begin
WITH n AS (SELECT nextval(pg_get_serial_sequence('kb_index', 'id'))::int AS id)
INSERT INTO kb_index (id, space_id, model_id, name, status, base_done, kind, options, embedder, embedder_options) OVERRIDING SYSTEM VALUE
SELECT n.id, s.id, %(model)s, 'kb_' || s.id || '_' || n.id, 'FOLLOWING', false, %(kind)s, %(options)s, %(embedder)s, %(embedder_options)s
FROM n CROSS JOIN kb_space s WHERE s.id = %(space)s AND s.status = 'ACTIVE'
RETURNING id

-- name: restate
UPDATE kb_index SET options = %(options)s, embedder = %(embedder)s, embedder_options = %(embedder_options)s WHERE id = %(index)s

-- name: base
WITH part AS (SELECT id, doc_id FROM kb_chunk_state WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current AND id > %(after)s ORDER BY id
              LIMIT %(limit)s),
     put AS (INSERT INTO kb_index_todo (index_id, doc_id, chunk_id) SELECT %(index)s, doc_id, id FROM part ORDER BY 2, 3 ON CONFLICT DO NOTHING)
SELECT count(*) AS n, coalesce(max(id), 0) AS last FROM part

-- name: base_done
UPDATE kb_index SET base_done = true, wanted = %(wanted)s, error = NULL WHERE id = %(index)s AND status = 'FOLLOWING'

-- name: todo
SELECT doc_id, chunk_id, seq FROM kb_index_todo WHERE index_id = %(index)s AND (doc_id, chunk_id) > (%(doc)s, %(chunk)s)
ORDER BY doc_id, chunk_id LIMIT %(limit)s

-- name: todo_left
SELECT count(*) AS n FROM kb_index_todo WHERE index_id = %(index)s

-- name: current
SELECT id, doc_id, vec_id, ck, bucket, acl, acl_seq FROM kb_chunk_state
WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current AND id = ANY(%(ids)s::bigint[])

-- name: chunks_of
SELECT s.id FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.in_current AND s.doc_id = ANY(%(docs)s::bigint[])

-- name: done
DELETE FROM kb_index_todo t USING unnest(%(docs)s::bigint[], %(chunks)s::bigint[], %(seqs)s::bigint[]) x (doc_id, chunk_id, seq)
WHERE t.index_id = %(index)s AND t.doc_id = x.doc_id AND t.chunk_id = x.chunk_id AND t.seq = x.seq

-- name: stands_still
UPDATE kb_index SET error = %(error)s WHERE id = %(index)s AND status = 'FOLLOWING'

-- name: agreed
UPDATE kb_index SET agreement = %(agreement)s WHERE id = %(index)s

-- name: lock_both
SELECT id, status, base_done FROM kb_index WHERE space_id = %(space)s AND status IN ('FOLLOWING', 'SERVING') ORDER BY id FOR UPDATE

-- name: anything_to_do
SELECT EXISTS (SELECT FROM kb_index_todo WHERE index_id = %(index)s) AS yes

-- name: stand_down
UPDATE kb_index SET status = 'FOLLOWING', base_done = true, keep_until = clock_timestamp() + %(keep)s * interval '1 second'
WHERE space_id = %(space)s AND status = 'SERVING'

-- name: stand_up
UPDATE kb_index SET status = 'SERVING', served_at = clock_timestamp(), keep_until = NULL, error = NULL WHERE id = %(index)s AND status = 'FOLLOWING'

-- name: space_follows
UPDATE kb_space s SET model_id = i.model_id, embedder = i.embedder, embedder_options = i.embedder_options, index_kind = i.kind, index_options = i.options
FROM kb_index i WHERE i.id = %(index)s AND i.status = 'SERVING' AND s.id = i.space_id

-- name: wanted_again
UPDATE kb_index SET keep_until = NULL WHERE id = %(index)s AND status = 'FOLLOWING' AND keep_until IS NOT NULL

-- name: give_up
UPDATE kb_index SET status = 'DROPPING' WHERE id = %(index)s AND status = 'FOLLOWING'

-- name: keep
UPDATE kb_index SET keep_until = clock_timestamp() + %(keep)s * interval '1 second'
WHERE id = %(index)s AND status = 'FOLLOWING' AND served_at IS NOT NULL

-- name: expire
UPDATE kb_index SET status = 'DROPPING' WHERE space_id = %(space)s AND status = 'FOLLOWING' AND keep_until < clock_timestamp() RETURNING id

-- name: forget_todo
DELETE FROM kb_index_todo WHERE index_id = %(index)s

-- name: forget_tombstones
DELETE FROM vector_tombstone WHERE index_id = %(index)s

-- name: dropped
UPDATE kb_index SET status = 'DROPPED' WHERE id = %(index)s AND status = 'DROPPING'

-- name: building
SELECT DISTINCT s.key FROM kb_index i JOIN kb_space s ON s.id = i.space_id
WHERE i.status = 'FOLLOWING' AND i.keep_until IS NULL AND s.status = 'ACTIVE'
  AND EXISTS (SELECT FROM kb_index o WHERE o.space_id = s.id AND o.status = 'SERVING') ORDER BY s.key

-- name: sample
SELECT s.id, s.doc_id, c.content, c.prefix FROM kb_chunk_state s JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.in_current AND s.bucket = ANY(%(buckets)s::smallint[]) ORDER BY s.vec_id LIMIT %(limit)s
