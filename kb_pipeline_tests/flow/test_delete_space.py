"""A space that is deleted while workers and walks are still at it: nothing of it comes back."""

from collections.abc import Callable
from typing import Any

import pytest

from kb_pipeline.errors import Rejected, Transient
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.store import embeddings, retention, spaces
from kb_pipeline.store.database import transaction
from kb_pipeline_tests.fakes import Gate, MemoryIndex
from kb_pipeline_tests.flow.scenario import Flow, article


@pytest.fixture
def published(lying: Flow) -> Flow:
    """One document is published; an edit of it waits."""
    lying.memory.put("a.md", article("maple"))
    lying.sync()
    lying.memory.put("a.md", article("maple").replace("mapleword1x7", "novelty"))
    lying.walk()
    return lying


@pytest.mark.parametrize("place", ["embedder", "index"])
def test_a_worker_writes_nothing_into_a_space_that_was_deleted_meanwhile(published: Flow, place: str) -> None:
    gate: Gate = getattr(published.app, place).gate
    gate.close()
    with published.beside(published.ingest) as ended:
        gate.await_caller()
        residue = delete_space(published.engine, published.space)
        assert set(residue.values()) == {0}
        before = published.rows()
        gate.open()
    assert ended[0].published == 0
    after = published.rows()
    assert after["kb_embedding"] == before["kb_embedding"]
    assert {k: n for k, n in after.items() if n and k != "kb_embedding"} == {}
    assert published.index.indexes == {} and published.blobs.objects == {}
    with pytest.raises(Rejected):
        published.hits("novelty")
    assert published.execute("SELECT status FROM kb_space WHERE id = %(space)s")[0].status == "DELETED"


def test_a_walk_writes_nothing_into_a_space_that_was_deleted_meanwhile(published: Flow) -> None:
    published.memory.put("b.md", article("b"))
    published.memory.gate.close()
    with published.beside(published.walk) as ended:
        published.memory.gate.await_caller()
        assert set(delete_space(published.engine, published.space).values()) == {0}
        published.memory.gate.open()
    assert ended[0].errors["memory"].code == "space_gone"
    assert sum(n for k, n in published.rows().items() if k != "kb_embedding") == 0


def test_deleting_a_space_that_was_half_deleted_ends_the_same(published: Flow) -> None:
    published.index.down = True
    with pytest.raises(Transient):
        delete_space(published.engine, published.space)
    assert published.execute("SELECT status FROM kb_space WHERE id = %(space)s")[0].status == "DELETING"
    assert published.ingest().tasks == 0
    published.index.down = False
    assert set(delete_space(published.engine, published.space).values()) == {0}
    assert published.execute("SELECT status FROM kb_space WHERE id = %(space)s")[0].status == "DELETED"


def test_a_space_made_again_under_the_same_key_is_out_of_reach_of_an_old_worker(published: Flow) -> None:
    published.embedder.gate.close()
    with published.beside(published.ingest):
        published.embedder.gate.await_caller()
        delete_space(published.engine, published.space)
        again = published.app.add_space(published.space.key)
        published.embedder.gate.open()
    assert again.id != published.space.id
    with transaction(published.app.pool) as c:
        assert c.execute("SELECT count(*) AS n FROM kb_chunk WHERE space_id = %s", (again.id,)).fetchone().n == 0  # type: ignore[union-attr]
        assert spaces.lock_shared(c, published.space) is None


def test_a_vector_that_somebody_takes_up_while_its_space_is_deleted_stays(
    published: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk and the pin come after the look at the chunks of other spaces, and before the deletion."""
    model = published.space.model_id
    look = retention.stage_of_space
    (text, *_) = [
        bytes(r.content_hash) for r in published.execute("SELECT content_hash FROM kb_chunk WHERE space_id = %(space)s")
    ]

    def look_and_be_late(*values: Any) -> tuple[int, int]:
        seen = look(*values)
        with transaction(published.app.pool) as c:
            assert embeddings.pin(c, model, [text]) == {text}
        return seen

    other = published.app.add_space("other")  # with an active space of the model its unused vectors are not all forgotten
    monkeypatch.setattr(retention, "stage_of_space", look_and_be_late)
    delete_space(published.engine, published.space)
    kept = published.execute("SELECT content_hash FROM kb_embedding WHERE model_id = %(model)s", model=other.model_id)
    assert text in {bytes(r.content_hash) for r in kept}


def test_cached_vectors_go_with_their_space_unless_another_has_the_text(make_flow: Callable[..., Flow]) -> None:
    def texts(flow: Flow) -> set[bytes]:
        return {bytes(r.content_hash) for r in flow.execute("SELECT content_hash FROM kb_chunk WHERE space_id = %(space)s")}

    def cached(flow: Flow) -> set[bytes]:
        query = "SELECT content_hash FROM kb_embedding WHERE model_id = (SELECT model_id FROM kb_space WHERE id = %(space)s)"
        return {bytes(r.content_hash) for r in flow.execute(query)}

    gone = make_flow({"a.md": article("shared"), "b.md": article("secret")}, index=MemoryIndex())
    kept = make_flow({"a.md": article("shared"), "c.md": article("other")}, index=MemoryIndex())
    gone.sync()
    kept.sync()
    theirs, ours = texts(gone), texts(kept)
    assert theirs & ours and theirs - ours and theirs | ours <= cached(kept)
    assert set(delete_space(gone.engine, gone.space).values()) == {0}
    assert ours <= cached(kept) and not (theirs - ours) & cached(kept)
