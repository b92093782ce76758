"""A space that can be served by two kinds of index and by any number of models, each of which counts what it is asked."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kb_pipeline.engine import Modelled
from kb_pipeline.model import IndexRef, Json
from kb_pipeline.ports import Embedder, VectorIndex, Vectors
from kb_pipeline.settings import Settings
from kb_pipeline.store import indexes, spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.indexes import Index
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp, MemoryBlobs, MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import Flow, article

OTHER = "other"  # a kind of index that is not in this database
_number = count(1)


class Counted:
    """An embedder, and how often each text was embedded by it."""

    def __init__(self, inner: Embedder) -> None:
        self.inner, self.texts = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        self.texts.update(texts)
        return self.inner.embed_documents(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self.inner.embed_query(text)


class ChangingApp(FakedApp):
    """``other``: the index of the kind that is not in this database; ``models``: the embedders by dimension."""

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self.other, self.models = MemoryIndex(), dict[int, Counted]()
        super().__init__(settings, pool, migrations()[-1].version, blobs=MemoryBlobs())

    def _index(self, ref: IndexRef) -> VectorIndex:
        return self.other if ref.kind == OTHER else super()._index(ref)

    def _open_index(self, kind: str, options: Json) -> VectorIndex:
        return self.other if kind == OTHER else super()._open_index(kind, options)

    def _embedder(self, of: Modelled) -> Embedder:
        made = super()._embedder(of)
        return self.models.setdefault(made.dimension, Counted(made))


class Change(Flow):
    """``app`` is a ChangingApp; ``first``: the dimension of the model that the space has from the beginning."""

    app: ChangingApp

    def __init__(self, app: ChangingApp, space: Space, memory: MemorySource) -> None:
        self.key, self.first = space.key, space.dimension
        super().__init__(app, space, memory, app.add_fake_source(space, memory))

    def asked_first(self) -> int:
        """Texts that the first model has embedded."""
        return sum(self.app.models[self.first].texts.values())

    def again(self) -> None:
        self.space = self.app.space(self.key)

    def to_other(self) -> bool:
        return self.app.change_index(self.space, index=OTHER)

    def to_model(self, dimension: int) -> bool:
        return self.app.change_index(self.space, embedder_options={"dimension": dimension})

    def build(self) -> Any:
        report = self.app.build_index(self.space)
        self.again()
        return report

    def living(self) -> list[Index]:
        with transaction(self.app.pool) as c:
            return indexes.living(c, self.space.id)

    def held(self, index: Index) -> set[Any]:
        """Vectors that it shows, of everything that is current."""
        port = self.engine.index(index.ref)
        return set(port.present(index.ref, sorted(self.current())))

    def current(self) -> set[Any]:
        rows = self.execute("SELECT vec_id FROM kb_chunk_state WHERE space_id = %(space)s AND in_current")
        return {r.vec_id for r in rows}

    def all_held(self, index: Index) -> int:
        return sum(b.count for b in self.engine.index(index.ref).digest(index.ref).values())

    def todo(self) -> int:
        with transaction(self.app.pool) as c:
            return sum(indexes.todo_left(c, i.ref.index_id) for i in indexes.living(c, self.space.id))

    def serving(self) -> IndexRef:
        with transaction(self.app.pool) as c:
            return spaces.serving_index(c, self.space.id)


@pytest.fixture
def make_change(settings: Settings, pool: Pool) -> Callable[[], Change]:
    with transaction(pool) as c:
        c.execute("DELETE FROM kb_embedding")

    def make() -> Change:
        app, number = ChangingApp(settings, pool), next(_number)
        space = app.add_space(f"change-{number}", embedder="hashing", embedder_options={"dimension": 128 + number})
        return Change(app, space, MemorySource({f"{n}.md": article(f"word{n}", 4, tag=f"t{number}x{n}") for n in range(6)}))

    return make


@pytest.fixture
def change(make_change: Callable[[], Change]) -> Change:
    """Six documents, synced."""
    made = make_change()
    made.sync()
    return made
