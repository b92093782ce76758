"""What is special about folders: names, patterns, links, permissions, stamps, and files that change under the reader."""

import errno
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kb_pipeline import connectors
from kb_pipeline.connectors import local_dir
from kb_pipeline.connectors.local_dir import Config, LocalDir
from kb_pipeline.errors import Fatal, KbError, Rejected, Transient
from kb_pipeline.model import Item, Page, Presence, Verdict

MAX_BYTES = 10**6
NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def shared_root() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Permissions mean nothing to root."""
    if (me := os.geteuid()) != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)


def write(root: Path, *paths: str, content: bytes = b"x") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def folder(root: Path, **options: Any) -> LocalDir:
    return LocalDir(Config(path=root, **options))


def pages(root: Path, **options: Any) -> list[Page]:
    return list(folder(root, **options).pages(None, 50))


def ids(root: Path, **options: Any) -> list[str]:
    return [item.external_id for page in pages(root, **options) for item in page.items]


def aged(root: Path, **options: Any) -> LocalDir:
    """Opened a minute from now: nothing is provisional any more."""
    connector = folder(root, **options)
    connector.clock = lambda: time.time() + 60  # type: ignore[method-assign]
    return connector


def only(root: Path) -> Item:
    ((item,),) = (page.items for page in pages(root))
    return item


def refused(call: Callable[[], object]) -> KbError:
    with pytest.raises(KbError) as e:
        call()
    return e.value


# --- names


def test_a_name_that_is_not_utf8_is_a_bad_item_and_costs_itself_only(root: Path) -> None:
    write(root, "a.md", "z.md")
    (root / os.fsdecode(b"caf\xe9.md")).write_bytes(b"x")
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["a.md", "z.md"]
    assert page.verdict is Verdict.COMPLETE
    (bad,) = page.bad
    assert (bad.external_id, bad.code) == (r"./caf\xe9.md", "name_not_utf8")
    assert "rename" in bad.message
    bad.external_id.encode()  # storable
    assert aged(root).listing_digest() is None


def test_an_escaped_name_never_equals_the_name_of_another_file(root: Path) -> None:
    for name in (b"a\xff", rb"a\xff", rb"\\xff", b"\\\xff", b"\xff\\xff"):
        (root / os.fsdecode(name)).write_bytes(b"x")
    (page,) = pages(root)
    found = [item.external_id for item in page.items] + [bad.external_id for bad in page.bad]
    assert len(found) == len(set(found)) == 5
    assert folder(root).presence(found) == [Presence.PRESENT] * 5


def test_a_walk_resumes_behind_a_name_that_is_not_utf8(root: Path) -> None:
    (root / os.fsdecode(b"dir\xff")).mkdir()
    for name in (b"a", b"dir\xff/b", b"dir\xff/c\\x", b"\xfe", b"z"):
        (root / os.fsdecode(name)).write_bytes(b"x")
    whole = list(folder(root).pages(None, 1))
    assert sum(len(page.bad) for page in whole) == 3
    for number, page in enumerate(whole, 1):
        assert [(p.items, p.bad) for p in folder(root).pages(page.checkpoint, 1) if p.items or p.bad] == [
            (p.items, p.bad) for p in whole[number:]
        ]


def test_odd_names_are_listed_and_fetched_as_they_are(root: Path) -> None:
    names = ["new\nline.md", "a b#c?d%.md", "e\u0301.md", "é.md", "\\back.md", "x\x01.md"]
    write(root, *names)
    assert sorted(ids(root)) == sorted(names)
    for name in names:
        assert folder(root).fetch(name, MAX_BYTES).data.read() == b"x"


def test_an_item_names_its_file_and_its_address(root: Path) -> None:
    write(root, "a b/c#1 é.md", content=b"123")
    os.utime(root / "a b/c#1 é.md", ns=(0, 1_600_000_000_123_456_789))
    item = only(root)
    assert (item.external_id, item.title, item.size_bytes) == ("a b/c#1 é.md", "c#1 é.md", 3)
    assert item.uri == (root / "a b/c#1 é.md").as_uri()
    assert item.modified_at is not None and item.modified_at.isoformat() == "2020-09-13T12:26:40.123456+00:00"


def test_a_time_beyond_the_calendar_is_no_time() -> None:
    assert local_dir._utc(10**21) is None


# --- patterns


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("*.md", "", ["a.md", "d/b.md", "d/e/c.md"]),
        ("/*.md", "", ["a.md"]),
        ("d/*.md", "", ["d/b.md"]),
        ("d/**/*.md", "", ["d/b.md", "d/e/c.md"]),
        ("**/*.md", "", ["a.md", "d/b.md", "d/e/c.md"]),
        ("d/**", "", ["d/b.md", "d/e/c.md", "d/t.txt"]),
        ("d", "", ["d/b.md", "d/e/c.md", "d/t.txt"]),
        ("d/", "d/e/", ["d/b.md", "d/t.txt"]),
        ("e", "", ["d/e/c.md"]),
        ("[ab].md", "", ["a.md", "d/b.md"]),
        ("[!a].md", "", ["d/b.md", "d/e/c.md"]),
        ("?.txt, a.*", "", ["a.md", "d/t.txt"]),
        ("*.md,*.txt", "*b*", ["a.md", "d/e/c.md", "d/t.txt"]),
        ("", "*.md", ["d/t.txt"]),
        ("", "d/**", ["a.md"]),
        ("", "**/e", ["a.md", "d/b.md", "d/t.txt"]),
        (["a.md"], [], ["a.md"]),
        ("*.MD", "", []),
    ],
)
def test_patterns_choose_files(root: Path, include: object, exclude: object, left: list[str]) -> None:
    everything = ["a.md", "d/b.md", "d/e/c.md", "d/t.txt"]
    write(root, *everything)
    assert sorted(ids(root, include=include, exclude=exclude)) == left
    connector = folder(root, include=include, exclude=exclude)
    assert connector.presence(everything) == [Presence.PRESENT if p in left else Presence.GONE for p in everything]
    for path in everything:
        assert (connector.content_digest(path) is not None) == (path in left)


@pytest.mark.parametrize("pattern", ["/", "../x", "a/../b", "[z-a]"])
def test_a_pattern_that_matches_no_path_is_refused(root: Path, pattern: str) -> None:
    with pytest.raises(ValidationError):
        Config(path=root, include=(pattern,))


def test_hidden_temporary_and_machine_files_are_left_out_by_default(root: Path) -> None:
    write(
        root,
        ".git/config",
        ".hidden.md",
        "~$report.docx",
        "a.tmp",
        "b.swp",
        "c~",
        "Thumbs.db",
        "node_modules/x/readme.md",
        "k.md",
    )
    assert ids(root) == ["k.md"]


def test_an_excluded_folder_is_not_entered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "node_modules/a.md", "private/b.md", "c.md")
    opened = spy_on_open(monkeypatch)
    assert ids(root, exclude="node_modules,private/**") == ["c.md"]
    assert not {b"node_modules", b"private"} & set(opened)


def test_a_relative_root_and_an_unknown_option_are_refused() -> None:
    with pytest.raises(ValidationError, match="absolute"):
        Config(path=Path("docs"))
    with pytest.raises(ValidationError):
        Config(path=Path("/docs"), follow_symlinks=True)


# --- links and special files


def test_links_are_reported_and_not_followed(root: Path, tmp_path: Path) -> None:
    write(tmp_path, "outside/secret.md")
    write(root, "d/a.md")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "out.md").symlink_to(tmp_path / "outside/secret.md")
    (root / "d/loop").symlink_to(root)
    (root / "inside.md").symlink_to(root / "d/a.md")
    (root / "dangling").symlink_to("nowhere")
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["d/a.md"]
    assert page.verdict is Verdict.COMPLETE
    assert [reason.split(":")[0] for reason in page.reasons] == ["d/loop", "dangling", "inside.md", "out", "out.md"]
    through = ["out/secret.md", "out.md", "d/loop/d/a.md", "inside.md"]
    assert folder(root).presence(through) == [Presence.GONE] * 4
    for path in through:
        assert refused(lambda path=path: folder(root).fetch(path, MAX_BYTES)).code == "gone"


def test_a_folder_that_becomes_a_link_between_listing_and_opening_is_not_entered(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "outside/secret.md")
    write(root, "d/a.md", "e.md")
    real = os.open

    def swap(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == b"d" and (root / "d").is_dir() and not (root / "d").is_symlink():
            (root / "d").rename(tmp_path / "moved")
            (root / "d").symlink_to(tmp_path / "outside")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(local_dir.os, "open", swap)
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["e.md"]
    assert page.verdict is Verdict.PARTIAL


def test_a_root_that_is_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    write(root, "a.md")
    (tmp_path / "link").symlink_to(root)
    assert ids(tmp_path / "link") == ["a.md"]


def test_pipes_are_reported_and_never_opened(root: Path) -> None:
    os.mkfifo(root / "pipe")
    write(root, "a.md")
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["a.md"]
    assert page.verdict is Verdict.COMPLETE and page.reasons == ("pipe: no regular file, not opened",)
    assert refused(lambda: folder(root).fetch("pipe", MAX_BYTES)).code == "gone"
    assert folder(root).presence(["pipe"]) == [Presence.GONE]


@pytest.mark.parametrize("external_id", ["../x", "a/../../x", "/etc/passwd", "a//b", "./../x", "", ".", "a\0b"])
def test_an_id_that_leaves_the_root_is_refused(root: Path, external_id: str) -> None:
    write(root.parent, "x")
    connector = folder(root, exclude="")
    assert refused(lambda: connector.fetch(external_id, MAX_BYTES)).code == "outside_root"
    assert refused(lambda: connector.content_digest(external_id)).code == "outside_root"
    assert connector.presence([external_id]) == [Presence.UNKNOWN]


def test_many_reasons_are_told_in_part_and_counted(root: Path) -> None:
    for number in range(150):
        (root / f"link{number:03}").symlink_to("nowhere")
    write(root, "a.md", "z.md")
    first, last = folder(root).pages(None, 1)
    assert len(first.reasons) + len(last.reasons) == 101
    assert last.reasons[-1].startswith("50 more")


# --- what cannot be read


def test_an_unreadable_folder_makes_the_listing_partial_and_the_walk_goes_on(shared_root: Path) -> None:
    write(shared_root, "a.md", "b/c.md", "d.md", "e/f/g.md", "e/h.md")
    (shared_root / "b").chmod(0)
    (shared_root / "e").chmod(0o744)  # its names can be read, but nothing about them
    with without_privileges():
        (page,) = pages(shared_root)
        assert [item.external_id for item in page.items] == ["a.md", "d.md"]
        assert page.verdict is Verdict.PARTIAL
        assert [reason.split(":")[0] for reason in page.reasons] == ["b/", "e/"]
        assert all("exclude" in reason for reason in page.reasons)
        connector = aged(shared_root)
        assert connector.listing_digest() is None
        assert aged(shared_root, exclude="b,e").listing_digest() is not None
        assert connector.presence(["b/c.md", "a.md"]) == [Presence.FORBIDDEN, Presence.PRESENT]
        assert ids(shared_root, exclude="b,e") == ["a.md", "d.md"]
        assert pages(shared_root, exclude="b,e")[0].verdict is Verdict.COMPLETE


def test_an_unreadable_file_is_forbidden_and_not_gone(shared_root: Path) -> None:
    write(shared_root, "a.md")
    (shared_root / "a.md").chmod(0)
    with without_privileges():
        connector = folder(shared_root)
        for error in (refused(lambda: connector.fetch("a.md", 10)), refused(lambda: connector.content_digest("a.md"))):
            assert isinstance(error, Rejected) and error.code == "forbidden" and "read" in error.message
        assert connector.presence(["a.md"]) == [Presence.PRESENT]


def test_an_unreadable_root_is_fatal(shared_root: Path) -> None:
    shared_root.chmod(0)
    with without_privileges():
        for call in (folder(shared_root).check, lambda: pages(shared_root), lambda: folder(shared_root).fetch("a.md", 10)):
            error = refused(call)
            assert isinstance(error, Fatal) and error.code == "root_unreadable"
        assert folder(shared_root).presence(["a.md"]) == [Presence.UNKNOWN]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_folder_that_fails_to_list_makes_the_listing_partial(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(root, "a.md", "b/c.md", "d.md")
    inode, real = os.stat(root / "b").st_ino, os.scandir

    def scandir(fd: int) -> Any:
        if os.fstat(fd).st_ino == inode:
            raise OSError(number, os.strerror(number))
        return real(fd)

    monkeypatch.setattr(local_dir.os, "scandir", scandir)
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["a.md", "d.md"]
    assert page.verdict is Verdict.PARTIAL and page.reasons[0].startswith("b/: not listed")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EBUSY])
def test_a_failing_disk_is_transient(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    write(root, "a.md")

    def fail(raw: object, size: int) -> Iterator[bytes]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_dir, "_pieces", fail)
    for call in (lambda: folder(root).fetch("a.md", 10), lambda: folder(root).content_digest("a.md")):
        assert isinstance(refused(call), Transient)


def test_a_full_temporary_folder_is_transient_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    write(root, "a.md", content=b"12345")
    monkeypatch.setattr(local_dir, "_IN_MEMORY", 4)
    monkeypatch.setattr(local_dir.tempfile, "TemporaryFile", Full)
    error = refused(lambda: folder(root).fetch("a.md", 10))
    assert isinstance(error, Transient) and error.code == "no_temp_space"


# --- changes during the walk


def test_what_vanishes_after_its_folder_was_listed_is_simply_not_there(root: Path) -> None:
    write(root, "a.md", "b.md", "c/d.md", "e.md")
    walk = folder(root).pages(None, 1)
    assert [item.external_id for item in next(walk).items] == ["a.md"]
    (root / "b.md").unlink()
    shutil.rmtree(root / "c")
    rest = list(walk)
    assert [item.external_id for page in rest for item in page.items] == ["e.md"]
    assert {page.verdict for page in rest} == {Verdict.COMPLETE}


def test_a_folder_that_vanishes_before_it_is_opened_is_simply_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "a.md", "b/c.md", "d.md")
    real = os.open

    def vanish(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == b"b":
            shutil.rmtree(root / "b")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(local_dir.os, "open", vanish)
    (page,) = pages(root)
    assert [item.external_id for item in page.items] == ["a.md", "d.md"]
    assert page.verdict is Verdict.COMPLETE


def test_what_fails_behind_the_last_full_page_is_told_on_a_page_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "a.md", "b.md", "c/d.md")
    real = os.open

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == b"c":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(local_dir.os, "open", fail)
    first, last = folder(root).pages(None, 2)
    assert first.verdict is Verdict.COMPLETE and len(first.items) == 2
    assert last.verdict is Verdict.PARTIAL and last.items == () and last.checkpoint == first.checkpoint


def test_a_root_that_vanishes_during_a_probe_says_nothing_about_its_items(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "a.md")
    connector = folder(root)
    real = connector._probe

    def probe(fd: int, external_id: str) -> Presence:
        if root.exists():
            shutil.rmtree(root)
        return real(fd, external_id)

    monkeypatch.setattr(connector, "_probe", probe)
    assert connector.presence(["a.md", "b.md"]) == [Presence.UNKNOWN] * 2


@pytest.mark.parametrize("replacement", [None, "folder", "file"])
def test_a_root_that_vanishes_during_the_walk_is_fatal(root: Path, tmp_path: Path, replacement: str | None) -> None:
    write(root, "a.md", "b.md", "c.md")
    walk = folder(root).pages(None, 1)
    next(walk)
    root.rename(tmp_path / "elsewhere")
    if replacement == "folder":
        root.mkdir()
    elif replacement == "file":
        root.write_bytes(b"x")
    error = refused(lambda: list(walk))
    assert isinstance(error, Fatal) and error.code == "root_missing"


def test_a_resumed_walk_does_not_list_the_folders_it_has_behind_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, *(f"{d}/{e}/{f}.md" for d in "abc" for e in "xyz" for f in "12"))
    opened = spy_on_open(monkeypatch)
    rest = [i.external_id for p in folder(root).pages({"after": "b/y/1.md"}, 50) for i in p.items]
    assert rest == ["b/y/2.md", "b/z/1.md", "b/z/2.md", *(f"c/{e}/{f}.md" for e in "xyz" for f in "12")]
    assert opened[1:] == [b"b", b"y", b"z", b"c", b"x", b"y", b"z"]


def test_a_huge_folder_is_listed_in_slices_without_loss(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, *(f"{number:02}.md" for number in range(21)), "a/b.md", "a0/b.md")
    whole = [i.external_id for p in folder(root).pages(None, 4) for i in p.items]
    for names in (1, 2, 3, 7, 23):
        monkeypatch.setattr(local_dir, "_NAMES", names)
        assert [i.external_id for p in folder(root).pages(None, 4) for i in p.items] == whole
        assert [i.external_id for p in folder(root).pages({"after": "09.md"}, 4) for i in p.items] == whole[10:]


def test_no_descriptor_stays_open(root: Path) -> None:
    write(root, "a/b/c.md", "a/b/d.md", "e.md")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    connector = folder(root)
    for _ in range(3):
        walk = connector.pages(None, 1)
        next(walk)
        walk.close()  # type: ignore[attr-defined]
        connector.presence(["a/b/c.md", "a/x"])
        connector.fetch("a/b/c.md", 10).data.close()
        with suppress(Rejected):
            connector.fetch("a/x/y", 10)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


# --- stamps


def test_a_file_written_within_the_resolution_of_its_stamp_is_provisional(root: Path) -> None:
    write(root, "a.md")
    now = os.stat(root / "a.md").st_mtime
    connector = folder(root)
    for age, provisional in ((0.0, True), (1.9, True), (2.1, False)):
        connector.clock = lambda age=age: now + age  # type: ignore[method-assign]
        ((item,),) = (page.items for page in connector.pages(None, 50))
        assert item.provisional is provisional
        assert (connector.listing_digest() is None) is provisional


def test_a_date_in_the_future_does_not_make_a_file_provisional_for_ever(root: Path) -> None:
    write(root, "a.md")
    os.utime(root / "a.md", (time.time() + 10**6,) * 2)
    assert aged(root).listing_digest() is not None


def test_an_edit_of_equal_size_under_a_restored_mtime_changes_the_revision(root: Path) -> None:
    write(root, "a.md", content=b"one")
    os.utime(root / "a.md", (1.5e9, 1.5e9))
    before, stamp = only(root), os.stat(root / "a.md").st_ctime_ns
    while os.stat(root / "a.md").st_ctime_ns == stamp:  # until the file system's clock ticks
        (root / "a.md").write_bytes(b"two")
        os.utime(root / "a.md", (1.5e9, 1.5e9))
    after = only(root)
    assert (after.size_bytes, after.modified_at, after.identity) == (before.size_bytes, before.modified_at, before.identity)
    assert after.revision != before.revision


def test_identity_survives_a_rename_and_is_not_claimed_for_a_file_with_two_names(root: Path) -> None:
    write(root, "a.md")
    before = only(root)
    (root / "d").mkdir()
    (root / "a.md").rename(root / "d/b.md")
    assert only(root).identity == before.identity is not None
    os.link(root / "d/b.md", root / "c.md")
    assert [item.identity for page in pages(root) for item in page.items] == [None, None]


@pytest.mark.parametrize("change", [b"longer than before", b"of equal len", b"short"])
@pytest.mark.parametrize("call", ["fetch", "content_digest"])
def test_a_file_that_changes_while_it_is_read_is_read_again_later(
    root: Path, monkeypatch: pytest.MonkeyPatch, change: bytes, call: str
) -> None:
    write(root, "a.md", content=b"as it was it")
    real = local_dir._pieces

    def pieces(raw: Any, size: int) -> Iterator[bytes]:
        for piece in real(raw, size):
            yield piece
            (root / "a.md").write_bytes(change)

    monkeypatch.setattr(local_dir, "_pieces", pieces)
    connector = folder(root)
    error = refused(lambda: connector.fetch("a.md", MAX_BYTES) if call == "fetch" else connector.content_digest("a.md"))
    assert isinstance(error, Transient) and error.code == "changed_while_reading"


def test_a_file_that_grows_without_end_does_not_hold_the_reader() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"x" * size

    with pytest.raises(OSError):
        for _ in local_dir._pieces(Endless(), 10):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("mtime", "at", "waits"),
    [
        (1000.0, 1000.5, True),
        (1000.0, 1002.5, False),
        (1000.123, 1000.130, True),
        (1000.123, 1000.2, False),
        (2000.5, 1000.0, False),
    ],
)
def test_reading_begins_when_a_write_would_get_another_stamp(
    root: Path, monkeypatch: pytest.MonkeyPatch, mtime: float, at: float, waits: bool
) -> None:
    write(root, "a.md")
    os.utime(root / "a.md", (mtime, mtime))
    slept: list[float] = []

    class Clock:
        time = staticmethod(lambda: at)
        sleep = staticmethod(slept.append)

    monkeypatch.setattr(connectors, "time", Clock)
    folder(root).content_digest("a.md")
    assert bool(slept) is waits and all(0 < seconds <= 2 for seconds in slept)


def test_a_large_file_is_copied_to_a_temporary_file_and_a_small_one_to_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_dir, "_IN_MEMORY", 3 * 2**20)
    content = os.urandom(3 * 2**20 + 1)
    write(root, "large.bin", content=content)
    write(root, "small.bin", content=content[:-1])
    large, small = (folder(root).fetch(name, 10 * 2**20) for name in ("large.bin", "small.bin"))
    assert isinstance(small.data, io.BytesIO) and not isinstance(large.data, io.BytesIO)
    with large.data, small.data:
        assert large.data.read() == content and small.data.read() == content[:-1]


def spy_on_open(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    real, opened = os.open, list[Any]()

    def spy(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(local_dir.os, "open", spy)
    return opened


def test_the_change_token_is_about_selected_files_only(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_bytes(b"a")
    os.utime(tmp_path / "in" / "a.md", (1e9, 1e9))
    connector = LocalDir(Config(path=tmp_path, include=("in",), exclude=("*.tmp",)))
    before = settled(connector)
    for other in (tmp_path / "b.md", tmp_path / "in" / "x.tmp"):
        other.write_bytes(b"x")
    (tmp_path / "in" / "link.md").symlink_to(tmp_path / "b.md")
    assert settled(connector) == before
    (tmp_path / "in" / "c.md").write_bytes(b"c")
    assert settled(connector) != before


def test_a_write_within_its_own_clock_tick_makes_the_token_unlike_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.md").write_bytes(b"a")
    written = (tmp_path / "a.md").stat().st_ctime
    monkeypatch.setattr("kb_pipeline.connectors.time.time", lambda: written + 0.001)
    connector = LocalDir(Config(path=tmp_path))
    assert connector.change_token(60.0) != connector.change_token(60.0)
    monkeypatch.setattr("kb_pipeline.connectors.time.time", lambda: written + 10.0)
    assert connector.change_token(60.0) == connector.change_token(60.0)


def settled(connector: LocalDir) -> str:
    before = None
    for _ in range(10_000):
        if (token := connector.change_token(60.0)) is not None and token == before:
            return token
        before = token
    raise AssertionError("the token never settles")
