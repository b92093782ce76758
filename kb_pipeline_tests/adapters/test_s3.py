"""What is special about a bucket: pages of the service, versions, scopes, 403 and 404, broken answers, stored checksums."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kb_pipeline.connectors import s3 as connector_module
from kb_pipeline.errors import Fatal, Misconfigured, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.model import Page, Presence
from kb_pipeline.registry import open_adapter
from kb_pipeline_tests import s3

MAX_BYTES = 10**9


@pytest.fixture
def bucket(moto: str) -> str:
    return s3.new_bucket(moto)


def opened(endpoint: str, bucket: str, **options: Any) -> Any:
    return open_adapter("connector", "s3", s3.options(endpoint, bucket, **options))


def put(endpoint: str, bucket: str, *keys: str, **options: Any) -> None:
    for key in keys:
        s3.client(endpoint).put_object(Bucket=bucket, Key=key, **{"Body": b"x", **options})


def ids(pages: Iterator[Page]) -> list[str]:
    return [item.external_id for page in pages for item in page.items]


# --- listing


def test_answers_of_the_service_are_cut_into_pages_and_a_checkpoint_lies_inside_one(
    proxy: s3.Proxy, moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_LIST", 3)
    put(moto, bucket, *(f"k{n}" for n in range(8)))
    pages = list(opened(proxy.endpoint, bucket).pages(None, 2))
    assert [len(page.items) for page in pages] == [2, 2, 2, 2]
    assert len(proxy.seen) == 3
    assert ids(opened(proxy.endpoint, bucket).pages(pages[1].checkpoint, 2)) == ["k4", "k5", "k6", "k7"]
    assert "start-after=k3" in proxy.seen[3].query


def test_a_page_that_fails_raises_and_the_walk_goes_on_behind_the_last_checkpoint(
    proxy: s3.Proxy, moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_LIST", 2)
    put(moto, bucket, *(f"k{n}" for n in range(6)))
    proxy.rule = lambda seen: s3.Trouble(503, "SlowDown") if "continuation-token" in seen.query else None
    pages, seen = opened(proxy.endpoint, bucket).pages(None, 2), list[Page]()
    with pytest.raises(RateLimited):
        for page in pages:
            seen.append(page)
    assert ids(iter(seen)) == ["k0", "k1"]
    proxy.rule = lambda seen: None
    assert ids(opened(proxy.endpoint, bucket).pages(seen[-1].checkpoint, 2)) == ["k2", "k3", "k4", "k5"]


def test_keys_that_xml_cannot_hold_are_listed_and_read_as_they_are(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    keys = ["a%0Ab", "c%20d", "e+f", "g%2Bh", "i%01j", "z%00"]
    rows = "".join(
        f"<Contents><Key>{k}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag>"
        "<Size>1</Size></Contents>"
        for k in keys
    )
    answer = f"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
    proxy.rule = lambda seen: (
        s3.Trouble(200, body=answer.encode()) if "list-type" in seen.query else s3.Trouble(404, "NoSuchKey")
    )
    connector = opened(proxy.endpoint, bucket)
    (page,) = connector.pages(None, 50)
    assert [item.external_id for item in page.items] == ["a\nb", "c d", "e f", "g+h", "i\x01j"]
    assert [bad.code for bad in page.bad] == ["name_not_storable"]
    assert "encoding-type=url" in proxy.seen[0].query
    assert connector.listing_digest() is None
    with pytest.raises(Rejected):
        connector.fetch("a\nb", MAX_BYTES)
    assert proxy.seen[-1].path == f"/{bucket}/a\nb"


def test_a_store_that_lists_in_no_order_is_refused(proxy: s3.Proxy, bucket: str) -> None:
    rows = "".join(f"<Contents><Key>{k}</Key><ETag>1</ETag><Size>1</Size></Contents>" for k in ("b", "a"))
    rows = rows.replace("<ETag>", "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>")
    proxy.rule = lambda seen: s3.Trouble(200, body=f"<ListBucketResult>{rows}</ListBucketResult>".encode())
    with pytest.raises(Fatal) as e:
        list(opened(proxy.endpoint, bucket).pages(None, 50))
    assert e.value.code == "unordered_listing"


@pytest.mark.parametrize(("versioned", "root"), [(False, "ListBucketResult"), (True, "ListVersionsResult")])
def test_a_listing_that_is_cut_without_a_way_to_go_on_is_not_the_end(
    proxy: s3.Proxy, bucket: str, versioned: bool, root: str
) -> None:
    entry = "<Key>a.md</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag><Size>1</Size>"
    rows = f"<Version>{entry}<IsLatest>true</IsLatest></Version>" if versioned else f"<Contents>{entry}</Contents>"
    answer = f"<{root}><IsTruncated>true</IsTruncated>{rows}</{root}>"
    proxy.rule = lambda seen: s3.Trouble(200, body=answer.encode())
    connector = opened(proxy.endpoint, bucket, versioned=versioned)
    for listing in (lambda: list(connector.pages(None, 50)), connector.listing_digest):
        with pytest.raises(Transient) as e:
            listing()
        assert e.value.code == "listing_cut"
    with pytest.raises(Transient):
        opened(proxy.endpoint, bucket, scope_depth=1).scopes()


def test_folder_markers_and_excluded_keys_are_no_items(moto: str, bucket: str) -> None:
    put(moto, bucket, "docs/a.md", "docs/.hidden/b.md", "docs/c.txt", "docs2/d.md")
    put(moto, bucket, "docs/", "docs/sub/", Body=b"")
    connector = opened(moto, bucket, prefix="docs", include="*.md")
    assert ids(connector.pages(None, 50)) == ["a.md"]
    assert ids(opened(moto, bucket, prefix="docs").pages(None, 50)) == ["a.md", "c.txt"]
    assert connector.presence(["c.txt", ".hidden/b.md"]) == [Presence.GONE] * 2
    with pytest.raises(Rejected, match="excluded"):
        connector.fetch("c.txt", MAX_BYTES)


def test_versions_are_revisions_and_a_delete_marker_is_a_deletion(moto: str) -> None:
    bucket = s3.new_bucket(moto, versioned=True)
    put(moto, bucket, "a", "b", "b")
    connector = opened(moto, bucket, versioned=True)
    before = {item.external_id: item.revision for page in connector.pages(None, 50) for item in page.items}
    put(moto, bucket, "a")  # the same content
    s3.client(moto).delete_object(Bucket=bucket, Key="b")
    after = {item.external_id: item.revision for page in connector.pages(None, 50) for item in page.items}
    assert set(before) == {"a", "b"} and set(after) == {"a"} and after["a"] != before["a"]
    assert connector.fetch("a", MAX_BYTES).revision == after["a"]
    assert connector.presence(["a", "b"]) == [Presence.PRESENT, Presence.GONE]
    assert ids(opened(moto, bucket).pages(None, 50)) == ["a"]  # without the option too


# --- scopes


def test_scopes_by_depth_hold_everything_once(moto: str, bucket: str) -> None:
    put(moto, bucket, "p/a/1", "p/a/b/2", "p/c/3", "p/top", "p/.git/x", "q/4")
    connector = opened(moto, bucket, prefix="p", scope_depth="1")
    assert connector.capabilities.scopes and connector.scopes() == [".", "a/", "c/"]
    listed = {scope: ids(connector.scope_pages(scope, None, 1)) for scope in connector.scopes()}
    assert listed == {".": ["top"], "a/": ["a/1", "a/b/2"], "c/": ["c/3"]}
    assert sorted(x for found in listed.values() for x in found) == ids(connector.pages(None, 50))


def test_named_scopes_are_the_whole_source_and_resume_in_key_order(moto: str, bucket: str) -> None:
    put(moto, bucket, "a/1", "a/2", "b/3", "c/4", "top")
    connector = opened(moto, bucket, scopes="c/,a/")
    assert connector.scopes() == ["a/", "c/"]
    pages = list(connector.pages(None, 1))
    assert ids(iter(pages)) == ["a/1", "a/2", "c/4"]
    for number, page in enumerate(pages, 1):
        assert ids(connector.pages(page.checkpoint, 1)) == ids(iter(pages[number:]))
    assert connector.presence(["b/3", "c/4"]) == [Presence.GONE, Presence.PRESENT]


def test_a_scope_that_may_not_be_listed_does_not_stop_the_others(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    put(moto, bucket, "a/1", "b/2")
    proxy.rule = lambda seen: s3.Trouble(403, "AccessDenied") if "prefix=a" in seen.query else None
    connector = opened(proxy.endpoint, bucket, scopes="a/,b/")
    with pytest.raises(Rejected, match="a/"):
        list(connector.scope_pages("a/", None, 50))
    assert ids(connector.scope_pages("b/", None, 50)) == ["b/2"]
    assert connector.listing_digest() is None


@pytest.mark.parametrize(
    "options", [{"scopes": "a/,a/b/"}, {"scopes": "a/", "scope_depth": "1"}, {"secret_key": ""}, {"endpoint": "nonsense"}]
)
def test_options_that_contradict_each_other_are_refused(moto: str, options: dict[str, str]) -> None:
    with pytest.raises(Misconfigured) as e:
        open_adapter("connector", "s3", {**s3.options(moto, "bucket"), **options})
    assert s3.SECRET_KEY not in e.value.message


# --- presence


def test_a_forbidden_item_is_not_gone_and_without_listing_nothing_is(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    put(moto, bucket, "a", "b")
    connector = opened(proxy.endpoint, bucket)
    asked = ["a", "b", "c"]
    proxy.rule = lambda seen: s3.Trouble(403, "AccessDenied") if seen.path.endswith("/b") else None
    assert connector.presence(asked) == [Presence.PRESENT, Presence.FORBIDDEN, Presence.GONE]
    proxy.rule = lambda seen: s3.Trouble(403, "AccessDenied") if seen.method == "GET" else None
    assert connector.presence(asked) == [Presence.PRESENT, Presence.PRESENT, Presence.UNKNOWN]
    proxy.rule = lambda seen: s3.Trouble(503, "SlowDown") if seen.path.endswith("/b") else None
    assert connector.presence(asked) == [Presence.PRESENT, Presence.UNKNOWN, Presence.GONE]
    proxy.rule = lambda seen: s3.Trouble(403, "SignatureDoesNotMatch")
    assert connector.presence(asked) == [Presence.UNKNOWN] * 3


# --- reading


def test_a_broken_answer_goes_on_where_it_ended_and_only_in_the_same_revision(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    content = bytes(range(256)) * 4000
    put(moto, bucket, "a", Body=content)
    proxy.rule = lambda seen: s3.Trouble(cut_after=300_000) if "range" not in seen.headers else None
    fetched = opened(proxy.endpoint, bucket).fetch("a", MAX_BYTES)
    assert fetched.data.read() == content
    assert "if-match" in proxy.seen[-1].headers and "range" in proxy.seen[-1].headers

    def edited(seen: s3.Seen) -> s3.Trouble | None:
        if "range" in seen.headers:
            return s3.Trouble(before=lambda: put(moto, bucket, "a", Body=content[::-1]))
        return s3.Trouble(cut_after=300_000)

    proxy.rule = edited
    with pytest.raises(Transient) as e:
        opened(proxy.endpoint, bucket).fetch("a", MAX_BYTES)
    assert e.value.code == "changed_while_reading"


def test_a_store_that_passes_over_conditions_does_not_mix_two_revisions(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    put(moto, bucket, "a", Body=b"1" * 1000)

    def rule(seen: s3.Seen) -> s3.Trouble | None:
        if "range" not in seen.headers:
            return s3.Trouble(cut_after=500)
        return s3.Trouble(200, body=b"2" * 500)  # no ETag of the first reading

    proxy.rule = rule
    with pytest.raises(Transient):
        opened(proxy.endpoint, bucket).fetch("a", MAX_BYTES)


def test_an_answer_that_breaks_again_and_again_is_transient(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    put(moto, bucket, "a", Body=b"x" * 1000)
    proxy.rule = lambda seen: s3.Trouble(cut_after=0) if seen.method == "GET" else None
    with pytest.raises(Transient) as e:
        opened(proxy.endpoint, bucket).fetch("a", MAX_BYTES)
    assert e.value.code == "unreadable"
    assert len(proxy.seen) == 3


def test_an_object_that_is_too_large_is_refused_before_its_content_is_read(
    moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(moto, bucket, "a", Body=b"x" * 1000)
    connector = opened(moto, bucket)
    monkeypatch.setattr("botocore.response.StreamingBody.read", lambda *a: pytest.fail("read"))
    with pytest.raises(TooLarge):
        connector.fetch("a", 999)


def test_a_large_object_goes_to_a_file(moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "_IN_MEMORY", 10)
    put(moto, bucket, "a", Body=b"x" * 1000)
    with (fetched := opened(moto, bucket).fetch("a", MAX_BYTES)).data as data:
        assert data.fileno() and data.tell() == 0 and len(data.read()) == fetched.size_bytes == 1000


@pytest.mark.parametrize(
    ("status", "code", "kind", "expected"),
    [
        (403, "InvalidObjectState", Rejected, "archived"),
        (403, "AccessDenied", Rejected, "forbidden"),
        (404, "NoSuchKey", Rejected, "gone"),
        (404, "NoSuchBucket", Fatal, "bucket_missing"),
        (403, "RequestTimeTooSkewed", Fatal, "bad_credentials"),
        (301, "PermanentRedirect", Fatal, "bucket_missing"),
        (503, "SlowDown", RateLimited, "rate_limited"),
        (500, "InternalError", Transient, "unreadable"),
    ],
)
def test_errors_are_told_by_what_happens_next(
    proxy: s3.Proxy, bucket: str, status: int, code: str, kind: type[Exception], expected: str
) -> None:
    # What asks for the region of a bucket after a redirection must be answered.
    proxy.rule = lambda seen: s3.Trouble(status, code) if seen.method == "GET" else s3.Trouble(200)
    with pytest.raises(kind) as e:
        opened(proxy.endpoint, bucket).fetch("a", MAX_BYTES)
    assert e.value.code == expected and f"s3://{bucket}/a" in e.value.message


def test_how_long_the_store_asks_to_wait_is_passed_on(proxy: s3.Proxy, bucket: str) -> None:
    proxy.rule = lambda seen: s3.Trouble(503, "SlowDown", headers=(("Retry-After", "17"),))
    for call in (lambda c: c.fetch("a", MAX_BYTES), lambda c: next(c.pages(None, 50))):
        with pytest.raises(RateLimited) as e:
            call(opened(proxy.endpoint, bucket))
        assert e.value.retry_after == 17


def test_a_stored_checksum_of_the_whole_content_is_taken_and_an_etag_never(
    proxy: s3.Proxy, moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3.client(moto)
    digest = hashlib.sha256(b"x").digest()
    client.put_object(Bucket=bucket, Key="stored", Body=b"x", ChecksumAlgorithm="SHA256")
    upload = client.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    part = client.upload_part(Bucket=bucket, Key="parts", UploadId=upload, PartNumber=1, Body=b"parts")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(Bucket=bucket, Key="parts", UploadId=upload, MultipartUpload=parts)
    connector = opened(proxy.endpoint, bucket)
    revision, found = connector.content_digest("parts")
    assert revision.endswith("-1") and found == hashlib.sha256(b"parts").digest()
    monkeypatch.setattr("botocore.response.StreamingBody.read", lambda *a: pytest.fail("read"))
    assert connector.content_digest("stored")[1] == digest


@pytest.mark.parametrize("answer", [{"ChecksumSHA256": "YQ==-2"}, {"ChecksumSHA256": "YQ==", "ChecksumType": "COMPOSITE"}, {}])
def test_a_checksum_over_the_checksums_of_parts_is_no_hash_of_the_content(answer: dict[str, str]) -> None:
    assert connector_module._stored_sha256(answer) is None


# --- check and credentials


def test_check_tells_what_it_found_and_how_far_the_clock_is_off(proxy: s3.Proxy, moto: str, bucket: str) -> None:
    put(moto, bucket, "docs/a", "docs/b")
    proxy.ahead_seconds = 3600
    found = opened(proxy.endpoint, bucket, prefix="docs").check()
    assert found["objects"] == 2 and found["bucket"] == bucket and 3590 < found["clock_skew_seconds"] < 3610
    assert 3590 < opened(proxy.endpoint, bucket).clock() - time.time() < 3610


def test_a_wrong_secret_is_fatal_and_stays_out_of_the_message(tmp_path_factory: pytest.TempPathFactory) -> None:
    with s3.nanio(tmp_path_factory.mktemp("nanio")) as endpoint:
        bucket = s3.new_bucket(endpoint)
        put(endpoint, bucket, "a b+c%", "é中")
        assert ids(opened(endpoint, bucket).pages(None, 1)) == ["a b+c%", "é中"]
        assert opened(endpoint, bucket).fetch("a b+c%", 1).data.read() == b"x"
        connector = opened(endpoint, bucket, secret_key="wrong-and-confidential")
        for call in (connector.check, lambda: list(connector.pages(None, 1)), lambda: connector.fetch("é中", 1)):
            with pytest.raises(Fatal) as e:
                call()
            assert e.value.code == "bad_credentials" and "confidential" not in e.value.message
        assert connector.presence(["é中"]) == [Presence.UNKNOWN]
