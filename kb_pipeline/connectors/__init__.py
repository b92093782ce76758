"""Connectors, one file each; and what they share: the patterns of those whose items have paths, the report of a listing, and
what the stamps of files prove.

``*``, ``?`` and ``[...]`` stay within a name, ``**`` spans folders. Without a slash a pattern matches a name at any depth,
with one the whole relative path. A matched folder stands for everything below it. Exclude wins over include.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from kb_pipeline.model import Verdict

_REASONS = 100
RACY_SECONDS = 2.0  # the coarsest file time stamps in use (FAT)
_TICK_SECONDS = 0.02  # Linux stamps files with the time of the last timer tick, at most 10 ms ago
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _readable(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not pattern.strip("/") or ".." in pattern.split("/"):
            raise ValueError(f"{pattern!r} is no pattern for a relative path")
        try:
            _Patterns([pattern])
        except re.error as e:
            raise ValueError(f"{pattern!r}: {e}") from e
    return patterns


Globs = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_readable)]  # "a,b" is two patterns


class Selection:
    """Which paths belong to a source. Paths are bytes, relative, with "/" between their parts."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self.everything = not include
        self.include = _Patterns(include)
        self.exclude = _Patterns(exclude)

    def has(self, parts: Sequence[bytes]) -> bool:
        """Whether a walk that enters no excluded folder finds this path."""
        included = self.everything
        for end, name in enumerate(parts, 1):
            path = b"/".join(parts[:end])
            if self.exclude.match(path, name):
                return False
            included = included or self.include.match(path, name)
        return included


class _Patterns:
    """Sorted by what they cost: names and their ends are compared, only the rest is a regular expression."""

    def __init__(self, patterns: Iterable[str]) -> None:
        names, starts, ends, others = set[bytes](), list[bytes](), list[bytes](), list[str]()
        for pattern in patterns:
            raw = pattern.rstrip("/").encode("utf-8", "surrogateescape")
            if re.search(rb"[/?\[]", raw) or raw.count(b"*") > 1 or b"*" in raw[1:-1]:
                others.append(_regex(pattern))
            elif raw.endswith(b"*"):
                starts.append(raw[:-1])
            elif raw.startswith(b"*"):
                ends.append(raw[1:])
            else:
                names.add(raw)
        self._names, self._starts, self._ends = frozenset(names), tuple(starts), tuple(ends)
        self._others = re.compile("|".join(others), re.DOTALL) if others else None

    def match(self, path: bytes, name: bytes) -> bool:
        """Whether this file or folder itself is matched; ``name`` is the last part of ``path``."""
        if name in self._names or name.startswith(self._starts) or name.endswith(self._ends):
            return True
        return self._others is not None and self._others.fullmatch(path.decode("utf-8", "surrogateescape")) is not None


def _regex(pattern: str) -> str:
    anchored = "/" in pattern.rstrip("/")
    pattern = pattern.strip("/")
    while pattern.endswith("/**"):
        pattern = pattern[:-3]  # the folder itself, so that it need not be entered
    out = "" if anchored else "(?:.*/)?"
    for token in re.findall(r"\*\*/|\*+|\?|\[!?[^]]+\]|.", pattern, re.DOTALL):
        if token == "**/":
            out += "(?:.*/)?"
        elif token[0] == "*":
            out += ".*" if len(token) > 1 else "[^/]*"
        elif token == "?":
            out += "[^/]"
        elif len(token) > 1:
            negated = token[1] == "!"
            inside = re.sub(r"[\\\[^&~|]", r"\\\g<0>", token[1 + negated : -1])
            out += f"(?!/)[{'^' if negated else ''}{inside}]"
        else:
            out += re.escape(token)
    return out


class Report:
    """What a listing could not read or passed over. It tells the first 100 and counts the others, so that it stays small."""

    def __init__(self) -> None:
        self._left = _REASONS
        self._reasons, self._untold, self._verdict = list[str](), 0, Verdict.COMPLETE

    def unlisted(self, name: str, why: str) -> None:
        """Something that may hold items: the page is PARTIAL."""
        self._verdict = Verdict.PARTIAL
        self.skipped(name, why)

    def skipped(self, name: str, why: str) -> None:
        """Something that is no item, and that people may miss."""
        reason = f"{name}: {why}"
        if self._reasons[-1:] == [reason]:
            return
        if self._left:
            self._left -= 1
            self._reasons.append(reason)
        else:
            self._untold += 1

    def take(self) -> tuple[Verdict, tuple[str, ...]]:
        """For the next page: what came up since the last call."""
        more = [f"{self._untold} more entries were not listed or were skipped"] if self._untold else []
        taken = self._verdict, tuple(self._reasons + more)
        self._reasons, self._untold, self._verdict = [], 0, Verdict.COMPLETE
        return taken


# --- the stamps of files --------------------------------------------------------------------------------------------


def _tick(nanoseconds: int) -> float:
    """How long another write may leave the same stamp."""
    return RACY_SECONDS if nanoseconds % 10**9 == 0 else _TICK_SECONDS  # whole seconds: perhaps all that can be stored


def wait_out_tick(st: os.stat_result) -> None:
    """Wait until a write would get another mtime than this one has: then equal stamps around a reading prove it whole."""
    left = _tick(st.st_mtime_ns) - (time.time() - st.st_mtime)
    if 0 < left <= RACY_SECONDS:
        time.sleep(left)


class _OutOfTime(Exception):
    pass


def tree_token(root: int, selection: Selection, budget_seconds: float) -> str | None:
    """A digest over path, size, mtime, ctime and inode of every selected file below ``root``; None when it takes longer.

    Nothing is opened but folders, one at a time. A file written within its own clock tick makes the token unlike any other.
    """
    clock, end = time.time(), time.monotonic() + budget_seconds
    digest, racy, stack = hashlib.sha256(), False, [(b"", selection.everything)]
    try:
        while stack:
            prefix, inside = stack.pop()
            folders = list[tuple[bytes, bool]]()
            for name, kind, st in _stats(root, prefix, end):
                path = prefix + name
                if selection.exclude.match(path, name):
                    continue
                included = inside or selection.include.match(path, name)
                if kind == stat.S_IFDIR:
                    folders.append((path + b"/", included))
                elif st is not None and included:
                    digest.update(b"%b\0%d %d %d %d\0" % (path, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino))
                    racy = racy or -RACY_SECONDS < clock - st.st_ctime < _tick(st.st_ctime_ns)
                elif kind is None:
                    digest.update(b"%b\0closed\0" % path)  # differs once it can be read
            stack += reversed(folders)
    except _OutOfTime:
        return None
    return f"{digest.hexdigest()}-{time.time_ns()}" if racy else digest.hexdigest()


def _stats(root: int, prefix: bytes, end: float) -> list[tuple[bytes, int | None, os.stat_result | None]]:
    """Name, kind and (of files) state of a folder's entries, in byte order. No kind: it cannot be read. Raises _OutOfTime."""
    found = list[tuple[bytes, int | None, os.stat_result | None]]()
    try:
        fd = os.open(prefix or b".", _ENTER, dir_fd=root)
    except FileNotFoundError:
        return found
    except OSError:
        return [(b"", None, None)]
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if time.monotonic() >= end:
                    raise _OutOfTime
                name = os.fsencode(entry.name)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        found.append((name, stat.S_IFDIR, None))
                    elif entry.is_file(follow_symlinks=False):
                        found.append((name, stat.S_IFREG, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
                except OSError:
                    found.append((name, None, None))
    except OSError:
        found.append((b"", None, None))
    finally:
        os.close(fd)
    return sorted(found, key=lambda f: f[0])
