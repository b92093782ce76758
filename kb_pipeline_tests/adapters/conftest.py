"""A bucket's server that knows the whole protocol, and what stands between it and a client to make trouble."""

from collections.abc import Iterator

import pytest

from kb_pipeline_tests import s3


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with s3.moto() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *a, **k: 0)
    with s3.proxy(moto) as between:
        yield between
