"""The flow of the core's tests over a source in memory; the watched index and objects tell when they are called."""

from collections.abc import Callable

import pytest

from kb_pipeline_tests.cli.conftest import folder, home, kb, loaded  # noqa: F401
from kb_pipeline_tests.flow.conftest import flow, lying, make_flow  # noqa: F401
from kb_pipeline_tests.flow.scenario import Flow
from kb_pipeline_tests.maintenance.watched import WatchedIndex


@pytest.fixture
def watched(make_flow: Callable[..., Flow]) -> Flow:  # noqa: F811
    """With an index that runs what a test hands it, at the moment the test names."""
    return make_flow(index=WatchedIndex())
