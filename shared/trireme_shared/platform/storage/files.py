"""Files by URL: local paths and whatever fsspec opens (s3://, gs://, memory://, …). Everything here blocks.

expand(glob) -> files
open_read(url)
write_atomic(url): all or nothing, under a name others may read at once

Errors are OSErrors with a message for the user: FileNotFoundError and PermissionError if a retry cannot help,
ConnectionError if the store cannot be reached. `trouble_of` tells whose fault one is: the data's, or that of
the machine or storage that was asked for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.security import private_files
from trireme_shared.platform.storage import object_store
from trireme_shared.platform.storage.direct_file import DirectFile
from trireme_shared.platform.storage.object_store import TEMPORARY
from trireme_shared.protocol.errors import (
    DatasetError,
    InvalidArgument,
    PeerError,
    ResourceExhausted,
    StorageUnreachable,
    TriremeError,
)

_MAGIC = frozenset("*?[")
_STORES = ("s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://", "oss://")
_FILE_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    NotImplementedError,
    ImportError,
    InvalidArgument,
)


def is_glob(url: str) -> bool:
    return not _MAGIC.isdisjoint(url)


def local_path(url: str) -> Path | None:
    """The path a local URL (`a/b`, `file:///a/b`) means; None for any other."""
    filesystem, path = _resolve(url)
    return Path(path) if isinstance(filesystem, LocalFileSystem) else None


def absolute(url: str) -> str:
    """`url` with a local path made absolute (globs stay globs), so that it means the same in every working
    directory."""
    path = local_path(url)
    return str(path) if path is not None else url


def join(url: str, *names: str) -> str:
    """`url` with names below it."""
    return "/".join((url.rstrip("/"), *names)) if url.strip("/") else "/" + "/".join(names)


def expand(url: str) -> list[str]:
    """The files of a path, URL or glob, sorted. A name that exists literally is not taken as a glob.

    Raises InvalidArgument for an unknown protocol, OSError if the place cannot be listed.
    """
    filesystem, path = _resolve(url)
    with _asking(url):
        if _is_file(filesystem, path):
            found = [path]
        elif is_glob(path):
            found = sorted(
                str(name)
                for name, info in filesystem.glob(path, detail=True).items()
                if info["type"] == "file"
            )
        else:
            found = []
    if isinstance(filesystem, LocalFileSystem):
        return found
    return [with_path(url, path, str(name)) for name in found]


def expand_some(url: str, hint: str) -> list[str]:
    """As `expand`. Raises DatasetError if the place cannot be listed and, with `hint`, if there is no
    file."""
    with reading(url, "a place of files"):
        found = expand(url)
    if not found:
        what = "matches no file" if is_glob(url) else "does not exist"
        raise DatasetError(f"{url} {what}", hint=hint, url=url)
    return found


def _is_file(filesystem: Any, path: str) -> bool:
    """`isfile` of fsspec takes every error, missing credentials too, for a missing file; `info` of HTTP takes
    a silent server for one."""
    try:
        return bool(filesystem.info(path)["type"] == "file")
    except (FileNotFoundError, NotADirectoryError) as error:
        if (trouble := trouble_of(error, path)) is not None:
            raise trouble from error
        return False


def exists(url: str) -> bool:
    filesystem, path = _resolve(url)
    with _asking(url):
        return bool(filesystem.exists(path))


def size(url: str) -> int:
    """Bytes of a file. Raises FileNotFoundError."""
    filesystem, path = _resolve(url)
    with _asking(url):
        found = filesystem.size(path)
    if found is None:
        raise OSError(f"the server of {url} does not say how many bytes the file has")
    return int(found)


def stamp(url: str) -> str:
    """Changes whenever the file is written again; "" if the storage cannot say, or the file is not there."""
    try:
        filesystem, path = _resolve(url)
        with _asking(url):
            found = filesystem.info(path)
    except (OSError, InvalidArgument):
        return ""
    changed = next(
        (str(found[name]) for name in ("ETag", "mtime", "LastModified", "created") if found.get(name)), ""
    )
    return f"{found.get('size')} {changed}" if changed else ""


def size_and_tag(url: str) -> tuple[int, str]:
    """Bytes of a file, and the ETag of an object of a store ("": any other file; servers of one file by HTTP
    may each have their own). Raises OSError."""
    filesystem, path = _resolve(url)
    with _asking(url):
        found = filesystem.info(path)
    if found["type"] != "file":
        raise IsADirectoryError(f"{url} is no file")
    tag = found.get("ETag") or found.get("etag") if url.startswith(_STORES) else None
    return int(found["size"]) if found["size"] is not None else size(url), str(tag or "").strip('"')


@contextmanager
def open_read(url: str) -> Iterator[BinaryIO]:
    """The file, seekable, for reading. Raises OSError, InvalidArgument."""
    filesystem, path = _resolve(url)
    with _explaining(url), filesystem.open(path, "rb") as file:
        yield cast("BinaryIO", file)


def read_bytes(url: str) -> bytes:
    with _asking(url), open_read(url) as file:
        return file.read()


@contextmanager
def write_atomic(url: str) -> Iterator[BinaryIO]:
    """A file to write into. It appears under `url`, complete, when the block ends without an exception; else
    not at all.

    Local: temp name in the same folder (past the page cache), fsync, rename, fsync of the folder. S3: one
    upload, completed or aborted. Elsewhere: written locally, without a name, then put as one file.
    """
    filesystem, name = _resolve(url)
    if object_store.is_s3(url):
        with _explaining(url), object_store.write(filesystem, name) as file:
            yield file
        return
    if not isinstance(filesystem, LocalFileSystem):
        with tempfile.TemporaryFile() as local:  # without a name it goes with this process, whatever ends it
            yield cast("BinaryIO", local)
            local.seek(0)
            # fsspec has no public name for it
            filesystem.makedirs(filesystem._parent(name), exist_ok=True)  # noqa: SLF001
            filesystem.put_file(f"/dev/fd/{local.fileno()}", name)
        return
    path = Path(name)
    private_files.make_missing(path.parent)
    temporary = path.with_name(f".{path.name}.{ids.new_id()}{TEMPORARY}")
    try:
        with DirectFile(temporary) as file:
            yield cast("BinaryIO", file)
            file.finish()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_bytes(url: str, content: bytes | memoryview) -> None:
    """`content` under `url`, all or nothing."""
    filesystem, name = _resolve(url)
    if object_store.is_s3(url):
        with _asking(url):
            filesystem.pipe_file(name, bytes(content))
        return
    with write_atomic(url) as file:
        file.write(content)


def names(url: str) -> list[str]:
    """The names directly in a folder, sorted; empty if the folder does not exist. Raises OSError."""
    filesystem, path = _resolve(url)
    try:
        with _asking(url):
            found = filesystem.ls(path, detail=False)
    except object_store.NoBucket:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({str(name).rstrip("/").rsplit("/", 1)[-1] for name in found})


def below(url: str) -> list[str]:
    """Names of all files in a folder and its folders, relative to it, in no order. Raises OSError."""
    filesystem, path = _resolve(url)
    if isinstance(filesystem, LocalFileSystem):
        root = Path(path)
        if not root.is_dir():
            raise FileNotFoundError(f"{url} is no folder")
        return [
            # a Path for each of a million files is slow
            os.path.relpath(os.path.join(folder, name), path)  # noqa: PTH118
            for folder, _, found in os.walk(path)
            for name in found
        ]
    with _asking(url):
        start = len(path.rstrip("/")) + 1
        return [str(name)[start:] for name in filesystem.find(path)]


def remove_file(url: str) -> None:
    """A missing file is no error. Raises OSError."""
    filesystem, path = _resolve(url)
    with _asking(url), contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(path)


def remove_tree(url: str) -> None:
    """The folder and everything in it, unfinished uploads too. A missing folder is no error. Raises
    OSError."""
    filesystem, path = _resolve(url)
    with _asking(url):
        if object_store.is_s3(url):  # it raises NoBucket alone of the errors of what is missing
            object_store.remove_tree(filesystem, path)
            return
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm(path, recursive=True)


def sweep(url: str) -> int:
    """Remove unfinished files of dead writers below the folder; nothing may be writing there. Returns how
    many.

    Raises OSError.
    """
    filesystem, path = _resolve(url)
    if object_store.is_s3(url):
        with _asking(url):
            return object_store.abort_uploads(filesystem, path)
    if not isinstance(filesystem, LocalFileSystem):
        return 0
    left = list(Path(path).rglob(f".*{TEMPORARY}"))
    for temporary in left:
        temporary.unlink(missing_ok=True)
    return len(left)


def check_writable(url: str) -> None:
    """Write a small file below the folder, read it and delete it. Raises OSError, InvalidArgument with the
    reason of a failure."""
    probe = join(url, f"probe-{ids.new_id()}")
    content = probe.encode()
    write_bytes(probe, content)
    found = read_bytes(probe)
    remove_file(probe)
    if found != content:
        raise OSError(f"{probe} was written with {len(content)} bytes and read with {len(found)}")


@contextmanager
def reading(url: str, kind: str) -> Iterator[None]:
    """Turns errors inside the block into a DatasetError that names the file and the format; ResourceExhausted
    and StorageUnreachable if the machine or the storage is to blame
    (shared/trireme_shared/platform/storage/files.py)."""
    try:
        yield
    except (DatasetError, PeerError):
        raise
    except FileNotFoundError as error:
        if (trouble := trouble_of(error, url)) is not None:
            raise trouble from error
        msg = f"{url} does not exist (any more)"
        raise DatasetError(
            msg, hint="check the path; every member of the job must see the file", url=url
        ) from error
    except _FILE_ERRORS as error:
        if (trouble := trouble_of(error, url)) is not None:
            raise trouble from error
        msg = f"{url} cannot be read as {kind}: {' '.join(str(error).split()) or type(error).__name__}"
        raise DatasetError(
            msg, hint="check the file, its permissions and the reader that dataset() returns", url=url
        ) from error


def is_empty(url: str) -> bool:
    """Whether a file has no bytes at all: then it has no records, whatever the format. Raises
    DatasetError."""
    with reading(url, "a file"):
        return size(url) == 0


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    """Turns errors of an object store's client into an OSError with a message for the user."""
    try:
        yield
    except Exception as error:
        if explained := object_store.explained(error, url):
            raise explained from error
        raise


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """As `_explaining`, around nothing but calls of the storage's library: what else that raises is an
    OSError, too."""
    try:
        with _explaining(url):
            yield
    except (OSError, TriremeError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _resolve(url: str) -> tuple[Any, str]:
    url = str(url)  # of a Url, the text that a file is opened by
    if object_store.is_s3(url):
        filesystem = object_store.filesystem()
        # fsspec has no public name for it
        return filesystem, str(filesystem._strip_protocol(url))  # noqa: SLF001
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        msg = f"no way to open {url}: {error}"
        raise InvalidArgument(
            msg, hint="install the fsspec package of that protocol, or copy the files"
        ) from error
    return filesystem, str(path)


def with_path(url: str, stripped: str, found: str) -> str:
    """`url`, whose path fsspec calls `stripped`, with the path `found` instead. Everything else is kept:
    host, user, account, branch, and the other links of a chain (`simplecache::...`).

    The path is where both end alike: `hdfs://name:8020/data/*` and `/data/*`; `s3://bucket/*` and `bucket/*`;
    for http both are whole.
    """
    links = url.split("::")
    place = next((number for number, link in enumerate(links) if "://" in link), None)
    if place is None or found == stripped:
        return url
    alike = takewhile(
        lambda pair: pair[0] == pair[1], zip(reversed(links[place]), reversed(stripped), strict=False)
    )
    tail = "".join(letter for letter, _ in alike)[::-1]
    # what only the stripped path has: the container of abfs://container@account/...
    before = stripped[: len(stripped) - len(tail)]
    if not found.startswith(before):
        msg = f"{url} gives {found}, which is not below it"
        raise InvalidArgument(msg, hint="give the files by another URL")
    links[place] = links[place][: len(links[place]) - len(tail)] + found[len(before) :]
    return "::".join(links)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MEMORY = {errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}
_RESOURCES = _DESCRIPTORS | _FULL | _MEMORY | {errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_SILENT = {
    errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN,
    errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN,
}  # fmt: skip
_SERVER_ERROR = 500
_MOST_KEPT = 1024


def trouble_of(error: BaseException, what: str) -> PeerError | None:
    """The trouble of machine or storage that made `error`, itself or by way of its causes; None: neither is
    to blame. `what` was being read, for the message.

        error of a read ─ trouble_of ─► ResourceExhausted
            this machine has no descriptor, memory, or disk space left, or its disk fails
                                    ─► StorageUnreachable   the storage does not answer
                                    ─► None                 anything else: the file, its name, its permissions

    The first two say nothing about the data, so no record may be discarded for them: who reads tries again,
    and gives up for itself.
    """
    for cause in _causes(error):
        if isinstance(cause, PeerError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _SILENT | _RESOURCES:
            return _of_errno(cause, what)
        if isinstance(cause, ConnectionError | TimeoutError) or _is_http_trouble(cause):
            return _silent(what, error)
    return None


def trouble_in_user_code(error: BaseException, what: str) -> PeerError | None:
    """As `trouble_of`, for what a user's own reader raises: only errors that the operating system has
    numbered. A TimeoutError of its own making may be the record's fault, each time."""
    found = (
        cause
        for cause in _causes(error)
        if isinstance(cause, OSError) and cause.errno in _SILENT | _RESOURCES
    )
    cause = next(found, None)
    return None if cause is None else _of_errno(cause, what)


def kept_open() -> int:
    """How many files a reader may keep open between tasks: an eighth of what this process may open. A trainer
    has up to three readers, and sockets beside them."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_KEPT if limit == resource.RLIM_INFINITY else min(_MOST_KEPT, max(1, limit // 8))


def _of_errno(error: OSError, what: str) -> PeerError:
    return _of_resource(error, what) if error.errno in _RESOURCES else _silent(what, error)


def _of_resource(error: OSError, what: str) -> ResourceExhausted:
    if error.errno in _DESCRIPTORS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        whole = error.errno == errno.ENFILE
        limit = (
            "of all processes of this machine"
            if whole
            else f"{soft} of this process (ulimit -n; hard limit {hard})"
        )
        msg = f"{what} cannot be opened now: the limit of open files is reached: {limit}"
        hint = (
            "raise fs.file-max"
            if whole
            else "start members with a higher limit: ulimit -n 65536, or LimitNOFILE= of the service"
        )
        return ResourceExhausted(msg, hint=hint)
    msg = f"{what} cannot be read now: {' '.join(str(error).split())}"
    if error.errno in _FULL:
        return ResourceExhausted(
            msg, hint=f"free space in {tempfile.gettempdir()}, or set TMPDIR to a folder with more"
        )
    if error.errno in _MEMORY:
        return ResourceExhausted(msg, hint="this machine needs more memory")
    return ResourceExhausted(msg, hint="check the disk, or the network file system, on this machine")


def _silent(what: str, error: BaseException) -> StorageUnreachable:
    msg = (
        f"{what} cannot be read now: its storage does not answer: "
        f"{' '.join(str(error).split()) or type(error).__name__}"
    )
    return StorageUnreachable(msg, hint="make the storage reachable from this machine; it is tried again")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _is_http_trouble(error: BaseException) -> bool:
    """fsspec tells every failure of an HTTP server as a missing file, caused by this."""
    aiohttp = sys.modules.get("aiohttp")
    if aiohttp is None:
        return False
    if isinstance(error, aiohttp.ClientResponseError):
        return bool(error.status >= _SERVER_ERROR)
    return isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)
