"""Words in PostgreSQL: BM25 of what shares a rare term, and rows that come and go with their vectors."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import sql

from kb_pipeline.errors import Rejected
from kb_pipeline.indexes import pgvector
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.maintenance.promotion import promote_if_large
from kb_pipeline.model import Candidate, VectorEntry
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.terms import document_keys, question_keys, weighed
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.indexes.bench import Bench, bench_maker, entries, vec_id, vectors


@pytest.fixture
def make_bench(make_app: Callable[..., FakedApp], request: pytest.FixtureRequest) -> Callable[[], Bench]:
    return bench_maker("pgvector", make_app(), request, keyword=True)


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


def worded(
    texts: Sequence[str], title: str = "", acl: Callable[[int], tuple[int, ...]] = lambda _: (), first: int = 0
) -> list[VectorEntry]:
    made = entries(vectors(first + len(texts)), acl)[first:]
    return [replace(e, text=t, title=title) for e, t in zip(made, texts, strict=True)]


def ask(bench: Bench, question: str, k: int = 10, acl: Sequence[int] | None = None) -> list[Candidate]:
    found: list[Candidate] = bench.index.keyword(bench.ref, question, k, acl)  # type: ignore[attr-defined]
    return found


def chunks(bench: Bench, question: str, k: int = 10, acl: Sequence[int] | None = None) -> list[int]:
    return [x.chunk_id for x in ask(bench, question, k, acl)]


def rows(bench: Bench, statement: str = "SELECT count(*) AS n FROM kb_words WHERE space_id = %(space)s") -> int:
    with transaction(bench.app.pool) as c:
        return int(c.execute(statement, {"space": bench.space.id, "index": bench.ref.index_id}).fetchone().n)  # type: ignore[union-attr]


def bm25(bench: Bench, texts: Sequence[str], question: str) -> dict[int, float]:
    """By the book, over everything."""
    bags = [Counter(document_keys(t, "", bench.ref.index_id)) for t in texts]
    length = sum(b.total() for b in bags) / len(bags)
    scores: dict[int, float] = {}
    for key in question_keys(question, bench.ref.index_id):
        having = sum(key in b for b in bags)
        for n, b in enumerate(bags):
            if key in b:
                idf = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
                scores[n] = scores.get(n, 0) + idf * b[key] / (b[key] + 1.2 * (0.25 + 0.75 * b.total() / length))
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_the_score_is_bm25_over_the_whole_index(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    words = [*(f"word{n}" for n in range(30)), "KB-2041", "备份", "恢复备份", "数据库", "v2.3.1"]
    weights = [1 / (n + 1) for n in range(len(words))]
    texts = [" ".join(rng.choices(words, weights, k=rng.randint(1, 40))) for _ in range(300)]
    bench.index.upsert(bench.ref, worded(texts))
    for _ in range(10):
        question = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        scores = bm25(bench, texts, question)
        found = ask(bench, question, 300)
        assert {x.chunk_id: pytest.approx(x.score) for x in found} == scores
        assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)


def test_a_rare_product_term_is_found_first_among_thousands_that_have_all_the_rest(bench: Bench) -> None:
    common = "how to restore the backup of a cluster 如何恢复集群的备份"
    texts = [common] * 2500
    texts[1700] = "KB-2041"
    bench.index.upsert(bench.ref, worded(texts))
    for question in ("KB-2041", f"{common} KB-2041", f"KB-2041 {common}"):
        assert chunks(bench, question)[0] == 1700
    assert len(ask(bench, "KB-2041 backup", 2400)) == 2400


@pytest.mark.parametrize("matches", [5, 20])
def test_what_is_frequent_fills_the_answer_and_both_words_go_before_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, matches: int
) -> None:
    """Only a part of what has one frequent word is looked at, and that with both is part of it."""
    monkeypatch.setattr(pgvector, "MATCHES", matches)
    texts = ["alpha filler"] * 100 + ["beta filler"] * 100 + ["alpha beta filler"] * 3
    bench.index.upsert(bench.ref, worded(texts))
    found = chunks(bench, "alpha beta", 5)
    assert set(found[:3]) == {200, 201, 202} and len(found) == 5
    assert len(ask(bench, "alpha", 60)) == 60
    assert len(ask(bench, "filler alpha beta zebra", 203)) == 203


def test_no_more_is_looked_at_than_the_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgvector, "MATCHES", 30)
    words = [f"w{'x' * n}" for n in range(20)]
    rng = random.Random(1)
    bench.index.upsert(bench.ref, worded([" ".join(rng.sample(words, 5)) for _ in range(1000)]))
    monkeypatch.setattr(pgvector.SQL, "keyword", pgvector.SQL.keyword.replace("LIMIT %(k)s", "LIMIT 100000 + 0 * %(k)s"))
    assert 30 <= len(ask(bench, " ".join(words), 5)) <= 2 * 30  # every word is in 250
    estimated = replace(weighed([], 0.0, 1, 1), keys=question_keys(" ".join(words), bench.ref.index_id))
    everything = replace(estimated, weights=[1.0] * 20, rare=estimated.keys)
    monkeypatch.setattr(pgvector, "weighed", lambda *_: everything)  # estimated from a sample, there seemed to be less
    assert len(ask(bench, " ".join(words), 5)) == 30


def test_frequencies_of_a_large_index_are_estimated_well_enough_to_tell_rare_from_frequent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector, "MATCHES", 50)
    texts = [f"everywhere {'often' if n % 3 == 0 else 'else'}" for n in range(2000)]
    bench.index.upsert(bench.ref, worded(texts))
    found = ask(bench, "everywhere often", 20)
    assert all(x.chunk_id % 3 == 0 for x in found)
    often = ask(bench, "often", 1)[0].score
    assert often == pytest.approx(math.log(3) * 1 / (1 + 1.2), rel=0.3)  # a third of them
    assert ask(bench, "everywhere", 1)[0].score < 0.02


def test_a_short_text_goes_before_a_long_one_and_the_title_counts(bench: Bench) -> None:
    long = "backup " + " ".join(f"filler{n}" for n in range(100))
    bench.index.upsert(bench.ref, [*worded([long, "backup policy"]), *worded(["policy of this"], "Backup", first=2)])
    assert chunks(bench, "backup") == [2, 1, 0]


def test_a_filter_gives_k_of_what_it_permits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgvector, "MATCHES", 20)
    few = set(range(7, 2000, 40))
    made = worded(["the same words"] * 2000, acl=lambda n: (1,) if n in few else (2,))
    made.append(replace(worded(["the same words"], first=2000)[0], acl=()))
    bench.index.upsert(bench.ref, made)
    for question in ("same", "same words"):
        found = chunks(bench, question, 60, [1])
        assert set(found) == few | {2000}
    assert chunks(bench, "same", 5, []) == [2000]
    bench.index.upsert(bench.ref, [replace(made[7], acl=(3,), acl_seq=1, checksum=1)])
    assert 7 not in chunks(bench, "same", 60, [1]) and 7 in chunks(bench, "same", 60, [3])


def test_neighbours_in_one_leaf_never_see_each_others_words(make_bench: Callable[[], Bench]) -> None:
    one = make_bench()
    while (two := make_bench()).space.id % 32 != one.space.id % 32:
        pass
    one.index.upsert(one.ref, worded(["secret plan"]))
    two.index.upsert(two.ref, worded(["public plan"], first=1))
    assert rows(one, "SELECT count(DISTINCT shard) AS n FROM kb_words") == 1
    assert (chunks(one, "secret"), chunks(one, "plan")) == ([0], [0])
    assert (chunks(two, "secret"), chunks(two, "plan")) == ([], [1])


def test_neighbours_whose_keys_are_equal_are_told_apart(
    make_bench: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of two indexes may meet by chance."""
    monkeypatch.setattr(pgvector, "document_keys", lambda text, title, salt: document_keys(text, title, 0))
    monkeypatch.setattr(pgvector, "question_keys", lambda text, salt: question_keys(text, 0))
    test_neighbours_in_one_leaf_never_see_each_others_words(make_bench)


@pytest.mark.parametrize("question", ["?!", "。。。", " ", "", "🚀"])
def test_a_question_without_a_term_finds_nothing(bench: Bench, question: str) -> None:
    bench.index.upsert(bench.ref, worded(["anything ?! 。。。 🚀", ""]))
    assert ask(bench, question) == []


def test_a_question_of_ten_thousand_terms_and_one_of_one_character(bench: Bench) -> None:
    bench.index.upsert(bench.ref, worded(["数据库的备份策略", "用 kubectl 部署", "word7x and others"]))
    assert chunks(bench, " ".join(f"word{n}x" for n in range(10_000))) == [2]
    assert chunks(bench, "份") == [0] and chunks(bench, "用") == [1] and chunks(bench, "恢") == []


def test_words_go_with_their_vectors_and_a_refused_entry_leaves_none(bench: Bench) -> None:
    made = worded(["one fish", "two fish"])
    bench.index.upsert(bench.ref, made)
    bench.index.upsert(bench.ref, made)
    assert rows(bench) == 2
    bench.index.upsert(bench.ref, [replace(made[0], text="red herring")])
    assert (chunks(bench, "one"), chunks(bench, "herring")) == ([], [0])
    with pytest.raises(Rejected):
        bench.index.upsert(bench.ref, [replace(made[1], text="blue whale", vector=b"\0\0")])
    assert chunks(bench, "whale") == []
    bench.index.delete(bench.ref, [vec_id(0)])
    assert (rows(bench), chunks(bench, "fish")) == (1, [1])
    assert bench.drop() == 0
    assert rows(bench) == 0


def test_a_drop_counts_what_is_left_of_words(bench: Bench) -> None:
    """In a shard where the space never was."""
    bench.index.upsert(bench.ref, worded(["one fish"]))
    with transaction(bench.app.pool) as c:
        moved = "UPDATE kb_words SET shard = (shard + 1) %% 32 WHERE space_id = %s"
        c.execute(moved, [bench.space.id])
    assert bench.drop() == 1
    with transaction(bench.app.pool) as c:
        c.execute("DELETE FROM kb_words WHERE space_id = %s", [bench.space.id])


def test_a_space_takes_its_words_along_to_a_shard_of_its_own_and_they_end_with_it(bench: Bench) -> None:
    bench.index.upsert(bench.ref, worded(["one fish", "two fish"]))
    shard = promote_if_large(bench.app.engine, bench.space, promised_chunks=10**6)
    assert shard is not None
    assert set(chunks(bench, "fish")) == {0, 1}
    assert rows(bench, "SELECT count(DISTINCT shard) AS n FROM kb_words WHERE space_id = %(space)s") == 2
    with transaction(bench.app.pool) as c:
        assert spaces.clear_left(c, bench.space.id, before=datetime.now(UTC) + timedelta(hours=1), limit=1000) >= 2
        assert spaces.clear_left(c, bench.space.id, before=datetime.now(UTC) + timedelta(hours=1), limit=1000) == 0
    assert rows(bench) == 2 and set(chunks(bench, "fish")) == {0, 1}
    bench.index.upsert(bench.ref, worded(["three fish"], first=2))
    with transaction(bench.app.pool) as c:
        before = c.execute(sql.SQL("SELECT pg_relation_filenode({}::regclass) AS n").format(f"kb_words_{shard}")).fetchone()
    assert set(delete_space(bench.app.engine, bench.space).values()) == {0}
    with transaction(bench.app.pool) as c:
        after = c.execute(sql.SQL("SELECT pg_relation_filenode({}::regclass) AS n").format(f"kb_words_{shard}")).fetchone()
    assert rows(bench) == 0 and before != after  # truncated with the shard


def test_words_that_move_wait_to_be_sorted_in_until_the_index_settles(bench: Bench) -> None:
    """All of them, as long as they move; from then on the list is as short as in any other shard."""
    rng = random.Random(2)
    bench.index.upsert(bench.ref, worded([" ".join(f"w{rng.randrange(10**6)}" for _ in range(300)) for _ in range(2000)]))
    assert promote_if_large(bench.app.engine, bench.space, promised_chunks=10**6) is not None
    assert len(ask(bench, "w 1")) == 10
    assert waiting(bench) > 1000  # pages of 8 KB
    bench.index.upsert(bench.ref, worded(["late fish"], first=2000))
    bench.index.settle(bench.ref)
    assert waiting(bench) == 0
    assert chunks(bench, "fish") == [2000]
    options = "SELECT reloptions AS o FROM pg_class WHERE relname ~ '^kb_words_.*_terms_idx$' GROUP BY 1"
    with transaction(bench.app.pool) as c:
        assert [set(r.o) for r in c.execute(options)] == [{"fastupdate=on", "gin_pending_list_limit=4096"}]


def test_shards_that_are_made_later_have_a_place_for_words(bench: Bench) -> None:
    with transaction(bench.app.pool) as c:
        c.execute("SELECT kb_ensure_spare_shards((SELECT count(*)::int + 1 FROM kb_shard WHERE state = 'SPARE'))")
        shards = c.execute("SELECT count(*) AS n FROM kb_shard").fetchone()
        leaves = "SELECT count(*) AS n FROM pg_inherits WHERE inhparent = %s::regclass"
        for table in ("kb_words", f"kb_vector_m{bench.ref.model_id}w", f"kb_vector_m{bench.ref.model_id}"):
            assert c.execute(leaves, [table]).fetchone() == shards


def waiting(bench: Bench) -> int:
    """Pages of words that are not sorted in, which they are then."""
    with transaction(bench.app.pool) as c:
        shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [bench.space.id]).fetchone().shard  # type: ignore[union-attr]
        done = c.execute(pgvector.SQL.sort_words_in, {"leaf": f"kb_words_{shard}"}).fetchall()
        return sum(r[0] for r in done)


def test_settling_sorts_in_what_waits(bench: Bench) -> None:
    bench.index.upsert(bench.ref, worded(["one fish"]))
    assert waiting(bench) > 0
    bench.index.upsert(bench.ref, worded(["two fish"], first=1))
    bench.index.settle(bench.ref)
    assert waiting(bench) == 0
    assert set(chunks(bench, "fish")) == {0, 1}


def plan(bench: Bench, statement: str, **values: Any) -> str:
    with transaction(bench.app.pool) as c:
        shard = c.execute("SELECT shard FROM kb_space WHERE id = %s", [bench.space.id]).fetchone().shard  # type: ignore[union-attr]
        c.execute(pgvector.SQL.word_settings)
        names = {"table": sql.Identifier(f"kb_vector_m{bench.ref.model_id}w"), "words": sql.Identifier(f"kb_words_{shard}")}
        query = sql.SQL("EXPLAIN ") + sql.SQL(statement).format(**names)
        where = {"shard": shard, "space": bench.space.id, "index": bench.ref.index_id, **values}
        return "\n".join(r[0] for r in c.execute(query, where))


@pytest.mark.parametrize("analysed", [False, True])
def test_the_way_to_matches_leads_through_their_terms_in_one_leaf(bench: Bench, analysed: bool) -> None:
    bench.index.upsert(bench.ref, worded([f"the same {n} words" for n in range(3000)]))
    if analysed:
        with bench.app.pool.connection() as c:
            c.execute("ANALYZE kb_words")
    keys = question_keys("the same words 17", bench.ref.index_id)
    counted = plan(bench, pgvector.SQL.frequencies, keys=keys, most=2001, sample=400)
    ranked = plan(bench, pgvector.SQL.keyword, rare=keys, one=keys[:2], other=keys[:2], keys=keys, weights=[1.0] * len(keys), length=9.0, most=2000,
                  k=40, acl=[1])  # fmt: skip
    for text in (counted, ranked):
        assert "_terms_idx" in text and "Seq Scan" not in text, text
        assert len({word for word in text.split() if word.startswith("kb_words_") and word.count("_") == 2}) == 1, text
