-- Totals for monitoring, added up from ingestion_node_log: they stay when the log is purged.

CREATE TABLE kb_counter (
    space_id int NOT NULL,
    name     text NOT NULL,
    total    bigint NOT NULL,
    PRIMARY KEY (space_id, name)
) WITH (fillfactor = 50);

-- Log rows before this moment are in the totals. One row.
CREATE TABLE kb_counted (
    one   boolean PRIMARY KEY DEFAULT true CONSTRAINT kb_counted_one CHECK (one),
    until timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO kb_counted DEFAULT VALUES;

-- The log is written in the order of time: a few pages say where a moment lies in a week of it.
CREATE INDEX ingestion_node_log_finished ON ingestion_node_log USING brin (finished_at) WITH (pages_per_range = 16, autosummarize = on);
