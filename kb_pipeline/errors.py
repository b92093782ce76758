"""Errors, named by what happens next.

KbError
├── Transient      the same call may succeed later: the task is requeued (honours ``retry_after``)
│   └── RateLimited    the other side asked us to wait
├── Rejected       this item cannot be processed: its task fails for good, everything else goes on
│   └── TooLarge       one request or one item exceeds a limit of the other side: split it, or reject it
├── Fatal          this source, endpoint or command cannot go on: credentials, scope, unreachable root
│   ├── Misconfigured  an option, a key or a file the operator gave is wrong
│   └── MissingExtra   an optional package is not installed
└── StateError     a bug of ours: a transition that does not exist, a row that must be there
"""


class KbError(Exception):
    """An error with a stable ``code`` (snake_case, stored and shown) and a sentence for a person.

    The message names the thing, the cause and what to do. It must not carry secrets: adapters scrub vendor text.
    """

    code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code


class Transient(KbError):
    """Try the same thing again, not before ``retry_after`` seconds when the other side said so."""

    code = "transient"

    def __init__(self, message: str, *, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class RateLimited(Transient):
    code = "rate_limited"


class Rejected(KbError):
    """This document, item or text is refused: corrupt, unsupported, gone, forbidden, not permitted."""

    code = "rejected"


class TooLarge(Rejected):
    code = "too_large"


class Fatal(KbError):
    """Stop this source or command; nothing about the single item would help."""

    code = "fatal"


class Misconfigured(Fatal):
    code = "misconfigured"


class MissingExtra(Fatal):
    """An optional dependency is missing; the message says which extra to install."""

    code = "missing_extra"


class StateError(KbError):
    code = "state_error"
