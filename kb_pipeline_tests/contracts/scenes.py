"""How a test edits the source behind a connector. A new connector adds its scene to ``SCENES``."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kb_pipeline.registry import open_adapter
from kb_pipeline_tests import s3

NOBODY = 65534


class Scene(Protocol):
    """A source that is empty at first. Ids are paths; no id is the folder of another."""

    provisional: bool  # its revisions are made of stamps, so an item of this very moment is read again
    examples: int  # how many random trees its speed allows

    def connector(self) -> Any: ...

    def put(self, external_id: str, content: bytes) -> None:
        """Create or edit, long ago as far as the source lets one."""
        ...

    def put_just_now(self, external_id: str, content: bytes) -> None: ...

    def remove(self, external_id: str) -> None: ...

    def move(self, old: str, new: str) -> None: ...

    def revoked(self, external_id: str) -> Any:
        """A context in which its content may not be read."""
        ...

    def unlistable(self, folder: str) -> Any:
        """A context in which what is below ``folder`` cannot be listed, and perhaps more."""
        ...

    def clock_ahead(self, seconds: float) -> bool:
        """Set the source's clock. False: it is this machine's."""
        ...

    def vanish(self) -> None: ...


class LocalFolder:
    """The source behind local_dir."""

    provisional, examples = True, 60

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # another user must reach it, to be denied what is in it
        self.root = folder / "root"
        self.root.mkdir()

    def connector(self) -> Any:
        return open_adapter("connector", "local_dir", {"path": str(self.root)})

    def put(self, external_id: str, content: bytes) -> None:
        self.put_just_now(external_id, content)
        os.utime(self.root / external_id, (1.5e9, 1.5e9 + len(content)))  # long ago: nothing is provisional

    def put_just_now(self, external_id: str, content: bytes) -> None:
        path = self.root / external_id
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def remove(self, external_id: str) -> None:
        (self.root / external_id).unlink()

    def move(self, old: str, new: str) -> None:
        (self.root / old).rename(self.root / new)

    def revoked(self, external_id: str) -> Any:
        return self._denied(external_id.rpartition("/")[0], 0)

    def unlistable(self, folder: str) -> Any:
        return self._denied(folder, 0)

    @contextmanager
    def _denied(self, name: str, mode: int) -> Iterator[None]:
        me = os.geteuid()
        (self.root / name).chmod(mode)
        try:
            if me == 0:
                os.seteuid(NOBODY)
            yield
        finally:
            os.seteuid(me)
            (self.root / name).chmod(0o755)

    def clock_ahead(self, seconds: float) -> bool:
        return False

    def vanish(self) -> None:
        shutil.rmtree(self.root)


class Bucket:
    """The source behind s3: a bucket of its own, reached through a proxy."""

    provisional, examples = False, 3

    def __init__(self, endpoint: str, proxy: s3.Proxy, *, versioned: bool = False) -> None:
        self.client, self.proxy, self.versioned = s3.client(endpoint), proxy, versioned
        self.bucket = s3.new_bucket(endpoint, versioned=versioned)
        proxy.rule, proxy.ahead_seconds = (lambda seen: None), 0.0

    def connector(self) -> Any:
        options = s3.options(self.proxy.endpoint, self.bucket, prefix="docs", versioned=self.versioned)
        return open_adapter("connector", "s3", options)

    def put(self, external_id: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"docs/{external_id}", Body=content)

    put_just_now = put

    def remove(self, external_id: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"docs/{external_id}")

    def move(self, old: str, new: str) -> None:
        source = {"Bucket": self.bucket, "Key": f"docs/{old}"}
        self.client.copy_object(Bucket=self.bucket, Key=f"docs/{new}", CopySource=source)
        self.remove(old)

    def revoked(self, external_id: str) -> Any:
        return self._answering(lambda seen: seen.path.endswith(external_id), s3.Trouble(403, "AccessDenied"))

    def unlistable(self, folder: str) -> Any:
        return self._answering(lambda seen: "max-keys=1000" in seen.query, s3.Trouble(503, "SlowDown"))

    @contextmanager
    def _answering(self, which: Callable[[s3.Seen], bool], trouble: s3.Trouble) -> Iterator[None]:
        self.proxy.rule = lambda seen: trouble if which(seen) else None
        try:
            yield
        finally:
            self.proxy.rule = lambda seen: None

    def clock_ahead(self, seconds: float) -> bool:
        self.proxy.ahead_seconds = seconds
        return True

    def vanish(self) -> None:
        versions = self.client.list_object_versions(Bucket=self.bucket)
        for entry in versions.get("Versions", []) + versions.get("DeleteMarkers", []):
            self.client.delete_object(Bucket=self.bucket, Key=entry["Key"], VersionId=entry["VersionId"])
        self.client.delete_bucket(Bucket=self.bucket)


# Name -> what makes a scene from a fixture getter and a folder of its own. A name begins with the connector's.
SCENES: Mapping[str, Callable[[Callable[[str], Any], Path], Scene]] = {
    "local_dir": lambda fixture, folder: LocalFolder(folder),
    "s3": lambda fixture, folder: Bucket(fixture("moto_endpoint"), fixture("moto_proxy")),
    "s3-versioned": lambda fixture, folder: Bucket(fixture("moto_endpoint"), fixture("moto_proxy"), versioned=True),
}
