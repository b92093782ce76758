-- name: read
SELECT v.doc_id, v.version, v.revision, v.raw_path, v.raw_sha256, v.parsed_path, v.text_sha256, v.title, v.chunk_ids
FROM kb_doc_version v JOIN unnest(%(docs)s::bigint[], %(versions)s::int[]) x (doc_id, version) ON v.doc_id = x.doc_id AND v.version = x.version

-- name: fetched
UPDATE kb_doc_version v SET revision = x.revision, raw_path = x.raw_path, raw_sha256 = x.raw_sha256, raw_bytes = x.raw_bytes
FROM unnest(%(doc_id)s::bigint[], %(version)s::int[], %(revision)s::text[], %(raw_path)s::text[], %(raw_sha256)s::bytea[], %(raw_bytes)s::bigint[])
     x (doc_id, version, revision, raw_path, raw_sha256, raw_bytes)
WHERE v.doc_id = x.doc_id AND v.version = x.version

-- name: parsed
UPDATE kb_doc_version v SET parsed_path = x.parsed_path, text_sha256 = x.text_sha256, title = x.title, parse_result = x.parse_result
FROM unnest(%(doc_id)s::bigint[], %(version)s::int[], %(parsed_path)s::text[], %(text_sha256)s::bytea[], %(title)s::text[], %(parse_result)s::jsonb[])
     x (doc_id, version, parsed_path, text_sha256, title, parse_result)
WHERE v.doc_id = x.doc_id AND v.version = x.version

-- name: object_paths
SELECT unnest(ARRAY[raw_path, parsed_path]) AS path FROM kb_doc_version WHERE doc_id = ANY(%(docs)s::bigint[])
