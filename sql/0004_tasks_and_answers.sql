-- The task machine, its log, and what answers were based on.

CREATE SEQUENCE kb_ready_seq;

CREATE TABLE ingestion_task (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id        int NOT NULL REFERENCES kb_space,
    doc_id          bigint NOT NULL REFERENCES kb_doc,
    version         int NOT NULL,
    status          text NOT NULL CONSTRAINT ingestion_task_status
                    CHECK (status IN ('INIT', 'PENDING', 'PROCESSING', 'SUCCESS', 'FAILED', 'DEAD', 'CANCELING', 'CANCELED')),
    current_node    text NOT NULL DEFAULT 'FETCHER' CONSTRAINT ingestion_task_node
                    CHECK (current_node IN ('FETCHER', 'PARSER', 'CHUNKER', 'EMBEDDING', 'INDEXER', 'CLEANUP')),
    attempt         int NOT NULL DEFAULT 0,           -- the fence: +1 at every claim and cancel, never back
    deaths          int NOT NULL DEFAULT 0,           -- leases that ran out at this node
    ready_seq       bigint NOT NULL DEFAULT nextval('kb_ready_seq'),
    retry_count     int NOT NULL DEFAULT 0,
    max_retry_count int NOT NULL DEFAULT 3,
    size_bytes      bigint NOT NULL DEFAULT 0,        -- as listed: batches are bounded by it
    error_code      text,
    error_message   text,
    next_attempt_at timestamptz,
    claimed_by      text,
    lease_until     timestamptz,
    node_started_at timestamptz,
    trace_id        uuid NOT NULL DEFAULT gen_random_uuid(),
    cancel_reason   text,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (doc_id, version)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- Claimed by ready_seq, never by id: the planner would take the primary key and walk everything that is done.
CREATE INDEX ingestion_task_ready ON ingestion_task (space_id, ready_seq) WHERE status = 'PENDING';
CREATE INDEX ingestion_task_due ON ingestion_task (next_attempt_at) WHERE status = 'FAILED';
CREATE INDEX ingestion_task_lease ON ingestion_task (lease_until) WHERE status = 'PROCESSING';
CREATE INDEX ingestion_task_queued ON ingestion_task (space_id) WHERE status IN ('INIT', 'CANCELING');
CREATE INDEX ingestion_task_space ON ingestion_task (space_id, id DESC);
CREATE UNIQUE INDEX ingestion_task_one_live ON ingestion_task (doc_id) WHERE status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING');

CREATE TABLE kb_queue_floor (
    space_id int PRIMARY KEY REFERENCES kb_space,
    floor    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE ingestion_node_log (
    task_id     bigint NOT NULL,
    space_id    int NOT NULL,
    node        text NOT NULL,
    status      text NOT NULL,
    attempt     int NOT NULL,
    retry       int NOT NULL DEFAULT 0,
    input       jsonb,
    output      jsonb,
    error       text,
    trace_id    uuid NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    duration_ms double precision GENERATED ALWAYS AS (extract(epoch FROM finished_at - started_at) * 1000) STORED
) PARTITION BY RANGE (started_at);
CREATE INDEX ingestion_node_log_task ON ingestion_node_log (task_id);

-- Partitions by week, from last week on. Called before work begins, so that a week never begins without one.
CREATE FUNCTION kb_ensure_log_weeks(ahead int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE monday date; leaf text;
BEGIN
    FOR monday IN SELECT d::date FROM generate_series(date_trunc('week', now() AT TIME ZONE 'UTC') - interval '1 week',
                  date_trunc('week', now() AT TIME ZONE 'UTC') + ahead * interval '1 week', interval '1 week') d LOOP
        leaf := 'ingestion_node_log_' || to_char(monday, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(leaf) IS NOT NULL;
        PERFORM pg_advisory_xact_lock(2, 0);
        CONTINUE WHEN to_regclass(leaf) IS NOT NULL;
        EXECUTE format('CREATE TABLE %I (LIKE ingestion_node_log INCLUDING ALL)', leaf);
        EXECUTE format('ALTER TABLE ingestion_node_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       leaf, monday::text || ' 00:00+00', (monday + 7)::text || ' 00:00+00');
    END LOOP;
END $$;
SELECT kb_ensure_log_weeks(4);

CREATE TABLE kb_answer (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id   int NOT NULL REFERENCES kb_space,
    question   text NOT NULL,
    principals text[] NOT NULL,
    k          int NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    snapshot   pg_snapshot NOT NULL,
    chunk_ids  bigint[] NOT NULL,
    scores     real[] NOT NULL
);
CREATE INDEX kb_answer_space ON kb_answer (space_id, at);
