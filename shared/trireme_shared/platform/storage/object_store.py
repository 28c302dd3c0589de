"""S3 for shared/trireme_shared/platform/storage/files.py: the client's settings, uploads that appear complete
or not at all, readable errors.

    write ─► marker ─► parts of an upload ─► completed: the object is there
                                       └── anything else ─► aborted: no object, and no parts that cost money
             `─ an empty object beside it, which goes at the end; of a writer that was killed it stays, and
                tells `abort_uploads` the key. MinIO lists unfinished uploads by exact keys only

Endpoint and credentials come from the usual AWS_* variables and files. Everything here blocks, no request for
longer than REQUEST_S; without this limit the client would wait without end for a server that stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, cast

from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import InvalidArgument

TEMPORARY = ".tmp"  # of files and markers of writers that are not done
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
    upload = _Upload(filesystem, path)
    try:
        yield cast("BinaryIO", upload)
        upload.complete()
    except BaseException:
        try:
            upload.abort()
        # the first error is the one to raise; `abort_uploads` removes this upload later
        except Exception as error:  # noqa: BLE001
            log.warning("upload_left", path=path, cause=str(error))
        raise


class _Upload(io.RawIOBase):
    """Files of s3fs are not used here: one that is not finished in order is finished by the garbage
    collector. An object smaller than a part is written by one request."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._bucket, _, self._key = path.partition("/")
        self._marker = marker_of(self._key, ids.new_id())
        self._waiting = bytearray()  # less than a part
        self._upload = ""  # its id; "": it was not begun
        self._parts: list[dict[str, Any]] = []
        self._size = 0

    def __repr__(self) -> str:
        return f"<_Upload {self._path}: {self._size} bytes in {len(self._parts)} parts>"

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: Any, /) -> int:
        """Raises OSError."""
        view = memoryview(content)
        size = view.nbytes
        view = view.cast("B") if size else view[:0]
        for start in range(0, size, PART_BYTES):
            self._waiting += view[start : start + PART_BYTES]
            while len(self._waiting) >= PART_BYTES:
                self._send(bytes(self._waiting[:PART_BYTES]))
                del self._waiting[:PART_BYTES]
        self._size += size
        return size

    def complete(self) -> None:
        """Raises OSError."""
        if not self._upload:
            self._filesystem.pipe_file(self._path, bytes(self._waiting))
            return
        if self._waiting:
            self._send(bytes(self._waiting))
        self._call("complete_multipart_upload", MultipartUpload={"Parts": self._parts})
        self._upload = ""
        self._unmark()

    def abort(self) -> None:
        """Raises OSError: the marker stays."""
        self._waiting.clear()
        if self._upload:
            with contextlib.suppress(FileNotFoundError):  # it was completed, and the answer was lost
                self._call("abort_multipart_upload")
            self._upload = ""
            self._unmark()

    def _begin(self) -> None:
        self._filesystem.call_s3("put_object", Bucket=self._bucket, Key=self._marker, Body=b"")
        try:
            begun = self._filesystem.call_s3("create_multipart_upload", Bucket=self._bucket, Key=self._key)
        except (PermissionError, FileNotFoundError):  # after any other error there may be an upload
            self._unmark()
            raise
        self._upload = str(begun["UploadId"])

    def _send(self, content: bytes) -> None:
        if not self._upload:
            self._begin()
        part: dict[str, Any] = {"PartNumber": len(self._parts) + 1}
        answer = self._call("upload_part", **part, Body=content)
        part |= {name: answer[name] for name in ("ETag", "ChecksumSHA256") if name in answer}
        self._parts.append(part)

    def _call(self, method: str, **named: Any) -> Any:
        return self._filesystem.call_s3(
            method, Bucket=self._bucket, Key=self._key, UploadId=self._upload, **named
        )

    def _unmark(self) -> None:
        """The object is whole, or there is no upload of it."""
        try:
            self._filesystem.call_s3("delete_object", Bucket=self._bucket, Key=self._marker)
        except Exception as error:  # noqa: BLE001  a marker that stays does no harm
            log.warning("marker_left", path=f"{self._bucket}/{self._marker}", cause=str(error))


def marker_of(key: str, writer: str) -> str:
    """Of the upload of that object by one writer; named as temporary files of local folders are."""
    folder, _, name = key.rpartition("/")
    return f"{folder}{'/' if folder else ''}.{name}.{writer}{TEMPORARY}"


def marked_by(key: str) -> str:
    """The object whose upload a marker tells; "": it is no marker."""
    folder, _, name = key.rpartition("/")
    object_name = name[1:].removesuffix(TEMPORARY).rpartition(".")[0]
    if not (name.startswith(".") and name.endswith(TEMPORARY) and object_name):
        return ""
    return f"{folder}{'/' if folder else ''}{object_name}"


def remove_tree(filesystem: Any, path: str) -> None:
    """Remove every object below `path`, and abort every unfinished upload there. Raises OSError."""
    abort_uploads(filesystem, path)  # while their markers are there
    bucket, _ = _split(path)
    for keys in _listed(filesystem, path):
        _delete(filesystem, bucket, keys)


def abort_uploads(filesystem: Any, path: str) -> int:
    """Abort all unfinished uploads below `path`; the caller knows that their writers are gone. Returns how
    many. Raises OSError."""
    bucket, prefix = _split(path)
    aborted = _abort(filesystem, bucket, prefix)
    for keys in _listed(filesystem, path):
        markers = [key for key in keys if marked_by(key)]
        aborted += sum(_abort(filesystem, bucket, marked_by(marker)) for marker in markers)
        _delete(filesystem, bucket, markers)
    return aborted


def _abort(filesystem: Any, bucket: str, prefix: str) -> int:
    """Of objects whose keys begin so, as far as the server tells them."""
    aborted = 0
    for page in _pages(filesystem, "list_multipart_uploads", Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            with contextlib.suppress(FileNotFoundError):  # finished or aborted meanwhile
                filesystem.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                aborted += 1
    return aborted


def _listed(filesystem: Any, path: str) -> Iterator[list[str]]:
    """Keys below `path`, by AT_ONCE at most."""
    bucket, prefix = _split(path)
    for page in _pages(filesystem, "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=AT_ONCE):
        yield [found["Key"] for found in page.get("Contents", ())]


def _delete(filesystem: Any, bucket: str, keys: Sequence[str]) -> None:
    if not keys:
        return
    named = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    answer = filesystem.call_s3("delete_objects", Bucket=bucket, Delete=named)
    for refused in answer.get("Errors", ()):
        msg = (
            f"s3://{bucket}/{refused.get('Key')} cannot be deleted: {refused.get('Code')} "
            f"{refused.get('Message')}"
        )
        raise PermissionError(msg)


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
