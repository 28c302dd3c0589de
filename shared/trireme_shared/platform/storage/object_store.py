"""S3 for shared/trireme_shared/platform/storage/files.py: the client's settings, uploads that appear complete
or not at all, readable errors.

    write ─► parts of an upload ─► completed: the object is there
                             └── anything else ─► aborted: no object, and no parts that cost money

Endpoint and credentials come from the usual AWS_* variables and files. Everything here blocks, no request for
longer than REQUEST_S; without this limit the client would wait without end for a server that stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, cast

from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import InvalidArgument

PROTOCOLS = ("s3://", "s3a://")
CONNECT_S = 5.0
READ_S = 30.0
REQUEST_S = 120.0  # with its repetitions; a part at 0.14 MB/s
ATTEMPTS = 3
PART_BYTES = 16 << 20  # an upload has at most 10,000 parts: files up to 156 GiB
AT_ONCE = 1000  # objects in one request to delete

log = telemetry.logger("object_store")


class NoBucket(FileNotFoundError):
    """The bucket itself does not exist."""


def is_s3(url: str) -> bool:
    return url.startswith(PROTOCOLS) and "::" not in url


def endpoint() -> str:
    """The address of an S3 server that is not Amazon's, or ""."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def filesystem() -> Any:
    """S3 by fsspec's interface. Raises InvalidArgument if s3fs is not installed."""
    try:
        kind = _bounded()
    except ImportError as error:
        raise InvalidArgument(
            "s3:// needs s3fs, which is not installed", hint="pip install 'trireme[s3]'"
        ) from error
    return kind(
        endpoint_url=endpoint() or None,
        use_listings_cache=False,  # other processes write here too
        config_kwargs={
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "retries": {"total_max_attempts": ATTEMPTS, "mode": "standard"},
        },
    )


@cache
def _bounded() -> Any:
    """s3fs whose requests take at most REQUEST_S."""
    from fsspec.asyn import sync_wrapper  # noqa: PLC0415  only where it is needed
    from s3fs import S3FileSystem  # noqa: PLC0415

    class Bounded(S3FileSystem):  # type: ignore[misc]
        retries = 2

        async def _call_s3(self, method: str, *arguments: Any, **named: Any) -> Any:
            async with asyncio.timeout(REQUEST_S):
                return await super()._call_s3(method, *arguments, **named)

        call_s3 = sync_wrapper(_call_s3)

    return Bounded


@contextmanager
def write(filesystem: Any, path: str) -> Iterator[BinaryIO]:
    """The object appears when the block ends without an exception. Uses memory for two parts."""
    file = filesystem.open(path, "wb", block_size=PART_BYTES, autocommit=False)
    try:
        yield cast("BinaryIO", file)
        file.close()
        file.commit()
    except BaseException:
        file.closed = True  # else the garbage collector would upload the rest
        try:
            file.discard()
        # the first error is the one to raise; `abort_uploads` removes this upload later
        except Exception as error:  # noqa: BLE001
            log.warning("upload_left", path=path, cause=str(error))
        raise


def remove_tree(filesystem: Any, path: str) -> None:
    """Remove every object below `path`, and abort every unfinished upload there. Raises OSError."""
    bucket, prefix = _split(path)
    for page in _pages(filesystem, "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=AT_ONCE):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
        if not keys:
            continue
        answer = filesystem.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        for refused in answer.get("Errors", ()):
            msg = (
                f"s3://{bucket}/{refused.get('Key')} cannot be deleted: {refused.get('Code')} "
                f"{refused.get('Message')}"
            )
            raise PermissionError(msg)
    abort_uploads(filesystem, path)


def abort_uploads(filesystem: Any, path: str) -> int:
    """Abort all unfinished uploads below `path`; the caller knows that their writers are gone. Returns how
    many. Raises OSError."""
    bucket, prefix = _split(path)
    aborted = 0
    for page in _pages(filesystem, "list_multipart_uploads", Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            with contextlib.suppress(FileNotFoundError):  # finished or aborted meanwhile
                filesystem.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                aborted += 1
    return aborted


def make_bucket(url: str) -> None:
    """The bucket of `url`; one that is there already is no error. Raises OSError."""
    bucket = _split(url.partition("://")[2])[0]
    try:
        filesystem().call_s3("create_bucket", Bucket=bucket)
    except FileExistsError:
        return
    except Exception as error:
        if clear := explained(error, url):
            raise clear from error
        raise


def explained(error: BaseException, url: str) -> OSError | None:
    """An error of the S3 client as an OSError that says what to do; None for any other error and for a
    missing object."""
    botocore = sys.modules.get("botocore.exceptions")
    if botocore is None or not is_s3(url):
        return None
    at = endpoint() or "Amazon S3"
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
        return PermissionError(
            f"{url}: no credentials for {at}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_SHARED_CREDENTIALS_FILE"
        )
    if isinstance(error, TimeoutError):
        return ConnectionError(
            f"{url}: no answer from {at} within {REQUEST_S:g} s; is it alive? see AWS_ENDPOINT_URL"
        )
    if isinstance(error, botocore.HTTPClientError | botocore.ConnectionError):
        waited = f"{ATTEMPTS} attempts (at most {CONNECT_S:g} s to connect, {READ_S:g} s to read)"
        return ConnectionError(
            f"{url}: no answer from {at} in {waited}: {error}; is it there? see AWS_ENDPOINT_URL"
        )
    if isinstance(error, botocore.BotoCoreError):
        return OSError(f"{url}: {error}")
    if not isinstance(error, OSError) or not isinstance(error.__cause__, botocore.ClientError):
        return None
    code = str(error.__cause__.response.get("Error", {}).get("Code", ""))
    if code == "NoSuchBucket":
        bucket = _split(url.partition("://")[2])[0]
        return NoBucket(f"{url}: there is no bucket {bucket!r} at {at}; create it, or correct the name")
    if isinstance(error, PermissionError):
        who = os.environ.get("AWS_ACCESS_KEY_ID") or "this machine's credentials"
        return PermissionError(
            f"{url}: {at} refuses access to {who} ({code}: {error}); check key, secret and policy"
        )
    if isinstance(error, FileNotFoundError):
        return None
    return OSError(error.errno, f"{url}: {at} answers {code}: {error}")


def _split(path: str) -> tuple[str, str]:
    """Bucket, and the prefix of all objects below the path."""
    bucket, _, key = path.strip("/").partition("/")
    return bucket, f"{key}/" if key else ""


def _pages(filesystem: Any, method: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    while True:
        page: dict[str, Any] = filesystem.call_s3(method, **arguments)
        yield page
        if not page.get("IsTruncated"):
            return
        if "NextContinuationToken" in page:
            arguments["ContinuationToken"] = page["NextContinuationToken"]
        else:
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
