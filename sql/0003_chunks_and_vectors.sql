-- Chunk text (insert-only) and its narrow state, partitioned by shard: no foreign keys, no DEFAULT partition, no DETACH, ever.

CREATE SEQUENCE kb_chunk_id;

CREATE TABLE kb_chunk (
    shard        int NOT NULL,
    id           bigint NOT NULL,
    space_id     int NOT NULL,
    doc_id       bigint NOT NULL,
    content_hash bytea NOT NULL,                     -- sha256 of exactly what is embedded: prefix and content
    occurrence   int NOT NULL,
    tokens       int NOT NULL,
    page_from    int NOT NULL DEFAULT 0,
    page_to      int NOT NULL DEFAULT 0,
    title_path   text[] NOT NULL DEFAULT '{}',
    prefix       text NOT NULL DEFAULT '',
    content      text NOT NULL,
    display      text,                               -- the slice with its links; null = the content
    PRIMARY KEY (shard, id)
) PARTITION BY LIST (shard);

CREATE TABLE kb_chunk_state (
    shard       int NOT NULL,
    id          bigint NOT NULL DEFAULT nextval('kb_chunk_id'),
    space_id    int NOT NULL,
    doc_id      bigint NOT NULL,
    hash        uuid NOT NULL,                       -- the first 16 bytes of content_hash
    occurrence  int NOT NULL,
    vec_id      uuid NOT NULL,
    incarnation int NOT NULL DEFAULT 0,
    ck          int NOT NULL,                        -- checksum of the index entry: first 4 bytes of sha256(vec_id, acl)
    bucket      smallint NOT NULL,                   -- first 12 bits of vec_id
    payload     int NOT NULL,                        -- checksum of path, pages and display: they may change, the hash not
    acl_seq     bigint NOT NULL DEFAULT 0,
    acl         int[] NOT NULL DEFAULT '{}',         -- interned principals, a filter hint; empty = everybody
    vec_status  smallint NOT NULL DEFAULT 0,         -- 0 waiting, 1 indexed, 3 being erased
    in_current  boolean NOT NULL DEFAULT false,
    PRIMARY KEY (shard, id),
    UNIQUE (shard, doc_id, hash, occurrence)
) PARTITION BY LIST (shard);

-- New path, pages or display of a chunk whose text stayed, until the version that brings them is published.
CREATE TABLE kb_chunk_restated (
    doc_id     bigint NOT NULL,
    version    int NOT NULL,
    chunk_id   bigint NOT NULL,
    space_id   int NOT NULL,
    payload    int NOT NULL,
    page_from  int NOT NULL,
    page_to    int NOT NULL,
    title_path text[] NOT NULL,
    display    text,
    PRIMARY KEY (doc_id, version, chunk_id)
);

CREATE TABLE vector_retry (
    shard    int NOT NULL,
    chunk_id bigint NOT NULL,
    space_id int NOT NULL,
    attempts int NOT NULL DEFAULT 0,
    next_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    error    text NOT NULL,
    PRIMARY KEY (shard, chunk_id)
);

-- The durable cache: a text is embedded once per model, in any document, version or space. A null vector is a claim.
CREATE TABLE kb_embedding (
    model_id     int NOT NULL,
    content_hash bytea NOT NULL,
    vector       bytea,                              -- float16, little-endian, L2-normalised
    token        bigint NOT NULL DEFAULT 0,
    owner        text,                               -- of a claim: nobody waits for a process that is known to be dead
    lease_until  timestamptz,
    last_used    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model_id, content_hash)
) PARTITION BY LIST (model_id);
CREATE SEQUENCE kb_embedding_token;

CREATE TABLE kb_index (
    id         int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    space_id   int NOT NULL REFERENCES kb_space,
    model_id   int NOT NULL REFERENCES kb_model,
    name       text NOT NULL,                        -- holds the id, so that a name is never used twice
    status     text NOT NULL CONSTRAINT kb_index_status CHECK (status IN ('FOLLOWING', 'SERVING', 'DROPPING', 'DROPPED')),
    base_done  boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX kb_index_serving ON kb_index (space_id) WHERE status = 'SERVING';

CREATE SEQUENCE kb_todo_seq;
CREATE TABLE kb_index_todo (
    index_id int NOT NULL REFERENCES kb_index,
    doc_id   bigint NOT NULL,
    chunk_id bigint NOT NULL DEFAULT 0,              -- 0: the ACL of the document's current chunks
    seq      bigint NOT NULL DEFAULT nextval('kb_todo_seq'),
    PRIMARY KEY (index_id, doc_id, chunk_id)
);

CREATE TABLE vector_tombstone (
    index_id   int NOT NULL REFERENCES kb_index,
    vec_id     uuid NOT NULL,
    space_id   int NOT NULL,
    doc_id     bigint NOT NULL,
    chunk_id   bigint NOT NULL,
    state      text NOT NULL CONSTRAINT vector_tombstone_state CHECK (state IN ('W', 'E')),  -- W: ask again, E: dead for good
    not_before timestamptz NOT NULL DEFAULT clock_timestamp(),
    tries      int NOT NULL DEFAULT 0,
    PRIMARY KEY (index_id, vec_id)
) WITH (fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX vector_tombstone_space ON vector_tombstone (space_id, state, not_before);

-- A vector's name is bound to its row, text and incarnation: once erased it is never used again.
CREATE FUNCTION kb_vec_id(chunk_id bigint, hash uuid, incarnation int) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN encode(substring(sha256(convert_to(chunk_id || ':' || hash || ':' || incarnation, 'UTF8')) FROM 1 FOR 16), 'hex')::uuid;

CREATE FUNCTION kb_checksum(vec_id uuid, acl int[]) RETURNS int
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ('x' || encode(substring(sha256(convert_to(vec_id || ':' || acl::text, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::int;

CREATE FUNCTION kb_bucket(vec_id uuid) RETURNS smallint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (get_byte(uuid_send(vec_id), 0) * 16 + get_byte(uuid_send(vec_id), 1) / 16)::smallint;

-- A leaf is made apart and attached: CREATE .. PARTITION OF would lock the parent against everybody.
CREATE FUNCTION kb_add_leaf(parent text, shard int, options text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE leaf text := parent || '_' || shard;
BEGIN
    IF to_regclass(leaf) IS NOT NULL THEN RETURN; END IF;
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL) WITH (%s)', leaf, parent, options);
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I CHECK (shard = %s)', leaf, leaf || '_shard', shard);
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES IN (%s)', parent, leaf, shard);
END $$;

-- One vector table per model, since a column has one dimension. Needs the extension "vector" (0.7 or later) when called.
CREATE FUNCTION kb_add_vector_leaves(model int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n int;
BEGIN
    FOR n IN SELECT shard FROM kb_shard ORDER BY shard LOOP
        PERFORM kb_add_leaf('kb_vector_m' || model, n, 'fillfactor = 100');
    END LOOP;
END $$;

CREATE FUNCTION kb_ensure_vector_table(model int, dimension int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE parent text := 'kb_vector_m' || model;
BEGIN
    PERFORM pg_advisory_xact_lock(2, 0);             -- the shard list stands still while leaves are made
    IF to_regclass(parent) IS NULL THEN
        EXECUTE format('CREATE TABLE %I (shard int NOT NULL, vec_id uuid NOT NULL, space_id int NOT NULL, index_id int NOT NULL,'
            ' chunk_id bigint NOT NULL, doc_id bigint NOT NULL, acl_seq bigint NOT NULL, ck int NOT NULL, bucket smallint NOT NULL,'
            ' acl int[] NOT NULL, v halfvec(%s) NOT NULL, PRIMARY KEY (shard, vec_id)) PARTITION BY LIST (shard)', parent, dimension);
        EXECUTE format('CREATE INDEX %I ON %I (shard, space_id, index_id)', parent || '_space', parent);
        EXECUTE format('CREATE INDEX %I ON %I USING gin (acl) WITH (fastupdate = off)', parent || '_acl', parent);
    END IF;
    PERFORM kb_add_vector_leaves(model);
END $$;

-- Make sure that at least "wanted" spare shards exist, in every partitioned table.
CREATE FUNCTION kb_ensure_spare_shards(wanted int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n int; have int; model int;
BEGIN
    PERFORM pg_advisory_xact_lock(2, 0);
    SELECT count(*) INTO have FROM kb_shard WHERE state = 'SPARE';
    SELECT coalesce(max(shard), -1) INTO n FROM kb_shard;
    FOR n IN n + 1 .. n + wanted - have LOOP
        PERFORM kb_add_leaf('kb_chunk', n, 'fillfactor = 100, autovacuum_vacuum_insert_scale_factor = 0.05');
        PERFORM kb_add_leaf('kb_chunk_state', n, 'fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0');
        INSERT INTO kb_shard (shard, state) VALUES (n, 'SPARE');
        FOR model IN SELECT id FROM kb_model LOOP
            IF to_regclass('kb_vector_m' || model) IS NOT NULL THEN
                PERFORM kb_add_leaf('kb_vector_m' || model, n, 'fillfactor = 100');
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- The row of a model, with its partition of the cache.
CREATE FUNCTION kb_ensure_model(fp text, dim int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE model int;
BEGIN
    SELECT id INTO model FROM kb_model WHERE fingerprint = fp;
    IF model IS NOT NULL THEN RETURN model; END IF;
    PERFORM pg_advisory_xact_lock(2, 0);
    SELECT id INTO model FROM kb_model WHERE fingerprint = fp;
    IF model IS NOT NULL THEN RETURN model; END IF;
    INSERT INTO kb_model (fingerprint, dimension) VALUES (fp, dim) RETURNING id INTO model;
    EXECUTE format('CREATE TABLE %I (LIKE kb_embedding INCLUDING ALL)', 'kb_embedding_m' || model);
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I CHECK (model_id = %s)', 'kb_embedding_m' || model, 'kb_embedding_m' || model || '_model', model);
    EXECUTE format('ALTER TABLE kb_embedding ATTACH PARTITION %I FOR VALUES IN (%s)', 'kb_embedding_m' || model, model);
    RETURN model;
END $$;

-- Shards 0 to 31 are shared by small spaces; eight more lie ready for spaces that grow out of them.
SELECT kb_ensure_spare_shards(32);
UPDATE kb_shard SET state = 'SHARED';
SELECT kb_ensure_spare_shards(8);

-- Empties a space's own leaves. The caller holds the lock of its kb_shard row: TRUNCATE has no WHERE.
CREATE FUNCTION kb_truncate_shard(n int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE leaves text;
BEGIN
    SELECT string_agg(format('%I', c.relname), ', ') INTO leaves FROM pg_class c JOIN pg_inherits h ON h.inhrelid = c.oid JOIN pg_class p ON p.oid = h.inhparent
    WHERE (p.relname IN ('kb_chunk', 'kb_chunk_state') OR p.relname LIKE 'kb\_vector\_m%') AND c.relname = p.relname || '_' || n;
    EXECUTE 'TRUNCATE ' || leaves;
END $$;
