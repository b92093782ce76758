-- name: create
INSERT INTO kb_space (key, name, shard, model_id, embedder, embedder_options, index_kind, index_options, chunking, retained_versions, schedule, time_zone, audience)
SELECT %(key)s, %(name)s,
       (SELECT h.shard FROM kb_shard h LEFT JOIN kb_space s ON s.shard = h.shard AND s.status <> 'DELETED'
        WHERE h.state = 'SHARED' GROUP BY h.shard ORDER BY count(s.id), h.shard LIMIT 1),
       %(model_id)s, %(embedder)s, %(embedder_options)s, %(index_kind)s, %(index_options)s, %(chunking)s, %(retained_versions)s, %(schedule)s, %(time_zone)s, %(audience)s

-- name: create_index
WITH n AS (SELECT nextval(pg_get_serial_sequence('kb_index', 'id'))::int AS id)
INSERT INTO kb_index (id, space_id, model_id, name, status, base_done, kind, options, embedder, embedder_options) OVERRIDING SYSTEM VALUE
SELECT n.id, s.id, s.model_id, 'kb_' || s.id || '_' || n.id, 'FOLLOWING', false, s.index_kind, s.index_options, s.embedder, s.embedder_options
FROM n CROSS JOIN kb_space s WHERE s.id = %(space)s

-- name: create_floor
INSERT INTO kb_queue_floor (space_id) VALUES (%(space)s)

-- name: serve_index
UPDATE kb_index SET status = 'SERVING', base_done = true, served_at = clock_timestamp()
WHERE space_id = %(space)s AND status = 'FOLLOWING'
  AND NOT EXISTS (SELECT FROM kb_index i WHERE i.space_id = %(space)s AND i.status = 'SERVING')

-- name: ensure_model
SELECT kb_ensure_model(%(fingerprint)s, %(dimension)s) AS id

-- name: get
SELECT s.id, s.key, s.name, s.status, s.generation, s.model_id, m.fingerprint, m.dimension, s.embedder, s.embedder_options, s.index_kind,
       s.index_options, s.chunking, s.retained_versions, s.schedule, s.audience, s.time_zone
FROM kb_space s JOIN kb_model m ON m.id = s.model_id
WHERE (s.key = %(key)s::text AND s.status <> 'DELETED') OR s.id = %(id)s::int

-- name: list_all
SELECT s.id, s.key, s.name, s.status, s.generation, s.model_id, m.fingerprint, m.dimension, s.embedder, s.embedder_options, s.index_kind,
       s.index_options, s.chunking, s.retained_versions, s.schedule, s.audience, s.time_zone
FROM kb_space s JOIN kb_model m ON m.id = s.model_id
WHERE s.status <> 'DELETED' ORDER BY s.key

-- name: update
UPDATE kb_space SET name = coalesce(%(name)s, name), schedule = coalesce(%(schedule)s, schedule), time_zone = coalesce(%(time_zone)s, time_zone),
    retained_versions = coalesce(%(retained_versions)s::int, retained_versions), chunking = coalesce(%(chunking)s::jsonb, chunking),
    audience = CASE WHEN %(set_audience)s::boolean THEN %(audience)s::jsonb ELSE audience END
WHERE id = %(space)s AND status = 'ACTIVE'

-- name: lock_shared
SELECT pg_advisory_xact_lock_shared(1, %(space)s::int)

-- name: lock_exclusive
SELECT pg_advisory_xact_lock(1, %(space)s::int)

-- name: shard
SELECT shard FROM kb_space WHERE id = %(space)s AND generation = %(generation)s AND status = 'ACTIVE'

-- name: living_indexes
SELECT i.id, i.space_id, i.model_id, i.name, m.dimension, i.kind, i.options FROM kb_index i JOIN kb_model m ON m.id = i.model_id
WHERE i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.status DESC, i.id

-- name: serving_index
SELECT i.id, i.space_id, i.model_id, i.name, m.dimension, i.kind, i.options FROM kb_index i JOIN kb_model m ON m.id = i.model_id
WHERE i.space_id = %(space)s AND i.status = 'SERVING'

-- name: lock_indexes
SELECT id, status FROM kb_index WHERE space_id = %(space)s AND status IN ('FOLLOWING', 'SERVING') ORDER BY id FOR SHARE

-- name: wants_own_shard
SELECT h.state = 'SHARED' AND s.left_shard IS NULL AND (%(promised)s::bigint > %(threshold)s::bigint OR EXISTS (
         SELECT FROM kb_chunk_state t WHERE t.shard = s.shard AND t.space_id = s.id OFFSET %(threshold)s::bigint LIMIT 1)) AS yes
FROM kb_space s JOIN kb_shard h ON h.shard = s.shard WHERE s.id = %(space)s

-- name: promotable
SELECT s.shard FROM kb_space s JOIN kb_shard h ON h.shard = s.shard
WHERE s.id = %(space)s AND s.generation = %(generation)s AND s.status = 'ACTIVE' AND s.left_shard IS NULL AND h.state = 'SHARED'

-- name: ensure_spares
SELECT kb_ensure_spare_shards(%(wanted)s::int)

-- name: take_spare
UPDATE kb_shard SET state = 'OWNED', space_id = %(space)s
WHERE shard = (SELECT shard FROM kb_shard WHERE state = 'SPARE' ORDER BY shard LIMIT 1 FOR UPDATE SKIP LOCKED) AND state = 'SPARE'
RETURNING shard

-- name: copy_state
INSERT INTO kb_chunk_state SELECT %(new)s::int, id, space_id, doc_id, hash, occurrence, vec_id, incarnation, ck, bucket, payload, acl_seq, acl, vec_status, in_current
FROM kb_chunk_state WHERE shard = %(old)s::int AND space_id = %(space)s

-- name: copy_text
INSERT INTO kb_chunk SELECT %(new)s::int, id, space_id, doc_id, content_hash, occurrence, tokens, page_from, page_to, title_path, prefix, content, display
FROM kb_chunk WHERE shard = %(old)s::int AND space_id = %(space)s

-- name: copy_retry
INSERT INTO vector_retry (shard, chunk_id, space_id, doc_id, attempts, next_at, error, seen_at)
SELECT %(new)s::int, chunk_id, space_id, doc_id, attempts, next_at, error, seen_at
FROM vector_retry WHERE shard = %(old)s::int AND space_id = %(space)s

-- name: copy_vectors
INSERT INTO {table} (shard, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v)
SELECT %(new)s::int, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v
FROM {table} WHERE shard = %(old)s::int AND space_id = %(space)s

-- name: has_words
SELECT EXISTS (SELECT FROM kb_words WHERE shard = %(old)s::int AND space_id = %(space)s
                  AND index_id IN (SELECT id FROM kb_index WHERE space_id = %(space)s)) AS yes

-- name: words_wait
ALTER INDEX {index} SET (gin_pending_list_limit = {kilobytes})

-- name: copy_words
INSERT INTO kb_words (shard, index_id, vec_id, space_id, chunk_id, doc_id, terms)
SELECT %(new)s::int, index_id, vec_id, space_id, chunk_id, doc_id, terms FROM kb_words
WHERE shard = %(old)s::int AND space_id = %(space)s AND index_id IN (SELECT id FROM kb_index WHERE space_id = %(space)s)

-- name: moved
UPDATE kb_space SET shard = %(new)s::int, left_shard = %(old)s::int, left_at = clock_timestamp() WHERE id = %(space)s

-- name: vector_tables
SELECT DISTINCT t.name FROM kb_index CROSS JOIN LATERAL (VALUES ('kb_vector_m' || model_id), ('kb_vector_m' || model_id || 'w')) t(name)
WHERE space_id = %(space)s AND status IN ('FOLLOWING', 'SERVING') AND to_regclass(t.name) IS NOT NULL

-- name: left
SELECT left_shard FROM kb_space WHERE id = %(space)s AND left_shard IS NOT NULL AND left_shard <> shard AND left_at < %(before)s

-- name: clear_chunks
WITH ids AS (SELECT id FROM kb_chunk_state WHERE shard = %(old)s::int AND space_id = %(space)s ORDER BY id LIMIT %(limit)s),
     s AS (DELETE FROM kb_chunk_state c USING ids WHERE c.shard = %(old)s::int AND c.id = ids.id AND c.space_id = %(space)s),
     t AS (DELETE FROM kb_chunk c USING ids WHERE c.shard = %(old)s::int AND c.id = ids.id AND c.space_id = %(space)s),
     r AS (DELETE FROM vector_retry c USING ids WHERE c.shard = %(old)s::int AND c.chunk_id = ids.id AND c.space_id = %(space)s)
SELECT count(*) AS n FROM ids

-- name: clear_vectors
DELETE FROM {table} WHERE shard = %(old)s::int AND vec_id = ANY(ARRAY(
    SELECT vec_id FROM {table} WHERE shard = %(old)s::int AND space_id = %(space)s LIMIT %(limit)s))

-- name: clear_words
DELETE FROM kb_words w USING (
    SELECT index_id, vec_id FROM kb_words WHERE shard = %(old)s::int AND space_id = %(space)s
       AND index_id IN (SELECT id FROM kb_index WHERE space_id = %(space)s) LIMIT %(limit)s) x
WHERE w.shard = %(old)s::int AND w.index_id = x.index_id AND w.vec_id = x.vec_id AND w.space_id = %(space)s

-- name: forget_left
UPDATE kb_space SET left_shard = NULL, left_at = NULL WHERE id = %(space)s AND left_shard = %(old)s::int
