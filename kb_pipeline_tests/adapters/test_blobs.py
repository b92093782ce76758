"""What is special about each object store: durability and leftovers of the folder, the error codes of S3."""

import errno
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kb_pipeline.blobs import folder
from kb_pipeline.blobs.folder import Config, FolderBlobs
from kb_pipeline.blobs.s3 import Config as S3Config
from kb_pipeline.blobs.s3 import S3Blobs
from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, Transient

NOBODY = 65534


def objects(n: int) -> list[tuple[str, bytes]]:
    return [(f"spaces/7/docs/{number}/v1/FETCHER-a1", b"%d" % number) for number in range(n)]


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(root: Path) -> FolderBlobs:
    return FolderBlobs(Config(path=root))


class Calls(list[str]):
    """The order in which a store makes durable and renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, syncfs: bool) -> None:
        super().__init__()
        replace, fsync = os.replace, os.fsync

        def spy_sync(fd: int) -> bool:
            if syncfs:
                self.append("syncfs")
            return syncfs

        def spy_replace(source: str, target: str) -> None:
            self.append("rename")
            replace(source, target)

        def spy_fsync(fd: int) -> None:
            self.append("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
            fsync(fd)

        monkeypatch.setattr(folder, "_syncfs", spy_sync)
        monkeypatch.setattr(folder.os, "replace", spy_replace)
        monkeypatch.setattr(folder.os, "fsync", spy_fsync)


def test_data_is_durable_before_it_is_visible_and_the_names_before_the_call_returns(
    store: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, syncfs=True)
    store.put_many(objects(400))
    assert calls == ["syncfs", *["rename"] * 400, "syncfs"]


def test_without_syncfs_each_file_and_each_folder_above_it_is_synced(
    store: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, syncfs=False)
    store.put_many(objects(3))
    # objects' parent, objects, spaces, 7, docs, and two for each object
    assert calls == ["fsync file"] * 3 + ["rename"] * 3 + ["fsync folder"] * (5 + 3 * 2)


def test_a_failing_sync_shows_nothing(store: FolderBlobs, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "_syncfs", fail)
    with pytest.raises(Transient):
        store.put_many(objects(3))
    assert everything(root) == []


def test_the_real_sync_works_or_says_that_it_cannot(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert folder._syncfs(fd) in (True, False)
    finally:
        os.close(fd)
    if folder._libc_syncfs() is not None:
        with pytest.raises(OSError):
            folder._syncfs(-1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_transient_and_leaves_nothing_of_the_batch(
    store: FolderBlobs, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.put_many([("kept/a", b"x")])
    real = shutil.copyfileobj

    def copy(source: Any, target: Any, length: int) -> None:
        if source.getvalue() == b"2":
            target.write(b"half")
            raise OSError(number, os.strerror(number))
        real(source, target, length)

    monkeypatch.setattr(folder.shutil, "copyfileobj", copy)
    with pytest.raises(Transient) as e:
        store.put_many(objects(5))
    assert e.value.code == "blob_store_full" and "KB_BLOBS" in e.value.message
    assert everything(root) == ["kept/a"]
    assert os.listdir(root) == ["kept"]


def test_a_folder_that_must_not_be_written_is_fatal() -> None:
    place = tempfile.mkdtemp()
    me = os.geteuid()
    try:
        os.chmod(place, 0o555)
        if me == 0:
            os.seteuid(NOBODY)
        with pytest.raises(Fatal) as e:
            FolderBlobs(Config(path=Path(place, "objects"))).put_many(objects(1))
        assert e.value.code == "blob_store_denied"
    finally:
        os.seteuid(me)
        os.rmdir(place)


def test_temporary_files_are_no_objects_and_are_removed_after_a_day(store: FolderBlobs, root: Path) -> None:
    store.put_many([("a/b", b"x")])
    for name, age in (("a/.tmp-young", 3600), ("a/.tmp-old", 90_000), ("c/.tmp-old", 90_000)):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"half")
        os.utime(root / name, (time.time() - age,) * 2)
    assert list(store.keys("")) == ["a/b"]
    assert everything(root) == ["a/.tmp-young", "a/b"]
    assert not (root / "c").exists()


def test_a_huge_folder_is_listed_in_slices_without_loss(store: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted([f"n/{number:02}" for number in range(20)] + ["n/05-/x", "n/0/x", "n/a.b/x"])
    store.put_many([(name, b"") for name in names])
    for size in (1, 2, 7, 23):
        monkeypatch.setattr(folder, "_NAMES", size)
        assert list(store.keys("")) == names


def test_the_last_deletion_leaves_no_empty_folders_and_the_root(store: FolderBlobs, root: Path) -> None:
    store.put_many([("a/b/c", b"x"), ("a/d", b"x")])
    store.delete_many(["a/b/c"])
    assert not (root / "a/b").exists() and (root / "a/d").exists()
    store.delete_many(["a/d"])
    assert os.listdir(root) == []


def test_deleting_beside_a_writer_loses_none_of_its_objects(store: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_syncfs", lambda fd: True)  # the disk is not what is tested
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            store.put_many([("a/b/c/other", b"x")])
            store.delete_many(["a/b/c/other"])

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for number in range(150):
            store.put_many([(f"a/b/c/{number}", b"mine")])
            assert store.get(f"a/b/c/{number}") == b"mine"
            store.delete_many([f"a/b/c/{number}"])
    finally:
        done.set()
        thread.join()


def test_a_folder_that_others_delete_and_make_again_is_made_again(store: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_many([("a/b", b"x")])
    real, errors = os.makedirs, [FileExistsError(), FileNotFoundError()]

    def makedirs(path: str, exist_ok: bool) -> None:
        if path.endswith("/c") and errors:
            raise errors.pop()
        real(path, exist_ok=exist_ok)

    monkeypatch.setattr(folder.os, "makedirs", makedirs)
    store.put_many([("c/d", b"y")])
    assert store.get("c/d") == b"y" and not errors


def test_a_missing_store_is_fatal_and_not_a_missing_object(store: FolderBlobs, root: Path) -> None:
    assert list(store.keys("")) == []  # nothing was ever written
    store.put_many([("a", b"x")])
    root.rename(root.with_name("unmounted"))
    with pytest.raises(Fatal) as e:
        store.get("a")
    assert e.value.code == "blob_store_missing"


def test_a_relative_folder_is_refused() -> None:
    with pytest.raises(ValidationError, match="absolute"):
        Config(path=Path("objects"))


# --- s3


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="blobs")
        yield f"http://{host}:{port}"
    server.stop()


def s3(endpoint: str, **options: Any) -> S3Blobs:
    return S3Blobs(S3Config(**{"bucket": "blobs", "endpoint": endpoint, **options}))


def error_of(answer: Any, status: int = 400) -> KbError:
    """What a store says when the service answers every GetObject like this."""
    from botocore.stub import Stubber

    store = s3("http://127.0.0.1:9")
    with Stubber(store._client) as stub:
        stub.add_client_error("get_object", answer, "secret vendor text", status)
        with pytest.raises(KbError) as e:
            store.get("a")
    return e.value


@pytest.mark.parametrize(
    ("vendor_code", "status", "kind", "code"),
    [
        ("NoSuchKey", 404, Rejected, "blob_missing"),
        ("NoSuchBucket", 404, Fatal, "blob_store_missing"),
        ("PermanentRedirect", 301, Fatal, "blob_store_missing"),
        ("AccessDenied", 403, Fatal, "blob_store_denied"),
        ("InvalidAccessKeyId", 403, Fatal, "blob_store_denied"),
        ("RequestTimeTooSkewed", 403, Fatal, "blob_store_denied"),
        ("SlowDown", 503, RateLimited, "rate_limited"),
        ("", 429, RateLimited, "rate_limited"),
        ("InternalError", 500, Transient, "blob_store_error"),
        ("RequestTimeout", 400, Transient, "blob_store_error"),
        ("", 502, Transient, "blob_store_error"),
        ("XMinioStorageFull", 507, Transient, "blob_store_full"),
    ],
)
def test_errors_of_the_service_are_told_by_what_happens_next(
    endpoint: str, vendor_code: str, status: int, kind: type[KbError], code: str
) -> None:
    error = error_of(vendor_code, status)
    assert type(error) is kind and error.code == code
    assert "s3://blobs/a" in error.message and "vendor text" not in error.message


def test_a_missing_bucket_is_fatal_in_every_call(endpoint: str) -> None:
    store = s3(endpoint, bucket="not-there")
    for call in (
        lambda: store.put_many([("a", b"x")]),
        lambda: store.put_many([("a", BytesIO(b"x" * (8 * 2**20 + 1)))]),
        lambda: store.get("a"),
        lambda: store.delete_many(["a"]),
        lambda: list(store.keys("")),
    ):
        with pytest.raises(Fatal) as e:
            call()
        assert e.value.code == "blob_store_missing"


def test_missing_credentials_are_fatal(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Fatal) as e:
        s3(endpoint).get("a")
    assert e.value.code == "blob_store_denied" and "AWS_ACCESS_KEY_ID" in e.value.message


def test_an_unreachable_service_is_transient(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda *a, **k: 0)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *a, **k: 0)
    with pytest.raises(Transient):
        s3("http://127.0.0.1:9").get("a")


def test_an_endpoint_that_is_no_url_is_misconfigured(endpoint: str) -> None:
    with pytest.raises(Misconfigured, match="KB_S3_ENDPOINT"):
        s3("nonsense")


def test_a_key_that_cannot_be_deleted_fails_the_call(endpoint: str) -> None:
    from botocore.stub import ANY, Stubber

    store = s3("http://127.0.0.1:9", prefix="p")
    for vendor_code, kind in (("AccessDenied", Fatal), ("InternalError", Transient), ("NoSuchKey", None)):
        with Stubber(store._client) as stub:
            answer = {"Errors": [{"Key": "p/x/2", "Code": vendor_code, "Message": "no"}]}
            stub.add_response("delete_objects", answer, {"Bucket": "blobs", "Delete": ANY})
            if kind is None:
                store.delete_many(["x/1", "x/2"])
                continue
            with pytest.raises(kind, match="x/2"):
                store.delete_many(["x/1", "x/2"])


def test_many_deletions_are_sent_a_thousand_at_a_time(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, sizes = s3(endpoint), list[int]()

    def delete_objects(Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(Delete["Objects"]))
        return {}

    monkeypatch.setattr(store._client, "delete_objects", delete_objects)
    store.delete_many(f"k{number}" for number in range(2500))
    assert sizes == [1000, 1000, 500]


def test_folder_markers_of_consoles_are_no_objects(endpoint: str) -> None:
    store = s3(endpoint, prefix="/markers/")
    store.put_many([("a/b", b"x")])
    store._client.put_object(Bucket="blobs", Key="markers/a/", Body=b"")
    assert list(store.keys("")) == ["a/b"]


def test_listing_goes_on_behind_the_first_answer(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3(endpoint, prefix="pages")
    names = [f"n{number:02}" for number in range(7)]
    store.put_many([(name, b"") for name in names])
    paginator, sizes = store._client.get_paginator("list_objects_v2"), list[int]()

    class SmallPages:
        def paginate(self, **wanted: Any) -> Iterator[Any]:
            for page in paginator.paginate(**wanted, PaginationConfig={"PageSize": 3}):
                sizes.append(page["KeyCount"])
                yield page

    monkeypatch.setattr(store._client, "get_paginator", lambda name: SmallPages())
    assert list(store.keys("")) == names
    assert sizes == [3, 3, 1]
