"""Objects in an S3 bucket or a compatible store. Credentials come from boto3's own chain.

The bucket should have lifecycle rules: one that aborts uploads a killed writer left incomplete, and, where it keeps versions,
one that expires those of deleted objects.
"""

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from itertools import islice
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from kb_pipeline.blobs import checked_key
from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, Transient

_THREADS = 8
_IN_FLIGHT = 32  # objects taken from the caller at a time, of at most _PART bytes each in memory
_PART = 8 * 2**20  # from here on an object is sent in parts
_DELETE = 1000  # the most that DeleteObjects takes

_NO_OBJECT = {"NoSuchKey", "404", "NotFound"}
_NO_BUCKET = {"NoSuchBucket", "PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}
_SLOW_DOWN = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "TooManyRequests",
    "RequestLimitExceeded",
    "Throttling",
    "429",
    "503",
}
_RETRY = {
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",
    "IncompleteBody",
    "NoSuchUpload",
}


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(min_length=1)
    prefix: str = ""
    endpoint: str = ""  # empty: AWS
    region: str = "us-east-1"


class S3Blobs:
    def __init__(self, config: Config) -> None:
        import boto3
        from botocore.config import Config as Options
        from botocore.exceptions import BotoCoreError

        self._bucket = config.bucket
        self._prefix = f"{config.prefix.strip('/')}/" if config.prefix.strip("/") else ""
        # The stores that are compatible know no checksums beyond what a request must have.
        checksums = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        options = Options(
            retries={"mode": "standard", "total_max_attempts": 3},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=_THREADS,
            **(checksums if config.endpoint else {}),
        )
        try:
            # A session of its own: boto3's default session is not made for several threads.
            self._client: Any = boto3.session.Session().client(
                "s3", region_name=config.region, endpoint_url=config.endpoint or None, config=options
            )
        except (BotoCoreError, ValueError) as e:
            raise Misconfigured(
                f"object store s3://{config.bucket}: {e}: correct KB_BLOBS, KB_S3_ENDPOINT, KB_S3_REGION"
            ) from e

    def put_many(self, objects: Iterable[tuple[str, bytes | BinaryIO]]) -> None:
        """File objects stay the caller's; they must stay open until this returns."""
        rest = iter(objects)
        with ThreadPoolExecutor(_THREADS, "s3-put") as pool:
            while batch := list(islice(rest, _IN_FLIGHT)):
                list(pool.map(lambda pair: self._put(*pair), batch))

    def _put(self, key: str, content: bytes | BinaryIO) -> None:
        from boto3.s3.transfer import TransferConfig

        name = self._prefix + checked_key(key)
        with self._errors(key):
            if not isinstance(content, bytes):
                start = content.tell()
                head = content.read(_PART)
                if len(head) == _PART:
                    content.seek(start)
                    # One part at a time, in this thread: what is in memory is one part, and small files next to it go on.
                    parts = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, use_threads=False)
                    self._client.upload_fileobj(content, self._bucket, name, Config=parts)
                    return
                content = head
            self._client.put_object(Bucket=self._bucket, Key=name, Body=content)

    def get(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(self._body(key)["Body"].read())

    def open(self, key: str) -> BinaryIO:
        """A copy that can seek: in memory when small, in a temporary file when large."""
        with self._errors(key):
            answer = self._body(key)
            data: BinaryIO = BytesIO() if answer["ContentLength"] <= _PART else tempfile.TemporaryFile()  # noqa: SIM115
            try:
                for piece in answer["Body"].iter_chunks(2**20):
                    data.write(piece)
                data.seek(0)
            except BaseException:
                data.close()
                raise
            return data

    def _body(self, key: str) -> Any:
        return self._client.get_object(Bucket=self._bucket, Key=self._prefix + checked_key(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while batch := list(islice(rest, _DELETE)):
            named = {"Objects": [{"Key": self._prefix + checked_key(key)} for key in batch], "Quiet": True}
            with self._errors(f"{len(batch)} objects"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=named)
            for error in answer.get("Errors", ()):
                if error.get("Code") not in _NO_OBJECT:
                    raise self._error(error.get("Key", "").removeprefix(self._prefix), error.get("Code", ""), 0)

    def clear(self, folder: str) -> None:
        self.delete_many(self.keys(folder))
        with self._errors(f"{folder}*"):
            uploads = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + folder
            )
            for page in uploads:
                for upload in page.get("Uploads", ()):
                    self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def keys(self, prefix: str) -> Iterator[str]:
        if base := prefix.rpartition("/")[0]:
            checked_key(base)
        with self._errors(f"{prefix}*"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            for page in pages:
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):  # what consoles create to show a folder
                        yield entry["Key"].removeprefix(self._prefix)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Vendor text stays out of the messages: it can hold key ids and signed URLs."""
        from boto3.exceptions import Boto3Error
        from botocore import exceptions as vendor

        try:
            yield
        except vendor.ClientError as e:
            status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise self._error(key, e.response.get("Error", {}).get("Code", ""), status) from e
        except (vendor.NoCredentialsError, vendor.PartialCredentialsError, vendor.CredentialRetrievalError) as e:
            way_out = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
            raise Fatal(f"{self._what(key)}: {type(e).__name__}: {way_out}", code="blob_store_denied") from e
        except (vendor.BotoCoreError, Boto3Error, OSError) as e:
            way_out = "check that the store can be reached"
            raise Transient(f"{self._what(key)}: {type(e).__name__}: {way_out}", code="blob_store_error") from e

    def _error(self, key: str, code: str, status: int) -> KbError:
        what = f"{self._what(key)}: {code or status}"
        if code in _NO_OBJECT:
            return Rejected(f"{what}: restore it from a backup", code="blob_missing")
        if code in _NO_BUCKET:
            return Fatal(f"{what}: create the bucket, or correct KB_BLOBS and KB_S3_REGION", code="blob_store_missing")
        if code in _FULL or status == 507:
            return Transient(f"{what}: free some space, or raise the quota", code="blob_store_full")
        if code in _SLOW_DOWN or status == 429:
            return RateLimited(f"{what}: the store asks for fewer requests")
        if status >= 500 or code in _RETRY:
            return Transient(f"{what}: it is tried again", code="blob_store_error")
        way_out = (
            "allow GetObject, PutObject, DeleteObject, ListBucket on it, and check the credentials and this machine's clock"
        )
        return Fatal(f"{what}: {way_out}", code="blob_store_denied")

    def _what(self, key: str) -> str:
        return f"object store s3://{self._bucket}/{self._prefix}{key}"
