-- Searching by words on pgvector. An index that does has a vector table of its own, kb_vector_m1w beside kb_vector_m1, so that one of
-- either kind can be built beside the other; its words lie apart, since permissions change and words do not. Leaves are made with the
-- first such index.
CREATE TABLE kb_words (
    shard    int NOT NULL,
    index_id int NOT NULL,
    vec_id   uuid NOT NULL,                          -- in the order of the key a random one: the first rows are a sample
    space_id int NOT NULL,
    chunk_id bigint NOT NULL,
    doc_id   bigint NOT NULL,
    terms    int[] NOT NULL,                         -- a key per occurrence, different ones in each index
    PRIMARY KEY (shard, index_id, vec_id)
) PARTITION BY LIST (shard);
CREATE INDEX kb_words_terms ON kb_words USING gin (terms) WITH (fastupdate = on, gin_pending_list_limit = 4096);

DROP FUNCTION kb_ensure_vector_table(int, int);
DROP FUNCTION kb_add_vector_leaves(int);

CREATE FUNCTION kb_leaf_options(parent text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN CASE parent WHEN 'kb_words' THEN 'fillfactor = 100, toast_tuple_target = 8160' ELSE 'fillfactor = 100' END;

CREATE FUNCTION kb_add_index_leaves(parent text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n int;
BEGIN
    FOR n IN SELECT shard FROM kb_shard ORDER BY shard LOOP
        PERFORM kb_add_leaf(parent, n, kb_leaf_options(parent));
    END LOOP;
END $$;

CREATE FUNCTION kb_ensure_vector_table(model int, dimension int, words boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
DECLARE parent text := 'kb_vector_m' || model || CASE WHEN words THEN 'w' ELSE '' END;
BEGIN
    PERFORM pg_advisory_xact_lock(2, 0);             -- the shard list stands still while leaves are made
    IF to_regclass(parent) IS NULL THEN
        EXECUTE format('CREATE TABLE %I (shard int NOT NULL, vec_id uuid NOT NULL, space_id int NOT NULL, index_id int NOT NULL,'
            ' chunk_id bigint NOT NULL, doc_id bigint NOT NULL, acl_seq bigint NOT NULL, ck int NOT NULL, bucket smallint NOT NULL,'
            ' acl int[] NOT NULL, v halfvec(%s) NOT NULL, PRIMARY KEY (shard, vec_id)) PARTITION BY LIST (shard)', parent, dimension);
        EXECUTE format('CREATE INDEX %I ON %I (shard, space_id, index_id)', parent || '_space', parent);
        EXECUTE format('CREATE INDEX %I ON %I USING gin (acl) WITH (fastupdate = off)', parent || '_acl', parent);
    END IF;
    PERFORM kb_add_index_leaves(parent);
    IF words THEN PERFORM kb_add_index_leaves('kb_words'); END IF;
END $$;

-- Parents of the leaves that pgvector has in each shard.
CREATE FUNCTION kb_index_parents() RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT c.relname::text FROM pg_class c WHERE c.relkind = 'p' AND pg_table_is_visible(c.oid)
       AND (c.relname ~ '^kb_vector_m[0-9]+w?$' OR c.relname = 'kb_words' AND EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid))
    ORDER BY c.oid
$$;

CREATE OR REPLACE FUNCTION kb_ensure_spare_shards(wanted int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n int; have int; parent text;
BEGIN
    PERFORM pg_advisory_xact_lock(2, 0);
    SELECT count(*) INTO have FROM kb_shard WHERE state = 'SPARE';
    SELECT coalesce(max(shard), -1) INTO n FROM kb_shard;
    FOR n IN n + 1 .. n + wanted - have LOOP
        PERFORM kb_add_leaf('kb_chunk', n, 'fillfactor = 100, autovacuum_vacuum_insert_scale_factor = 0.05');
        PERFORM kb_add_leaf('kb_chunk_state', n, 'fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0');
        INSERT INTO kb_shard (shard, state) VALUES (n, 'SPARE');
        FOR parent IN SELECT kb_index_parents() LOOP
            PERFORM kb_add_leaf(parent, n, kb_leaf_options(parent));
        END LOOP;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION kb_truncate_shard(n int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE leaves text;
BEGIN
    SELECT string_agg(format('%I', c.relname), ', ') INTO leaves FROM pg_class c JOIN pg_inherits h ON h.inhrelid = c.oid JOIN pg_class p ON p.oid = h.inhparent
    WHERE (p.relname IN ('kb_chunk', 'kb_chunk_state') OR p.relname IN (SELECT kb_index_parents())) AND c.relname = p.relname || '_' || n;
    EXECUTE 'TRUNCATE ' || leaves;
END $$;
