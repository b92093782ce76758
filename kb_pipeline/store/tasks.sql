-- name: floor
SELECT coalesce((SELECT floor FROM kb_queue_floor WHERE space_id = %(space)s), 0) AS floor

-- name: claim
WITH p AS MATERIALIZED (
    SELECT id FROM ingestion_task
    WHERE space_id = %(space)s AND status = 'PENDING' AND ready_seq > %(floor)s AND current_node = ANY(%(nodes)s::text[])
      AND EXISTS (SELECT FROM kb_space s WHERE s.id = %(space)s AND s.generation = %(generation)s AND s.status = 'ACTIVE')
    ORDER BY ready_seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
UPDATE ingestion_task t SET status = 'PROCESSING', attempt = attempt + 1, claimed_by = %(me)s, updated_at = clock_timestamp(),
    lease_until = clock_timestamp() + %(ttl)s * interval '1 second', node_started_at = clock_timestamp()
FROM p, kb_doc d WHERE t.id = p.id AND d.id = t.doc_id
RETURNING t.id, t.doc_id, t.version, t.attempt, t.current_node, t.size_bytes, t.retry_count, t.max_retry_count, t.trace_id,
          d.source_id, d.external_id, d.title, t.ready_seq

-- name: raise_floor
UPDATE kb_queue_floor SET floor = %(claimed)s::bigint - 400 WHERE space_id = %(space)s AND floor < %(claimed)s::bigint - 2400

-- name: renew
UPDATE ingestion_task t SET lease_until = clock_timestamp() + %(ttl)s * interval '1 second'
FROM unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt)
WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = 'PROCESSING'

-- name: fence
SELECT t.id FROM ingestion_task t JOIN unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt) ON t.id = x.id AND t.attempt = x.attempt
WHERE t.status = 'PROCESSING' ORDER BY t.id FOR UPDATE OF t

-- name: move
WITH x AS (SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(at_nodes)s::text[], %(outputs)s::text[], %(codes)s::text[], %(messages)s::text[],
                                %(next_at)s::timestamptz[]) x (id, attempt, at_node, output, code, message, next_at)),
     t AS (UPDATE ingestion_task t SET status = %(to)s, current_node = coalesce(%(node)s, t.current_node), updated_at = clock_timestamp(),
               node_started_at = clock_timestamp(), error_code = x.code, error_message = x.message, next_attempt_at = x.next_at,
               deaths = CASE WHEN %(advanced)s::boolean THEN 0 ELSE t.deaths END,
               retry_count = CASE WHEN %(failed)s::boolean THEN t.retry_count + 1 WHEN %(advanced)s::boolean THEN 0 ELSE t.retry_count END,
               ready_seq = CASE WHEN %(to)s = 'PENDING' THEN nextval('kb_ready_seq') ELSE t.ready_seq END,
               claimed_by = CASE WHEN %(to)s = 'PROCESSING' THEN t.claimed_by END,
               lease_until = CASE WHEN %(to)s = 'PROCESSING' THEN t.lease_until END
           FROM x WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = ANY(%(from)s::text[])
           RETURNING t.id, t.space_id, t.attempt, t.retry_count, t.trace_id, x.at_node, x.output, x.code, x.message)
INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, retry, output, error, trace_id, started_at)
SELECT id, space_id, at_node, %(log)s, attempt, retry_count, output::jsonb, code || ': ' || message, trace_id, %(started)s FROM t

-- name: due
UPDATE ingestion_task SET status = 'PENDING', ready_seq = nextval('kb_ready_seq'), updated_at = clock_timestamp()
WHERE id = ANY(ARRAY(SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'FAILED' AND next_attempt_at <= clock_timestamp()
                     ORDER BY next_attempt_at LIMIT 1000 FOR UPDATE SKIP LOCKED)) AND status = 'FAILED'

-- name: owners
SELECT DISTINCT claimed_by FROM ingestion_task WHERE space_id = %(space)s AND status = 'PROCESSING' AND lease_until IS NOT NULL

-- name: interrupt
WITH t AS (UPDATE ingestion_task SET status = 'PENDING', deaths = deaths + 1, ready_seq = nextval('kb_ready_seq'), updated_at = clock_timestamp(),
               claimed_by = NULL, lease_until = NULL
           WHERE id = ANY(ARRAY(SELECT id FROM ingestion_task WHERE space_id = %(space)s AND status = 'PROCESSING'
                                AND (lease_until < clock_timestamp() OR claimed_by = ANY(%(dead)s::text[])) AND deaths + 1 < %(deaths)s
                                ORDER BY id LIMIT 1000 FOR UPDATE SKIP LOCKED)) AND status = 'PROCESSING'
           RETURNING id, space_id, current_node, attempt, retry_count, trace_id, node_started_at)
INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, retry, error, trace_id, started_at)
SELECT id, space_id, current_node, 'INTERRUPTED', attempt, retry_count, 'interrupted: its process died or fell silent', trace_id,
       greatest(node_started_at, clock_timestamp() - interval '1 day') FROM t

-- name: release_run
WITH t AS (UPDATE ingestion_task SET status = 'PENDING', ready_seq = nextval('kb_ready_seq'), updated_at = clock_timestamp(), claimed_by = NULL,
               lease_until = NULL
           WHERE status = ANY(%(from)s::text[]) AND status = 'PROCESSING' AND starts_with(claimed_by, %(run)s || '@')
           RETURNING id, space_id, current_node, attempt, retry_count, trace_id, node_started_at)
INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, retry, error, trace_id, started_at)
SELECT id, space_id, current_node, 'INTERRUPTED', attempt, retry_count, 'interrupted: its run was ended', trace_id,
       greatest(node_started_at, clock_timestamp() - interval '1 day') FROM t

-- name: end_leases
UPDATE ingestion_task SET lease_until = clock_timestamp()
WHERE status = ANY(%(from)s::text[]) AND status = 'PROCESSING' AND starts_with(claimed_by, %(run)s || '@') AND lease_until > clock_timestamp()

-- name: poison
SELECT id, doc_id FROM ingestion_task WHERE space_id = %(space)s AND status = 'PROCESSING'
AND (lease_until < clock_timestamp() OR claimed_by = ANY(%(dead)s::text[])) AND deaths + 1 >= %(deaths)s ORDER BY id LIMIT 100

-- name: bury
WITH t AS (UPDATE ingestion_task SET status = 'DEAD', deaths = deaths + 1, attempt = attempt + 1, updated_at = clock_timestamp(), claimed_by = NULL,
               lease_until = NULL, error_code = 'poison',
               error_message = 'its process died ' || deaths + 1 || ' times at ' || current_node || ': look at the document, then kb task retry ' || id
           WHERE id = ANY(%(ids)s::bigint[]) AND status = 'PROCESSING' AND deaths + 1 >= %(deaths)s
             AND (lease_until < clock_timestamp() OR claimed_by = ANY(%(dead)s::text[]))
           RETURNING id, doc_id, version, space_id, current_node, attempt, retry_count, trace_id, node_started_at),
     l AS (INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, retry, error, trace_id, started_at)
           SELECT id, space_id, current_node, 'FAILED', attempt, retry_count, 'poison: its process died', trace_id,
                  greatest(node_started_at, clock_timestamp() - interval '1 day') FROM t)
SELECT doc_id, version FROM t

-- name: canceling
SELECT id, doc_id FROM ingestion_task WHERE space_id = %(space)s AND status = 'CANCELING' ORDER BY doc_id LIMIT 200

-- name: lock_canceling
SELECT id, doc_id, version FROM ingestion_task WHERE id = ANY(%(ids)s::bigint[]) AND status = 'CANCELING' ORDER BY id FOR UPDATE

-- name: cleaned
WITH t AS (UPDATE ingestion_task SET status = 'CANCELED', current_node = 'CLEANUP', updated_at = clock_timestamp()
           WHERE id = ANY(%(ids)s::bigint[]) AND status = 'CANCELING' RETURNING id, space_id, attempt, retry_count, trace_id)
INSERT INTO ingestion_node_log (task_id, space_id, node, status, attempt, retry, trace_id, started_at)
SELECT id, space_id, 'CLEANUP', 'SUCCESS', attempt, retry_count, trace_id, clock_timestamp() FROM t

-- name: admit
UPDATE ingestion_task t SET status = 'PENDING', ready_seq = nextval('kb_ready_seq'), updated_at = clock_timestamp()
FROM (SELECT DISTINCT ON (i.doc_id) i.id FROM ingestion_task i
      WHERE i.space_id = %(space)s AND i.status = 'INIT'
        AND NOT EXISTS (SELECT FROM ingestion_task l WHERE l.doc_id = i.doc_id AND l.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING'))
      ORDER BY i.doc_id, i.version) p
WHERE t.id = p.id AND t.status = 'INIT'

-- name: waiting
SELECT status, count(*) AS n FROM ingestion_task
WHERE space_id = %(space)s AND status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED', 'CANCELING') GROUP BY status

-- name: next_due
SELECT extract(epoch FROM min(next_attempt_at) - clock_timestamp()) AS seconds FROM ingestion_task WHERE space_id = %(space)s AND status = 'FAILED'

-- name: list_all
SELECT t.id AS task_id, t.doc_id AS document_id, d.external_id, t.version, t.status, t.current_node, t.retry_count, t.error_code, t.error_message,
       t.next_attempt_at, t.created_at, t.updated_at
FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id
WHERE t.space_id = %(space)s AND (%(status)s::text IS NULL OR t.status = %(status)s) AND (%(before)s::bigint IS NULL OR t.id < %(before)s)
ORDER BY t.id DESC LIMIT %(limit)s

-- name: get
SELECT t.id AS task_id, t.space_id, t.doc_id AS document_id, d.external_id, t.version, t.status, t.current_node, t.retry_count, t.max_retry_count,
       t.attempt, t.error_code, t.error_message, t.next_attempt_at, t.cancel_reason, t.trace_id, t.created_at, t.updated_at
FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id WHERE t.id = %(task)s

-- name: log
SELECT node, status, attempt, retry, output, error, started_at, finished_at, duration_ms FROM ingestion_node_log
WHERE task_id = %(task)s ORDER BY finished_at, attempt

-- name: retry
WITH t AS (UPDATE ingestion_task t SET retry_count = 0, deaths = 0, error_code = NULL, error_message = NULL, next_attempt_at = NULL,
               updated_at = clock_timestamp(), ready_seq = nextval('kb_ready_seq'),
               status = CASE WHEN EXISTS (SELECT FROM ingestion_task l WHERE l.doc_id = t.doc_id AND l.id <> t.id
                                          AND l.status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING')) THEN 'INIT' ELSE 'PENDING' END,
               current_node = CASE WHEN v.chunk_ids IS NOT NULL THEN t.current_node WHEN v.parsed_path IS NOT NULL THEN 'CHUNKER'
                                   WHEN v.raw_path IS NOT NULL THEN 'PARSER' ELSE 'FETCHER' END
           FROM kb_doc_version v WHERE v.doc_id = t.doc_id AND v.version = t.version AND t.id = %(task)s AND t.status = ANY(%(from)s::text[])
           RETURNING t.space_id, t.doc_id, t.version),
     r AS (DELETE FROM vector_retry r USING t WHERE r.space_id = t.space_id AND r.doc_id = t.doc_id)
UPDATE kb_doc_version v SET status = 'PROCESSING' FROM t WHERE v.doc_id = t.doc_id AND v.version = t.version

-- name: cancel
WITH t AS (UPDATE ingestion_task SET status = CASE WHEN status IN ('INIT', 'DEAD') THEN 'CANCELED' ELSE 'CANCELING' END, attempt = attempt + 1,
               cancel_reason = %(reason)s, updated_at = clock_timestamp(), claimed_by = NULL, lease_until = NULL
           WHERE id = %(task)s AND status = ANY(%(from)s::text[]) RETURNING doc_id, version, status),
     v AS (UPDATE kb_doc_version v SET status = 'CANCELED' FROM t
           WHERE t.status = 'CANCELED' AND v.doc_id = t.doc_id AND v.version = t.version AND v.status IN ('PROCESSING', 'FAILED'))
SELECT status FROM t

-- name: cancel_unfinished
WITH t AS (UPDATE ingestion_task SET status = CASE WHEN status = 'INIT' THEN 'CANCELED' ELSE 'CANCELING' END, attempt = attempt + 1,
               cancel_reason = %(reason)s, updated_at = clock_timestamp(), claimed_by = NULL, lease_until = NULL
           WHERE id = ANY(ARRAY(SELECT id FROM ingestion_task
                                WHERE space_id = %(space)s AND (%(doc)s::bigint IS NULL OR doc_id = %(doc)s)
                                  AND status IN ('INIT', 'PENDING', 'PROCESSING', 'FAILED')
                                ORDER BY id LIMIT 1000 FOR UPDATE)) RETURNING doc_id, version, status),
     v AS (UPDATE kb_doc_version v SET status = 'CANCELED' FROM t
           WHERE t.status = 'CANCELED' AND v.doc_id = t.doc_id AND v.version = t.version AND v.status IN ('PROCESSING', 'FAILED'))
SELECT count(*) AS n FROM t

-- name: log_weeks
SELECT kb_ensure_log_weeks(4)

-- name: give_back
UPDATE ingestion_task t SET status = 'PENDING', current_node = coalesce(%(node)s, t.current_node), ready_seq = nextval('kb_ready_seq'), updated_at = clock_timestamp(), claimed_by = NULL, lease_until = NULL
FROM unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt)
WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = ANY(%(from)s::text[])

-- name: supersede
UPDATE ingestion_task t SET status = 'CANCELING', attempt = t.attempt + 1, cancel_reason = 'superseded by newer content', updated_at = clock_timestamp(),
    claimed_by = NULL, lease_until = NULL
FROM unnest(%(ids)s::bigint[], %(attempts)s::int[]) x (id, attempt)
WHERE t.id = x.id AND t.attempt = x.attempt AND t.status = ANY(%(from)s::text[])

-- name: failed_documents
SELECT d.external_id, t.id AS task_id, t.status, t.current_node, t.error_code, t.error_message FROM ingestion_task t JOIN kb_doc d ON d.id = t.doc_id
WHERE t.space_id = %(space)s AND t.status IN ('FAILED', 'DEAD') ORDER BY t.id DESC LIMIT %(limit)s
