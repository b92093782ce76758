"""Object stores, one file each; and the keys that all of them take."""

import re

from kb_pipeline.errors import StateError

# What means the same in a file name, an S3 key and a URL. No part begins with a dot: those are a store's own.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199})*")
_MAX_KEY = 900  # S3: 1024 with its prefix


def checked_key(key: str) -> str:
    """Raises StateError: keys are made by this program, never taken from a source."""
    if len(key) > _MAX_KEY or not _KEY.fullmatch(key):
        raise StateError(
            f"{key[:100]!r} is no object key: parts of letters, digits and _.=+@- between slashes", code="bad_blob_key"
        )
    return key
