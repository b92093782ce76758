"""A folder: every regular file below ``path`` is an item, its relative POSIX path the external id.

Order      A walk goes depth first and compares paths component by component, as bytes ("a/z" comes before "a.md"). That is
           a total order over external ids, so a checkpoint is only the last id: what lies before it is not even listed.
Memory     One page and, per open level, at most ``_NAMES`` names, however many files there are.
Links      Symbolic links are reported and never followed, by no call: every component is opened with O_NOFOLLOW relative to
           the folder above it, so a name that is swapped for a link in the meantime leads nowhere. A link's target inside
           the folder is listed under its own name.
Revision   Size, mtime, ctime and inode. ctime, because mtime can be set: tools that write fixed mtimes (reproducible builds,
           archive extraction) would otherwise hide a change of equal size. A rename or chmod costs one reading and no more.
Identity   The inode: a hint, as a deleted file's inode is given to the next one. Only an equal digest proves a move.
Clock      The kernel that stamps local files is the one that answers time.time(); a network file system may differ.
"""

import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nsmallest
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, field_validator

from kb_pipeline.connectors import RACY_SECONDS, Globs, Report, Selection, tree_token, wait_out_tick
from kb_pipeline.errors import Fatal, Rejected, TooLarge, Transient
from kb_pipeline.model import BadItem, Fetched, Item, Json, Page, Presence, Verdict
from kb_pipeline.ports import Capabilities

# Hidden, half-written, or written by machines for machines. "lost+found" is never readable, and would spoil every listing.
_EXCLUDE = (
    ".*", "~$*", "*~", "*.tmp", "*.temp", "*.swp", "*.swo", "*.part", "*.partial", "*.crdownload", "Thumbs.db", "desktop.ini",
    "__MACOSX", "__pycache__", "node_modules", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information",
)  # fmt: skip
_IN_MEMORY = 8 * 2**20
_NAMES = 200_000  # names of one folder held at a time: some 15 MB

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW
_LIST = os.O_RDONLY | os.O_DIRECTORY | _SAFE
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | _SAFE  # O_PATH: search permission is enough
_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFE
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # the last two: a parent is a file or a link by now
_DENIED = (errno.EACCES, errno.EPERM)
_CHANGED = errno.EAGAIN  # which no regular file gives
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_Files = Generator[tuple[bytes, os.stat_result], None, None]


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    include: Globs = ()  # empty: everything
    exclude: Globs = _EXCLUDE  # given: replaces the defaults

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        # Each process has its own working directory: a relative path would name another folder in another process.
        if not (path := path.expanduser()).is_absolute():
            raise ValueError(f"{path} is relative: give an absolute path")
        return path


class LocalDir:
    capabilities = Capabilities(order_stable=True, lag_seconds=0.0, probe=True, digest=True, snapshot_digest=True, token=True)

    def __init__(self, config: Config) -> None:
        self._path = os.fsencode(config.path)
        self._selection = Selection(config.include, config.exclude)

    def check(self) -> Json:
        with self._root() as root:
            try:
                entries = sum(self._selection.has([name]) for name in _sorted_names(root, b""))
            except OSError as e:
                raise self._unusable(e) from e
        return {"path": os.fsdecode(self._path), "entries": entries}

    def clock(self) -> float:
        return time.time()

    def pages(self, checkpoint: Json | None, limit: int) -> Iterator[Page]:
        last = (checkpoint or {}).get("after")
        after = tuple(_components(last)) if last else ()
        report, first = Report(), True
        with self._root() as root, closing(self._files(root, after, report)) as files:
            while True:
                clock, items, bad = self.clock(), list[Item](), list[BadItem]()
                for path, st in islice(files, limit):
                    last, readable = _external_id(path)
                    if readable:
                        items.append(self._item(last, path, st, clock))
                    else:
                        way_out = "rename the file (convmv converts whole folders)"
                        bad.append(BadItem(last, "name_not_utf8", f"{last}: the name is not UTF-8: {way_out}"))
                self._require_same(root)  # what was not there may have been the folder itself
                found = len(items) + len(bad)
                verdict, reasons = report.take()
                if found or reasons or first:
                    yield Page(tuple(items), tuple(bad), {"after": last} if last else {}, verdict, reasons)
                first = False
                if found < limit:
                    return

    def listing_digest(self) -> str | None:
        clock, digest, report = self.clock(), hashlib.sha256(), Report()
        with self._root() as root, closing(self._files(root, (), report)) as files:
            for path, st in files:
                if _racy(st, clock) or not _external_id(path)[1]:
                    return None
                digest.update(b"%b\0%b\0" % (path, _revision(st).encode()))
            self._require_same(root)
        return digest.hexdigest() if report.take()[0] is Verdict.COMPLETE else None

    def change_token(self, budget_seconds: float) -> str | None:
        with self._root() as root:
            token = tree_token(root, self._selection, budget_seconds)
            self._require_same(root)
        return token

    def content_digest(self, external_id: str) -> tuple[str, bytes] | None:
        digest = hashlib.sha256()
        try:
            with self._reading(external_id) as (raw, st):
                for piece in _pieces(raw, st.st_size):
                    digest.update(piece)
        except Rejected as e:
            if e.code == "gone":
                return None
            raise
        return _revision(st), digest.digest()

    def fetch(self, external_id: str, max_bytes: int) -> Fetched:
        with ExitStack() as undo:
            with self._reading(external_id) as (raw, st):
                if st.st_size > max_bytes:
                    way_out = "split the file, exclude it, or raise KB_MAX_FILE_BYTES"
                    raise TooLarge(f"{external_id}: {st.st_size} bytes, the limit is {max_bytes}: {way_out}")
                data: BinaryIO = BytesIO() if st.st_size <= _IN_MEMORY else tempfile.TemporaryFile()  # noqa: SIM115
                undo.callback(data.close)
                for piece in _pieces(raw, st.st_size):
                    data.write(piece)
                data.seek(0)
            undo.pop_all()
        return Fetched(data, st.st_size, _revision(st))

    def presence(self, external_ids: Sequence[str]) -> list[Presence]:
        try:
            with self._root() as root:
                found = [self._probe(root, external_id) for external_id in external_ids]
                self._require_same(root)
                return found
        except Fatal:
            return [Presence.UNKNOWN] * len(external_ids)

    @contextmanager
    def _root(self) -> Iterator[int]:
        """A descriptor of the folder; the folder itself may be a link."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise self._unusable(e) from e
        try:
            yield fd
        finally:
            os.close(fd)

    def _require_same(self, root: int) -> None:
        """Raises Fatal when ``path`` does not lead to the opened folder any more: nothing seen since then can be trusted."""
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(root))
        except OSError as e:
            raise self._unusable(e) from e
        if not same:
            raise Fatal(f"{os.fsdecode(self._path)}: replaced while it was read: sync again", code="root_missing")

    def _unusable(self, e: OSError) -> Fatal:
        name = os.fsdecode(self._path)
        if e.errno in _GONE:
            return Fatal(f"{name}: {e.strerror}: mount or restore the folder, or correct path", code="root_missing")
        way_out = "let the user who runs kb read and search it" if e.errno in _DENIED else "check the disk or the mount"
        return Fatal(f"{name}: {e.strerror}: {way_out}", code="root_unreadable")

    def _files(self, root: int, after: tuple[bytes, ...], report: Report) -> _Files:
        """Regular files behind ``after`` in the order of the module's docstring; all else goes into the report."""
        selection, stack = self._selection, [_Folder(os.dup(root), b"", after, self._selection.everything)]
        try:
            while stack:
                folder = stack[-1]
                try:
                    if (name := next(folder.names, None)) is None:
                        os.close(stack.pop().fd)
                        continue
                    path = folder.prefix + name
                    if selection.exclude.match(path, name):
                        continue
                    st = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone since its folder was listed
                except OSError as e:
                    report.unlisted(_external_id(folder.prefix)[0] or "./", _why(e))
                    continue
                on_the_way = bool(folder.after) and name == folder.after[0]  # the checkpoint, or a folder above it
                included = folder.included or selection.include.match(path, name)
                if stat.S_ISDIR(st.st_mode):
                    if (fd := _enter(folder.fd, name, path, report)) is not None:
                        stack.append(_Folder(fd, path + b"/", folder.after[1:] if on_the_way else (), included))
                elif not included or on_the_way:
                    continue
                elif stat.S_ISREG(st.st_mode):
                    yield path, st
                else:
                    kind = "symbolic link, not followed" if stat.S_ISLNK(st.st_mode) else "no regular file, not opened"
                    report.skipped(_external_id(path)[0], kind)
        finally:
            for folder in stack:
                os.close(folder.fd)

    def _item(self, external_id: str, path: bytes, st: os.stat_result, clock: float) -> Item:
        return Item(
            external_id=external_id,
            revision=_revision(st),
            title=external_id.rpartition("/")[2],
            uri="file://" + quote(self._path.rstrip(b"/") + b"/" + path),
            size_bytes=st.st_size,
            modified_at=_utc(st.st_mtime_ns),
            # With several names an inode does not say which one moved.
            identity=f"{st.st_dev}:{st.st_ino}" if st.st_nlink == 1 else None,
            provisional=_racy(st, clock),
        )

    def _probe(self, root: int, external_id: str) -> Presence:
        try:
            parts = _components(external_id)
            if not self._selection.has(parts):
                return Presence.GONE  # the configuration took it out of the source
            with _parent(root, parts) as folder:
                mode = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode
        except Rejected:
            return Presence.UNKNOWN  # no listing ever named it
        except OSError as e:
            return Presence.GONE if e.errno in _GONE else Presence.FORBIDDEN if e.errno in _DENIED else Presence.UNKNOWN
        return Presence.PRESENT if stat.S_ISREG(mode) else Presence.GONE

    @contextmanager
    def _reading(self, external_id: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """The open file and its state, which must be the same afterwards. Raises Rejected, Transient, Fatal."""
        with self._open(external_id) as raw:
            try:
                wait_out_tick(os.fstat(raw.fileno()))
                before = os.fstat(raw.fileno())
                yield raw, before
                after = os.fstat(raw.fileno())
            except OSError as e:
                raise _unreadable(external_id, e) from e
        if _revision(after) != _revision(before):
            raise _unreadable(external_id, OSError(_CHANGED, "changed while it was read"))

    def _open(self, external_id: str) -> BinaryIO:
        parts = _components(external_id)
        with self._root() as root:
            try:
                with _parent(root, parts) as folder:
                    # Never opened unless it is a regular file: opening a device or a pipe can have effects.
                    mode = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode
                    if not self._selection.has(parts) or not stat.S_ISREG(mode):
                        raise OSError(errno.ENOENT, "excluded by the patterns, or no file any more")
                    return open(os.open(parts[-1], _READ, dir_fd=folder), "rb", buffering=0)
            except OSError as e:
                self._require_same(root)
                raise _unreadable(external_id, e) from e


@dataclass(slots=True)
class _Folder:
    fd: int
    prefix: bytes
    after: tuple[bytes, ...]  # where a resumed walk goes on below this folder
    included: bool  # it, or a folder above it, matches include
    names: Iterator[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.names = _sorted_names(self.fd, self.after[0] if self.after else b"")


def _sorted_names(fd: int, first: bytes) -> Iterator[bytes]:
    """Names from ``first`` on, in byte order. A huge folder is read again for each ``_NAMES`` of them."""
    with os.scandir(fd) as entries:
        names = [os.fsencode(entry.name) for entry in islice(entries, _NAMES + 1)]
    if len(names) <= _NAMES:
        names.sort()
        yield from names[bisect_left(names, first) :]
        return
    while len(names) >= _NAMES:
        with os.scandir(fd) as entries:
            names = nsmallest(_NAMES, (name for entry in entries if (name := os.fsencode(entry.name)) >= first))
        yield from names
        first = names[-1] + b"\0" if names else first  # the next possible name


def _enter(parent: int, name: bytes, path: bytes, report: Report) -> int | None:
    try:
        return os.open(name, _LIST, dir_fd=parent)
    except FileNotFoundError:
        return None  # gone since the folder above was listed
    except OSError as e:
        report.unlisted(_external_id(path)[0] + "/", _why(e))
        return None


@contextmanager
def _parent(root: int, parts: Sequence[bytes]) -> Iterator[int]:
    """The folder that holds the last part, reached without following a link."""
    with ExitStack() as opened:
        fd = root
        for part in parts[:-1]:
            fd = os.open(part, _PASS, dir_fd=fd)
            opened.callback(os.close, fd)
        yield fd


def _revision(st: os.stat_result) -> str:
    return f"{st.st_size}-{st.st_mtime_ns}-{st.st_ctime_ns}-{st.st_ino}"


def _racy(st: os.stat_result, clock: float) -> bool:
    """Written so recently that another write could leave the same stamps. A date in the future that someone set is not."""
    return st.st_mtime > clock - RACY_SECONDS and st.st_ctime > clock - RACY_SECONDS


def _pieces(raw: BinaryIO, size: int) -> Iterator[bytes]:
    """The content. Ends at one byte more than ``size``: a file that grows faster than it is read does not hold us."""
    left = size + 1
    while left and (piece := raw.read(min(left, 2**20))):
        left -= len(piece)
        yield piece
    if left != 1:
        raise OSError(_CHANGED, "changed while it was read")


def _utc(nanoseconds: int) -> datetime | None:
    try:
        return _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None  # file systems can store years beyond 9999


def _external_id(path: bytes) -> tuple[str, bool]:
    """The path as text, and whether it is UTF-8. If not, it is escaped behind "./", with which no listed path begins: so it
    never equals the id of another file, whatever that one is called."""
    try:
        return path.decode(), True
    except UnicodeDecodeError:
        return "./" + path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace"), False


def _components(external_id: str) -> list[bytes]:
    """The other way round. Raises Rejected for what is no path below the root."""
    path = external_id.encode("utf-8", "surrogatepass")
    if path.startswith(b"./"):
        path = re.sub(rb"\\(\\|x[0-9a-f]{2})", lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1][1:].decode()), path[2:])
    parts = path.split(b"/")
    if b"\0" in path or not {b"", b".", b".."}.isdisjoint(parts):
        raise Rejected(f"{external_id!r} is no path below the source's folder: give a listed id", code="outside_root")
    return parts


def _why(e: OSError) -> str:
    way_out = "let the user who runs kb read and search it, or exclude it" if e.errno in _DENIED else "sync again"
    return f"not listed: {e.strerror}: {way_out}"


def _unreadable(external_id: str, e: OSError) -> Rejected | Transient:
    if e.errno in _GONE:
        return Rejected(f"{external_id}: {e.strerror}: the next sync takes it out", code="gone")
    if e.errno in _DENIED:
        return Rejected(f"{external_id}: {e.strerror}: let the user who runs kb read it, or exclude it", code="forbidden")
    if e.errno == _CHANGED:
        return Transient(f"{external_id}: {e.strerror}: it is read again later", code="changed_while_reading")
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = f"free some in {tempfile.gettempdir()}"
        return Transient(f"{external_id}: no space for a temporary copy: {way_out}", code="no_temp_space")
    return Transient(f"{external_id}: {e.strerror}: check the disk or the mount", code="unreadable")
