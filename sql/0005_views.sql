-- For people: what a version consists of, and what is current. Both read every shard; programs carry the shard.

CREATE VIEW kb_version_chunk AS
SELECT v.space_id, v.doc_id, v.version, u.seq, c.id AS chunk_id, c.title_path, c.page_from, c.page_to, c.tokens, c.content
FROM kb_doc_version v
CROSS JOIN LATERAL unnest(v.chunk_ids) WITH ORDINALITY u (chunk_id, seq)
JOIN kb_space s ON s.id = v.space_id
JOIN kb_chunk c ON c.shard = s.shard AND c.id = u.chunk_id;

CREATE VIEW kb_current_chunk AS
SELECT s.key AS space, d.id AS doc_id, d.external_id, d.title, d.current_ver AS version, c.id AS chunk_id, c.title_path, c.content, t.vec_id, t.vec_status
FROM kb_space s
JOIN kb_chunk_state t ON t.shard = s.shard AND t.space_id = s.id AND t.in_current
JOIN kb_chunk c ON c.shard = s.shard AND c.id = t.id
JOIN kb_doc d ON d.id = t.doc_id;
