"""Spaces and their shards: where a space begins, and how it moves to a shard of its own beside writers and readers."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from kb_pipeline.errors import Misconfigured
from kb_pipeline.maintenance.promotion import GRACE, clear_left_shard, promote_if_large
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import BYTES_PER_CHUNK, pending, sync_space
from kb_pipeline_tests.fakes import FakedApp, MemorySource
from kb_pipeline_tests.store.shelf import Shelf, cut

_number = count(1)


@pytest.fixture
def small(app: FakedApp) -> FakedApp:
    """An application that gives a space its own shard above 20 chunks."""
    app.engine = replace(app.engine, limits=replace(app.engine.limits, own_shard_chunks=20))
    return app


def shard_of(pool: Pool, space: Space) -> tuple[int, str, int | None]:
    """(shard, its state, its owner)."""
    query = "SELECT h.shard, h.state, h.space_id FROM kb_space s JOIN kb_shard h ON h.shard = s.shard WHERE s.id = %s"
    with transaction(pool) as c:
        return tuple(c.execute(query, [space.id]).fetchone())  # type: ignore[arg-type]


def rows_in(pool: Pool, shard: int, space: Space) -> tuple[int, int]:
    query = """SELECT (SELECT count(*) FROM kb_chunk WHERE shard = %(shard)s AND space_id = %(space)s) AS texts,
                      (SELECT count(*) FROM kb_chunk_state WHERE shard = %(shard)s AND space_id = %(space)s) AS states"""
    with transaction(pool) as c:
        return tuple(c.execute(query, {"shard": shard, "space": space.id}).fetchone())  # type: ignore[arg-type]


def filled(app: FakedApp, documents: int = 3, chunks: int = 10) -> tuple[Shelf, list[int]]:
    shelf = Shelf(app.pool, app.add_space(f"filled-{next(_number)}"))
    texts = [f"text {i}" for i in range(chunks)]
    return shelf, [shelf.published(f"d{n}", *texts) for n in range(documents)]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "-a", "_a", "A", "a b", "a.b", "ä", "a" * 64, "a\nb", "a\n"])
def test_a_key_that_is_no_name_is_refused_with_the_rule(app: FakedApp, key: str) -> None:
    with pytest.raises(Misconfigured, match="use 1 to 63 of a-z") as e:
        app.add_space(key)
    assert e.value.code == "bad_space_key"


@pytest.mark.parametrize("key", ["0", "a-b_c", "a" * 63])
def test_letters_digits_dash_and_underscore_make_a_key(app: FakedApp, key: str) -> None:
    assert app.add_space(key).key == key


def test_a_living_key_is_taken_and_a_deleted_one_is_free(app: FakedApp, pool: Pool) -> None:
    first = app.add_space("twice")
    with pytest.raises(Misconfigured, match="space 'twice' exists already"):
        app.add_space("twice")
    with transaction(pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETING' WHERE id = %s", [first.id])
    with pytest.raises(Misconfigured, match="exists already"):
        app.add_space("twice")
    with transaction(pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE id = %s", [first.id])
    assert app.add_space("twice").id != first.id


def test_an_unknown_key_is_answered_with_those_that_exist(app: FakedApp, space: Space) -> None:
    with pytest.raises(Misconfigured, match=f"no space 'nowhere' .*{space.key}.*kb space add nowhere"):
        app.space("nowhere")


# --- shards -----------------------------------------------------------------------------------------------------------


def test_new_spaces_spread_over_the_shared_shards(app: FakedApp, pool: Pool) -> None:
    with transaction(pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETED' WHERE status <> 'DELETED'")  # those of other tests do not count
    for i in range(64):
        app.add_space(f"spread-{i}")
    with transaction(pool) as c:
        found = Counter(r.shard for r in c.execute("SELECT shard FROM kb_space WHERE key LIKE 'spread-%'"))
        shared = {r.shard for r in c.execute("SELECT shard FROM kb_shard WHERE state = 'SHARED'")}
    assert found == dict.fromkeys(shared, 2)


def test_a_space_stays_up_to_the_threshold_and_moves_above_it(small: FakedApp, pool: Pool) -> None:
    shelf, _ = filled(small, documents=2)
    old, state, _ = shard_of(pool, shelf.space)
    assert state == "SHARED"
    assert promote_if_large(small.engine, shelf.space) is None
    shelf.published("one-more", "text")
    new = promote_if_large(small.engine, shelf.space)
    assert shard_of(pool, shelf.space) == (new, "OWNED", shelf.space.id)
    assert new != old
    assert promote_if_large(small.engine, shelf.space) is None


def test_promotion_moves_every_row_as_it_is(small: FakedApp, pool: Pool) -> None:
    shelf, docs = filled(small)
    neighbour = Shelf(pool, small.add_space(f"neighbour-{next(_number)}"))
    with transaction(pool) as c:
        c.execute("UPDATE kb_space SET shard = %s WHERE id = %s", [shelf.shard, neighbour.space.id])
    theirs = neighbour.published("theirs", "their text")
    query = """SELECT to_jsonb(s) - 'shard' AS state, to_jsonb(c) - 'shard' AS text FROM kb_chunk_state s
               JOIN kb_chunk c ON c.shard = s.shard AND c.id = s.id WHERE s.shard = %(shard)s AND s.space_id = %(space)s ORDER BY s.id"""
    old = shelf.shard
    before = shelf.rows(query, shard=old)
    versions = shelf.rows("SELECT doc_id, chunk_ids FROM kb_doc_version WHERE space_id = %(space)s ORDER BY 1")
    new = promote_if_large(small.engine, shelf.space)
    assert new is not None and len(before) == 30
    assert shelf.rows(query, shard=new) == before
    assert shelf.rows("SELECT doc_id, chunk_ids FROM kb_doc_version WHERE space_id = %(space)s ORDER BY 1") == versions
    assert rows_in(pool, new, neighbour.space) == (0, 0)
    assert len(neighbour.states(theirs)) == 1
    shelf.edited(docs[0], "text 0", "new text")  # and life goes on there
    assert rows_in(pool, new, shelf.space) == (31, 31)


def test_the_left_shard_is_cleared_after_the_grace_and_not_before(small: FakedApp, pool: Pool) -> None:
    shelf, _ = filled(small)
    old = shelf.shard
    new = promote_if_large(small.engine, shelf.space)
    assert new is not None
    assert clear_left_shard(small.engine, shelf.space) == 0
    assert rows_in(pool, old, shelf.space) == (30, 30)
    later = datetime.now(UTC) + GRACE + timedelta(seconds=5)
    assert clear_left_shard(small.engine, shelf.space, now=later) >= 30
    assert rows_in(pool, old, shelf.space) == (0, 0)
    assert rows_in(pool, new, shelf.space) == (30, 30)
    assert shelf.value("SELECT left_shard FROM kb_space WHERE id = %(space)s") is None


def test_two_promotions_of_one_space_take_one_shard(small: FakedApp, pool: Pool) -> None:
    shelf, _ = filled(small)
    with ThreadPoolExecutor(2) as threads:
        taken = list(threads.map(lambda _: promote_if_large(small.engine, shelf.space), range(2)))
    assert sorted(x is None for x in taken) == [False, True]
    with transaction(pool) as c:
        (owned,) = c.execute("SELECT count(*) FROM kb_shard WHERE space_id = %s", [shelf.space.id]).fetchone()  # type: ignore[misc]
    assert owned == 1
    with transaction(pool) as c:
        assert spaces.promote(c, shelf.space) is None  # nor later, however many chunks there are


def test_promotions_at_once_take_different_shards_and_spares_are_replenished(small: FakedApp, pool: Pool) -> None:
    shelves = [filled(small)[0] for _ in range(10)]  # more than the spares that lie ready
    with ThreadPoolExecutor(3) as threads:
        taken = list(threads.map(lambda s: promote_if_large(small.engine, s.space), shelves))
    assert None not in taken and len(set(taken)) == 10
    assert [shard_of(pool, s.space) for s in shelves] == [(n, "OWNED", s.space.id) for n, s in zip(taken, shelves, strict=True)]
    assert all(rows_in(pool, n, s.space) == (30, 30) for n, s in zip(taken, shelves, strict=True) if n is not None)
    with transaction(pool) as c:
        (spare,) = c.execute("SELECT count(*) FROM kb_shard WHERE state = 'SPARE'").fetchone()  # type: ignore[misc]
        c.execute("SELECT kb_ensure_spare_shards(8)")
        query = "SELECT count(*) FROM kb_shard WHERE state = 'SPARE' AND to_regclass('kb_chunk_' || shard) IS NOT NULL"
        assert c.execute(query).fetchone() == (8,)
    assert spare >= 1


def test_writers_and_readers_beside_a_promotion_lose_nothing(small: FakedApp, pool: Pool) -> None:
    """A reader takes the shard first and reads with it, as a search does; a promotion must never show it less."""
    shelf, _ = filled(small)
    stop, wrote = threading.Event(), threading.Semaphore(0)
    short: list[int] = []
    written: list[int] = []

    def read() -> None:
        seen = 0
        while not stop.is_set():
            shard = shelf.shard
            query = """SELECT count(t.id) AS n, max(s.shard) AS shard FROM kb_space s LEFT JOIN kb_chunk_state t
                       ON t.shard = %(shard)s AND t.space_id = s.id AND t.in_current WHERE s.id = %(space)s"""
            found = shelf.rows(query, shard=shard)[0]
            if found.shard == shard:  # else a search begins again
                if found.n < seen:
                    short.append(found.n)
                seen = found.n

    def write() -> None:
        for n in count():
            if stop.is_set():
                return
            written.append(shelf.published(f"w{n}", f"text {n}"))
            wrote.release()

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(read), threads.submit(write)]
        assert all(wrote.acquire(timeout=30) for _ in range(3))
        new = promote_if_large(small.engine, shelf.space)
        assert all(wrote.acquire(timeout=30) for _ in range(3))
        stop.set()
        for thread in running:
            thread.result()
    assert short == []
    assert new is not None
    assert rows_in(pool, new, shelf.space) == (30 + len(written), 30 + len(written))
    missing = shelf.rows(
        """SELECT v.doc_id FROM kb_doc_version v CROSS JOIN LATERAL unnest(v.chunk_ids) u (id) WHERE v.space_id = %(space)s
           AND NOT EXISTS (SELECT FROM kb_chunk_state s WHERE s.shard = %(shard)s AND s.id = u.id AND s.in_current)""",
        shard=new,
    )
    assert missing == []


def test_a_load_that_promises_more_gets_its_shard_before_the_first_chunk(small: FakedApp, pool: Pool) -> None:
    space = small.add_space(f"promised-{next(_number)}")
    shelf = Shelf(pool, space)
    shelf.add("a")
    assert pending(small.engine, space) is True
    assert shard_of(pool, space)[1] == "SHARED"
    with transaction(pool) as c:
        c.execute("UPDATE ingestion_task SET size_bytes = %s WHERE space_id = %s", [21 * BYTES_PER_CHUNK, space.id])
    assert pending(small.engine, space) is True
    assert shard_of(pool, space)[1:] == ("OWNED", space.id)
    shard = shelf.shard
    shelf.bring(shelf.value("SELECT id FROM kb_doc WHERE space_id = %(space)s"), cut("text"))
    assert rows_in(pool, shard, space) == (1, 1)


def test_a_space_that_is_being_deleted_is_not_promoted(small: FakedApp, pool: Pool) -> None:
    shelf, _ = filled(small)
    with transaction(pool) as c:
        c.execute("UPDATE kb_space SET status = 'DELETING', generation = generation + 1 WHERE id = %s", [shelf.space.id])
    assert promote_if_large(small.engine, shelf.space) is None
    with transaction(pool) as c:
        assert spaces.lock_shared(c, shelf.space) is None
    assert shard_of(pool, shelf.space)[1] == "SHARED"


def test_a_walk_over_many_bytes_loads_into_a_shard_of_its_own(small: FakedApp, pool: Pool) -> None:
    space = small.add_space(f"walked-{next(_number)}")
    small.add_fake_source(space, MemorySource({f"{n}.txt": f"words of {n} " * 200 for n in range(8)}))
    report = sync_space(small.engine, space)
    assert report.ingest.published == 8 and not report.failed
    shard, state, owner = shard_of(pool, space)
    assert (state, owner) == ("OWNED", space.id)
    assert rows_in(pool, shard, space)[0] >= 8
