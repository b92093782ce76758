"""File locks and files of the data folder."""

import os
from pathlib import Path


def flock(fd: int, *, exclusive: bool) -> bool:
    """Never waits. False when others hold it."""
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Closing alone would leave the lock with a child that was forked meanwhile and has the same descriptor."""
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def open_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    own_like_parent(path)
    return fd


def own_like_parent(path: Path) -> None:
    """What root makes in another user's data folder must remain usable for that user."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
