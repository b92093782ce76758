"""What every adapter of S3 needs: a client, and its errors told apart by what happens next.

Compatible stores use codes of their own beside those of Amazon; an answer without a body (HEAD) has its status as its code.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

from kb_pipeline.errors import Misconfigured
from kb_pipeline.http import seconds_to_wait

_CODES = {
    "NO_OBJECT": {"NoSuchKey", "NoSuchVersion", "404", "NotFound"},
    "NO_BUCKET": {
        "NoSuchBucket",
        "PermanentRedirect",
        "301",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    },
    "FULL": {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"},
    "SLOW_DOWN": {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "TooManyRequests",
        "RequestLimitExceeded",
        "Throttling",
        "429",
        "503",
    },
    "RETRY": {
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "OperationAborted",
        "ConditionalRequestConflict",
        "BadDigest",
        "IncompleteBody",
        "NoSuchUpload",
    },
    "CHANGED": {"PreconditionFailed", "412", "InvalidRange", "416"},
    "ARCHIVED": {"InvalidObjectState"},
    # A bare 400 too: a HEAD with an expired token gets it, and so does a writer whose content nobody waited for.
    "BAD_KEYS": {"400", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed"},
}


class Trouble(Enum):
    NO_OBJECT = auto()  # of a HEAD: the object or its bucket
    NO_BUCKET = auto()  # or it is in another region
    FULL = auto()
    SLOW_DOWN = auto()
    RETRY = auto()
    CHANGED = auto()  # a condition on the object does not hold
    ARCHIVED = auto()  # it must be restored before it can be read
    BAD_KEYS = auto()  # the service knows no such credentials, they have expired, or the clocks differ
    NO_KEYS = auto()  # boto3 found no credentials
    DENIED = auto()  # a missing object too, where the credentials may not list
    UNREACHABLE = auto()  # no answer, or half of one


_TROUBLES = {code: Trouble[name] for name, codes in _CODES.items() for code in codes}


class S3Failure(Exception):
    """A vendor's error without the vendor's text, which can hold key ids and signed URLs. Adapters never let it out.

    ``retry_after``: seconds that the service asks to wait.
    """

    def __init__(self, trouble: Trouble, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.trouble, self.detail, self.retry_after = trouble, detail, retry_after


def trouble_of(code: str, status: int) -> Trouble:
    """Which kind of failure an answer tells of."""
    if (found := _TROUBLES.get(code)) is not None:
        return found
    if status == 507:
        return Trouble.FULL
    if status == 429:
        return Trouble.SLOW_DOWN
    return Trouble.RETRY if status >= 500 else Trouble.DENIED


def open_client(
    what: str, settings: str, *, endpoint: str, region: str, threads: int, keys: tuple[str, str] | None = None
) -> Any:
    """A boto3 client that threads may share. ``keys``: access key and secret key; None: boto3's own chain.

    Raises Misconfigured for ``what``, naming ``settings`` as what to correct.
    """
    import boto3
    from botocore.config import Config as Options
    from botocore.exceptions import BotoCoreError

    # The stores that are compatible know no checksums beyond what a request must have.
    checksums = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    options = Options(
        retries={"mode": "standard", "total_max_attempts": 3},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=threads,
        **(checksums if endpoint else {}),
    )
    access_key, secret_key = keys or (None, None)
    try:
        # A session of its own: boto3's default session is not made for several threads.
        return boto3.session.Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key).client(
            "s3", region_name=region, endpoint_url=endpoint or None, config=options
        )
    except (BotoCoreError, ValueError) as e:
        raise Misconfigured(f"{what}: {e}: correct {settings}") from e


@contextmanager
def failures() -> Iterator[None]:
    """Raises S3Failure for whatever boto3 or the connection raises inside."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as vendor

    try:
        yield
    except vendor.ClientError as e:
        answer = e.response.get("ResponseMetadata", {})
        status, code = answer.get("HTTPStatusCode", 0), e.response.get("Error", {}).get("Code", "")
        raise S3Failure(trouble_of(code, status), code or str(status), seconds_to_wait(answer.get("HTTPHeaders", {}))) from e
    except (vendor.NoCredentialsError, vendor.PartialCredentialsError, vendor.CredentialRetrievalError) as e:
        raise S3Failure(Trouble.NO_KEYS, type(e).__name__) from e
    except (vendor.BotoCoreError, Boto3Error) as e:
        raise S3Failure(Trouble.UNREACHABLE, type(e).__name__) from e


def time_of(answer: Any) -> float:
    """The service's own time, in whole seconds since the epoch; ours where it tells none."""
    stamp = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(stamp).timestamp() if stamp else time.time()
