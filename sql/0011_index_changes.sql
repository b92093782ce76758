-- An index row says by itself what it is made of: beside the serving one another may be built, of another kind or model.
ALTER TABLE kb_index
    ADD COLUMN kind             text NOT NULL DEFAULT 'pgvector',
    ADD COLUMN options          jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN embedder         text NOT NULL DEFAULT '',
    ADD COLUMN embedder_options jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN wanted           bigint,               -- chunks its base was made of, while it is being built
    ADD COLUMN served_at        timestamptz,          -- when it began to serve, the last time
    ADD COLUMN keep_until       timestamptz,          -- served before, and kept up to date until then; null: serving, or being built
    ADD COLUMN agreement        real,                 -- share of the ten best that it had in common with the one it replaced
    ADD COLUMN error            text;                 -- why its building stands still
ALTER TABLE kb_answer
    ADD COLUMN mode     text NOT NULL DEFAULT 'vector',  -- how its scores came about
    ADD COLUMN index_id int;                             -- the index that was asked, and so the model; null: before this was kept
UPDATE kb_index i SET kind = s.index_kind, options = s.index_options, embedder = s.embedder, embedder_options = s.embedder_options
FROM kb_space s WHERE s.id = i.space_id;
CREATE UNIQUE INDEX kb_index_building ON kb_index (space_id) WHERE status = 'FOLLOWING' AND keep_until IS NULL;
