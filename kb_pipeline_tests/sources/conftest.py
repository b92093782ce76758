"""The flow of the core's tests, over simulated sources."""

from kb_pipeline_tests.flow.conftest import flow, make_flow  # noqa: F401
