"""Objects as files below one folder, the key being the path.

A batch is written under temporary names, made durable, renamed, and made durable again: no reader ever sees half an object,
and after a power cut an object is whole or not there. On Linux that costs two syncfs calls whatever the size of the batch,
elsewhere one fsync for each file and folder. A killed writer leaves temporary files; keys() removes them after a day.
"""

import errno
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from heapq import nsmallest
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, field_validator

from kb_pipeline.blobs import checked_key
from kb_pipeline.errors import Fatal, KbError, Rejected, Transient

_TEMPORARY = ".tmp-"  # no key has a part that begins with a dot
_ABANDONED_SECONDS = 24 * 3600
_NAMES = 100_000  # of one folder held at a time
_TRIES = 100


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not (path := path.expanduser()).is_absolute():
            raise ValueError(f"{path} is relative, and so another folder in each process: give an absolute path")
        return path


class FolderBlobs:
    def __init__(self, config: Config) -> None:
        self._root = os.fspath(config.path)

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        written: list[tuple[str, str]] = []  # temporary name, name
        try:
            os.makedirs(self._root, exist_ok=True)
            fd = os.open(self._root, os.O_RDONLY)  # before the first write: syncfs tells of errors since then
            try:
                for key, content in objects:
                    path = self._path(key)
                    temporary = os.path.join(os.path.dirname(path), _TEMPORARY + secrets.token_hex(8))
                    written.append((temporary, path))
                    self._write(temporary, content)
                self._sync(fd, [temporary for temporary, _ in written])
                for temporary, path in written:
                    os.replace(temporary, path)
                self._sync(fd, self._folders(path for _, path in written))
                written.clear()
            finally:
                os.close(fd)
        except OSError as e:
            raise self._error(e) from e
        finally:
            for temporary, path in written:  # what a failed batch has not renamed
                with suppress(OSError):
                    os.unlink(temporary)
                self._prune(os.path.dirname(path))

    def get(self, key: str) -> bytes:
        with self.open(key) as f:
            try:
                return f.read()
            except OSError as e:
                raise self._error(e) from e

    def open(self, key: str) -> BinaryIO:
        try:
            return open(self._path(key), "rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
            if not os.path.isdir(self._root):
                raise Fatal(f"{self._root}: no such folder: mount it, or correct KB_BLOBS", code="blob_store_missing") from e
            raise Rejected(f"object {key} is not in {self._root}: restore it from a backup", code="blob_missing") from e
        except OSError as e:
            raise self._error(e) from e

    def delete_many(self, keys: Iterable[str]) -> None:
        try:
            for key in keys:
                path = self._path(key)
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
                self._prune(os.path.dirname(path))
        except OSError as e:
            raise self._error(e) from e

    def clear(self, folder: str) -> None:
        path = self._path(folder.removesuffix("/"))
        try:
            for _ in range(_TRIES):  # a late writer may put something into a folder that is being emptied
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
                if not os.path.lexists(path):
                    self._prune(os.path.dirname(path))
                    return
        except OSError as e:
            raise self._error(e) from e

    def keys(self, prefix: str) -> Iterator[str]:
        """Holds one folder's names a level, and of a huge one ``_NAMES``. Removes what killed writers left."""
        base = prefix.rpartition("/")[0]
        try:
            yield from self._below(f"{checked_key(base)}/" if base else "", prefix)
        except OSError as e:
            raise self._error(e) from e

    def _path(self, key: str) -> str:
        return os.path.join(self._root, checked_key(key))

    def _write(self, path: str, content: bytes | BinaryIO) -> None:
        source = BytesIO(content) if isinstance(content, bytes) else content
        with self._create(path) as f:
            shutil.copyfileobj(source, f, 2**20)

    def _create(self, path: str) -> BinaryIO:
        for _ in range(_TRIES):
            # Either error: another process deleted the last object beside it, and the folder, between two of our steps.
            with suppress(FileNotFoundError, FileExistsError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                return open(path, "xb")
        raise OSError(errno.EBUSY, f"{os.path.dirname(path)} is deleted again and again")

    def _sync(self, root: int, paths: list[str]) -> None:
        if _syncfs(root):
            return
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _folders(self, paths: Iterable[str]) -> list[str]:
        """The folders of these files up to the root's own parent: each may be new, and so an entry in the one above."""
        folders = {os.path.dirname(self._root)}
        for path in paths:
            while (path := os.path.dirname(path)) not in folders and path.startswith(self._root):
                folders.add(path)
        return sorted(folders)

    def _prune(self, folder: str) -> None:
        """Remove empty folders upwards. rmdir takes no folder that holds anything, so a concurrent writer loses nothing."""
        while folder != self._root:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return
            folder = os.path.dirname(folder)

    def _below(self, folder: str, prefix: str) -> Iterator[str]:
        for name in self._names(os.path.join(self._root, folder)):
            key = folder + name
            if not key.startswith(prefix):
                continue
            if name.endswith("/"):
                yield from self._below(key, prefix)
            else:
                yield key

    def _names(self, folder: str) -> Iterator[str]:
        """Names in key order: a folder counts as its name with a slash, as in the keys below it."""
        last = ""
        while True:
            try:
                with os.scandir(folder) as entries:
                    names = nsmallest(_NAMES, (name for entry in entries if (name := self._name(entry)) > last))
            except (FileNotFoundError, NotADirectoryError):
                return  # nothing was ever written there, or it was deleted meanwhile
            yield from names
            if len(names) < _NAMES:
                return
            last = names[-1]

    def _name(self, entry: "os.DirEntry[str]") -> str:
        """Empty for what is no object."""
        if not entry.name.startswith(_TEMPORARY):
            return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
        with suppress(FileNotFoundError):
            if entry.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED_SECONDS:
                os.unlink(entry.path)
                self._prune(os.path.dirname(entry.path))
        return ""

    def _error(self, e: OSError) -> KbError:
        what = f"object store {self._root}: {e.strerror or e}"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return Transient(f"{what}: free some space, or move KB_BLOBS to a larger disk", code="blob_store_full")
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Fatal(f"{what}: let the user who runs kb write there, or correct KB_BLOBS", code="blob_store_denied")
        return Transient(f"{what}: check the disk or the mount", code="blob_store_error")


@cache
def _libc_syncfs() -> Any:
    if sys.platform != "linux":
        return None
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def _syncfs(fd: int) -> bool:
    """Make everything that was written to this file system durable. False where the platform cannot."""
    if (syncfs := _libc_syncfs()) is None:
        return False
    if syncfs(fd) == 0:
        return True
    import ctypes

    if (number := ctypes.get_errno()) == errno.ENOSYS:
        return False
    raise OSError(number, os.strerror(number))
