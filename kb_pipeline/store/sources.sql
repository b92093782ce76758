-- name: add
INSERT INTO kb_source (space_id, name, kind, config) VALUES (%(space)s, %(name)s, %(kind)s, %(config)s) RETURNING id

-- name: add_lease
INSERT INTO sync_lease (source_id) VALUES (%(source)s)

-- name: list_all
SELECT id, space_id, name, kind, config, status, listing_count, listing_at, listing_digest, approved, waiting_deletions, watermark
FROM kb_source WHERE space_id = %(space)s AND status <> 'REMOVED' ORDER BY name

-- name: find
SELECT r.id, r.space_id, r.name, r.kind, r.config, r.status, r.listing_count, r.listing_at, r.listing_digest, r.approved, r.waiting_deletions, r.watermark
FROM kb_source r JOIN kb_space s ON s.id = r.space_id AND s.status = 'ACTIVE'
WHERE r.name = %(name)s AND r.status <> 'REMOVED' ORDER BY s.key

-- name: set_status
UPDATE kb_source SET status = %(status)s, listing_digest = NULL, change_token = NULL WHERE id = %(source)s AND status <> 'REMOVED'

-- name: approve
UPDATE kb_source SET approved = %(up_to)s::bigint, listing_digest = NULL, change_token = NULL WHERE id = %(source)s

-- name: spend
UPDATE kb_source SET approved = approved - %(count)s::bigint WHERE id = %(source)s AND approved >= %(count)s::bigint

-- name: forget_digest
UPDATE kb_source SET listing_digest = NULL WHERE id = %(source)s AND listing_digest IS NOT NULL
