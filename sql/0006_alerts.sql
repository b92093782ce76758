-- What needs a person, and what that is told from: one open record per cause, the outcome of reconciliations, failing vectors.

CREATE TABLE kb_alert (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id    int REFERENCES kb_space,             -- null: the installation
    kind        text NOT NULL CONSTRAINT kb_alert_kind CHECK (kind IN
                ('SYNC_FAILED', 'TASK_DEAD', 'APPROVAL_WAITING', 'RECONCILIATION_FAILED', 'SCHEDULE_MISSED', 'VECTOR_FAILED')),
    subject     text NOT NULL,
    message     text NOT NULL,
    first_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    notified_at timestamptz,
    resolved_at timestamptz
);
CREATE UNIQUE INDEX kb_alert_open ON kb_alert (coalesce(space_id, 0), kind, subject) WHERE resolved_at IS NULL;
CREATE INDEX kb_alert_space ON kb_alert (space_id, resolved_at);

CREATE TABLE kb_reconciliation (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id  int NOT NULL REFERENCES kb_space,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    chunks    bigint NOT NULL,
    vectors   bigint NOT NULL,
    missing   bigint NOT NULL,
    orphaned  bigint NOT NULL,
    wrong     bigint NOT NULL,
    repaired  bigint NOT NULL,
    remaining bigint NOT NULL
);
CREATE INDEX kb_reconciliation_space ON kb_reconciliation (space_id, id DESC);

-- A row here is the state "failed" of a vector. Nobody has written any before this version.
ALTER TABLE vector_retry ADD COLUMN doc_id bigint NOT NULL DEFAULT 0, ADD COLUMN seen_at timestamptz NOT NULL DEFAULT clock_timestamp();
CREATE INDEX vector_retry_doc ON vector_retry (space_id, doc_id);
CREATE INDEX vector_retry_exhausted ON vector_retry (space_id) WHERE attempts >= 5;

ALTER TABLE kb_doc
    ADD COLUMN missed_sync bigint,                   -- the walk that missed it again, later than hidden_sync: where nobody can be asked
    ADD COLUMN beyond_guard boolean NOT NULL DEFAULT false;  -- it was hidden beyond the guard: its deletion spends an approval

CREATE INDEX ingestion_task_dead_code ON ingestion_task (space_id, error_code, doc_id) WHERE status = 'DEAD';
CREATE INDEX kb_source_waiting ON kb_source (space_id) WHERE waiting_deletions > 0;
