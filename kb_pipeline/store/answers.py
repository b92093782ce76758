"""The join that decides what a search may show, and the log of what was shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from kb_pipeline.errors import Misconfigured
from kb_pipeline.model import Candidate, IndexRef, Json, Mode
from kb_pipeline.statements import load_statements
from kb_pipeline.store.database import Connection, one

SQL = load_statements(__package__, "answers.sql")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a search begins: where the space's rows are, when it was asked, and what serves it by which model."""

    shard: int
    at: datetime
    fingerprint: str
    embedder: str
    embedder_options: Json
    ref: IndexRef


def standing(c: Connection, space_id: int) -> Standing | None:
    r = c.execute(SQL.standing, {"space": space_id}).fetchone()
    return Standing(r.shard, r.at, r.fingerprint, r.embedder, r.embedder_options, IndexRef(*r[5:])) if r else None


@dataclass(frozen=True, slots=True)
class Joined:
    """One snapshot's view of the candidates: those that may be shown, and where it was taken."""

    rows: list[Any]
    shard: int
    snapshot: str
    republished: bool  # a candidate's document was published since the search began: some of its chunks may have been missed


def join_candidates(
    c: Connection,
    space_id: int,
    standing: Standing,
    candidates: Sequence[Candidate],
    principals: Sequence[str],
    k: int,
) -> Joined:
    """The best ``k`` rows of current, visible, permitted chunks, best first. An id that is not the chunk's own is a ghost."""
    values = {
        "space": space_id,
        "shard": standing.shard,
        "since": standing.at,
        "vectors": [x.vec_id for x in candidates],
        "chunks": [x.chunk_id for x in candidates],
        "docs": [x.doc_id for x in candidates],
        "scores": [x.score for x in candidates],
        "principals": list(principals),
        "k": k,
    }
    rows = c.execute(join_statement(standing.shard), values).fetchall()
    head = rows[0]
    return Joined([r for r in rows if r.chunk_id is not None], head.shard, str(head.snapshot), head.republished)


def join_statement(shard: int) -> sql.Composed:
    """With its leaves named: through their parents the planner would open and lock five relations more."""
    state, text = (sql.Identifier(f"{table}_{shard}") for table in ("kb_chunk_state", "kb_chunk"))
    return sql.SQL(SQL.join).format(state=state, text=text)


def log_answer(
    c: Connection,
    standing: Standing,
    question: str,
    principals: Sequence[str],
    k: int,
    mode: Mode,
    joined: Joined,
    hits: Sequence[Any],
) -> int:
    values = {
        "space": standing.ref.space_id,
        "index": standing.ref.index_id,
        "question": question,
        "principals": list(principals),
        "k": k,
        "mode": mode,
        "snapshot": joined.snapshot,
        "chunks": [h.chunk_id for h in hits],
        "scores": [h.score for h in hits],
    }
    return int(one(c.execute(SQL.log, values)).id)


def set_acl(c: Connection, doc_ids: Sequence[int], clauses: Sequence[Sequence[str]] | None) -> None:
    """New own ACL of documents that the caller has locked; holds for searches at once."""
    c.execute(SQL.set_acl, {"docs": list(doc_ids), "acl": None if clauses is None else Jsonb([list(x) for x in clauses])})


@dataclass(frozen=True, slots=True)
class Logged:
    """A row of the answer log, best hit first. ``snapshot`` is None where the row was restored from another server's past."""

    id: int
    space_id: int
    question: str
    principals: list[str]
    k: int
    at: datetime
    snapshot: str | None
    chunk_ids: list[int]
    scores: list[float]
    mode: str
    index_id: int | None


def get_answer(c: Connection, answer_id: int) -> Logged:
    """Raises Misconfigured if there is none."""
    row = c.execute(SQL.get, {"answer": answer_id}).fetchone()
    if row is None:
        raise Misconfigured(
            f"no answer {answer_id}: kb search --json tells the id; answers are kept for a time, and only with KB_ANSWER_LOG",
            code="no_answer",
        )
    return Logged(*row)
