"""New files written past the page cache: what is written once and read after a crash only need not push out what is in use,
nor be copied by the kernel a page at a time (twice the processor time, and far more where the kernel throttles its writers).

    write(any bytes) -> a buffer -> whole buffers by O_DIRECT, one being filled while the other is written
    finish           -> what is left, through the cache -> fsync

Where a system or file system knows no O_DIRECT, everything goes through the cache. Everything blocks.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES = 4 << 20  # a multiple of any disk's block; mmap aligns it


class DirectFile(io.RawIOBase):
    """A file for writing at `path`, where there may be none yet. What was written is on the disk after `finish`, not before;
    what goes wrong may be told by a later call."""

    def __init__(self, path: Path) -> None:
        self._descriptor, self._direct = _create(path)
        self._filling, self._other = _buffer(), _buffer()
        self._filled = 0
        self._behind = ThreadPoolExecutor(1, "direct-file")
        self._written: Future[None] | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it; the number of bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        taken = 0
        while taken < view.nbytes:
            count = min(BUFFER_BYTES - self._filled, view.nbytes - taken)
            self._filling[self._filled : self._filled + count] = view[taken : taken + count]
            self._filled += count
            taken += count
            if self._filled == BUFFER_BYTES:
                self._wait()
                self._written = self._behind.submit(self._put, self._filling)
                self._filling, self._other, self._filled = self._other, self._filling, 0
        return taken

    def finish(self) -> None:
        """Nothing may be written after it. Raises OSError."""
        self._wait()
        if self._direct and self._filled:
            self._through_cache()
        self._put(self._filling[: self._filled])
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            self._behind.shutdown()
            os.close(self._descriptor)
        super().close()

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _put(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:  # of a file system that opens so and cannot write so, or after half a write
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()

    def _through_cache(self) -> None:
        import fcntl  # noqa: PLC0415  where there is O_DIRECT, there it is

        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
        self._direct = False


def _buffer() -> memoryview:
    return memoryview(mmap.mmap(-1, BUFFER_BYTES))  # touched when it is used


def _create(path: Path) -> tuple[int, bool]:
    """Its descriptor, and whether that goes past the cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if sys.platform == "linux":
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        path.unlink(missing_ok=True)  # some systems make it and then refuse
    return os.open(path, flags, 0o666), False
