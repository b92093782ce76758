-- name: chunk_ids
SELECT v.doc_id, v.chunk_ids FROM kb_doc_version v JOIN unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version)
  ON v.doc_id = x.doc_id AND v.version = x.version

-- name: revive
UPDATE kb_chunk_state s SET vec_status = 0, incarnation = incarnation + 1, vec_id = kb_vec_id(s.id, hash, incarnation + 1),
    ck = kb_checksum(kb_vec_id(s.id, hash, incarnation + 1), acl), bucket = kb_bucket(kb_vec_id(s.id, hash, incarnation + 1))
WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s AND s.vec_status = 3

-- name: wanted
SELECT s.id, s.doc_id, s.vec_id, s.ck, s.bucket, s.acl, s.acl_seq FROM kb_chunk_state s
WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s

-- name: publishable
SELECT id, current_ver, acl_seq FROM kb_doc WHERE id = ANY(%(docs)s::bigint[]) AND status <> 'DELETED'

-- name: stamp
SELECT clock_timestamp() AS at

-- name: close_publications
UPDATE kb_publication SET to_at = %(at)s, to_xid = pg_current_xact_id() WHERE doc_id = ANY(%(docs)s::bigint[]) AND to_at IS NULL

-- name: publish
WITH x AS (SELECT * FROM unnest(%(docs)s::bigint[], %(versions)s::int[]) x (id, version)),
     d AS (UPDATE kb_doc d SET current_ver = x.version, status = 'AVAILABLE', published_at = clock_timestamp()
           FROM x, kb_doc o WHERE d.id = x.id AND o.id = x.id AND d.current_ver < x.version AND d.status <> 'DELETED'
           RETURNING d.id, x.version, o.current_ver AS old),
     n AS (SELECT v.doc_id, u.id FROM d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.version CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)),
     p AS (SELECT v.doc_id, u.id FROM d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.old CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)),
     diff AS (SELECT coalesce(n.id, p.id) AS id, n.id IS NOT NULL AS cur FROM n FULL JOIN p ON n.id = p.id WHERE n.id IS NULL OR p.id IS NULL),
     f AS (UPDATE kb_chunk_state s SET in_current = diff.cur, vec_status = CASE WHEN diff.cur THEN 1 ELSE s.vec_status END
           FROM diff WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = diff.id RETURNING s.id, s.doc_id, s.vec_id, diff.cur),
     w AS (INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state)
           SELECT i.id, f.vec_id, %(space)s, f.doc_id, f.id, 'W' FROM f CROSS JOIN kb_index i
           WHERE NOT f.cur AND i.space_id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') ORDER BY i.id, f.vec_id ON CONFLICT DO NOTHING),
     t AS (INSERT INTO kb_index_todo (index_id, doc_id, chunk_id)
           SELECT i.id, f.doc_id, f.id FROM f CROSS JOIN kb_index i WHERE f.cur AND i.space_id = %(space)s AND i.status = 'FOLLOWING' ORDER BY 1, 2, 3
           ON CONFLICT (index_id, doc_id, chunk_id) DO UPDATE SET seq = nextval('kb_todo_seq')),
     v AS (UPDATE kb_doc_version v SET status = 'READY' FROM d WHERE v.doc_id = d.id AND v.version = d.version),
     b AS (INSERT INTO kb_publication (space_id, doc_id, version, from_at, from_xid)
           SELECT %(space)s, id, version, %(at)s, pg_current_xact_id() FROM d)
SELECT (SELECT count(*) FROM d) AS documents, (SELECT count(*) FROM f WHERE cur) AS appeared, (SELECT count(*) FROM f WHERE NOT cur) AS lost

-- name: restate
WITH r AS (DELETE FROM kb_chunk_restated r USING unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version)
           WHERE r.doc_id = x.doc_id AND r.version = x.version RETURNING r.chunk_id, r.payload, r.page_from, r.page_to, r.title_path, r.display),
     s AS (UPDATE kb_chunk_state s SET payload = r.payload FROM r WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.id = r.chunk_id)
UPDATE kb_chunk c SET page_from = r.page_from, page_to = r.page_to, title_path = r.title_path, display = r.display
FROM r WHERE c.shard = %(shard)s::int AND c.space_id = %(space)s AND c.id = r.chunk_id
