-- name: moment
SELECT s.shard, clock_timestamp() AS now, %(at)s::timestamptz < s.as_of_horizon AS purged, nullif(s.as_of_horizon, '-infinity') AS horizon,
       EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
               WHERE l.locktype = 'advisory' AND l.classid = 1 AND l.objid = s.id::oid AND l.objsubid = 2 AND l.mode = 'ShareLock' AND l.granted
                 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND a.xact_start <= %(at)s::timestamptz) AS open
FROM kb_space s WHERE s.id = %(space)s AND s.status = 'ACTIVE'

-- name: ended
SELECT DISTINCT doc_id FROM kb_publication
WHERE space_id = %(space)s AND to_at > %(at)s::timestamptz - interval '3 minutes' AND doc_id > %(after)s ORDER BY doc_id LIMIT %(limit)s

-- name: every
SELECT id AS doc_id FROM kb_doc WHERE space_id = %(space)s AND id > %(after)s ORDER BY id LIMIT %(limit)s

-- name: then
WITH sp AS (SELECT audience FROM kb_space WHERE id = %(space)s AND status = 'ACTIVE')
SELECT d.id, p.version, d.status = 'DELETED' AS deleted,
       acl.invited AND acl.permitted AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL AS shown,
       acl.invited AND (acl.permitted OR d.acl_seq > 0) AND (d.hidden_at IS NULL OR d.hidden_at > %(at)s::timestamptz) AS counted
FROM kb_doc d CROSS JOIN sp
CROSS JOIN LATERAL (
    SELECT version, to_at, to_xid FROM kb_publication p
    WHERE p.doc_id = d.id AND CASE WHEN %(snapshot)s::pg_snapshot IS NULL THEN p.from_at <= %(at)s::timestamptz
                                   ELSE pg_visible_in_snapshot(p.from_xid, %(snapshot)s::pg_snapshot) END
    ORDER BY from_at DESC, id DESC LIMIT 1) p
CROSS JOIN LATERAL (
    SELECT NOT EXISTS (SELECT FROM jsonb_array_elements(sp.audience) clause WHERE NOT clause ?| %(principals)s::text[]) AS invited,
           NOT EXISTS (SELECT FROM jsonb_array_elements(d.acl) clause WHERE NOT clause ?| %(principals)s::text[]) AS permitted) acl
WHERE d.id = ANY(%(docs)s::bigint[]) AND d.space_id = %(space)s
  AND (p.to_at IS NULL
       OR CASE WHEN %(snapshot)s::pg_snapshot IS NOT NULL THEN NOT pg_visible_in_snapshot(p.to_xid, %(snapshot)s::pg_snapshot)
               ELSE p.to_at > %(at)s::timestamptz
                    OR EXISTS (SELECT FROM kb_publication n WHERE n.doc_id = d.id AND n.from_xid = p.to_xid) END)

-- name: left
WITH x AS (SELECT * FROM unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version))
SELECT v.doc_id, u.id FROM x JOIN kb_doc_version v ON v.doc_id = x.doc_id AND v.version = x.version CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)
EXCEPT
SELECT d.id, u.id FROM x JOIN kb_doc d ON d.id = x.doc_id JOIN kb_doc_version n ON n.doc_id = d.id AND n.version = d.current_ver
CROSS JOIN LATERAL unnest(n.chunk_ids) u (id)
WHERE NOT EXISTS (SELECT FROM kb_publication p WHERE p.doc_id = x.doc_id AND p.to_at >= %(since)s::timestamptz)

-- name: owners
SELECT s.id, s.doc_id FROM kb_chunk_state s WHERE s.shard = %(shard)s::int AND s.id = ANY(%(ids)s::bigint[]) AND s.space_id = %(space)s

-- name: texts
SELECT c.id AS chunk_id, c.doc_id, d.external_id, d.uri, coalesce(v.title, d.title) AS title, c.title_path, x.version, coalesce(c.display, c.content) AS text
FROM unnest(%(ids)s::bigint[], %(versions)s::int[]) x (chunk_id, version)
JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = x.chunk_id AND c.space_id = %(space)s
JOIN kb_doc d ON d.id = c.doc_id
LEFT JOIN kb_doc_version v ON v.doc_id = c.doc_id AND v.version = x.version
