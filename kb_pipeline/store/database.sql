-- name: bound_waits
SELECT set_config('lock_timeout', %(lock)s, true) AS lock, set_config('statement_timeout', %(statement)s, true) AS statement
