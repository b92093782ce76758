-- name: standing
SELECT s.shard, clock_timestamp() AS at, m.fingerprint, i.embedder, i.embedder_options, i.id, i.space_id, i.model_id, i.name, m.dimension, i.kind, i.options
FROM kb_space s JOIN kb_index i ON i.space_id = s.id AND i.status = 'SERVING' JOIN kb_model m ON m.id = i.model_id
WHERE s.id = %(space)s AND s.status = 'ACTIVE'

-- name: join
-- One look at state and document serves both the hits and "republished"; title and text are read for the best k alone.
WITH sp AS (SELECT id, shard, audience FROM kb_space WHERE id = %(space)s AND status = 'ACTIVE'),
     x AS MATERIALIZED (
         SELECT x.chunk_id, x.score, t.vec_id = x.vec_id AS own, t.doc_id, d.published_at, d.status, d.hidden_at, d.acl, d.external_id, d.uri, d.title, d.current_ver
         FROM unnest(%(vectors)s::uuid[], %(chunks)s::bigint[], %(docs)s::bigint[], %(scores)s::float8[]) x (vec_id, chunk_id, doc_id, score)
         LEFT JOIN {state} t ON t.shard = %(shard)s::int AND t.id = x.chunk_id AND t.space_id = %(space)s AND t.in_current
         LEFT JOIN kb_doc d ON d.id = coalesce(t.doc_id, x.doc_id)),
     head AS (SELECT coalesce((SELECT shard FROM sp), -1) AS shard, pg_current_snapshot()::text AS snapshot,
                     EXISTS (SELECT FROM x WHERE published_at >= %(since)s::timestamptz) AS republished),
     hit AS MATERIALIZED (
         SELECT x.* FROM x JOIN sp ON true
         WHERE x.own AND x.status = 'AVAILABLE' AND x.hidden_at IS NULL
           AND NOT EXISTS (SELECT FROM jsonb_array_elements(coalesce(sp.audience, '[]') || coalesce(x.acl, '[]')) clause
                           WHERE NOT clause ?| %(principals)s::text[])
         ORDER BY x.score DESC, x.chunk_id LIMIT %(k)s)
SELECT head.shard, head.snapshot, head.republished, hit.chunk_id, hit.doc_id, hit.score, hit.external_id, hit.uri, coalesce(v.title, hit.title) AS title,
       hit.current_ver AS version, c.title_path, coalesce(c.display, c.content) AS text
FROM head LEFT JOIN hit ON true
LEFT JOIN kb_doc_version v ON v.doc_id = hit.doc_id AND v.version = hit.current_ver
LEFT JOIN {text} c ON c.shard = %(shard)s::int AND c.id = hit.chunk_id AND c.space_id = %(space)s
ORDER BY hit.score DESC NULLS LAST, hit.chunk_id

-- name: log
INSERT INTO kb_answer (space_id, question, principals, k, snapshot, chunk_ids, scores, mode, index_id)
VALUES (%(space)s, %(question)s, %(principals)s::text[], %(k)s, %(snapshot)s::pg_snapshot, %(chunks)s::bigint[], %(scores)s::real[], %(mode)s, %(index)s)
RETURNING id

-- name: set_acl
UPDATE kb_doc SET acl = %(acl)s::jsonb, acl_seq = acl_seq + 1 WHERE id = ANY(%(docs)s::bigint[]) AND status <> 'DELETED'

-- name: get
SELECT a.id, a.space_id, a.question, a.principals, a.k, a.at,
       CASE WHEN pg_snapshot_xmax(a.snapshot) <= pg_snapshot_xmax(pg_current_snapshot()) THEN a.snapshot::text END AS snapshot, a.chunk_ids, a.scores,
       a.mode, a.index_id
FROM kb_answer a JOIN kb_space s ON s.id = a.space_id AND s.status = 'ACTIVE' WHERE a.id = %(answer)s
