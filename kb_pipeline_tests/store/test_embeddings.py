"""The cache: a text is claimed once, its vector stored by whoever still holds the claim, and pinned while it is wanted."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from kb_pipeline.states import Node
from kb_pipeline.store import embeddings, publications, removal
from kb_pipeline.store.database import Pool, transaction, worker_id
from kb_pipeline.store.spaces import Space, ensure_model
from kb_pipeline_tests.fakes import FakedApp
from kb_pipeline_tests.store.shelf import Shelf, cut

_number = count(1)
VECTOR = b"\x00\x3c" * 4


@pytest.fixture
def model(pool: Pool) -> int:
    """A model of its own for each test: the cache is shared by spaces."""
    with transaction(pool) as c:
        return ensure_model(c, f"model-{next(_number)}", 4)


def hashes(*names: str) -> list[bytes]:
    return [hashlib.sha256(n.encode()).digest() for n in names]


def claim(pool: Pool, model: int, wanted: list[bytes], lease_seconds: int = 60) -> tuple[int, set[bytes]]:
    with transaction(pool) as c:
        return embeddings.claim(c, model, wanted, lease_seconds)


def store(pool: Pool, model: int, token: int, found: list[bytes]) -> int:
    with transaction(pool) as c:
        return embeddings.store(c, model, token, dict.fromkeys(found, VECTOR))


def missing(pool: Pool, model: int, wanted: list[bytes]) -> set[bytes]:
    with transaction(pool) as c:
        return embeddings.missing(c, model, wanted)


def test_a_text_is_claimed_by_one_of_many(pool: Pool, model: int) -> None:
    wanted = hashes(*"abcdefgh")
    with ThreadPoolExecutor(6) as threads:
        taken = list(threads.map(lambda _: claim(pool, model, wanted), range(6)))
    assert len({token for token, _ in taken}) == 6
    assert sorted(h for _, mine in taken for h in mine) == sorted(wanted)


def test_a_claim_is_taken_over_when_its_lease_is_over_and_not_before(pool: Pool, model: int) -> None:
    wanted = hashes("a")
    first, _ = claim(pool, model, wanted, 60)
    assert claim(pool, model, wanted)[1] == set()
    with transaction(pool) as c:
        c.execute("UPDATE kb_embedding SET lease_until = '-infinity' WHERE model_id = %s", [model])
    second, mine = claim(pool, model, wanted)
    assert mine == set(wanted)
    assert store(pool, model, first, wanted) == 0  # the late one writes nothing
    assert missing(pool, model, wanted) == set(wanted)
    assert store(pool, model, second, wanted) == 1
    assert missing(pool, model, wanted) == set()


def test_the_claim_of_a_process_that_is_known_to_be_dead_is_taken_over_at_once(pool: Pool, model: int) -> None:
    """After a kill nobody waits for a lease that no one will ever renew."""
    first, _ = claim(pool, model, hashes("a", "b"), 3600)
    store(pool, model, first, hashes("b"))
    with transaction(pool) as c:
        dead = worker_id().rpartition("/")[0] + "/0"
        c.execute("UPDATE kb_embedding SET owner = %s WHERE model_id = %s AND owner IS NOT NULL", [dead, model])
    _, mine = claim(pool, model, hashes("a", "b"))
    assert mine == set(hashes("a"))
    assert claim(pool, model, hashes("a"))[1] == set()  # and this one lives


def test_a_claim_whose_answer_was_lost_is_had_again_with_its_token(pool: Pool, model: int) -> None:
    token, mine = claim(pool, model, hashes("a"))
    assert claim(pool, model, hashes("a"))[1] == set()
    with transaction(pool) as c:
        assert embeddings.claim(c, model, hashes("a"), 60, token) == (token, mine)


def test_a_stored_vector_is_never_replaced(pool: Pool, model: int) -> None:
    token, _ = claim(pool, model, hashes("a"))
    assert store(pool, model, token, hashes("a")) == 1
    with transaction(pool) as c:
        assert embeddings.store(c, model, token, {hashes("a")[0]: b"other"}) == 0
        (vector,) = c.execute("SELECT vector FROM kb_embedding WHERE model_id = %s", [model]).fetchone()  # type: ignore[misc]
    assert bytes(vector) == VECTOR
    assert claim(pool, model, hashes("a"))[1] == set()


def test_what_will_not_be_embedded_now_is_given_back_and_what_was_stays(pool: Pool, model: int) -> None:
    token, _ = claim(pool, model, hashes("a", "b"))
    store(pool, model, token, hashes("a"))
    with transaction(pool) as c:
        embeddings.give_back(c, model, token)
    assert missing(pool, model, hashes("a", "b")) == set(hashes("b"))
    assert claim(pool, model, hashes("a", "b"))[1] == set(hashes("b"))


def test_giving_back_leaves_the_claims_of_others(pool: Pool, model: int) -> None:
    mine, _ = claim(pool, model, hashes("a"))
    theirs, _ = claim(pool, model, hashes("b"))
    with transaction(pool) as c:
        embeddings.give_back(c, model, mine)
    assert store(pool, model, theirs, hashes("b")) == 1


def test_a_pin_finds_vectors_only_and_marks_them_as_used_now(pool: Pool, model: int) -> None:
    token, _ = claim(pool, model, hashes("a", "b"))
    store(pool, model, token, hashes("a"))
    with transaction(pool) as c:
        c.execute("UPDATE kb_embedding SET last_used = '2020-01-01' WHERE model_id = %s", [model])
        assert embeddings.pin(c, model, hashes("a", "b", "c")) == set(hashes("a"))
        used = c.execute("SELECT content_hash FROM kb_embedding WHERE model_id = %s AND last_used > '2021-01-01'", [model])
        assert [bytes(r.content_hash) for r in used] == hashes("a")


def test_a_pin_wins_over_a_purge_that_began_before_it(pool: Pool, model: int) -> None:
    """The purge has to wait for the row: what it then does must follow from the row as it is then, not as it was found."""
    token, _ = claim(pool, model, hashes("a", "b"))
    store(pool, model, token, hashes("a", "b"))
    with ThreadPoolExecutor(1) as threads:
        with transaction(pool) as c:
            c.execute("SELECT FROM kb_embedding WHERE model_id = %s AND content_hash = %s FOR UPDATE", [model, *hashes("a")])

            def purge() -> int:
                with transaction(pool) as d:
                    return removal.forget_unused_embeddings(d, model)

            running = threads.submit(purge)
            waiting = (
                "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            while not running.done():
                with transaction(pool) as d:
                    if d.execute(waiting).fetchone().n:  # type: ignore[union-attr]
                        break
            embeddings.pin(c, model, hashes("a"))
        assert running.result(timeout=30) == 1
    assert missing(pool, model, hashes("a", "b")) == set(hashes("b"))


def test_vectors_of_a_model_that_a_living_space_uses_are_kept(pool: Pool, space: Space) -> None:
    token, _ = claim(pool, space.model_id, hashes("kept"))
    store(pool, space.model_id, token, hashes("kept"))
    with transaction(pool) as c:
        assert removal.forget_unused_embeddings(c, space.model_id) == 0


def test_new_chunks_need_a_vector_and_current_ones_that_have_lost_theirs(pool: Pool, space: Space) -> None:
    shelf = Shelf(pool, space)
    doc = shelf.published("a", "one", "two")
    shelf.edit(doc)
    shelf.sweep()
    (held,) = shelf.claim()
    shelf.chunk(held, cut("one", "three", "three"))
    with transaction(pool) as c:
        ids = publications.chunk_ids(c, [doc], [2])[doc]
        lost = embeddings.needed(c, space.id, shelf.shard, space.model_id, ids)
        assert {n.content_hash for n in lost} == {cut(x)[0].content_hash for x in ("one", "three")}
        token, _ = embeddings.claim(c, space.model_id, [cut("one")[0].content_hash], 60)
        embeddings.store(c, space.model_id, token, {cut("one")[0].content_hash: b"xx"})
        found = embeddings.needed(c, space.id, shelf.shard, space.model_id, ids)
        texts = embeddings.texts(c, space.id, shelf.shard, [n.chunk_id for n in found])
    assert [(n.content_hash, n.doc_ids) for n in found] == [(cut("three")[0].content_hash, (doc,))]
    assert texts == [(cut("three")[0].content_hash, "three")]


def test_a_text_of_two_documents_is_needed_once_for_both(pool: Pool, space: Space) -> None:
    shelf = Shelf(pool, space)
    docs = shelf.add("a", "b")
    for held in shelf.claim():
        shelf.chunk(held, cut("same"))
    with transaction(pool) as c:
        ids = publications.chunk_ids(c, docs, [1, 1])
        (found,) = embeddings.needed(c, space.id, shelf.shard, space.model_id, [i for of in ids.values() for i in of])
    assert sorted(found.doc_ids) == sorted(docs)
    assert found.chunk_id in {i for of in ids.values() for i in of}


def test_a_vector_is_read_by_chunk_and_a_chunk_without_one_is_absent(pool: Pool, space: Space) -> None:
    shelf = Shelf(pool, space)
    (doc,) = shelf.add("a")
    (held,) = shelf.claim()
    pieces = cut("with vector", "without")
    shelf.chunk(held, pieces)
    token, _ = claim(pool, space.model_id, [p.content_hash for p in pieces])
    store(pool, space.model_id, token, [pieces[0].content_hash])
    with transaction(pool) as c:
        ids = publications.chunk_ids(c, [doc], [1])[doc]
        rows = embeddings.vectors_of(c, space.id, shelf.shard, space.model_id, ids)
    assert [(r.chunk_id, bytes(r.vector)) for r in rows] == [(ids[0], VECTOR)]
    assert shelf.at(Node.INDEXER, [held])


def test_two_models_do_not_share_a_vector(app: FakedApp, pool: Pool, model: int) -> None:
    token, _ = claim(pool, model, hashes("a"))
    store(pool, model, token, hashes("a"))
    with transaction(pool) as c:
        other = ensure_model(c, f"model-{next(_number)}", 4)
    assert missing(pool, other, hashes("a")) == set(hashes("a"))
    with transaction(pool) as c:
        assert ensure_model(c, f"model-{next(_number)}", 4) not in (model, other)


def test_a_model_is_made_once_by_many(pool: Pool) -> None:
    name = f"model-{next(_number)}"

    def make(_: int) -> int:
        with transaction(pool) as c:
            return ensure_model(c, name, 4)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(make, range(4)))) == 1
