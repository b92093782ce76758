"""What is special about an object store that others run: memory, what killed writers leave, wrong keys, restarts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kb_pipeline.blobs.s3 import Config, S3Blobs
from kb_pipeline.errors import Fatal, RateLimited, Transient
from kb_pipeline_tests import s3

PART = 8 * 2**20


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with s3.environment():
        yield


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3.nanio(tmp_path_factory.mktemp("nanio")) as endpoint:
        yield endpoint


def opened(endpoint: str, bucket: str) -> S3Blobs:
    return S3Blobs(Config(bucket=bucket, prefix="kb", endpoint=endpoint))


def uploads(endpoint: str, bucket: str) -> list[Any]:
    return list(s3.client(endpoint).list_multipart_uploads(Bucket=bucket).get("Uploads", []))


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_fatal_and_say_which_variables_to_correct(
    nanio: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.new_bucket(nanio)
    monkeypatch.setenv(name, "wrong-and-confidential")
    store = opened(nanio, bucket)
    for call in (lambda: store.put_many([("a", b"x")]), lambda: store.get("a"), lambda: list(store.keys(""))):
        with pytest.raises(Fatal) as e:
            call()
        assert e.value.code == "blob_store_denied" and "AWS_SECRET_ACCESS_KEY" in e.value.message
        assert "confidential" not in e.value.message


def test_objects_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    with s3.nanio(tmp_path) as endpoint, s3.environment():
        bucket = s3.new_bucket(endpoint)
        opened(endpoint, bucket).put_many([("a", b"x"), ("large", BytesIO(b"y" * (PART + 1)))])
    with s3.nanio(tmp_path) as endpoint, s3.environment():
        store = opened(endpoint, bucket)
        assert store.get("a") == b"x" and len(store.get("large")) == PART + 1


def test_a_slow_down_is_rate_limited_and_a_forbidden_key_fatal(proxy: s3.Proxy, moto: str) -> None:
    store = opened(proxy.endpoint, s3.new_bucket(moto))
    for trouble, kind, code in (
        (s3.Trouble(503, "SlowDown"), RateLimited, "rate_limited"),
        (s3.Trouble(403, "AccessDenied"), Fatal, "blob_store_denied"),
        (s3.Trouble(507, "QuotaExceeded"), Transient, "blob_store_full"),
    ):
        proxy.rule = lambda seen, trouble=trouble: trouble
        with pytest.raises(kind) as e:
            store.put_many([("a", b"x")])
        assert e.value.code == code
    proxy.rule = lambda seen: s3.Trouble(503, "SlowDown", headers=(("Retry-After", "17"),))
    with pytest.raises(RateLimited) as e:
        store.put_many([("a", b"x")])
    assert e.value.retry_after == 17


def test_an_upload_that_fails_between_parts_leaves_nothing(proxy: s3.Proxy, moto: str) -> None:
    bucket = s3.new_bucket(moto)
    proxy.rule = lambda seen: s3.Trouble(403, "AccessDenied") if "partNumber=2" in seen.query else None
    with pytest.raises(Fatal):
        opened(proxy.endpoint, bucket).put_many([("a", BytesIO(b"x" * (2 * PART + 1)))])
    assert any("partNumber=1" in seen.query for seen in proxy.seen)
    assert uploads(moto, bucket) == [] and list(opened(moto, bucket).keys("")) == []


@pytest.mark.parametrize("step", ["partNumber=1", "partNumber=2", "uploadId"])
def test_a_writer_killed_at_any_step_of_an_upload_leaves_nothing_that_clear_does_not_take(
    proxy: s3.Proxy, moto: str, step: str
) -> None:
    bucket = s3.new_bucket(moto)
    script = (
        "import sys; from io import BytesIO; from kb_pipeline.blobs.s3 import Config, S3Blobs\n"
        f"S3Blobs(Config(bucket={bucket!r}, prefix='kb', endpoint={proxy.endpoint!r}))"
        f".put_many([('spaces/7/a', BytesIO(b'x' * {2 * PART + 1}))])"
    )
    writer = subprocess.Popen([sys.executable, "-c", script])
    completes = "uploadId"  # alone: the request that completes the upload

    def rule(seen: s3.Seen) -> s3.Trouble | None:
        due = step in seen.query and (step != completes or seen.method == "POST")
        return s3.Trouble(500, "InternalError", before=lambda: os.kill(writer.pid, signal.SIGKILL)) if due else None

    proxy.rule = rule
    assert writer.wait() == -signal.SIGKILL
    store = opened(moto, bucket)
    assert len(uploads(moto, bucket)) == 1 and list(store.keys("")) == []
    store.clear("spaces/8/")
    assert len(uploads(moto, bucket)) == 1
    store.clear("spaces/7/")
    assert uploads(moto, bucket) == []


def test_an_answer_that_breaks_off_is_transient(proxy: s3.Proxy, moto: str) -> None:
    bucket = s3.new_bucket(moto)
    store = opened(proxy.endpoint, bucket)
    store.put_many([("a", b"x" * 100_000)])
    proxy.rule = lambda seen: s3.Trouble(cut_after=1000) if seen.method == "GET" else None
    for read in (store.get, store.open):
        with pytest.raises(Transient):
            read("a")


def test_a_large_object_is_written_and_read_in_flat_memory(nanio: str, tmp_path: Path) -> None:
    size = 200 * 2**20
    with (large := tmp_path / "large").open("wb") as f:
        f.truncate(size)
    script = (
        "import resource, sys; from kb_pipeline.blobs.s3 import Config, S3Blobs\n"
        f"store = S3Blobs(Config(bucket={s3.new_bucket(nanio)!r}, endpoint={nanio!r}))\n"
        "store.put_many([('small', b'x')]); store.get('small')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"with open({str(large)!r}, 'rb') as f: store.put_many([('large', f)])\n"
        "read = 0\n"
        "with store.open('large') as f:\n"
        "    while piece := f.read(2**20): read += len(piece)\n"
        "print(read, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    read, grown_kib = map(int, subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout.split())
    assert read == size
    assert grown_kib < 60 * 1024
