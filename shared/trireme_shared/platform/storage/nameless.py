"""Temporary files without a name, in the folder that TMPDIR names: nothing stays behind a process that is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from typing import IO, BinaryIO

from trireme_shared.platform.storage.trouble import trouble_of
from trireme_shared.protocol.errors import ResourceExhausted

_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPIED_BYTES = 1 << 20


class NoRoom(ResourceExhausted):
    """The folder of temporary files is full."""


def copy_of(file: str, source: BinaryIO) -> IO[bytes]:
    """What `source` gives, in a file that the caller closes; `file`: its name for messages.

    Raises NoRoom; ResourceExhausted if no temporary file can be made; and what `source` raises.
    """
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  the caller's
    except OSError as error:
        msg = f"{file} is read by way of a temporary file, and none can be made: {error}"
        hint = "set TMPDIR where the trainers run to a folder with space"
        raise trouble_of(error, file) or ResourceExhausted(msg, hint=hint, url=file) from error
    needed = 0
    try:
        while content := source.read(_COPIED_BYTES):
            needed += len(content)
            try:
                copy.write(content)
                copy.flush()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise _no_room(file, copy, needed) from error
    except BaseException:
        with contextlib.suppress(OSError):  # of what could not be written
            copy.close()
        raise
    return copy


def _no_room(file: str, copy: IO[bytes], needed: int) -> NoRoom:
    folder = tempfile.gettempdir()
    room = shutil.disk_usage(folder).free + os.fstat(copy.fileno()).st_size
    msg = (
        f"{folder} is full: {file} is read by way of a temporary file there, which needs at least {needed} bytes, and there is room for "
        f"{room}; free space, or set TMPDIR where the trainers run to a folder with more"
    )
    hint = "large compressed files are best decompressed once, or kept as Parquet"
    return NoRoom(msg, hint=hint, url=file, folder=folder, needed_bytes=needed, room_bytes=room)
