-- A document almost never changes, a version sometimes. Foreign keys only among these small plain tables, never to partitions.

CREATE TABLE kb_doc (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id     int NOT NULL REFERENCES kb_space,
    source_id    int NOT NULL REFERENCES kb_source,
    external_id  text NOT NULL,
    identity     text,                               -- survives a rename in the source
    title        text NOT NULL,
    uri          text NOT NULL,
    current_ver  int NOT NULL DEFAULT 0,             -- 0: nothing published
    last_ver     int NOT NULL DEFAULT 0,             -- the newest version row
    acl          jsonb,                              -- clauses, every one must be met; null = the space's audience
    acl_seq      bigint NOT NULL DEFAULT 0,
    seen_seq     bigint NOT NULL DEFAULT nextval('kb_seen_seq'),
    seen_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    status       text NOT NULL DEFAULT 'UPLOADED' CONSTRAINT kb_doc_status
                 CHECK (status IN ('UPLOADED', 'INDEXING', 'AVAILABLE', 'FAILED', 'DELETED')),
    hidden_at    timestamptz,
    hidden_sync  bigint,
    published_at timestamptz,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX kb_doc_living ON kb_doc (source_id, external_id) WHERE status <> 'DELETED';
CREATE INDEX kb_doc_identity ON kb_doc (source_id, identity) WHERE status <> 'DELETED' AND identity IS NOT NULL;
CREATE INDEX kb_doc_hidden ON kb_doc (source_id, hidden_sync) WHERE status <> 'DELETED' AND hidden_sync IS NOT NULL;
CREATE INDEX kb_doc_space ON kb_doc (space_id, id);
CREATE INDEX kb_doc_deleted ON kb_doc (source_id, seen_seq) WHERE status = 'DELETED';  -- what went while a page was read

CREATE TABLE kb_doc_version (
    doc_id         bigint NOT NULL REFERENCES kb_doc,
    version        int NOT NULL,
    space_id       int NOT NULL,
    status         text NOT NULL DEFAULT 'PROCESSING' CONSTRAINT kb_doc_version_status
                   CHECK (status IN ('PROCESSING', 'READY', 'FAILED', 'CANCELED', 'ARCHIVED')),
    revision       text NOT NULL DEFAULT '',         -- as the fetch returned it; '' = look again at the next walk
    raw_path       text,
    raw_sha256     bytea,
    raw_bytes      bigint,
    parsed_path    text,
    text_sha256    bytea,
    title          text,                             -- a title that the content itself names
    parse_result   jsonb NOT NULL DEFAULT '{}',
    chunk_ids      bigint[],                         -- in reading order; no GIN: it would write forty times the bytes
    recipe         text,                             -- parser, chunker and parameters, model
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (doc_id, version)
) WITH (fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX kb_doc_version_raw ON kb_doc_version (space_id, raw_sha256) WHERE raw_sha256 IS NOT NULL;

-- One row per time a version was current; a version may be current twice.
CREATE TABLE kb_publication (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id int NOT NULL,
    doc_id   bigint NOT NULL,
    version  int NOT NULL,
    from_at  timestamptz NOT NULL,
    to_at    timestamptz,
    from_xid xid8 NOT NULL,
    to_xid   xid8
) WITH (fillfactor = 85);
CREATE INDEX kb_publication_doc ON kb_publication (doc_id, from_at);
CREATE UNIQUE INDEX kb_publication_open ON kb_publication (doc_id) WHERE to_at IS NULL;
CREATE INDEX kb_publication_ended ON kb_publication (space_id, to_at) WHERE to_at IS NOT NULL;
