-- name: server
SELECT current_setting('server_version_num')::int AS version,
       (SELECT extversion FROM pg_extension WHERE extname = 'vector') AS vector,
       (SELECT default_version FROM pg_available_extensions WHERE name = 'vector') AS installable,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may_create,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR (has_database_privilege(current_database(), 'CREATE')
         AND EXISTS (SELECT FROM pg_available_extension_versions WHERE name = 'vector' AND trusted)) AS may_extend,
       to_regclass('kb_schema') IS NOT NULL AS migrated,
       to_regclass('kb_source') IS NOT NULL AS filled

-- name: schema
SELECT coalesce(max(version), 0) AS version FROM kb_schema

-- name: references
SELECT 'source ' || s.key || '/' || k.name AS owner, o.value FROM kb_source k
JOIN kb_space s ON s.id = k.space_id AND s.status = 'ACTIVE' CROSS JOIN LATERAL jsonb_each_text(k.config) o
WHERE k.status = 'ACTIVE' AND o.value ~ '^(env|file):'
UNION ALL
SELECT 'embedder of space ' || s.key, o.value FROM kb_space s CROSS JOIN LATERAL jsonb_each_text(s.embedder_options) o
WHERE s.status = 'ACTIVE' AND o.value ~ '^(env|file):'
ORDER BY 1, 2
