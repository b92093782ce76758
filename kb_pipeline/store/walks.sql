-- name: lease
SELECT owner, until >= clock_timestamp() AS held FROM sync_lease WHERE source_id = %(source)s

-- name: take
UPDATE sync_lease SET owner = %(me)s, token = token + 1, until = clock_timestamp() + %(ttl)s * interval '1 second'
WHERE source_id = %(source)s AND (until < clock_timestamp() OR (owner = %(dead)s AND owner <> '')) RETURNING token

-- name: renew
UPDATE sync_lease SET until = clock_timestamp() + %(ttl)s * interval '1 second' WHERE source_id = %(source)s AND token = %(token)s

-- name: release
UPDATE sync_lease SET until = '-infinity', owner = '' WHERE source_id = %(source)s AND token = %(token)s

-- name: release_run
UPDATE sync_lease SET until = '-infinity', owner = '', token = token + 1 WHERE starts_with(owner, %(run)s || '@')

-- name: open_job
SELECT j.id, j.walk_id, j.kind, j.window_from, j.source_started, j.resumed, j.started_at, j.verdict, j.reasons, j.counts, s.checkpoint
FROM sync_job j JOIN kb_source s ON s.id = j.source_id
WHERE j.source_id = %(source)s AND j.status IN ('PENDING', 'RUNNING') FOR UPDATE OF j

-- name: past
SELECT watermark, extract(epoch FROM clock_timestamp() - listing_at)::float8 AS listed_ago,
       waiting_deletions > 0 AND approved >= waiting_deletions AS deletions_approved
FROM kb_source WHERE id = %(source)s

-- name: begin
WITH s AS (UPDATE kb_source SET listing_digest = NULL WHERE id = %(source)s AND listing_digest IS NOT NULL)
INSERT INTO sync_job (space_id, source_id, walk_id, kind, window_from, status, source_started)
VALUES (%(space)s, %(source)s, nextval('kb_walk_id'), %(kind)s, %(window)s, 'PENDING', %(clock)s) RETURNING id, walk_id, started_at

-- name: mark_resumed
UPDATE sync_job SET resumed = true WHERE id = %(job)s

-- name: checkpoint
UPDATE kb_source SET checkpoint = %(checkpoint)s WHERE id = %(source)s

-- name: progress
UPDATE sync_job SET status = %(after)s, verdict = %(verdict)s, reasons = %(reasons)s, counts = %(counts)s
WHERE id = %(job)s AND status = ANY(%(before)s)

-- name: end
UPDATE sync_job SET status = %(after)s, verdict = %(verdict)s, reasons = %(reasons)s, counts = %(counts)s, error = %(error)s,
    finished_at = clock_timestamp()
WHERE id = %(job)s AND status = ANY(%(before)s)

-- name: roll_back
UPDATE sync_job SET status = %(after)s WHERE id = %(job)s AND status = ANY(%(before)s)

-- name: clean
UPDATE sync_job j SET status = %(after)s
WHERE j.space_id = %(space)s AND j.status = ANY(%(before)s)
  AND NOT EXISTS (SELECT FROM kb_doc d WHERE d.source_id = j.source_id AND d.hidden_sync = j.walk_id AND d.status <> 'DELETED')
  AND NOT EXISTS (SELECT FROM vector_tombstone t JOIN kb_doc d ON d.id = t.doc_id WHERE t.space_id = %(space)s AND d.hidden_sync = j.walk_id)

-- name: forget_seen
DELETE FROM sync_seen WHERE walk_id = %(walk)s

-- name: unchanged
WITH j AS (INSERT INTO sync_job (space_id, source_id, walk_id, status, source_started, counts, finished_at)
           VALUES (%(space)s, %(source)s, nextval('kb_walk_id'), %(after)s, %(clock)s, %(counts)s, clock_timestamp()) RETURNING source_id)
UPDATE kb_source s SET listing_at = clock_timestamp() FROM j WHERE s.id = j.source_id

-- name: complete_listing
UPDATE kb_source SET listing_count = %(count)s, listing_at = clock_timestamp(), listing_digest = %(digest)s, waiting_deletions = 0
WHERE id = %(source)s

-- name: store_watermark
UPDATE kb_source SET watermark = %(watermark)s WHERE id = %(source)s

-- name: could_not_begin
INSERT INTO sync_job (space_id, source_id, walk_id, status, verdict, error, finished_at)
VALUES (%(space)s, %(source)s, nextval('kb_walk_id'), %(after)s, 'PARTIAL', %(error)s, clock_timestamp())

-- name: waiting
UPDATE kb_source SET waiting_deletions = %(waiting)s WHERE id = %(source)s

-- name: mark_seen
INSERT INTO sync_seen (walk_id, doc_ids) VALUES (%(walk)s, %(docs)s::bigint[])

-- name: seen_watermark
SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS value FROM kb_seen_seq

-- name: seen_count
SELECT count(DISTINCT d) AS n FROM sync_seen s CROSS JOIN LATERAL unnest(s.doc_ids) d WHERE s.walk_id = %(walk)s

-- name: count_unseen
-- EXCEPT here and below: an anti-join may become a loop over everything seen, once a document, where statistics are of an older walk.
SELECT count(*) AS n FROM (
    SELECT d.id FROM kb_doc d
    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'
    EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s) x

-- name: unseen
SELECT d.id, d.external_id FROM kb_doc d WHERE d.id = ANY(ARRAY(
    SELECT d.id FROM kb_doc d
    WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NULL AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'
      AND d.id > %(after)s
    EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s ORDER BY 1 LIMIT %(limit)s))
ORDER BY d.id

-- name: lock_unseen
SELECT id FROM kb_doc WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id FOR UPDATE

-- name: hide
UPDATE kb_doc d SET hidden_sync = %(walk)s, hidden_at = clock_timestamp(), beyond_guard = %(beyond)s::boolean, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp()
WHERE d.id = ANY(ARRAY(SELECT unnest(%(ids)s::bigint[]) EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s))
  AND d.hidden_sync IS NULL AND d.status <> 'DELETED' AND d.seen_at < %(started)s::timestamptz - %(lag)s * interval '1 second'

-- name: deleted_since
SELECT external_id FROM kb_doc
WHERE source_id = %(source)s AND status = 'DELETED' AND seen_seq > %(mark)s AND external_id = ANY(%(ids)s::text[])

-- name: missed
-- Hidden long enough before this walk began, by an earlier one.
SELECT d.id FROM kb_doc d
WHERE d.source_id = %(source)s AND d.status <> 'DELETED' AND d.hidden_sync IS NOT NULL AND d.hidden_sync <> %(walk)s
  AND d.hidden_at <= %(started)s::timestamptz - %(apart)s * interval '1 second' AND coalesce(d.missed_sync, 0) < d.hidden_sync AND d.id > %(after)s
EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s ORDER BY 1 LIMIT %(limit)s

-- name: miss_again
UPDATE kb_doc d SET missed_sync = %(walk)s
WHERE d.id = ANY(ARRAY(SELECT unnest(%(ids)s::bigint[]) EXCEPT SELECT unnest(s.doc_ids) FROM sync_seen s WHERE s.walk_id = %(walk)s)) AND d.status <> 'DELETED' AND d.hidden_sync IS NOT NULL AND d.hidden_sync <> %(walk)s
  AND d.hidden_at <= %(started)s::timestamptz - %(apart)s * interval '1 second'

-- name: awaits_second
SELECT EXISTS (SELECT FROM kb_doc WHERE source_id = %(source)s AND status <> 'DELETED' AND hidden_sync IS NOT NULL
    AND hidden_at <= clock_timestamp() - %(apart)s * interval '1 second') AS yes

-- name: hidden
SELECT id, external_id, hidden_sync, coalesce(missed_sync, 0) > hidden_sync AS missed_again, beyond_guard FROM kb_doc
WHERE source_id = %(source)s AND status <> 'DELETED' AND hidden_sync IS NOT NULL AND id > %(after)s ORDER BY id LIMIT %(limit)s
