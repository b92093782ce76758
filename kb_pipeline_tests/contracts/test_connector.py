"""What every connector must keep, on a source that the test can change. A new connector adds its scene to ``SCENES``."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb_pipeline.errors import Fatal, KbError, Rejected
from kb_pipeline.model import Item, Page, Presence, Verdict
from kb_pipeline.registry import CONNECTORS
from kb_pipeline_tests import s3
from kb_pipeline_tests.contracts.scenes import SCENES, Scene

MAX_BYTES = 10**6


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    with s3.moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def moto_proxy(moto_endpoint: str) -> Iterator[s3.Proxy]:
    with s3.proxy(moto_endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *a, **k: 0)
        yield proxy


@pytest.fixture(params=sorted(SCENES))
def source(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        yield SCENES[request.param](request.getfixturevalue, Path(folder))


@pytest.fixture(params=sorted(SCENES), scope="module")
def kind(request: pytest.FixtureRequest) -> Any:
    return partial(SCENES[request.param], request.getfixturevalue)


def test_every_connector_has_a_scene() -> None:
    assert {name.partition("-")[0] for name in SCENES} == set(CONNECTORS)


def ids(pages: Sequence[Page] | Iterator[Page]) -> list[str]:
    return [item.external_id for page in pages for item in page.items]


def items(connector: Any) -> dict[str, Item]:
    return {item.external_id: item for page in connector.pages(None, 50) for item in page.items}


# Names of which one begins as the other does, or sorts before "/": what a wrong order of paths would trip over.
name = st.sampled_from(["a", "a-", "a.md", "a b", "ab", "b", "á", "中文", "𠮷", "z~1"])
tree = st.sets(st.lists(name, min_size=1, max_size=3).map("/".join), max_size=12).map(
    # A path is a file or a folder: where it is both, the file goes.
    lambda paths: sorted(p for p in paths if not any(q.startswith(p + "/") for q in paths))
)


def randomly(kind: Any, check: Callable[[Scene, st.DataObject], None]) -> None:
    """``check`` on as many empty sources of this kind as its speed allows."""
    with tempfile.TemporaryDirectory() as folder:
        examples = kind(Path(folder)).examples

    @settings(max_examples=examples, deadline=None, database=None)
    @given(data=st.data())
    def each(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(kind(Path(folder)), data)

    each()


def test_every_checkpoint_resumes_with_exactly_the_rest(kind: Any) -> None:
    def check(source: Scene, data: st.DataObject) -> None:
        paths, limit = data.draw(tree), data.draw(st.integers(1, 5))
        for path in paths:
            source.put(path, b"x")
        pages = list(source.connector().pages(None, limit))
        assert sorted(ids(pages)) == paths
        assert all(len(page.items) + len(page.bad) <= limit for page in pages)
        for number, page in enumerate(pages, 1):
            stored = json.loads(json.dumps(page.checkpoint))
            assert ids(source.connector().pages(stored, limit)) == ids(pages[number:])

    randomly(kind, check)


def test_a_resumed_walk_omits_nothing_that_was_there_all_along(kind: Any) -> None:
    def check(source: Scene, data: st.DataObject) -> None:
        before = data.draw(tree)
        for path in before:
            source.put(path, b"x")
        pages = list(source.connector().pages(None, 2))
        stop = data.draw(st.integers(1, len(pages)))
        removed = data.draw(st.sets(st.sampled_from(before))) if before else set()
        for path in removed:
            source.remove(path)
        for path in data.draw(st.sets(name.map(lambda n: f"added-{n}"))):
            source.put(path, b"y")
        seen = ids(pages[:stop]) + ids(source.connector().pages(pages[stop - 1].checkpoint, 2))
        assert len(seen) == len(set(seen))
        assert set(before) - removed <= set(seen)

    randomly(kind, check)


def test_an_empty_source_is_one_complete_empty_page(source: Any) -> None:
    pages = list(source.connector().pages(None, 50))
    assert [(page.items, page.bad, page.verdict) for page in pages] == [((), (), Verdict.COMPLETE)]
    assert ids(source.connector().pages(pages[0].checkpoint, 50)) == []


def test_an_unchanged_source_lists_the_same_items_in_the_same_order(source: Any) -> None:
    for path in ("b/2", "a", "b/1", "c.md"):
        source.put(path, b"x")
    assert list(source.connector().pages(None, 3)) == list(source.connector().pages(None, 3))


def test_the_listing_digest_changes_with_everything_listed_and_with_nothing_else(source: Any) -> None:
    source.put("a/one.md", b"one")
    source.put("two.md", b"two")
    digests = [source.connector().listing_digest()]
    assert digests[0] is not None and digests[0] == source.connector().listing_digest()
    for change in (
        lambda: source.put("three.md", b"three"),
        lambda: source.put("two.md", b"two, edited"),
        lambda: source.remove("a/one.md"),
        lambda: (source.remove("three.md"), source.put("four.md", b"three")),
    ):
        change()
        digests.append(source.connector().listing_digest())
    assert None not in digests and len(set(digests)) == len(digests)


def settled_token(source: Any) -> str:
    """The token once two in a row are equal: an edit within its own clock tick makes each unlike any other."""
    before = None
    for _ in range(10_000):
        token = source.connector().change_token(60.0)
        if token is not None and token == before:
            return str(token)
        before = token
    raise AssertionError("the token never settles")


def test_the_change_token_differs_after_every_change_and_only_then(source: Any) -> None:
    if not source.connector().capabilities.token:
        pytest.skip("it has none")
    source.put("a/one.md", b"one")
    source.put("two.md", b"two")
    tokens = [settled_token(source)]
    for change in (
        lambda: source.put("three.md", b"three"),
        lambda: source.put("two.md", b"two, edited"),
        lambda: source.put("two.md", b"two. edited"),  # of the same size
        lambda: source.put("a/b/deep.md", b"deep"),
        lambda: source.remove("a/one.md"),
        lambda: (source.remove("three.md"), source.put("four.md", b"three")),
    ):
        change()
        assert source.connector().change_token(60.0) != tokens[-1]
        tokens.append(settled_token(source))
    assert len(set(tokens)) == len(tokens)
    assert settled_token(source) == tokens[-1]


def test_a_change_token_that_takes_too_long_is_none(source: Any) -> None:
    if not source.connector().capabilities.token:
        pytest.skip("it has none")
    source.put("a.md", b"one")
    assert source.connector().change_token(0.0) is None


def test_a_listing_with_a_provisional_item_has_no_digest(source: Any) -> None:
    if not source.provisional:
        pytest.skip("its revisions hold for items of this very moment")
    source.put("old.md", b"old")
    source.put_just_now("new.md", b"new")
    connector = source.connector()
    found = items(connector)
    assert found["new.md"].provisional and not found["old.md"].provisional
    assert connector.listing_digest() is None


def test_an_edit_in_the_same_clock_tick_is_not_taken_for_the_listed_content(source: Any) -> None:
    source.put_just_now("a.md", b"one")
    before = items(source.connector())["a.md"]
    source.put_just_now("a.md", b"two")
    after = items(source.connector())["a.md"]
    assert before.provisional or after.revision != before.revision
    assert before.provisional == source.provisional


def test_content_that_changed_after_the_listing_has_the_revision_that_was_read(source: Any) -> None:
    source.put("a.md", b"one")
    connector = source.connector()
    listed = items(connector)["a.md"]
    source.put("a.md", b"two!")
    with (fetched := connector.fetch("a.md", MAX_BYTES)).data as data:
        assert data.read() == b"two!"
    assert fetched.revision == items(connector)["a.md"].revision != listed.revision


def test_a_moved_item_is_gone_there_and_present_here(source: Any) -> None:
    source.put("a.md", b"one")
    before = items(source.connector())["a.md"]
    source.move("a.md", "b.md")
    connector = source.connector()
    after = items(connector)
    assert set(after) == {"b.md"} and after["b.md"].identity == before.identity
    assert connector.presence(["a.md", "b.md"]) == [Presence.GONE, Presence.PRESENT]
    assert connector.fetch("b.md", MAX_BYTES).data.read() == b"one"


def test_a_revoked_item_is_forbidden_and_never_gone(source: Any) -> None:
    source.put("d/a.md", b"x")
    source.put("b.md", b"x")
    with source.revoked("d/a.md"):
        connector = source.connector()
        for read in (lambda: connector.fetch("d/a.md", MAX_BYTES), lambda: connector.content_digest("d/a.md")):
            with pytest.raises(Rejected) as e:
                read()
            assert e.value.code == "forbidden"
        assert connector.presence(["d/a.md", "b.md"]) == [Presence.FORBIDDEN, Presence.PRESENT]
    assert source.connector().fetch("d/a.md", MAX_BYTES).data.read() == b"x"


def test_a_listing_that_fails_in_part_is_never_complete(source: Any) -> None:
    source.put("a.md", b"x")
    source.put("d/b.md", b"x")
    with source.unlistable("d"):
        connector = source.connector()
        with suppress(KbError):
            assert any(page.verdict is Verdict.PARTIAL for page in connector.pages(None, 50))
        with suppress(KbError):
            assert connector.listing_digest() is None
        assert connector.presence(["d/b.md"]) != [Presence.GONE]
    assert sorted(ids(source.connector().pages(None, 50))) == ["a.md", "d/b.md"]


def test_the_clock_is_the_sources_own(source: Any) -> None:
    if not source.clock_ahead(50_000.0):
        pytest.skip("it is this machine's")
    assert 49_000 < source.connector().clock() - time.time() < 51_000


def test_an_edit_changes_the_revision_and_only_that_of_its_item(source: Any) -> None:
    source.put("a.md", b"one")
    source.put("b.md", b"one")
    before = items(source.connector())
    source.put("a.md", b"two!")
    after = items(source.connector())
    assert after["a.md"].revision != before["a.md"].revision
    assert after["b.md"] == before["b.md"]


def test_content_and_digest_are_read_at_the_listed_revision(source: Any) -> None:
    content = bytes(range(256)) * 50
    source.put("d/a.bin", content)
    connector = source.connector()
    item = items(connector)["d/a.bin"]
    with (fetched := connector.fetch("d/a.bin", MAX_BYTES)).data as data:
        assert data.tell() == 0
        assert data.read() == content
    assert fetched.size_bytes == item.size_bytes == len(content)
    assert fetched.revision == item.revision
    assert connector.content_digest("d/a.bin") == (item.revision, hashlib.sha256(content).digest())


def test_an_item_of_the_limit_is_fetched_and_one_byte_more_is_too_large(source: Any) -> None:
    source.put("a.md", b"12345")
    connector = source.connector()
    assert connector.fetch("a.md", 5).data.read() == b"12345"
    with pytest.raises(Rejected) as e:
        connector.fetch("a.md", 4)
    assert e.value.code == "too_large"
    assert "5" in e.value.message and "4" in e.value.message and "KB_MAX_FILE_BYTES" in e.value.message


def test_a_deleted_item_is_gone_in_every_call(source: Any) -> None:
    source.put("d/a.md", b"x")
    source.put("b.md", b"x")
    source.remove("d/a.md")
    connector = source.connector()
    assert ids(connector.pages(None, 50)) == ["b.md"]
    assert connector.content_digest("d/a.md") is None
    with pytest.raises(Rejected) as e:
        connector.fetch("d/a.md", MAX_BYTES)
    assert e.value.code == "gone"


def test_presence_answers_each_id_in_order(source: Any) -> None:
    source.put("d/a.md", b"x")
    source.put("b.md", b"x")
    wanted = ["b.md", "never/was.md", "d/a.md", "b.md/below-a-file"]
    assert source.connector().presence(wanted) == [Presence.PRESENT, Presence.GONE, Presence.PRESENT, Presence.GONE]
    assert source.connector().presence([]) == []


def test_every_listed_item_is_present(source: Any) -> None:
    for path in ("a/b/c.md", "a/b.md", "空 格.md"):
        source.put(path, b"x")
    connector = source.connector()
    assert set(connector.presence(list(items(connector)))) == {Presence.PRESENT}


def test_a_source_that_is_not_there_is_fatal_and_says_nothing_about_its_items(source: Any) -> None:
    source.put("a.md", b"x")
    connector = source.connector()
    source.vanish()
    for call in (
        connector.check,
        lambda: list(connector.pages(None, 50)),
        connector.listing_digest,
        lambda: connector.content_digest("a.md"),
        lambda: connector.fetch("a.md", MAX_BYTES),
    ):
        with pytest.raises(Fatal):
            call()
    assert connector.presence(["a.md", "b.md"]) == [Presence.UNKNOWN] * 2


def test_check_describes_the_source_as_json(source: Any) -> None:
    assert json.loads(json.dumps(source.connector().check()))


def test_the_clock_is_in_seconds_since_the_epoch(source: Any) -> None:
    assert abs(source.connector().clock() - time.time()) < 3600
