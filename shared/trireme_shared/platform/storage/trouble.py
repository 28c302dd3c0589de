"""Whose fault an OSError is: the data's, or that of the machine or storage that was asked for it.

    error of a read ─ trouble_of ─► ResourceExhausted   this machine has no descriptor, memory, or disk space left, or its disk fails
                                ─► StorageUnreachable   the storage does not answer
                                ─► None                 anything else: the file, its name, its permissions

The first two say nothing about the data, so no record may be discarded for them: who reads tries again, and gives up for itself.
"""

from __future__ import annotations

import errno
import resource
import sys
import tempfile
from collections.abc import Iterator

from trireme_shared.protocol.errors import PeerError, ResourceExhausted, StorageUnreachable

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
    """The trouble of machine or storage that made `error`, itself or by way of its causes; None: neither is to blame. `what` was being
    read, for the message."""
    for cause in _causes(error):
        if isinstance(cause, PeerError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _SILENT | _RESOURCES:
            return _of_errno(cause, what)
        if isinstance(cause, ConnectionError | TimeoutError) or _is_http_trouble(cause):
            return _silent(what, error)
    return None


def trouble_in_user_code(error: BaseException, what: str) -> PeerError | None:
    """As `trouble_of`, for what a user's own reader raises: only errors that the operating system has numbered. A TimeoutError of its own
    making may be the record's fault, each time."""
    found = (cause for cause in _causes(error) if isinstance(cause, OSError) and cause.errno in _SILENT | _RESOURCES)
    cause = next(found, None)
    return None if cause is None else _of_errno(cause, what)


def kept_open() -> int:
    """How many files a reader may keep open between tasks: an eighth of what this process may open. A trainer has up to three readers,
    and sockets beside them."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_KEPT if limit == resource.RLIM_INFINITY else min(_MOST_KEPT, max(1, limit // 8))


def _of_errno(error: OSError, what: str) -> PeerError:
    return _of_resource(error, what) if error.errno in _RESOURCES else _silent(what, error)


def _of_resource(error: OSError, what: str) -> ResourceExhausted:
    if error.errno in _DESCRIPTORS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        whole = error.errno == errno.ENFILE
        limit = (
            "of all processes of this machine" if whole else f"{soft} of this process (ulimit -n; hard limit {hard})"
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
    msg = f"{what} cannot be read now: its storage does not answer: {' '.join(str(error).split()) or type(error).__name__}"
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
