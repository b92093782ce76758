-- What starts runs by itself: what a source was last walked at, hints that it changed, and when each space is due.

ALTER TABLE kb_source
    ADD COLUMN change_token    text,                 -- of the source when its last completed walk began; null: it cannot be compared
    ADD COLUMN change_token_at timestamptz;

ALTER TABLE source_event ADD COLUMN payload jsonb NOT NULL DEFAULT '{}';
CREATE INDEX source_event_waiting ON source_event (source_id, id) WHERE taken_at IS NULL;

-- The last time that a walk of a source was asked for, and why. Each try of the same mark doubles the wait for the next one.
CREATE TABLE kb_source_request (
    source_id    int NOT NULL REFERENCES kb_source ON DELETE CASCADE,
    reason       text NOT NULL CONSTRAINT kb_source_request_reason CHECK (reason IN ('change', 'event')),
    mark         text NOT NULL,                      -- the change token, or the newest event, that asked
    number       bigint NOT NULL DEFAULT 1,          -- of requests ever: never used twice
    tries        int NOT NULL DEFAULT 1,             -- of this mark
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source_id, reason)
) WITH (fillfactor = 50);

ALTER TABLE kb_space ADD COLUMN time_zone text NOT NULL DEFAULT 'UTC';

-- One row per space and kind of work. due_at is moved before a run is asked for, so that no outcome of a run ends a schedule.
CREATE TABLE kb_schedule (
    space_id          int NOT NULL REFERENCES kb_space,
    kind              text NOT NULL CONSTRAINT kb_schedule_kind CHECK (kind IN ('sync', 'sweep', 'reconciliation', 'purge', 'gc', 'quality', 'ingest')),
    due_at            timestamptz,                   -- null: not due until it is marked again
    last_requested_at timestamptz,
    last_success_at   timestamptz,
    last_failure_at   timestamptz,
    misses            int NOT NULL DEFAULT 0,        -- requests in a row that did not succeed
    cron              text NOT NULL DEFAULT '',      -- what due_at was computed from, with its time zone
    PRIMARY KEY (space_id, kind)
) WITH (fillfactor = 50);
CREATE INDEX kb_schedule_due ON kb_schedule (due_at) WHERE due_at IS NOT NULL;

-- What waits, by space: one look into each index says whether a space needs a worker, however many tasks there are.
CREATE INDEX ingestion_task_retry ON ingestion_task (space_id, next_attempt_at) WHERE status = 'FAILED';
CREATE INDEX ingestion_task_claimed ON ingestion_task (space_id, lease_until) WHERE status = 'PROCESSING';
