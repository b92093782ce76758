-- name: digest
SELECT bucket, count(*) AS n, sum(ck) AS total FROM kb_chunk_state
WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current GROUP BY bucket

-- name: current
SELECT id, doc_id, vec_id, ck, bucket, acl, acl_seq FROM kb_chunk_state
WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current AND bucket = ANY(%(buckets)s::smallint[])

-- name: strays
SELECT x.vec_id, coalesce(s.id, 0) AS chunk_id, coalesce(s.doc_id, 0) AS doc_id,
       coalesce(s.in_current, false) OR EXISTS (SELECT FROM kb_doc_version v WHERE v.doc_id = s.doc_id AND v.status = 'PROCESSING' AND s.id = ANY(v.chunk_ids)) AS needed,
       EXISTS (SELECT FROM vector_tombstone t WHERE t.index_id = %(index)s AND t.vec_id = x.vec_id) AS condemned
FROM unnest(%(ids)s::uuid[]) x (vec_id)
LEFT JOIN kb_chunk_state s ON s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.vec_id = x.vec_id

-- name: condemn
INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)
SELECT %(index)s, x.vec_id, %(space)s, x.doc_id, x.chunk_id, CASE WHEN x.chunk_id = 0 THEN 'E' ELSE 'W' END
FROM unnest(%(ids)s::uuid[], %(docs)s::bigint[], %(chunks)s::bigint[]) x (vec_id, doc_id, chunk_id)
ORDER BY x.vec_id ON CONFLICT DO NOTHING

-- name: hashes
SELECT id, content_hash FROM kb_chunk WHERE shard = %(shard)s::int AND id = ANY(%(ids)s::bigint[]) AND space_id = %(space)s

-- name: names
SELECT id, external_id FROM kb_doc WHERE id = ANY(%(docs)s::bigint[])
