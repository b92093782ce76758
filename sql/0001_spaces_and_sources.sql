-- Spaces, sources, and who walks them. Statuses are text with named CHECKs (an enum is not smaller, and harder to change).

CREATE TABLE kb_model (
    id          int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    fingerprint text NOT NULL UNIQUE,          -- everything that changes the vectors
    dimension   int NOT NULL CONSTRAINT kb_model_dimension CHECK (dimension BETWEEN 1 AND 4000),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE kb_principal (
    id   int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE
);

CREATE TABLE kb_space (
    id                int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key               text NOT NULL CONSTRAINT kb_space_key CHECK (key ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    name              text NOT NULL,
    status            text NOT NULL DEFAULT 'ACTIVE' CONSTRAINT kb_space_status CHECK (status IN ('ACTIVE', 'DELETING', 'DELETED')),
    generation        int NOT NULL DEFAULT 1,  -- fences every write: +1 when the space is deleted
    shard             int NOT NULL,
    left_shard        int,                     -- where old rows wait for removal after a promotion
    left_at           timestamptz,
    model_id          int NOT NULL REFERENCES kb_model,
    embedder          text NOT NULL,
    embedder_options  jsonb NOT NULL DEFAULT '{}',
    index_kind        text NOT NULL,
    index_options     jsonb NOT NULL DEFAULT '{}',
    chunking          jsonb NOT NULL DEFAULT '{}',
    retained_versions int NOT NULL DEFAULT 5 CONSTRAINT kb_space_retained CHECK (retained_versions >= 1),
    schedule          text NOT NULL DEFAULT '',
    audience          jsonb,                   -- ACL clauses for documents without their own; null = everybody
    as_of_horizon     timestamptz NOT NULL DEFAULT '-infinity',
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX kb_space_living_key ON kb_space (key) WHERE status <> 'DELETED';

-- Partitions of the chunk and vector tables. A number comes back: whoever takes, clears or returns one locks its row.
CREATE TABLE kb_shard (
    shard    int PRIMARY KEY,
    state    text NOT NULL CONSTRAINT kb_shard_state CHECK (state IN ('SHARED', 'SPARE', 'OWNED')),
    space_id int REFERENCES kb_space,
    CONSTRAINT kb_shard_owner CHECK ((state = 'OWNED') = (space_id IS NOT NULL))
);

CREATE TABLE kb_source (
    id                int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id          int NOT NULL REFERENCES kb_space,
    name              text NOT NULL,
    kind              text NOT NULL,
    config            jsonb NOT NULL DEFAULT '{}',   -- secrets only as references: env:NAME, file:PATH
    status            text NOT NULL DEFAULT 'ACTIVE' CONSTRAINT kb_source_status CHECK (status IN ('ACTIVE', 'PAUSED', 'REMOVED')),
    watermark         jsonb NOT NULL DEFAULT '{}',   -- per scope ('*': the whole source), in the source's own clock
    checkpoint        jsonb,                         -- of the open walk, per scope: {"at": where to go on, "done": whether at all}
    listing_count     bigint,                        -- of the last complete listing
    listing_at        timestamptz,
    listing_digest    text,                          -- of the last complete listing whose every entry was taken in
    approved          bigint NOT NULL DEFAULT 0,     -- deletions allowed beyond the guard, spent one by one
    waiting_deletions bigint NOT NULL DEFAULT 0,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX kb_source_living_name ON kb_source (space_id, name) WHERE status <> 'REMOVED';

CREATE TABLE sync_lease (
    source_id int PRIMARY KEY REFERENCES kb_source,
    owner     text NOT NULL DEFAULT '',
    token     bigint NOT NULL DEFAULT 0,             -- +1 at every taking, never back: the fence of a walk
    until     timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

CREATE SEQUENCE kb_walk_id;
CREATE SEQUENCE kb_seen_seq;

CREATE TABLE sync_job (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id       int NOT NULL REFERENCES kb_space,
    source_id      int NOT NULL REFERENCES kb_source,
    walk_id        bigint NOT NULL,
    kind           text NOT NULL DEFAULT 'FULL' CONSTRAINT sync_job_kind CHECK (kind IN ('FULL', 'INCREMENTAL')),
    window_from    jsonb NOT NULL DEFAULT '{}',      -- per scope, in the source's clock: from when on; null: everything
    status         text NOT NULL CONSTRAINT sync_job_status
                   CHECK (status IN ('PENDING', 'RUNNING', 'SUCCESS', 'GC_CLEAN', 'FAILED', 'ROLLBACK')),
    verdict        text NOT NULL DEFAULT 'COMPLETE' CONSTRAINT sync_job_verdict
                   CHECK (verdict IN ('COMPLETE', 'PARTIAL', 'UNTRUSTED')),
    reasons        jsonb NOT NULL DEFAULT '[]',
    resumed        boolean NOT NULL DEFAULT false,
    counts         jsonb NOT NULL DEFAULT '{}',
    source_started double precision,                 -- seconds since the epoch, in the source's clock: the next watermark
    started_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at    timestamptz,
    error          text
);
CREATE UNIQUE INDEX sync_job_one_open ON sync_job (source_id) WHERE status IN ('PENDING', 'RUNNING');
CREATE INDEX sync_job_recent ON sync_job (source_id, id DESC);
CREATE INDEX sync_job_unclean ON sync_job (space_id) WHERE status = 'SUCCESS';

-- Logged on purpose: an unlogged set is empty after a crash, and "not seen" would then mean everything.
CREATE TABLE sync_seen (
    walk_id bigint NOT NULL,
    doc_id  bigint NOT NULL,
    PRIMARY KEY (walk_id, doc_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE source_event (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id    int NOT NULL REFERENCES kb_space,
    source_id   int NOT NULL REFERENCES kb_source,
    event_id    text NOT NULL,
    external_id text,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at    timestamptz,
    UNIQUE (source_id, event_id)
);
