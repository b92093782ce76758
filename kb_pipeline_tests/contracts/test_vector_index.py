"""What every vector index must keep: those of the registry on servers of their own, and the fake that tests work with."""

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import numpy as np
import pytest

from kb_pipeline.errors import Rejected, StateError
from kb_pipeline.maintenance.sweep import Listing
from kb_pipeline.model import Bucket, VectorEntry
from kb_pipeline.registry import INDEXES
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.indexes.bench import DIMENSION, Bench, bench_maker, best, entries, vec_id, vectors

WORDED = "pgvector with words"


@pytest.fixture(params=[*sorted(INDEXES), WORDED, "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_bench(kind: str, make_app: Callable[..., FakedApp], request: pytest.FixtureRequest) -> Callable[[], Bench]:
    return (
        bench_maker("pgvector", make_app(), request, keyword=True) if kind == WORDED else bench_maker(kind, make_app(), request)
    )


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


# --- writing ------------------------------------------------------------------------------------------------------------


def test_ensuring_again_keeps_what_is_there(bench: Bench) -> None:
    bench.index.upsert(bench.ref, entries(vectors(3)))
    bench.index.ensure(bench.ref)
    bench.index.ensure(bench.ref)
    assert len(bench.index.present(bench.ref, [vec_id(n) for n in range(3)])) == 3


def test_what_was_written_is_there_at_once_and_once(bench: Bench) -> None:
    made = entries(vectors(50))
    for _ in range(3):
        bench.index.upsert(bench.ref, made)
    assert bench.index.present(bench.ref, [e.vec_id for e in made]) == dict.fromkeys([e.vec_id for e in made], 0)
    assert sum(b.count for b in bench.index.digest(bench.ref).values()) == 50
    assert len(bench.index.search(bench.ref, vectors(1)[0], 100, None)) == 50


def test_writing_and_deleting_nothing_is_nothing(bench: Bench) -> None:
    bench.index.upsert(bench.ref, [])
    bench.index.delete(bench.ref, [])
    bench.index.delete(bench.ref, [vec_id(1)])
    assert bench.index.present(bench.ref, []) == {}
    assert bench.index.search(bench.ref, vectors(1)[0], 5, None) == []
    assert bench.index.digest(bench.ref) == {}


def test_an_older_acl_never_replaces_a_newer_one_and_the_same_may(bench: Bench) -> None:
    if not bench.index.capabilities.conditional:
        pytest.skip("an older ACL may come back, until the next reconciliation")
    old, *_ = entries(vectors(1), lambda _: (1,))
    newer = replace(old, acl=(2,), acl_seq=5, checksum=7)
    bench.index.upsert(bench.ref, [newer])
    bench.index.upsert(bench.ref, [replace(old, acl_seq=4)])
    assert bench.index.present(bench.ref, [old.vec_id]) == {old.vec_id: 5}
    assert bench.index.search(bench.ref, vectors(1)[0], 5, [1]) == []
    assert bench.index.ids(bench.ref, old.bucket) == {old.vec_id: 7}
    bench.index.upsert(bench.ref, [replace(newer, checksum=8)])
    bench.index.upsert(bench.ref, [replace(newer, acl=(3,), acl_seq=6, checksum=9)])
    assert bench.index.present(bench.ref, [old.vec_id]) == {old.vec_id: 6}
    assert [x.vec_id for x in bench.index.search(bench.ref, vectors(1)[0], 5, [3])] == [old.vec_id]


def test_deleting_by_id_takes_those_and_no_others(bench: Bench) -> None:
    made = entries(vectors(20))
    bench.index.upsert(bench.ref, made)
    gone = [e.vec_id for e in made[::2]]
    for _ in range(2):
        bench.index.delete(bench.ref, [*gone, vec_id(999)])
    assert set(bench.index.present(bench.ref, [e.vec_id for e in made])) == {e.vec_id for e in made[1::2]}
    assert {x.chunk_id for x in bench.index.search(bench.ref, vectors(1)[0], 50, None)} == set(range(1, 20, 2))


def test_indexes_do_not_see_each_other(make_bench: Callable[[], Bench]) -> None:
    one, two = make_bench(), make_bench()
    one.index.upsert(one.ref, entries(vectors(5)))
    assert two.index.search(two.ref, vectors(1)[0], 5, None) == []
    two.index.delete(two.ref, [vec_id(0)])
    two.index.upsert(two.ref, [replace(e, vec_id=vec_id(100 + n)) for n, e in enumerate(entries(vectors(3)))])
    assert two.drop() == 0
    assert len(one.index.present(one.ref, [vec_id(n) for n in range(5)])) == 5


def test_equal_principals_of_two_spaces_never_meet(make_bench: Callable[[], Bench]) -> None:
    """Interned principals are numbers that each space counts for itself."""
    one, two = make_bench(), make_bench()
    one.index.upsert(one.ref, entries(vectors(5), lambda _: (1,)))
    made = [replace(e, vec_id=vec_id(100 + n), chunk_id=100 + n) for n, e in enumerate(entries(vectors(5), lambda _: (1,)))]
    two.index.upsert(two.ref, made)
    assert {x.chunk_id for x in one.index.search(one.ref, vectors(1)[0], 50, [1])} == set(range(5))
    assert {x.chunk_id for x in two.index.search(two.ref, vectors(1)[0], 50, [1])} == set(range(100, 105))


@pytest.mark.parametrize("length", [DIMENSION - 1, DIMENSION + 1])
def test_a_vector_of_another_length_is_refused_and_costs_no_later_one(bench: Bench, length: int) -> None:
    good, bad = entries(vectors(2))
    with pytest.raises(Rejected):
        bench.index.upsert(bench.ref, [replace(bad, vector=np.ones(length, "<f2").tobytes())])
    bench.index.upsert(bench.ref, [good])
    assert set(bench.index.present(bench.ref, [good.vec_id, bad.vec_id])) == {good.vec_id}


# --- searching ----------------------------------------------------------------------------------------------------------


def test_search_over_two_thousand_vectors_is_exact_and_best_first(bench: Bench) -> None:
    made = vectors(2000)
    bench.index.upsert(bench.ref, entries(made))
    for query in vectors(10, seed=1):
        found = bench.index.search(bench.ref, query, 10, None)
        assert [x.chunk_id for x in found] == best(made, query, 10)
        assert [x.vec_id for x in found] == [vec_id(x.chunk_id) for x in found]
        assert [x.doc_id for x in found] == [x.chunk_id // 10 for x in found]
        assert sorted((x.score for x in found), reverse=True) == [x.score for x in found]
        assert found[0].score == pytest.approx(float(made[found[0].chunk_id] @ query), abs=2e-3)


def test_a_vector_comes_back_as_it_was_stored_in_float16(bench: Bench) -> None:
    made = vectors(30)
    made[0] = 0
    made[0, :4] = [1.0, 6e-8, -6.1e-5, 1e-3]  # the smallest float16 there is, and subnormal ones
    bench.index.upsert(bench.ref, entries(made))
    for n, query in enumerate(made):
        (found,) = bench.index.search(bench.ref, query, 1, None)
        assert found.chunk_id == n
        assert found.score == pytest.approx(1.0, abs=1e-3)


def test_a_filter_returns_k_of_what_it_permits(bench: Bench) -> None:
    """Principal 1 may read one in 40, principal 2 the rest; one in 100 is for everybody."""
    made = vectors(2000)
    everybody, few = set(range(0, 2000, 100)), set(range(7, 2000, 40))
    bench.index.upsert(bench.ref, entries(made, lambda n: () if n in everybody else (1,) if n in few else (2, 3)))
    query = vectors(1, seed=2)[0]
    for asker, permitted in (([1], everybody | few), ([], everybody), ([9], everybody), ([3, 1], set(range(2000)))):
        found = [x.chunk_id for x in bench.index.search(bench.ref, query, 10, asker)]
        assert found == best(made, query, 10, sorted(permitted)), asker
    assert len(bench.index.search(bench.ref, query, 5000, None)) == 2000


def test_more_is_asked_for_than_there_is(bench: Bench) -> None:
    bench.index.upsert(bench.ref, entries(vectors(7)))
    for k in (7, 8, 4096):
        assert len(bench.index.search(bench.ref, vectors(1)[0], k, None)) == 7


def test_an_asker_may_have_thousands_of_principals(bench: Bench) -> None:
    bench.index.upsert(bench.ref, entries(vectors(60), lambda n: tuple(range(n * 100, n * 100 + 100))))
    found = bench.index.search(bench.ref, vectors(1)[0], 100, range(1000, 6000))
    assert {x.chunk_id for x in found} == set(range(10, 60))
    bench.index.upsert(bench.ref, [replace(entries(vectors(1))[0], acl=tuple(range(5000)), acl_seq=1)])
    assert {x.chunk_id for x in bench.index.search(bench.ref, vectors(1)[0], 100, [4999])} == {0, 49}


def test_words_are_found_in_chinese_and_english_by_those_who_may(bench: Bench) -> None:
    if not bench.index.capabilities.keyword:
        pytest.skip("it does not search by words")
    texts = (("The invoice is due in March", "Payments"), ("出差报销流程说明", "财务制度"), ("Foxes run", "出差"))
    made = [replace(e, text=t, title=h) for e, (t, h) in zip(entries(vectors(3), lambda n: (n,)), texts, strict=True)]
    bench.index.upsert(bench.ref, made)

    def found(question: str, acl: list[int] | None = None, k: int = 5) -> list[int]:
        hits = bench.index.keyword(bench.ref, question, k, acl)  # type: ignore[attr-defined]
        assert sorted((x.score for x in hits), reverse=True) == [x.score for x in hits]
        return [x.chunk_id for x in hits]

    assert found("INVOICE payments") == [0]
    assert found("报销流程")[0] == 1
    assert set(found("出差")) == {1, 2}
    assert len(found("出差", k=1)) == 1
    assert found("出差", [2, 7]) == [2]
    assert found("出差" * 2000) != [] and found("?!") == [] and found("zebra") == []
    bench.index.delete(bench.ref, [made[1].vec_id])
    assert found("报销流程") == []


def test_digest_and_ids_tell_exactly_what_is_held(bench: Bench) -> None:
    made = entries(vectors(300))
    bench.index.upsert(bench.ref, made)
    expected: dict[int, Bucket] = {}
    for e in made:
        old = expected.get(e.bucket, Bucket(0, 0))
        expected[e.bucket] = Bucket(old.count + 1, old.checksum_sum + e.checksum)
    assert bench.index.digest(bench.ref) == expected
    bucket = made[0].bucket
    assert bench.index.ids(bench.ref, bucket) == {e.vec_id: e.checksum for e in made if e.bucket == bucket}
    assert bench.index.ids(bench.ref, next(b for b in range(4096) if b not in expected)) == {}


def test_a_checksum_may_be_any_signed_32_bit_number(bench: Bench) -> None:
    first, second = entries(vectors(2))
    made = [replace(first, checksum=-(2**31), bucket=5), replace(second, checksum=-(2**31), bucket=5)]
    bench.index.upsert(bench.ref, made)
    assert bench.index.digest(bench.ref) == {5: Bucket(2, -(2**32))}


def test_ten_thousand_in_one_bucket_are_counted_and_listed_in_little_space(bench: Bench) -> None:
    """As many as a bucket of 40 million holds, and more than a search window."""
    number, bucket = 10_500, 9
    ids = [UUID(int=bucket << 116 | vec_id(n).int & (1 << 116) - 1) for n in range(number)]
    entry = entries(vectors(1))[0]
    made = [replace(entry, vec_id=i, chunk_id=n, checksum=n, bucket=bucket) for n, i in enumerate(ids)]
    for first in range(0, number, 3500):
        bench.index.upsert(bench.ref, made[first : first + 3500])
    tracemalloc.start()
    try:
        assert bench.index.digest(bench.ref) == {bucket: Bucket(number, sum(range(number)))}
        counting = tracemalloc.get_traced_memory()[1]
        held = bench.index.ids(bench.ref, bucket)
        listing = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held == {i: n for n, i in enumerate(ids)}
    if bench.index.capabilities.digest:
        assert counting < 2**21
    assert listing < 1500 * number, listing  # the answer itself takes a quarter of it


def test_settling_a_small_index_changes_no_answer(bench: Bench) -> None:
    made = vectors(100)
    bench.index.upsert(bench.ref, entries(made))
    bench.index.settle(bench.ref)
    assert [x.chunk_id for x in bench.index.search(bench.ref, made[3], 10, None)] == best(made, made[3], 10)


# --- the end ------------------------------------------------------------------------------------------------------------


def test_a_dropped_index_takes_no_write_and_is_not_made_again_by_one(bench: Bench) -> None:
    made = entries(vectors(5))
    bench.index.upsert(bench.ref, made)
    assert bench.drop() == 0
    for late in (
        lambda: bench.index.upsert(bench.ref, made),
        lambda: bench.index.delete(bench.ref, [made[0].vec_id]),
        lambda: bench.index.search(bench.ref, vectors(1)[0], 5, None),
        lambda: bench.index.present(bench.ref, [made[0].vec_id]),
    ):
        with pytest.raises(StateError) as e:
            late()
        assert e.value.code == "index_gone"
    assert bench.index.drop(bench.ref) == 0


def test_a_drop_touches_no_neighbour_whose_name_begins_alike(bench: Bench) -> None:
    if not bench.index.capabilities.named:
        pytest.skip("entries are told apart by a number")
    bench.index.upsert(bench.ref, entries(vectors(5)))
    neighbour = replace(bench.ref, index_id=bench.ref.index_id * 10 + 1, name=f"{bench.ref.name}1")
    bench.index.ensure(neighbour)
    try:
        bench.index.upsert(neighbour, entries(vectors(3)))
        assert bench.index.drop(bench.ref) == 0
        assert len(bench.index.present(neighbour, [vec_id(n) for n in range(5)])) == 3
        if isinstance(bench.index, Listing):
            assert set(bench.index.names()) == {neighbour.name}
    finally:
        assert bench.index.drop(neighbour) == 0


def test_a_write_after_the_drop_leaves_nothing_behind(bench: Bench) -> None:
    if not isinstance(bench.index, Listing):
        pytest.skip("it cannot list indexes")
    assert set(bench.index.names()) == {bench.ref.name}
    assert bench.drop() == 0
    with pytest.raises(StateError):
        bench.index.upsert(bench.ref, entries(vectors(1)))
    assert set(bench.index.names()) == set()


def test_dropping_an_index_that_was_never_made_is_done(bench: Bench) -> None:
    never = replace(bench.ref, index_id=10**6, model_id=10**6, name="kb_never")
    assert bench.index.drop(never) == 0


def test_writers_at_once_lose_nothing(bench: Bench) -> None:
    made = entries(vectors(400))
    parts = [made[n * 80 : n * 80 + 160] for n in range(4)]  # they overlap
    errors: list[BaseException] = []

    def write(part: list[VectorEntry]) -> None:
        try:
            bench.index.upsert(bench.ref, part)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(b.count for b in bench.index.digest(bench.ref).values()) == 400
