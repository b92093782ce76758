-- name: leave
INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)
SELECT i.id, s.vec_id, s.space_id, s.doc_id, s.id, 'W'
FROM kb_doc_version v JOIN unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version) ON v.doc_id = x.doc_id AND v.version = x.version
JOIN kb_chunk_state s ON s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = ANY(v.chunk_ids) AND NOT s.in_current
CROSS JOIN kb_index i
WHERE v.status = 'PROCESSING' AND i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING')
ORDER BY i.id, s.vec_id ON CONFLICT DO NOTHING

-- name: give_up
WITH v AS (UPDATE kb_doc_version v SET status = %(status)s, chunk_ids = CASE WHEN %(status)s = 'CANCELED' THEN NULL ELSE v.chunk_ids END
           FROM unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version)
           WHERE v.doc_id = x.doc_id AND v.version = x.version AND v.status IN ('PROCESSING', 'FAILED') RETURNING v.doc_id, v.version),
     r AS (DELETE FROM kb_chunk_restated r USING v WHERE r.doc_id = v.doc_id AND r.version = v.version AND %(status)s = 'CANCELED')
UPDATE kb_doc d SET status = 'FAILED' FROM v WHERE d.id = v.doc_id AND d.current_ver = 0 AND d.status <> 'DELETED' AND %(status)s = 'FAILED'

-- name: forget_references
WITH v AS (UPDATE kb_doc_version SET chunk_ids = NULL
           WHERE doc_id = ANY(%(docs)s::bigint[]) AND status NOT IN ('PROCESSING', 'READY') AND chunk_ids IS NOT NULL RETURNING doc_id, version)
DELETE FROM kb_chunk_restated r USING v WHERE r.doc_id = v.doc_id AND r.version = v.version

-- name: erase
WITH kept AS (SELECT unnest(chunk_ids) AS id FROM kb_doc_version WHERE doc_id = ANY(%(docs)s::bigint[]) AND status IN ('PROCESSING', 'READY')),
     loose AS (SELECT s.id FROM kb_chunk_state s
               WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = ANY(%(docs)s::bigint[])
                 AND NOT EXISTS (SELECT FROM kept WHERE kept.id = s.id) ORDER BY s.id LIMIT %(limit)s::bigint),
     gone AS (DELETE FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = ANY(ARRAY(SELECT id FROM loose)) AND s.space_id = %(space)s
              RETURNING s.id, s.doc_id, s.vec_id),
     texts AS (DELETE FROM kb_chunk c WHERE c.shard = %(shard)s::int AND c.id = ANY(ARRAY(SELECT id FROM gone)) AND c.space_id = %(space)s),
     retries AS (DELETE FROM vector_retry r USING gone WHERE r.shard = %(shard)s::int AND r.chunk_id = gone.id),
     dead AS (INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)
              SELECT i.id, g.vec_id, %(space)s, g.doc_id, g.id, 'E' FROM gone g CROSS JOIN kb_index i
              WHERE i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, g.vec_id
              ON CONFLICT (index_id, vec_id) DO UPDATE SET state = 'E')
SELECT count(*) AS n FROM gone

-- name: due_documents
SELECT DISTINCT doc_id FROM vector_tombstone
WHERE space_id = %(space)s AND state = 'W' AND not_before <= clock_timestamp() ORDER BY doc_id LIMIT %(limit)s

-- name: drop_living
DELETE FROM vector_tombstone t USING kb_chunk_state s
WHERE t.space_id = %(space)s AND t.doc_id = ANY(%(docs)s::bigint[]) AND t.state = 'W'
  AND s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = t.chunk_id AND s.vec_id = t.vec_id AND s.in_current

-- name: mark_erasing
WITH busy AS (SELECT unnest(chunk_ids) AS id FROM kb_doc_version WHERE doc_id = ANY(%(docs)s::bigint[]) AND status = 'PROCESSING')
UPDATE kb_chunk_state s SET vec_status = 3
FROM vector_tombstone t
WHERE t.space_id = %(space)s AND t.doc_id = ANY(%(docs)s::bigint[]) AND t.state = 'W' AND t.not_before <= clock_timestamp()
  AND s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = t.chunk_id AND s.vec_id = t.vec_id AND NOT s.in_current
  AND NOT EXISTS (SELECT FROM busy WHERE busy.id = s.id)

-- name: mark_dead
UPDATE vector_tombstone t SET state = 'E'
WHERE t.space_id = %(space)s AND t.doc_id = ANY(%(docs)s::bigint[]) AND t.state = 'W' AND t.not_before <= clock_timestamp()
  AND NOT EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = t.chunk_id
                  AND s.vec_id = t.vec_id AND s.vec_status <> 3)

-- name: dead_vectors
SELECT vec_id FROM vector_tombstone
WHERE index_id = %(index)s AND state = 'E' AND (%(after)s::uuid IS NULL OR vec_id > %(after)s::uuid) ORDER BY vec_id LIMIT %(limit)s

-- name: confirm_dead
WITH gone AS (DELETE FROM vector_tombstone WHERE index_id = %(index)s AND vec_id = ANY(%(gone)s::uuid[]) AND state = 'E' RETURNING chunk_id, vec_id)
UPDATE kb_chunk_state s SET vec_status = 0, incarnation = incarnation + 1, vec_id = kb_vec_id(id, hash, incarnation + 1),
    ck = kb_checksum(kb_vec_id(id, hash, incarnation + 1), acl), bucket = kb_bucket(kb_vec_id(id, hash, incarnation + 1))
FROM gone
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = gone.chunk_id AND s.vec_id = gone.vec_id AND s.vec_status = 3

-- name: count_tries
UPDATE vector_tombstone SET tries = tries + 1, not_before = clock_timestamp() + least(3600, 2 ^ least(tries, 11)) * interval '1 second'
WHERE index_id = %(index)s AND vec_id = ANY(%(still)s::uuid[])

-- name: waiting
SELECT state, count(*) AS n FROM vector_tombstone WHERE space_id = %(space)s GROUP BY state
