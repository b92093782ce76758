-- name: parsed
SELECT d.id AS doc_id, d.external_id, t.id AS task_id, v.title, v.text_sha256, v.raw_bytes, count(*) OVER () AS total FROM ingestion_task t
JOIN kb_doc_version v ON v.doc_id = t.doc_id AND v.version = t.version JOIN kb_doc d ON d.id = t.doc_id
WHERE t.space_id = %(space)s AND t.status = 'PENDING' AND t.current_node = 'CHUNKER' ORDER BY t.ready_seq DESC LIMIT %(documents)s

-- name: unchunked
-- LATERAL with a LIMIT, here and below: looked up by key, whatever the planner thinks of the array.
WITH w AS MATERIALIZED (SELECT t.id AS task_id, t.doc_id, v.chunk_ids FROM ingestion_task t JOIN kb_doc_version v ON v.doc_id = t.doc_id AND v.version = t.version
          WHERE t.space_id = %(space)s AND t.status = 'PENDING' AND t.current_node = 'EMBEDDING' ORDER BY t.ready_seq DESC LIMIT %(documents)s),
     u AS MATERIALIZED (SELECT w.doc_id, u.id FROM w CROSS JOIN LATERAL unnest(w.chunk_ids) u (id) LIMIT %(rows)s),
     m AS (SELECT u.doc_id, count(*) AS missing FROM u
           LEFT JOIN LATERAL (SELECT c.id FROM kb_chunk c WHERE c.shard = %(shard)s::int AND c.id = u.id AND c.space_id = %(space)s LIMIT 1) c ON true
           LEFT JOIN LATERAL (SELECT s.id FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = u.id AND s.space_id = %(space)s LIMIT 1) s ON true
           WHERE c.id IS NULL OR s.id IS NULL GROUP BY u.doc_id)
SELECT w.doc_id, d.external_id, w.task_id, coalesce(cardinality(w.chunk_ids), 0) AS chunks, coalesce(m.missing, 0) AS missing, count(*) OVER () AS total
FROM w JOIN kb_doc d ON d.id = w.doc_id LEFT JOIN m ON m.doc_id = w.doc_id
WHERE m.missing > 0 OR coalesce(cardinality(w.chunk_ids), 0) = 0 ORDER BY w.doc_id LIMIT %(shown)s

-- name: unsound
-- A float16 is NaN or infinite where its exponent, in the second byte, is all ones.
WITH w AS MATERIALIZED (SELECT t.id AS task_id, t.doc_id, v.chunk_ids FROM ingestion_task t JOIN kb_doc_version v ON v.doc_id = t.doc_id AND v.version = t.version
          WHERE t.space_id = %(space)s AND t.status = 'PENDING' AND t.current_node = 'INDEXER' ORDER BY t.ready_seq DESC LIMIT %(documents)s),
     u AS MATERIALIZED (SELECT w.doc_id, w.task_id, u.id FROM w CROSS JOIN LATERAL unnest(w.chunk_ids) u (id) LIMIT %(rows)s),
     e AS (SELECT u.doc_id, u.task_id, e.vector IS NULL AS missing, octet_length(e.vector) <> 2 * %(dimension)s::int AS length,
                  encode(e.vector, 'hex') ~ '^(....)*..[7f][c-f]' AS number, encode(e.vector, 'hex') ~ '^(00[08]0|0000)*$' AS zero
           FROM u
           JOIN LATERAL (SELECT s.in_current FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = u.id AND s.space_id = %(space)s LIMIT 1) s ON NOT s.in_current
           JOIN LATERAL (SELECT c.content_hash FROM kb_chunk c WHERE c.shard = %(shard)s::int AND c.id = u.id AND c.space_id = %(space)s LIMIT 1) c ON true
           LEFT JOIN LATERAL (SELECT e.vector FROM kb_embedding e WHERE e.model_id = %(model)s::int AND e.content_hash = c.content_hash LIMIT 1) e ON true)
SELECT e.doc_id, d.external_id, e.task_id, count(*) FILTER (WHERE e.missing) AS missing, count(*) FILTER (WHERE e.length) AS length,
       count(*) FILTER (WHERE e.number) AS number, count(*) FILTER (WHERE e.zero) AS zero, count(*) OVER () AS total
FROM e JOIN kb_doc d ON d.id = e.doc_id WHERE e.missing OR e.length OR e.number OR e.zero
GROUP BY e.doc_id, d.external_id, e.task_id ORDER BY e.doc_id LIMIT %(shown)s

-- name: published
WITH d AS MATERIALIZED (SELECT d.id, d.external_id, v.chunk_ids FROM kb_doc d JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
          WHERE d.space_id = %(space)s AND d.status = 'AVAILABLE' AND d.published_at >= %(since)s ORDER BY d.published_at DESC LIMIT %(documents)s),
     u AS MATERIALIZED (SELECT d.id AS doc_id, d.external_id, u.id FROM d CROSS JOIN LATERAL unnest(d.chunk_ids) u (id) LIMIT %(rows)s)
SELECT u.doc_id, u.external_id, u.id AS chunk_id, s.vec_id FROM u
JOIN LATERAL (SELECT s.vec_id, s.in_current FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = u.id AND s.space_id = %(space)s LIMIT 1) s ON s.in_current

-- name: worked
-- By the tasks of the space, as the log has no index on time: a task has an entry only if it was touched since.
SELECT count(*) AS entries, percentile_cont(0.95) WITHIN GROUP (ORDER BY l.duration_ms) / 1000 AS p95, coalesce(sum((l.output ->> 'bytes')::bigint), 0)::bigint AS bytes
FROM ingestion_task t JOIN ingestion_node_log l ON l.task_id = t.id
WHERE t.space_id = %(space)s AND t.updated_at >= %(since)s::timestamptz - interval '10 minutes' AND l.node = %(node)s AND l.started_at >= %(since)s

-- name: texts
WITH v AS (SELECT DISTINCT v.doc_id, v.version, v.chunk_ids FROM ingestion_task t JOIN ingestion_node_log l ON l.task_id = t.id
           JOIN kb_doc_version v ON v.doc_id = t.doc_id AND v.version = t.version
           WHERE t.space_id = %(space)s AND t.updated_at >= %(since)s::timestamptz - interval '10 minutes' AND l.node = %(node)s AND l.status = 'SUCCESS' AND l.started_at >= %(since)s)
SELECT count(*) AS chunks, coalesce(sum(c.tokens), 0)::bigint AS tokens FROM v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)
JOIN LATERAL (SELECT c.tokens FROM kb_chunk c WHERE c.shard = %(shard)s::int AND c.id = u.id AND c.space_id = %(space)s LIMIT 1) c ON true
