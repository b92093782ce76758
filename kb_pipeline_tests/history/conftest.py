"""The flow of the core's tests, with every moment of the past settled: nobody has to wait for the publish limit."""

import pytest

from kb_pipeline_tests.flow.conftest import flow, make_flow  # noqa: F401


@pytest.fixture(autouse=True)
def everything_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kb_pipeline.as_of.SETTLED_SECONDS", 0.0)
