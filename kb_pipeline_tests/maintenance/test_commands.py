"""``kb reconcile``, ``kb purge``, ``kb gc`` as people and scripts see them."""

from pathlib import Path
from uuid import uuid4

import pytest

from kb_pipeline.store.database import Pool, transaction
from kb_pipeline_tests.cli.conftest import Kb

ZERO = {"missing": 0, "orphaned": 0, "wrong": 0, "repaired": 0}


def _break(pool: Pool, key: str, statement: str) -> str:
    """Run ``statement`` on the space's vector table; a vector id that it returns."""
    with transaction(pool) as c:
        space = c.execute("SELECT id, model_id FROM kb_space WHERE key = %s", [key]).fetchone()
        assert space is not None
        row = c.execute(
            statement.format(table=f"kb_vector_m{space.model_id}"),  # type: ignore[arg-type]
            {"space": space.id, "fresh": uuid4()},
        ).fetchone()
        assert row is not None
        return str(row.vec_id)


LOSE = "DELETE FROM {table} WHERE vec_id = (SELECT min(vec_id::text)::uuid FROM {table} WHERE space_id = %(space)s) RETURNING vec_id"
ADD = """INSERT INTO {table} SELECT shard, %(fresh)s, space_id, index_id, 0, 0, 0, 1, kb_bucket(%(fresh)s), acl, v
         FROM {table} WHERE space_id = %(space)s LIMIT 1 RETURNING vec_id"""


@pytest.fixture(autouse=True)
def pgvector(server: object) -> None:
    if not getattr(server, "has_pgvector", False):
        pytest.skip("this server has no pgvector")


def test_differences_are_told_repaired_and_gone(kb: Kb, loaded: str, pool: Pool) -> None:
    clean = kb.json("reconcile", loaded)
    assert {k: clean[k] for k in ZERO} == ZERO
    assert clean["chunks"] == clean["vectors"] == 2
    lost, foreign = _break(pool, loaded, LOSE), _break(pool, loaded, ADD)
    told = kb.json("reconcile", loaded, "--report-only", code=3)
    assert {k: told[k] for k in ZERO} == {"missing": 1, "orphaned": 1, "wrong": 0, "repaired": 0}
    assert [s["vec_id"] for s in told["samples"]["missing"]] == [lost]
    assert [s["vec_id"] for s in told["samples"]["orphaned"]] == [foreign]
    assert told["samples"]["missing"][0]["external_id"] in ("leave.md", "年假.md")
    assert kb.json("reconcile", loaded)["repaired"] == 2
    again = kb.json("reconcile", loaded)
    assert {k: again[k] for k in ZERO} == ZERO and again["waiting"] == 1
    assert kb.json("gc", loaded) == {"space": loaded, "vectors": 1, "waiting": 0, "compacted": False}
    assert kb.json("reconcile", loaded)["vectors"] == 2


def test_a_person_is_told_what_differs_and_what_to_do(kb: Kb, loaded: str, pool: Pool) -> None:
    assert "They are equal" in kb("reconcile", loaded).out
    lost = _break(pool, loaded, LOSE)
    told = kb("reconcile", loaded, "--report-only")
    assert told.code == 3
    assert "1 missing, 0 orphaned, 0 wrong; 0 repaired" in told.out and lost in told.out
    assert f"1 difference left: to repair, kb reconcile {loaded}" in told.err
    assert "1 repaired" in kb("reconcile", loaded).out
    foreign = _break(pool, loaded, ADD)
    told = kb("reconcile", loaded)
    assert told.code == 0 and foreign in told.out
    assert f"kb gc {loaded}" in told.err
    assert "1 vector erased" in kb("gc", loaded).out
    assert "Nothing to erase" in kb("gc", loaded).out


def test_purge_counts_what_it_removed(kb: Kb, loaded: str, folder: Path) -> None:
    for n in range(3):
        (folder / "leave.md").write_text(
            f"# Leave\n\nNew employees have {n} days of leave, this time for certain.\n", encoding="utf-8"
        )
        assert kb("sync", loaded).code == 0
    assert kb("search", loaded, "leave").code == 0
    nothing = kb("purge", loaded)
    assert nothing.code == 0 and "Nothing to purge" in nothing.out
    kb("space", "set", loaded, "retain=2")
    found = kb.json("purge", loaded, "--keep-days", "0")
    assert (found["space"], found["versions"], found["chunks"], found["objects"], found["answers"]) == (loaded, 2, 2, 4, 1)
    assert {"vectors", "embeddings", "logs"} <= set(found)
    kb("search", loaded, "leave")
    assert "1 answer forgotten" in kb("purge", loaded, "--keep-days", "0").out


@pytest.mark.parametrize("command", ["reconcile", "purge", "gc"])
def test_an_unknown_space_is_wrong_usage(kb: Kb, command: str) -> None:
    ran = kb(command, "nowhere")
    assert ran.code == 2
    assert "nowhere" in ran.err


def test_fewer_than_no_days_are_wrong_usage(kb: Kb) -> None:
    assert kb("purge", "any", "--keep-days", "-1").code == 2
