-- name: stage
CREATE TEMP TABLE IF NOT EXISTS stage_key (doc_id bigint, version int, seq int, content_hash bytea, occurrence int, payload int) ON COMMIT DELETE ROWS;
CREATE TEMP TABLE IF NOT EXISTS stage_text (doc_id bigint, seq int, tokens int, page_from int, page_to int, title_path text[], prefix text, content text, display text)
    ON COMMIT DELETE ROWS

-- name: copy_keys
COPY stage_key (doc_id, version, seq, content_hash, occurrence, payload) FROM STDIN (FORMAT BINARY)

-- name: copy_texts
COPY stage_text (doc_id, seq, tokens, page_from, page_to, title_path, prefix, content, display) FROM STDIN (FORMAT BINARY)

-- name: copy_restated
COPY kb_chunk_restated (doc_id, version, chunk_id, space_id, payload, page_from, page_to, title_path, display) FROM STDIN (FORMAT BINARY)

-- name: fresh
-- LATERAL with a LIMIT, here and below: the planner knows nothing of a staged table and would read the whole leaf.
SELECT k.doc_id, k.seq FROM stage_key k
LEFT JOIN LATERAL (SELECT s.id FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.doc_id = k.doc_id
                   AND s.hash = encode(substring(k.content_hash FROM 1 FOR 16), 'hex')::uuid AND s.occurrence = k.occurrence
                   AND s.space_id = %(space)s LIMIT 1) s ON true
WHERE s.id IS NULL ORDER BY k.doc_id, k.seq

-- name: insert
WITH x AS (SELECT k.*, encode(substring(k.content_hash FROM 1 FOR 16), 'hex')::uuid AS hash, t.tokens, t.page_from, t.page_to, t.title_path, t.prefix,
                  t.content, t.display FROM stage_text t JOIN stage_key k ON k.doc_id = t.doc_id AND k.seq = t.seq),
     i AS MATERIALIZED (SELECT x.doc_id, x.hash, x.occurrence, nextval('kb_chunk_id') AS id FROM (SELECT * FROM x ORDER BY doc_id, hash, occurrence) x),
     n AS (INSERT INTO kb_chunk_state (shard, id, space_id, doc_id, hash, occurrence, vec_id, ck, bucket, payload, acl_seq)
           SELECT %(shard)s::int, i.id, %(space)s, i.doc_id, i.hash, i.occurrence, w.vec_id, kb_checksum(w.vec_id, '{}'), kb_bucket(w.vec_id), x.payload, d.acl_seq
           FROM i JOIN x USING (doc_id, hash, occurrence) JOIN kb_doc d ON d.id = i.doc_id
           CROSS JOIN LATERAL (SELECT kb_vec_id(i.id, i.hash, 0) AS vec_id) w
           ORDER BY i.doc_id, i.hash, i.occurrence
           ON CONFLICT (shard, doc_id, hash, occurrence) DO NOTHING RETURNING id, doc_id, hash, occurrence)
INSERT INTO kb_chunk (shard, id, space_id, doc_id, content_hash, occurrence, tokens, page_from, page_to, title_path, prefix, content, display)
SELECT %(shard)s::int, n.id, %(space)s, n.doc_id, x.content_hash, n.occurrence, x.tokens, x.page_from, x.page_to, x.title_path, x.prefix, x.content, x.display
FROM n JOIN x USING (doc_id, hash, occurrence)

-- name: restated
SELECT k.doc_id, k.version, k.seq, s.id AS chunk_id FROM stage_key k
CROSS JOIN LATERAL (SELECT s.id, s.payload FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = k.doc_id
                    AND s.hash = encode(substring(k.content_hash FROM 1 FOR 16), 'hex')::uuid AND s.occurrence = k.occurrence LIMIT 1) s
WHERE s.payload <> k.payload
  AND NOT EXISTS (SELECT FROM kb_chunk_restated r WHERE r.doc_id = k.doc_id AND r.version = k.version AND r.chunk_id = s.id)

-- name: reference
WITH ids AS (SELECT k.doc_id, k.version, array_agg(s.id ORDER BY k.seq) AS ids FROM stage_key k
             CROSS JOIN LATERAL (SELECT s.id FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.doc_id = k.doc_id
                                 AND s.hash = encode(substring(k.content_hash FROM 1 FOR 16), 'hex')::uuid AND s.occurrence = k.occurrence LIMIT 1) s
             GROUP BY k.doc_id, k.version)
UPDATE kb_doc_version v SET chunk_ids = coalesce(ids.ids, '{}'), recipe = x.recipe
FROM unnest(%(docs)s::bigint[], %(versions)s::int[], %(recipes)s::text[]) x (doc_id, version, recipe)
LEFT JOIN ids ON ids.doc_id = x.doc_id AND ids.version = x.version
WHERE v.doc_id = x.doc_id AND v.version = x.version

-- name: texts
SELECT c.id, c.prefix, c.content, c.display, c.title_path, c.page_from, c.page_to, c.tokens
FROM unnest(%(ids)s::bigint[]) WITH ORDINALITY x (id, seq)
JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = x.id AND c.space_id = %(space)s ORDER BY x.seq

-- name: unknown
SELECT NOT EXISTS (SELECT FROM pg_stats WHERE schemaname = current_schema AND tablename = 'kb_chunk_state_' || %(shard)s::int) AS yes

-- name: learn
ANALYZE (SKIP_LOCKED) {leaf}
