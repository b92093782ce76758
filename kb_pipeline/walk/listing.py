"""The pages of a walk: scope by scope where there is one, several scopes side by side where the source names them."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import cast

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected, Transient
from kb_pipeline.model import Page
from kb_pipeline.ports import WHOLE, ChangeFeed, Connector, Scoped
from kb_pipeline.store import walks
from kb_pipeline.store.database import connection
from kb_pipeline.store.walks import Walk

WORKERS = 4  # scopes listed at a time: their pages wait for the network, and are written one after the other


@dataclass(frozen=True, slots=True)
class Listed:
    """One answer. No page: the scope ends here, with an ``error`` where the rest of it could not be listed."""

    scope: str
    page: Page | None = None
    mark: int = 0  # what has a higher seen_seq was written by somebody after the page was asked for
    error: KbError | None = None


def scopes_of(connector: Connector) -> list[str]:
    return cast(Scoped, connector).scopes() if connector.capabilities.scopes else [WHOLE]


def list_pages(engine: Engine, connector: Connector, walk: Walk) -> Generator[Listed, None, None]:
    """What is left of a walk. With scopes, one that fails for reasons of its own does not keep the others from being listed."""
    scopes = walk.left
    if not connector.capabilities.scopes:
        for scope in scopes:
            yield from _scope(engine, connector, walk, scope)
        return
    waiting, running = deque(scopes), dict[Future[Listed], tuple[str, Iterator[Listed]]]()
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="kb-walk") as threads:
        while waiting or running:
            while waiting and len(running) < WORKERS:
                scope = waiting.popleft()
                pages = _scope(engine, connector, walk, scope)
                running[threads.submit(next, pages)] = (scope, pages)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                scope, pages = running.pop(future)
                found = _own_error(future, scope)
                yield found
                if found.page is not None:
                    running[threads.submit(next, pages)] = (scope, pages)


def _own_error(future: Future[Listed], scope: str) -> Listed:
    try:
        return future.result()
    except (Transient, Rejected) as e:
        return Listed(scope, error=e)


def _scope(engine: Engine, connector: Connector, walk: Walk, scope: str) -> Iterator[Listed]:
    pages = _pages(connector, walk, scope, engine.limits.page_size)
    while True:
        with connection(engine.pool) as c:
            mark = walks.seen_watermark(c)
        page = next(pages, None)
        yield Listed(scope, page, mark)
        if page is None:
            return


def _pages(connector: Connector, walk: Walk, scope: str, limit: int) -> Iterator[Page]:
    since, at = walk.window_from[scope], walk.at(scope)
    if since is not None:
        return cast(ChangeFeed, connector).changed_since(since, at, limit, scope)
    if connector.capabilities.scopes:
        return cast(Scoped, connector).scope_pages(scope, at, limit)
    return connector.pages(at, limit)
