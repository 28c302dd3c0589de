"""Compressed files as what they hold: `.gz .bz2 .xz .zst`, of one or several streams.

for the master, which counts    scanning(file) ──► its content from the start, decompressed on the way
for trainers                    Decompressed().opened(file) ──► seekable: decompressed once, into a temporary
                                file without a name

Such files lie in the folder that TMPDIR names, and nothing stays behind a process that is killed (`copy_of`).
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import shutil
import tempfile
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import IO, Any, BinaryIO, cast

from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.files import kept_open, trouble_of
from trireme_shared.protocol.errors import DatasetError, ResourceExhausted

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        f"{folder} is full: {file} is read by way of a temporary file there, which needs at least "
        f"{needed} bytes, and there is room for "
        f"{room}; free space, or set TMPDIR where the trainers run to a folder with more"
    )
    hint = "large compressed files are best decompressed once, or kept as Parquet"
    return NoRoom(msg, hint=hint, url=file, folder=folder, needed_bytes=needed, room_bytes=room)


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
KEPT_BYTES = 16 << 30
_COPIED_BYTES = 1 << 20


def is_compressed(file: str) -> bool:
    return file.endswith(SUFFIXES)


class _Stream(io.RawIOBase):
    """Decompresses as it is read. Moving on reads what is between, moving back begins anew. Raises
    DatasetError, with the place, for what is damaged or cut off."""

    def __init__(self, file: str, source: BinaryIO) -> None:
        self._file, self._source = file, source
        self._stream = _decompressor(file, source)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0:
            raise io.UnsupportedOperation("the end of a compressed file is not known")
        if offset < self._position:
            self._source.seek(0)
            self._stream, self._position = _decompressor(self._file, self._source), 0
        while self._position < offset and self.readinto(
            bytearray(min(offset - self._position, _COPIED_BYTES))
        ):
            pass
        return self._position

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(len(buffer))
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            if (trouble := trouble_of(error, self._file)) is not None:
                raise trouble from error
            msg = f"{self._file} is damaged or cut off behind {self._position} decompressed bytes: {error}"
            raise DatasetError(
                msg, hint="copy or compress it again", url=self._file, offset=self._position
            ) from error
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _decompressor(file: str, source: BinaryIO) -> Any:
    if file.endswith(".gz"):
        return gzip.GzipFile(fileobj=source)
    if file.endswith(".bz2"):
        return bz2.BZ2File(source)
    if file.endswith(".xz"):
        return lzma.LZMAFile(source)
    import pyarrow as pa  # noqa: PLC0415  only where it is needed

    return pa.CompressedInputStream(pa.PythonFile(source, "r"), "zstd")


@contextmanager
def scanning(file: str) -> Iterator[BinaryIO]:
    """The file to be read from its start in order; decompressed, if its name says that it is compressed."""
    with files.open_read(file) as source:
        yield (
            cast("BinaryIO", io.BufferedReader(_Stream(file, source), _COPIED_BYTES))
            if is_compressed(file)
            else source
        )


class Decompressed:
    """Keeps the temporary files used last: at least one, and up to `kept_bytes` and `kept_files` (None: see
    kept_open), or as many as their disk has room for."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, kept_files: int | None = None) -> None:
        self._kept_bytes, self._kept_files = kept_bytes, kept_files or kept_open()
        self._copies: OrderedDict[str, IO[bytes]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._lock = RLock()
        self.decompressed = 0
        weakref.finalize(self, _close, self._copies)

    @contextmanager
    def opened(self, file: str) -> Iterator[BinaryIO]:
        """The content of a file, seekable. One that is compressed is for one thread at a time."""
        if not is_compressed(file):
            with files.open_read(file) as source:
                yield source
            return
        with self._lock:
            yield cast("BinaryIO", self._copy(file))

    def _copy(self, file: str) -> IO[bytes]:
        if file not in self._copies:
            copy = self._made(file)
            self.decompressed += 1
            self._copies[file], self._sizes[file] = copy, copy.tell()
            while len(self._copies) > 1 and (
                len(self._copies) > self._kept_files or sum(self._sizes.values()) > self._kept_bytes
            ):
                self._drop_oldest()
        self._copies.move_to_end(file)
        return self._copies[file]

    def _made(self, file: str) -> IO[bytes]:
        while True:
            try:
                with scanning(file) as source:
                    return copy_of(file, source)
            except NoRoom:
                if not self._copies:
                    raise
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        name, dropped = self._copies.popitem(last=False)
        dropped.close()
        del self._sizes[name]


def _close(copies: OrderedDict[str, IO[bytes]]) -> None:
    for copy in copies.values():
        copy.close()
