"""What a process that does nothing but ticks keeps from one to the next: connections, and nothing that may grow old."""

import pytest

from kb_pipeline.errors import KbError
from kb_pipeline.orchestration import resources
from kb_pipeline.orchestration.resources import KEPT, KbResource
from kb_pipeline.settings import Settings
from kb_pipeline.store.spaces import Space


def tick(settings: Settings) -> KbResource:
    return KbResource(home=str(settings.home), database_url=settings.database_url)


def test_ticks_share_connections_and_nothing_else(settings: Settings, space: Space) -> None:
    with KEPT.keeping():
        first, second = tick(settings), tick(settings)
        one, other = first.app(), second.app()
        assert one.pool is other.pool and one is not other and one.engine is not other.engine
        first.close()
        assert space.key in second.active_spaces(), "the end of one tick must leave the others theirs"
    assert one.pool.closed


def test_without_it_every_resource_opens_and_closes_its_own(settings: Settings, space: Space) -> None:
    one, other = tick(settings), tick(settings)
    assert one.app().pool is not other.app().pool
    pool = one.app().pool
    one.close()
    assert pool.closed
    other.close()


def test_a_database_that_was_away_is_opened_by_the_next_tick(
    settings: Settings, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise KbError("away", code="database_down")

    with KEPT.keeping():
        with monkeypatch.context() as m:
            m.setattr(resources, "open_database", away)
            with pytest.raises(KbError):
                tick(settings).app()
        assert space.key in tick(settings).active_spaces()
