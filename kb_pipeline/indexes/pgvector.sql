-- name: extension
SELECT (SELECT extversion FROM pg_extension WHERE extname = 'vector') AS installed,
       (SELECT default_version FROM pg_available_extensions WHERE name = 'vector') AS available

-- name: create_extension
CREATE EXTENSION IF NOT EXISTS vector

-- name: ensure_table
SELECT kb_ensure_vector_table(%(model)s, %(dimension)s, %(words)s)

-- name: table_exists
SELECT to_regclass(%(name)s)::text AS found

-- name: lock_space
SELECT pg_advisory_xact_lock_shared(1, %(space)s::int)

-- name: lock_living
SELECT s.shard FROM kb_index i JOIN kb_space s ON s.id = i.space_id
WHERE i.id = %(index)s AND s.id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING') AND s.status = 'ACTIVE' FOR SHARE OF i

-- name: living
SELECT s.shard FROM kb_index i JOIN kb_space s ON s.id = i.space_id
WHERE i.id = %(index)s AND s.id = %(space)s AND i.status IN ('FOLLOWING', 'SERVING')

-- name: stage
CREATE TEMP TABLE IF NOT EXISTS stage_entry (vec_id uuid, chunk_id bigint, doc_id bigint, acl_seq bigint, ck int, bucket smallint, acl int[], v halfvec)
    ON COMMIT DELETE ROWS

-- name: copy
COPY stage_entry (vec_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v) FROM STDIN (FORMAT BINARY)

-- name: upsert
INSERT INTO {table} AS t (shard, vec_id, space_id, index_id, chunk_id, doc_id, acl_seq, ck, bucket, acl, v)
SELECT %(shard)s::int, vec_id, %(space)s, %(index)s, chunk_id, doc_id, acl_seq, ck, bucket, acl, v FROM stage_entry ORDER BY vec_id
ON CONFLICT (shard, vec_id) DO UPDATE SET acl_seq = excluded.acl_seq, ck = excluded.ck, acl = excluded.acl,
    v = CASE WHEN t.v = excluded.v THEN t.v ELSE excluded.v END
WHERE excluded.acl_seq >= t.acl_seq

-- name: present
SELECT vec_id, acl_seq FROM {table}
WHERE shard = %(shard)s::int AND vec_id = ANY(%(ids)s::uuid[]) AND index_id = %(index)s AND space_id = %(space)s

-- name: delete
DELETE FROM {table} WHERE shard = %(shard)s::int AND vec_id = ANY(%(ids)s::uuid[]) AND index_id = %(index)s AND space_id = %(space)s

-- name: stage_words
CREATE TEMP TABLE IF NOT EXISTS stage_words (vec_id uuid, chunk_id bigint, doc_id bigint, terms int[]) ON COMMIT DELETE ROWS

-- name: copy_words
COPY stage_words (vec_id, chunk_id, doc_id, terms) FROM STDIN (FORMAT BINARY)

-- name: upsert_words
INSERT INTO kb_words AS w (shard, index_id, vec_id, space_id, chunk_id, doc_id, terms)
SELECT %(shard)s::int, %(index)s, vec_id, %(space)s, chunk_id, doc_id, terms FROM stage_words ORDER BY vec_id
ON CONFLICT (shard, index_id, vec_id) DO UPDATE SET terms = excluded.terms WHERE w.terms <> excluded.terms

-- name: delete_words
DELETE FROM kb_words WHERE shard = %(shard)s::int AND index_id = %(index)s AND vec_id = ANY(%(ids)s::uuid[]) AND space_id = %(space)s

-- name: sort_words_in
SELECT gin_clean_pending_list(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am a ON a.oid = c.relam
WHERE i.indrelid = %(leaf)s::regclass AND a.amname = 'gin'

-- name: word_settings
SELECT set_config('enable_seqscan', 'off', true)

-- name: frequencies
-- The leaf is named, and "index_id + 0" asked: the way leads through the terms, which differ from index to index, and never through
-- every row of one. What a full sample shows to be four times too frequent is not counted.
WITH sample AS MATERIALIZED (
    SELECT vec_id, terms FROM {words} WHERE index_id = %(index)s AND space_id = %(space)s ORDER BY vec_id LIMIT %(sample)s),
seen AS (SELECT count(*) AS n, coalesce(avg(cardinality(terms)), 1) AS length,
                max(('x' || left(vec_id::text, 8))::bit(32)::bigint + 1) / 4294967296.0 AS part FROM sample)
SELECT q.key, CASE WHEN o.often THEN %(most)s ELSE f.counted END AS counted, s.sampled, seen.n, seen.length, seen.part
FROM unnest(%(keys)s::int[]) q(key) CROSS JOIN seen
CROSS JOIN LATERAL (SELECT count(*) AS sampled FROM sample WHERE terms @> ARRAY[q.key]) s
CROSS JOIN LATERAL (SELECT seen.n = %(sample)s AND s.sampled > 4 * %(most)s * seen.part AS often) o
CROSS JOIN LATERAL (
    SELECT count(*) AS counted FROM (
        SELECT FROM {words} w WHERE w.index_id + 0 = %(index)s AND w.space_id = %(space)s AND w.terms @> ARRAY[q.key]
        LIMIT CASE WHEN o.often THEN 0 ELSE %(most)s END) x) f

-- name: keyword
WITH mine AS NOT MATERIALIZED (
    SELECT w.vec_id, w.chunk_id, w.doc_id, w.terms FROM {words} w
    WHERE w.index_id + 0 = %(index)s AND w.space_id = %(space)s AND (%(acl)s::int[] IS NULL OR EXISTS (
        SELECT FROM {table} v WHERE v.shard = %(shard)s::int AND v.vec_id = w.vec_id AND v.index_id = %(index)s
           AND v.space_id = %(space)s AND (v.acl = '{{}}' OR v.acl && %(acl)s::int[])))),
found AS MATERIALIZED (
    SELECT DISTINCT ON (x.vec_id) x.*, cardinality(x.terms) AS length FROM (
        (SELECT * FROM mine WHERE terms && %(rare)s::int[] LIMIT %(most)s)
        UNION ALL
        SELECT y.* FROM unnest(%(one)s::int[], %(other)s::int[]) p(one, other)
        CROSS JOIN LATERAL (SELECT * FROM mine WHERE terms @> ARRAY[p.one, p.other] LIMIT %(most)s) y) x
    ORDER BY x.vec_id),
occurring AS (
    SELECT f.vec_id, f.chunk_id, f.doc_id, f.length, q.weight, count(*) AS n
    FROM found f CROSS JOIN LATERAL unnest(f.terms) t(key) JOIN unnest(%(keys)s::int[], %(weights)s::float8[]) q(key, weight) USING (key)
    GROUP BY f.vec_id, f.chunk_id, f.doc_id, f.length, q.key, q.weight)
SELECT vec_id, chunk_id, doc_id, sum(weight * n / (n + 1.2 * (0.25 + 0.75 * length / %(length)s::float8))) AS score
FROM occurring GROUP BY vec_id, chunk_id, doc_id ORDER BY score DESC, vec_id LIMIT %(k)s

-- name: search_settings
SELECT set_config('hnsw.ef_search', %(ef)s, true) AS ef, set_config('hnsw.iterative_scan', 'relaxed_order', true) AS scan

-- name: permitted_few
SELECT count(*) < 5000 AS few FROM (SELECT FROM {table} WHERE shard = %(shard)s::int AND index_id = %(index)s AND space_id = %(space)s
    AND (acl = '{{}}' OR acl && %(acl)s::int[]) LIMIT 5000) x

-- name: search_exactly
-- Ordered by an expression that no HNSW index has: to turn index scans off does not keep PostgreSQL 18 from taking it here.
SELECT vec_id, chunk_id, doc_id, 1 - (v <=> %(q)s::halfvec({dimension})) AS score FROM {table}
WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s AND (acl = '{{}}' OR acl && %(acl)s::int[])
ORDER BY score DESC LIMIT %(k)s

-- name: search
SELECT vec_id, chunk_id, doc_id, 1 - (v <=> %(q)s::halfvec({dimension})) AS score FROM {table}
WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s
  AND (%(acl)s::int[] IS NULL OR acl = '{{}}' OR acl && %(acl)s::int[])
ORDER BY v <=> %(q)s::halfvec({dimension}) LIMIT %(k)s

-- name: digest
SELECT bucket, count(*) AS n, sum(ck) AS total FROM {table}
WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s GROUP BY bucket

-- name: ids
SELECT vec_id, ck FROM {table}
WHERE shard = %(shard)s::int AND vec_id BETWEEN %(low)s::uuid AND %(high)s::uuid AND space_id = %(space)s AND index_id = %(index)s

-- name: shards
SELECT shard FROM kb_space WHERE id = %(space)s UNION SELECT left_shard FROM kb_space WHERE id = %(space)s AND left_shard IS NOT NULL

-- name: drop_batch
DELETE FROM {table} WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s AND vec_id = ANY(ARRAY(
    SELECT vec_id FROM {table} WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s ORDER BY vec_id LIMIT 5000))

-- name: count_left
SELECT count(*) AS n FROM {table} WHERE space_id = %(space)s AND index_id = %(index)s

-- name: own_shard
SELECT s.shard FROM kb_space s JOIN kb_shard h ON h.shard = s.shard WHERE s.id = %(space)s AND h.state = 'OWNED' AND h.space_id = s.id

-- name: alone
SELECT pg_try_advisory_xact_lock(3, {space}) AS alone

-- name: index_state
SELECT i.indisvalid AS valid, EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = i.indexrelid) AS building
FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid WHERE c.relname = %(name)s

-- name: no_index_cleanup
ALTER TABLE {leaf} SET (vacuum_index_cleanup = off)

-- name: build
CREATE INDEX CONCURRENTLY {name} ON {leaf} USING hnsw (v halfvec_cosine_ops) WITH (m = {m}, ef_construction = {ef})

-- name: analyze
ANALYZE {leaf}

-- name: drop_index
DROP INDEX CONCURRENTLY IF EXISTS {name}

-- name: leftovers
SELECT c.relname AS name FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
WHERE NOT i.indisvalid AND (starts_with(c.relname, %(name)s || '_ccnew') OR starts_with(c.relname, %(name)s || '_ccold'))
  AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = i.indexrelid)

-- name: flush_counts
SELECT pg_stat_force_next_flush()

-- name: count_dead
ANALYZE {leaf} (shard)

-- name: is_dead
SELECT t.n_dead_tup > %(share)s * (c.reltuples + t.n_dead_tup) AS much
FROM pg_class c JOIN pg_stat_all_tables t ON t.relid = c.oid WHERE c.oid = %(name)s::regclass

-- name: rebuild
REINDEX INDEX CONCURRENTLY {name}

-- name: vacuum
VACUUM (INDEX_CLEANUP ON) {leaf}
