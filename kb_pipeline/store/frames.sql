-- name: documents
SELECT d.id AS doc_id, d.external_id, d.title, d.uri, d.current_ver, d.last_ver, r.status AS source_status,
       extract(epoch FROM clock_timestamp() - d.seen_at)::float8 AS seen_seconds_ago,
       CASE WHEN d.status = 'AVAILABLE' THEN d.current_ver END AS available_version,
       CASE WHEN d.current_ver > 0 THEN d.published_at IS NOT NULL END AS has_published_at,
       CASE WHEN d.current_ver > 0 THEN coalesce(v.status, 'MISSING') END AS current_status,
       CASE WHEN d.current_ver > 0 THEN coalesce(p.version, 0) = d.current_ver END AS in_history
FROM kb_doc d JOIN kb_source r ON r.id = d.source_id
LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver
LEFT JOIN kb_publication p ON p.doc_id = d.id AND p.to_at IS NULL
WHERE d.space_id = %(space)s AND d.status <> 'DELETED' ORDER BY d.id DESC LIMIT %(limit)s

-- name: versions
SELECT d.external_id, v.doc_id, v.version, v.raw_path, coalesce(octet_length(v.raw_sha256), 0) AS sha256_bytes, coalesce(v.raw_bytes, 0) AS raw_bytes, v.parsed_path,
       coalesce(octet_length(v.text_sha256), 0) AS text_sha256_bytes, v.recipe, v.parse_result ->> 'format' AS format, coalesce(cardinality(v.chunk_ids), 0) AS chunks,
       coalesce(cardinality(v.chunk_ids), 0) - (SELECT count(DISTINCT u) FROM unnest(v.chunk_ids) u) AS repeated,
       (SELECT count(DISTINCT u) FROM unnest(v.chunk_ids) u) - (SELECT count(*) FROM kb_chunk c
           WHERE c.shard = %(shard)s::int AND c.space_id = %(space)s AND c.id = ANY(v.chunk_ids)) AS missing
FROM (SELECT id, external_id FROM kb_doc WHERE space_id = %(space)s AND status <> 'DELETED' ORDER BY id DESC LIMIT %(limit)s) d
JOIN kb_doc_version v ON v.doc_id = d.id AND v.status = 'READY' ORDER BY v.doc_id DESC, v.version DESC LIMIT %(limit)s

-- name: chunks
WITH s AS MATERIALIZED (SELECT id, doc_id, hash FROM kb_chunk_state WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current ORDER BY id DESC LIMIT %(limit)s)
SELECT d.external_id, s.id AS chunk_id, c.tokens, c.page_from, c.page_to, c.content, c.display, c.title_path,
       c.content_hash = sha256(convert_to(CASE WHEN c.prefix = '' THEN c.content ELSE c.prefix || E'\n\n' || c.content END, 'UTF8')) AS hash_holds,
       encode(substring(c.content_hash FROM 1 FOR 16), 'hex')::uuid = s.hash AS state_agrees, c.doc_id = s.doc_id AS owner_agrees
FROM s JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = s.id AND c.space_id = %(space)s JOIN kb_doc d ON d.id = s.doc_id

-- name: embeddings
WITH s AS MATERIALIZED (SELECT id, doc_id FROM kb_chunk_state WHERE shard = %(shard)s::int AND space_id = %(space)s AND in_current ORDER BY id DESC LIMIT %(limit)s)
SELECT DISTINCT ON (c.content_hash) d.external_id, s.id AS chunk_id, c.content_hash, e.vector, extract(epoch FROM clock_timestamp() - e.last_used)::float8 AS used_seconds_ago
FROM s JOIN kb_chunk c ON c.shard = %(shard)s::int AND c.id = s.id AND c.space_id = %(space)s JOIN kb_doc d ON d.id = s.doc_id
LEFT JOIN kb_embedding e ON e.model_id = %(model)s::int AND e.content_hash = c.content_hash ORDER BY c.content_hash, s.id

-- name: entries
SELECT d.external_id, s.id AS chunk_id, s.vec_id, s.acl_seq, s.vec_status, s.vec_id = kb_vec_id(s.id, s.hash, s.incarnation) AS name_holds,
       s.bucket = kb_bucket(s.vec_id) AS bucket_holds, s.ck = kb_checksum(s.vec_id, s.acl) AS checksum_holds,
       EXISTS (SELECT FROM vector_tombstone t WHERE t.index_id = %(index)s AND t.vec_id = s.vec_id AND t.state = 'E') AS condemned
FROM kb_chunk_state s JOIN kb_doc d ON d.id = s.doc_id
WHERE s.shard = %(shard)s::int AND s.space_id = %(space)s AND s.in_current ORDER BY s.id DESC LIMIT %(limit)s
