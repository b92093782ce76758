"""The statements of kb_words on the oldest and on the newest server, with and without pgvector."""

import json
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from kb_pipeline.indexes import pgvector
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Connection, Pool
from kb_pipeline.terms import document_keys, question_keys

SHARD, WHERE = 3, {"shard": 3, "space": 5, "index": 9}
NAMES = {"words": sql.Identifier(f"kb_words_{SHARD}"), "table": sql.Identifier("stand_in")}
STAND_IN = "CREATE TEMP TABLE stand_in (shard int, vec_id uuid, index_id int, space_id int, acl int[]) ON COMMIT DROP"


@pytest.fixture
def c(pool: Pool) -> Any:
    """In a transaction that is rolled back."""
    with pool.connection() as opened:
        opened.execute("SELECT kb_add_index_leaves('kb_words')")
        opened.execute(STAND_IN)
        yield opened
        opened.rollback()


def put(c: Connection, texts: list[str]) -> None:
    c.execute(pgvector.SQL.stage_words)
    with c.cursor().copy(pgvector.SQL.copy_words) as copy:
        copy.set_types(pgvector._WORD_COLUMNS)
        for n, text in enumerate(texts):
            copy.write_row((UUID(int=n << 112), n, n, document_keys(text, "", WHERE["index"])))
    c.execute(pgvector.SQL.upsert_words, WHERE)
    c.execute(pgvector.SQL.word_settings)


def asked(question: str) -> dict[str, Any]:
    keys = question_keys(question, WHERE["index"])
    given = {"keys": keys, "weights": [1.0] * len(keys), "rare": keys[:1], "one": keys[1:], "other": keys[1:]}
    return {**WHERE, **given, "acl": None, "length": 5.0, "most": 100, "sample": 400, "k": 10}


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(n for child in plan.get("Plans", []) for n in nodes(child))]


@pytest.mark.parametrize("statement", ["frequencies", "keyword"])
def test_matches_are_reached_through_their_terms_in_one_leaf(c: Connection, statement: str) -> None:
    put(c, [f"text {n} of 数据备份" for n in range(2000)])
    query = sql.SQL(getattr(pgvector.SQL, statement)).format(**NAMES)
    explained = c.execute(sql.SQL("EXPLAIN (FORMAT JSON) ") + query, asked("text 77 数据")).fetchone()
    found = nodes((json.loads(explained[0]) if isinstance(explained[0], str) else explained[0])[0]["Plan"])  # type: ignore[index]
    reached = [n for n in found if n.get("Alias", "").startswith("w")]
    assert len(reached) == (1 if statement == "frequencies" else 2)
    assert {n["Plans"][0]["Index Name"] for n in reached} == {f"kb_words_{SHARD}_terms_idx"}
    assert {n["Relation Name"] for n in found if "Relation Name" in n} <= {f"kb_words_{SHARD}", "stand_in"}


def test_words_are_counted_ranked_replaced_and_deleted(c: Connection) -> None:
    put(c, ["alpha beta", "alpha", "gamma 备份", "alpha alpha"])
    put(c, ["alpha beta", "delta"])
    counted = c.execute(sql.SQL(pgvector.SQL.frequencies).format(**NAMES), asked("alpha beta zebra 备份")).fetchall()
    assert [r.counted for r in counted] == [2, 1, 0, 1]
    assert [r.sampled for r in counted] == [2, 1, 0, 1]
    assert {(r.n, float(r.length)) for r in counted} == {(4, 2.25)}
    ranked = c.execute(sql.SQL(pgvector.SQL.keyword).format(**NAMES), asked("beta alpha")).fetchall()
    assert [r.chunk_id for r in ranked] == [0, 3]
    c.execute(pgvector.SQL.delete_words, {**WHERE, "ids": [UUID(int=0)]})
    ranked = c.execute(sql.SQL(pgvector.SQL.keyword).format(**NAMES), asked("beta alpha")).fetchall()
    assert [r.chunk_id for r in ranked] == [3]


def test_a_sample_tells_how_many_there_are(c: Connection) -> None:
    keys = question_keys("same", WHERE["index"])
    c.execute(
        "INSERT INTO kb_words SELECT 3, 9, kb_vec_id(n, md5(n::text)::uuid, 0), 5, n, n, %s FROM generate_series(1, 5000) n",
        [keys],
    )
    c.execute(pgvector.SQL.word_settings)
    (row,) = c.execute(sql.SQL(pgvector.SQL.frequencies).format(**NAMES), asked("same")).fetchall()
    assert (row.counted, row.n, row.sampled) == (100, 400, 400)
    assert 4000 < row.n / float(row.part) < 6000


def test_words_move_to_another_shard_with_their_space_and_the_old_ones_are_cleared(c: Connection) -> None:
    c.execute("INSERT INTO kb_model (id, fingerprint, dimension) OVERRIDING SYSTEM VALUE VALUES (900, 'm', 8)")
    made = "INSERT INTO kb_space (key, name, shard, model_id, embedder, index_kind) VALUES ('moving', 'moving', 3, 900, 'x', 'pgvector') RETURNING id"
    space = c.execute(made).fetchone().id  # type: ignore[union-attr]
    index = "INSERT INTO kb_index (space_id, model_id, name, status) VALUES (%s, 900, 'kb_x', 'SERVING') RETURNING id"
    number = c.execute(index, [space]).fetchone().id  # type: ignore[union-attr]
    put(c, ["alpha"])
    c.execute(
        "INSERT INTO kb_words SELECT 3, %s, vec_id, %s, chunk_id, doc_id, terms FROM kb_words WHERE space_id = 5",
        [number, space],
    )
    where = {"old": 3, "new": 4, "space": space, "limit": 10}
    c.execute(spaces.SQL.copy_words, where)
    assert c.execute(spaces.SQL.clear_words, where).rowcount == 1
    left = c.execute("SELECT shard, space_id FROM kb_words ORDER BY shard").fetchall()
    assert [tuple(r) for r in left] == [(3, 5), (4, space)]
    c.execute("SELECT kb_truncate_shard(4)")
    assert c.execute("SELECT count(*) AS n FROM kb_words").fetchone().n == 1  # type: ignore[union-attr]
