"""What must be true of the database at any moment, whatever runs: asked of one snapshot; and what must be true in the end."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from kb_pipeline_tests.fakes import MemoryIndex

# Each finds nothing. ``outside``: the space whose vectors are not in this database; ``never_gone``: what no user ever removes.
ALWAYS = {
    "current, and not in the index": """
        SELECT s.space_id, s.doc_id, s.id FROM kb_space sp
        JOIN kb_index i ON i.space_id = sp.id AND i.status = 'SERVING' AND i.model_id = {model}
        JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current
        WHERE sp.status = 'ACTIVE' AND sp.id <> %(outside)s
          AND NOT EXISTS (SELECT FROM kb_vector_m{model} v WHERE v.shard = sp.shard AND v.vec_id = s.vec_id AND v.space_id = sp.id AND v.index_id = i.id)""",
    "current, and condemned": """
        SELECT s.space_id, s.doc_id, s.id, s.vec_status FROM kb_space sp
        JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current
        WHERE sp.status = 'ACTIVE'
          AND (s.vec_status = 3 OR EXISTS (SELECT FROM vector_tombstone t WHERE t.vec_id = s.vec_id AND t.state = 'E'))""",
    "current, without a cached vector": """
        SELECT c.space_id, c.doc_id, c.id FROM kb_space sp
        JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current
        JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id
        WHERE sp.status = 'ACTIVE' AND NOT EXISTS (SELECT FROM kb_embedding e WHERE e.model_id = sp.model_id
          AND e.content_hash = c.content_hash AND e.vector IS NOT NULL)""",
    "a living version without its rows": """
        SELECT v.space_id, v.doc_id, v.version, v.status FROM kb_space sp
        JOIN kb_doc_version v ON v.space_id = sp.id AND v.status IN ('PROCESSING', 'READY')
        CROSS JOIN LATERAL unnest(v.chunk_ids) u (id)
        WHERE sp.status = 'ACTIVE' AND NOT (EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = sp.shard AND s.id = u.id)
                                            AND EXISTS (SELECT FROM kb_chunk t WHERE t.shard = sp.shard AND t.id = u.id))""",
    "neither old nor new": """
        SELECT d.space_id, d.id, d.current_ver, d.status FROM kb_space sp JOIN kb_doc d ON d.space_id = sp.id
        LEFT JOIN kb_doc_version v ON v.doc_id = d.id AND v.version = d.current_ver AND v.status = 'READY'
        WHERE sp.status = 'ACTIVE'
          AND (SELECT coalesce(array_agg(s.id ORDER BY s.id), '{{}}') FROM kb_chunk_state s
               WHERE s.shard = sp.shard AND s.doc_id = d.id AND s.in_current)
           <> (SELECT coalesce(array_agg(DISTINCT i ORDER BY i), '{{}}') FROM unnest(v.chunk_ids) i)""",
    "the status and the current version disagree": """
        SELECT d.space_id, d.id, d.status, d.current_ver FROM kb_space sp JOIN kb_doc d ON d.space_id = sp.id
        WHERE sp.status = 'ACTIVE' AND (d.status = 'AVAILABLE') <> (d.current_ver > 0)""",
    "two living documents of one name": """
        SELECT source_id, external_id FROM kb_doc WHERE status <> 'DELETED' GROUP BY 1, 2 HAVING count(*) > 1""",
    "two live tasks of one document": """
        SELECT doc_id FROM ingestion_task WHERE status IN ('PENDING', 'PROCESSING', 'FAILED', 'CANCELING')
        GROUP BY doc_id HAVING count(*) > 1""",
    "two publications at one time": """
        SELECT a.doc_id, a.version, b.version FROM kb_publication a JOIN kb_publication b ON b.doc_id = a.doc_id AND b.id > a.id
        WHERE tstzrange(a.from_at, a.to_at) && tstzrange(b.from_at, b.to_at)""",
    "what is current and what is published disagree": """
        SELECT d.space_id, d.id, d.current_ver, p.version FROM kb_space sp JOIN kb_doc d ON d.space_id = sp.id
        LEFT JOIN kb_publication p ON p.doc_id = d.id AND p.to_at IS NULL
        WHERE sp.status = 'ACTIVE' AND d.current_ver <> coalesce(p.version, 0)""",
    "removed, although its source has it": """
        SELECT d.space_id, d.id, d.external_id, d.status, d.hidden_at FROM kb_space sp JOIN kb_doc d ON d.space_id = sp.id
        WHERE sp.status = 'ACTIVE' AND (d.status = 'DELETED' OR d.hidden_at IS NOT NULL) AND d.external_id = ANY(%(never_gone)s)""",
    "rows in a shard that is not the space's": """
        SELECT s.space_id, s.shard, count(*) FROM kb_chunk_state s JOIN kb_space sp ON sp.id = s.space_id
        JOIN kb_shard h ON h.shard = s.shard
        WHERE s.shard NOT IN (sp.shard, coalesce(sp.left_shard, -1)) OR h.state = 'SPARE'
           OR (h.state = 'OWNED' AND h.space_id <> s.space_id) GROUP BY 1, 2""",
    "a shard whose owner is not there": """
        SELECT h.shard, h.space_id, sp.status FROM kb_shard h JOIN kb_space sp ON sp.id = h.space_id
        WHERE h.shard <> sp.shard OR sp.status = 'DELETED'""",
    "vectors of a space that is gone": """
        SELECT v.space_id, count(*) FROM kb_vector_m{model} v JOIN kb_space sp ON sp.id = v.space_id WHERE sp.status = 'DELETED' GROUP BY 1""",
    **{
        f"{table} of a space that is gone": f"""
        SELECT x.space_id, count(*) FROM {table} x JOIN kb_space sp ON sp.id = x.space_id WHERE sp.status = 'DELETED' GROUP BY 1"""
        for table in (
            "kb_doc", "kb_doc_version", "kb_chunk", "kb_chunk_state", "kb_chunk_restated", "kb_publication", "ingestion_task",
            "ingestion_node_log", "vector_tombstone", "vector_retry", "kb_index", "kb_source", "sync_job", "kb_answer",
        )
    },
}  # fmt: skip

CURRENT_OUTSIDE = """
SELECT s.doc_id, s.id, s.vec_id FROM kb_space sp JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current
WHERE sp.id = %(outside)s AND sp.status = 'ACTIVE'
"""
SHOWN = """
SELECT d.external_id, c.content_hash, c.occurrence, coalesce(c.display, c.content), c.title_path
FROM kb_space sp JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current
JOIN kb_chunk c ON c.shard = sp.shard AND c.id = s.id JOIN kb_doc d ON d.id = s.doc_id AND d.status = 'AVAILABLE' AND d.hidden_at IS NULL
WHERE sp.id = %(space)s
"""


class Checker:
    """Looks at everything, over a connection of its own."""

    def __init__(self, url: str, models: Sequence[int], outside: int, index: MemoryIndex, never_gone: Sequence[str]) -> None:
        self.c = psycopg.connect(url, prepare_threshold=None, autocommit=True)
        self.index = index
        self.values = {"outside": outside, "never_gone": list(never_gone)}
        self.statements = {
            (name, m if "{model}" in text else 0): text.format(model=m) for name, text in ALWAYS.items() for m in models
        }

    def close(self) -> None:
        self.c.close()

    def look(self) -> list[str]:
        """One snapshot of the whole state. What is found, in words."""
        found = []
        with self.c.transaction():
            self.c.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for (name, _), statement in self.statements.items():
                if rows := self.c.execute(statement, self.values if "%(" in statement else None).fetchall():
                    found.append(f"{name}: {rows[:3]}")
        return found + self._outside()

    def _outside(self) -> list[str]:
        """The other index is not in the snapshot: missing is what is current before and after it was asked."""
        missing = self._current_outside()
        held = {i for rows in list(self.index.indexes.values()) for i in list(rows)}
        missing = {x for x in missing if x[2] not in held}
        missing &= self._current_outside() if missing else set()
        return [f"current, and not in the index outside: {sorted(missing)[:3]}"] if missing else []

    def _current_outside(self) -> set[tuple[Any, ...]]:
        return set(self.c.execute(CURRENT_OUTSIDE, self.values).fetchall())

    # --- in the end -----------------------------------------------------------------------------------------------------

    def compare(self, space_id: int, fresh_id: int) -> Counter[str]:
        """The space against a fresh load of the same sources, and its index against its rows, by ids."""
        shown, expected = self._shown(space_id), self._shown(fresh_id)
        current = {r[0] for r in self.c.execute(
            "SELECT s.vec_id FROM kb_space sp JOIN kb_chunk_state s ON s.shard = sp.shard AND s.space_id = sp.id AND s.in_current WHERE sp.id = %s",
            [space_id])}  # fmt: skip
        held = self._held(space_id)
        names = Counter(r[0] for r in self.c.execute(
            "SELECT external_id FROM kb_doc WHERE space_id = %s AND status <> 'DELETED'", [space_id]))  # fmt: skip
        unfinished = self.c.execute(
            "SELECT count(*) FROM ingestion_task WHERE space_id = %s AND status NOT IN ('SUCCESS', 'CANCELED')", [space_id]
        ).fetchone()
        return Counter({
            "lost": (expected - shown).total() + len(current - held),
            "ghosts": len({*shown} - {*expected}) + len(held - current),
            "duplicates": sum((shown - expected)[k] for k in expected) + sum(n - 1 for n in names.values()),
            "unfinished": unfinished[0] if unfinished else 0,
        })  # fmt: skip

    def _shown(self, space_id: int) -> Counter[Any]:
        return Counter(
            (name, bytes(h), n, text, tuple(path)) for name, h, n, text, path in self.c.execute(SHOWN, {"space": space_id})
        )

    def _held(self, space_id: int) -> set[Any]:
        if space_id == self.values["outside"]:
            return {i for name, rows in self.index.indexes.items() if name.startswith(f"kb_{space_id}_") for i in rows}
        (model, index) = self.c.execute(
            "SELECT model_id, id FROM kb_index WHERE space_id = %s AND status = 'SERVING'", [space_id]
        ).fetchone() or (0, 0)
        return {r[0] for r in self.c.execute(f"SELECT vec_id FROM kb_vector_m{model} WHERE index_id = %s", [index])}
