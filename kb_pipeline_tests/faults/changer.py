"""Whoever changes the model of a space in the storm: two models, and at most one switch at a time."""

import random
from datetime import datetime
from typing import TYPE_CHECKING

from kb_pipeline.maintenance import rebuild
from kb_pipeline.store import indexes
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space
from kb_pipeline_tests.fakes import FakedApp

if TYPE_CHECKING:
    from kb_pipeline_tests.faults.storm import Storm

MODELS = (256, 64)  # dimensions: the first of all spaces, and the one that a space changes to
KEPT = (0.5, 3600.0)  # seconds: a purge meets former indexes whose time is over, and others can be gone back to


def served_since(app: FakedApp, space: Space) -> tuple[int, datetime | None]:
    """Another answer: it was served by another index meanwhile."""
    with transaction(app.pool) as c:
        serving = indexes.serving(c, space.id)
    return serving.ref.index_id, serving.served_at


class IndexChanger:
    """``models``: their ids. Each has a table from the beginning."""

    def __init__(self, storm: "Storm", app: FakedApp, space: Space) -> None:
        self.storm, self.key = storm, space.key
        app.change_index(space, embedder_options={"dimension": MODELS[1]})
        app.build_index(space)
        rebuild.back(app.engine, space)
        app.build_index(space)
        with transaction(app.pool) as c:
            self.models = tuple(i.ref.model_id for i in indexes.living(c, space.id))

    def change(self, app: FakedApp, chance: random.Random) -> None:
        """The other model is begun, built, gone back from, given up: by whomever, in any order."""
        self.storm.rest(chance.random() * 0.3)
        space, keep, done = app.space(self.key), chance.choice(KEPT), self.storm.done
        act = chance.choice(["begin", "begin", "build", "build", "build", "back", "cancel"])
        if act == "begin":
            other = next(d for d in MODELS if d != space.dimension)
            done["index_begun"] += app.change_index(space, embedder_options={"dimension": other})
        elif act == "build":
            rebuild.build(app.engine, space, keep_seconds=keep)
            done["index_switched"] += 1
        elif act == "back":
            rebuild.back(app.engine, space)
            done["index_taken_back"] += 1
        elif chance.random() < 0.4:
            rebuild.cancel(app.engine, space, keep_seconds=keep)
            done["index_given_up"] += 1
