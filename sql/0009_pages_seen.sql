-- What a walk has seen: a row a page. With a row a document a walk over 500,000 unchanged ones wrote 174 MB of WAL.
ALTER TABLE sync_seen RENAME TO sync_seen_single;
CREATE TABLE sync_seen (
    walk_id bigint NOT NULL,
    doc_ids bigint[] NOT NULL                -- a document may stand in several pages of a walk
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX sync_seen_walk ON sync_seen (walk_id);
INSERT INTO sync_seen (walk_id, doc_ids) SELECT walk_id, array_agg(doc_id) FROM sync_seen_single GROUP BY walk_id, doc_id / 1000;
DROP TABLE sync_seen_single;
