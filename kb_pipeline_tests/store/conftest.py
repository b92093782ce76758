"""What is said to PostgreSQL holds on the embedded server and on the oldest one that is supported."""

import pytest

from kb_pipeline_tests.conftest import Server


@pytest.fixture(scope="module", params=["embedded", "postgres15"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found
