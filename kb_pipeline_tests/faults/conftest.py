"""Faults are done to the same scene that the tests of the core use."""

from kb_pipeline_tests.flow.conftest import make_flow

__all__ = ["make_flow"]
