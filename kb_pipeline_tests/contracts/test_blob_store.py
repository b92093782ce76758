"""What every object store must keep: a folder, and S3 as two servers speak it."""

import io
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kb_pipeline.errors import Rejected, StateError
from kb_pipeline.registry import BLOBS, open_adapter
from kb_pipeline_tests import s3

_number = count()


STORES = ("file", "s3-moto", "s3-nanio")


@pytest.fixture(scope="module", params=sorted(STORES))
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of a store that all tests of this module share; each works below a prefix of its own."""
    folder = tmp_path_factory.mktemp("objects")
    if request.param == "file":
        yield {"name": "file", "path": str(folder)}
        return
    with s3.moto() if request.param == "s3-moto" else s3.nanio(folder) as endpoint, s3.environment():
        yield {"name": "s3", "bucket": s3.new_bucket(endpoint), "prefix": "kb/a", "endpoint": endpoint}


def test_every_store_is_in_this_suite() -> None:
    assert {name.partition("-")[0] for name in STORES} == set(BLOBS)


@pytest.fixture
def store(options: dict[str, Any]) -> Any:
    return opened(options)


@pytest.fixture
def prefix() -> str:
    return f"spaces/{next(_number)}/"


def opened(options: dict[str, Any]) -> Any:
    return open_adapter("blobs", options["name"], {k: v for k, v in options.items() if k != "name"})


def test_what_was_written_is_read_by_another_process_of_the_same_store(options: dict[str, Any], prefix: str) -> None:
    content = bytes(range(256)) * 1000
    opened(options).put_many([(prefix + "a", content), (prefix + "d/empty", b"")])
    store = opened(options)
    assert store.get(prefix + "a") == content
    assert store.get(prefix + "d/empty") == b""
    with store.open(prefix + "a") as f:
        assert f.read(10) == content[:10]
        f.seek(-10, io.SEEK_END)
        assert f.read() == content[-10:]


def test_file_objects_are_written_from_where_they_stand_and_left_open(store: Any, prefix: str) -> None:
    small, large = io.BytesIO(b"skip small"), tempfile.TemporaryFile()  # noqa: SIM115
    large.write(b"skip" + b"0123456789abcdef" * 2**19 + b"the end")  # more than one part
    for f in (small, large):
        f.seek(4)
    store.put_many([(prefix + "small", small), (prefix + "large", large)])
    assert not small.closed and not large.closed
    large.close()
    assert store.get(prefix + "small") == b" small"
    with store.open(prefix + "large") as f:
        assert len(f.read(8 * 2**20)) == 8 * 2**20
        assert f.read() == b"the end"


def test_a_batch_is_taken_from_a_generator(store: Any, prefix: str) -> None:
    wanted = {f"{prefix}docs/{number}/v1/FETCHER-a1": b"%d" % number for number in range(70)}
    store.put_many((key, content) for key, content in wanted.items())
    assert {key: store.get(key) for key in store.keys(prefix)} == wanted
    store.put_many([])


def test_writing_again_replaces(store: Any, prefix: str) -> None:
    store.put_many([(prefix + "a", b"one, and longer")])
    store.put_many([(prefix + "a", b"two")])
    assert store.get(prefix + "a") == b"two"
    assert list(store.keys(prefix)) == [prefix + "a"]


@pytest.mark.parametrize("missing", ["nothing", "d", "d/a/below-an-object"])
def test_a_missing_object_is_rejected_as_such(store: Any, prefix: str, missing: str) -> None:
    store.put_many([(prefix + "d/a", b"x")])
    for read in (store.get, store.open):
        with pytest.raises(Rejected) as e:
            read(prefix + missing)
        assert e.value.code == "blob_missing"
        assert prefix + missing in e.value.message


def test_deleting_is_idempotent_and_takes_only_what_is_named(store: Any, prefix: str) -> None:
    store.put_many([(prefix + key, b"x") for key in ("a/b/c", "a/b/d", "a/e", "f")])
    for _ in range(2):
        store.delete_many([prefix + "a/b/c", prefix + "f", prefix + "never/was"])
        assert list(store.keys(prefix)) == [prefix + "a/b/d", prefix + "a/e"]
    store.delete_many(store.keys(prefix))
    assert list(store.keys(prefix)) == []
    store.put_many([(prefix + "a/b/c", b"again")])
    assert store.get(prefix + "a/b/c") == b"again"


# A dot after the last part only: no key is then another one's folder.
part = st.text("ab-=Z_0", min_size=1, max_size=2).filter(lambda text: text[0] not in "-=")
key = st.builds(lambda parts, end: "/".join([*parts, end]), st.lists(part, max_size=2), part.map(lambda text: f"{text}.x"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(key, max_size=8), wanted=st.one_of(st.just(""), part, key, part.map(lambda text: text + "/")))
def test_keys_are_those_that_begin_with_the_prefix_in_order(store: Any, names: set[str], wanted: str) -> None:
    base = f"spaces/{next(_number)}/"
    store.put_many([(base + name, b"") for name in names])
    assert list(store.keys(base + wanted)) == sorted(base + name for name in names if name.startswith(wanted))


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".tmp-1", "a/.b", "a b", "a\n", "é", "a\\b", "a" * 1000]
)
def test_a_key_that_is_no_plain_path_is_refused_and_nothing_is_written(store: Any, prefix: str, key: str) -> None:
    before = list(store.keys(""))
    for call in (
        lambda: store.put_many([(key, b"x")]),
        lambda: store.get(key),
        lambda: store.open(key),
        lambda: store.delete_many([key]),
    ):
        with pytest.raises(StateError):
            call()
    assert list(store.keys("")) == before


def test_keys_below_a_prefix_that_leaves_the_store_are_refused(store: Any) -> None:
    with pytest.raises(StateError):
        list(store.keys("../"))


def test_an_error_of_whoever_makes_the_objects_passes_through(store: Any, prefix: str) -> None:
    def objects() -> Iterator[tuple[str, bytes]]:
        yield prefix + "a", b"x"
        raise Rejected("the source is gone", code="gone")

    with pytest.raises(Rejected) as e:
        store.put_many(objects())
    assert e.value.code == "gone"


def test_two_stores_do_not_see_each_other(options: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    other = opened({**options, **({"path": str(tmp_path)} if options["name"] == "file" else {"prefix": "k"})})
    store = opened(options)
    store.put_many([(prefix + "a", b"x")])
    assert list(other.keys("")) == []
    other.delete_many([prefix + "a"])
    assert store.get(prefix + "a") == b"x"


def test_clear_leaves_nothing_below_a_folder_and_everything_beside_it(store: Any, prefix: str) -> None:
    beside = prefix.removesuffix("/") + "1/kept"  # the folder's name is a prefix of its neighbour's
    store.put_many([(prefix + "a", b"1"), (prefix + "d/e/b", b"2"), (beside, b"3")])
    store.clear(prefix)
    store.clear(prefix)
    assert list(store.keys(prefix)) == []
    assert store.get(beside) == b"3"
    store.put_many([(prefix + "a", b"again")])
    assert store.get(prefix + "a") == b"again"


def test_clear_takes_what_killed_writers_left(options: dict[str, Any], prefix: str) -> None:
    store = opened(options)
    store.put_many([(prefix + "a", b"1")])
    if options["name"] == "file":
        folder = Path(options["path"]) / prefix
        half = next(folder.iterdir()).with_name(".tmp-half-written")
        half.write_bytes(b"content")
        store.clear(prefix)
        assert not folder.exists()
        return
    client, bucket = s3.client(options["endpoint"]), options["bucket"]
    client.create_multipart_upload(Bucket=bucket, Key=f"kb/a/{prefix}half")
    beside = client.create_multipart_upload(Bucket=bucket, Key=f"kb/a/{prefix.removesuffix('/')}1/half")
    store.clear(prefix)
    assert [upload["UploadId"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [beside["UploadId"]]
    client.abort_multipart_upload(Bucket=bucket, Key=beside["Key"], UploadId=beside["UploadId"])
