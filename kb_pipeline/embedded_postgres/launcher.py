"""Run as a script, with the standard library only: take ``server.lock``, become a fitting account, execute PostgreSQL.

PostgreSQL refuses to run as root, so under root it gets another account: the owner of the data folder, or `nobody`. That
account often cannot enter the folders above the data folder or the Python environment (/root is 0700). Nothing outside the
data folder may be changed, so these are tried in order, and the first that reaches both is taken:

- the bare account
- the account with one ambient capability, CAP_DAC_READ_SEARCH or else CAP_DAC_OVERRIDE, which opens every folder. This needs
  the securebit NO_SETUID_FIXUP too: PostgreSQL checks its binaries with access(2), for which the kernel ignores the
  capabilities of a process whose user is not root, unless that bit is set.

initdb demands that its user has a name. A user without one (containers run as a number) gets a user namespace in which its
own uid shows as `nobody`; the files stay its own. For root that is no way out: the kernel lets a namespace map uid 0 only to
who has CAP_SETFCAP, and root that has that has the capabilities above.

A launcher and no ``preexec_fn``, because that would run between fork and exec of a process that may have threads.
"""

import contextlib
import ctypes
import fcntl
import os
import pwd
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

IN_USE, NO_ACCOUNT = 75, 77  # exit codes

_SERVER_FOLDERS = ("data.partial", "data", "logs")
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 1 << 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000

Account = tuple[int, int]


def main(root: str, detach: str, *command: str) -> None:
    lock = os.open(Path(root) / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    if os.geteuid() == 0:
        os.fchown(lock, os.stat(root).st_uid, os.stat(root).st_gid)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(IN_USE)
    os.set_inheritable(lock, True)
    become = _choose(Path(root), command[0])
    if detach == "detach":
        if os.fork():
            os._exit(0)
        os.setsid()
    become()
    os.execv(command[0], command)


def _choose(root: Path, executable: str) -> Callable[[], None]:
    for (uid, gid), become in _ways(root):
        if _reaches(become, root, executable):
            if os.geteuid() == 0:
                _give(root, uid, gid)
            return become
    if os.geteuid() == 0:
        print(
            f"PostgreSQL does not run as root, and no other account here can reach both {root} and {executable}: "
            "run kb as an ordinary user, put both below folders that everybody can enter"
        )
    else:
        print(f"initdb needs a name for uid {os.geteuid()}: give it an entry in /etc/passwd")
    sys.exit(NO_ACCOUNT)


def _ways(root: Path) -> Iterator[tuple[Account, Callable[[], None]]]:
    me = (os.geteuid(), os.getegid())
    if me[0] != 0:
        if _has_name(me[0]):
            yield me, lambda: None
        yield me, partial(_remap, me, _nobody())
        return
    owner = root.stat()
    account = (owner.st_uid, owner.st_gid) if owner.st_uid != 0 and _has_name(owner.st_uid) else _nobody()
    yield account, partial(_drop, account)
    yield account, partial(_drop_but_keep, account, _DAC_READ_SEARCH)
    yield account, partial(_drop_but_keep, account, _DAC_OVERRIDE)


def _reaches(become: Callable[[], None], root: Path, executable: str) -> bool:
    """Tried out in a child, since none of these can be undone."""
    if (pid := os.fork()) == 0:
        reached = False
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: a system without these calls
            become()
            reached = os.access(root, os.X_OK) and os.access(executable, os.R_OK | os.X_OK)
        os._exit(0 if reached else 1)
    return os.waitpid(pid, 0)[1] == 0


def _give(root: Path, uid: int, gid: int) -> None:
    for folder in (root / name for name in _SERVER_FOLDERS):
        if folder.is_dir() and folder.stat().st_uid != uid:
            for path, _, files in os.walk(folder, topdown=False):
                for name in files:
                    os.lchown(os.path.join(path, name), uid, gid)
                os.lchown(path, uid, gid)  # the top comes last, so that a killed walk is taken up again


def _drop(account: Account) -> None:
    uid, gid = account
    os.setgroups([])
    os.setregid(gid, gid)
    os.setreuid(uid, uid)


def _drop_but_keep(account: Account, capability: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0))
    _drop(account)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    only = 1 << capability
    sets = (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)  # effective, permitted, inheritable; low words, then high
    _check(libc.capset(header, sets))
    _check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0))


def _remap(me: Account, shown_as: Account) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{shown_as[0]} {me[0]} 1"), ("gid_map", f"{shown_as[1]} {me[1]} 1")):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _nobody() -> Account:
    """Any account with a name will do, `nobody` is the one that is nearly always there."""
    entries = sorted(pwd.getpwall(), key=lambda entry: entry.pw_name != "nobody")
    return next(((entry.pw_uid, entry.pw_gid) for entry in entries if entry.pw_uid != 0), (65534, 65534))


if __name__ == "__main__":
    main(*sys.argv[1:])
