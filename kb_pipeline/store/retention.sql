-- name: clock
SELECT clock_timestamp() AS now

-- name: documents
SELECT id FROM kb_doc WHERE space_id = %(space)s AND id > %(after)s ORDER BY id LIMIT %(limit)s

-- name: many_versions
SELECT doc_id FROM kb_doc_version WHERE doc_id = ANY(%(docs)s::bigint[]) AND status = 'READY'
GROUP BY doc_id HAVING count(*) > %(retained)s ORDER BY doc_id

-- name: archive
WITH r AS (SELECT v.doc_id, v.version, v.raw_path, v.parsed_path, v.version = d.current_ver AS current,
                  row_number() OVER (PARTITION BY v.doc_id ORDER BY v.version DESC) AS place
           FROM kb_doc_version v JOIN kb_doc d ON d.id = v.doc_id WHERE v.doc_id = ANY(%(docs)s::bigint[]) AND v.status = 'READY'),
     old AS MATERIALIZED (
           SELECT r.doc_id, r.version, r.raw_path, r.parsed_path, p.superseded_at FROM r
           CROSS JOIN LATERAL (SELECT max(coalesce(p.to_at, 'infinity')) AS superseded_at FROM kb_publication p
                               WHERE p.doc_id = r.doc_id AND p.version = r.version) p
           WHERE r.place > %(retained)s AND NOT r.current AND p.superseded_at < %(before)s::timestamptz),
     v AS (UPDATE kb_doc_version v SET status = 'ARCHIVED', raw_path = NULL, parsed_path = NULL FROM old
           WHERE v.doc_id = old.doc_id AND v.version = old.version),
     s AS (UPDATE kb_space SET as_of_horizon = greatest(as_of_horizon, (SELECT max(superseded_at) FROM old))
           WHERE id = %(space)s AND EXISTS (SELECT FROM old))
SELECT (SELECT count(*) FROM old) AS versions,
       ARRAY(SELECT DISTINCT u.path FROM old CROSS JOIN LATERAL unnest(ARRAY[old.raw_path, old.parsed_path]) u (path)
             WHERE u.path IS NOT NULL AND NOT EXISTS (
                 SELECT FROM kb_doc_version o WHERE o.doc_id = old.doc_id AND u.path IN (o.raw_path, o.parsed_path)
                   AND o.status IN ('PROCESSING', 'READY', 'FAILED') AND NOT EXISTS (SELECT FROM old x WHERE x.doc_id = o.doc_id AND x.version = o.version))) AS paths

-- name: unreferenced
SELECT d.id FROM unnest(%(docs)s::bigint[]) d (id)
WHERE EXISTS (SELECT FROM kb_doc_version v WHERE v.doc_id = d.id AND v.status NOT IN ('PROCESSING', 'READY') AND v.chunk_ids IS NOT NULL)
   OR (EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.doc_id = d.id AND s.space_id = %(space)s AND NOT s.in_current)
       AND (SELECT count(*) FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.doc_id = d.id AND s.space_id = %(space)s)
         > (SELECT count(DISTINCT u.id) FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)
            WHERE v.doc_id = d.id AND v.status IN ('PROCESSING', 'READY')))
ORDER BY d.id

-- name: stage
CREATE TEMP TABLE IF NOT EXISTS stage_unused (content_hash bytea PRIMARY KEY) ON COMMIT DELETE ROWS

-- name: unused
WITH i AS (INSERT INTO stage_unused SELECT content_hash FROM kb_embedding
           WHERE model_id = %(model)s::int AND last_used < %(before)s::timestamptz AND content_hash > %(after)s::bytea
           ORDER BY content_hash LIMIT %(limit)s RETURNING content_hash)
SELECT (SELECT count(*) FROM i) AS n, (SELECT content_hash FROM i ORDER BY content_hash DESC LIMIT 1) AS last

-- name: of_space
WITH b AS (SELECT id, content_hash FROM kb_chunk WHERE shard = %(shard)s::int AND space_id = %(space)s AND id > %(after)s ORDER BY id LIMIT %(limit)s),
     i AS (INSERT INTO stage_unused SELECT DISTINCT content_hash FROM b)
SELECT count(*) AS n, coalesce(max(id), 0) AS last FROM b

-- name: spare_elsewhere
DELETE FROM stage_unused u USING kb_chunk c WHERE c.shard = %(shard)s::int AND c.content_hash = u.content_hash AND c.space_id <> %(space)s

-- name: shards
SELECT shard FROM kb_shard WHERE state <> 'SPARE' ORDER BY shard

-- name: places
SELECT md5(string_agg(concat_ws(':', id, shard, left_shard), ',' ORDER BY id)) AS of_all FROM kb_space

-- name: spare_living
DELETE FROM stage_unused u USING kb_chunk c WHERE c.shard = %(shard)s::int AND c.content_hash = u.content_hash

-- name: forget_embeddings
DELETE FROM kb_embedding e USING stage_unused u
WHERE e.model_id = %(model)s::int AND e.content_hash = u.content_hash AND e.last_used < %(before)s::timestamptz
  AND (e.vector IS NOT NULL OR e.lease_until < clock_timestamp())

-- name: retired
-- Models that served this space, and that no index of any space has had since then.
SELECT i.model_id FROM kb_index i WHERE i.space_id = %(space)s AND i.served_at IS NOT NULL
  AND NOT EXISTS (SELECT FROM kb_index o WHERE o.model_id = i.model_id
                  AND (o.status IN ('FOLLOWING', 'SERVING') OR coalesce(o.keep_until, o.created_at) >= %(before)s::timestamptz))
GROUP BY i.model_id ORDER BY i.model_id

-- name: lock_model
-- Whoever begins an index of this model refers to its row, and so waits.
SELECT FROM kb_model WHERE id = %(model)s::int FOR UPDATE

-- name: forget_retired
DELETE FROM kb_embedding WHERE model_id = %(model)s::int
AND NOT EXISTS (SELECT FROM kb_index i WHERE i.model_id = %(model)s::int AND i.status IN ('FOLLOWING', 'SERVING'))
AND content_hash = ANY(ARRAY(
    SELECT content_hash FROM kb_embedding WHERE model_id = %(model)s::int AND last_used < %(before)s::timestamptz LIMIT %(limit)s))

-- name: answers
DELETE FROM kb_answer WHERE id = ANY(ARRAY(SELECT id FROM kb_answer WHERE space_id = %(space)s AND at < %(before)s::timestamptz ORDER BY at LIMIT %(limit)s))

-- name: oldest_log
SELECT min(started_at) AS at FROM ingestion_node_log WHERE space_id = %(space)s AND started_at < %(before)s::timestamptz

-- name: logs
DELETE FROM ingestion_node_log WHERE space_id = %(space)s AND started_at >= %(since)s::timestamptz AND started_at < %(before)s::timestamptz

-- name: seen
DELETE FROM sync_seen s USING sync_job j WHERE j.walk_id = s.walk_id AND j.space_id = %(space)s AND j.status NOT IN ('PENDING', 'RUNNING')

-- name: jobs
DELETE FROM sync_job j WHERE j.space_id = %(space)s AND j.status NOT IN ('PENDING', 'RUNNING') AND j.finished_at < %(before)s::timestamptz
  AND j.id < (SELECT max(l.id) FROM sync_job l WHERE l.source_id = j.source_id)

-- name: referenced
SELECT DISTINCT u.path FROM kb_doc_version v CROSS JOIN LATERAL unnest(ARRAY[v.raw_path, v.parsed_path]) u (path)
WHERE v.doc_id = ANY(%(docs)s::bigint[]) AND v.status IN ('PROCESSING', 'READY', 'FAILED') AND u.path IS NOT NULL

-- name: worked_on
SELECT doc_id, version, attempt FROM ingestion_task WHERE doc_id = ANY(%(docs)s::bigint[]) AND status = 'PROCESSING'
