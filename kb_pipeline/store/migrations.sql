-- name: lock
SELECT pg_advisory_xact_lock(2, 1)

-- name: create_table
CREATE TABLE IF NOT EXISTS kb_schema (
    version int PRIMARY KEY,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)

-- name: exists
SELECT to_regclass('kb_schema')::text AS found

-- name: newest
SELECT version, sha256 FROM kb_schema ORDER BY version DESC LIMIT 1

-- name: applied
SELECT version, sha256 FROM kb_schema

-- name: record
INSERT INTO kb_schema (version, name, sha256) VALUES (%(version)s, %(name)s, %(sha256)s)
