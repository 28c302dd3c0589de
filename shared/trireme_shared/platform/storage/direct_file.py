"""New files written past the page cache. They are read only after a crash, so they should not evict pages
that are in use; and the kernel's copy of each page costs twice the processor time, far more when the kernel
throttles writers.

    write(any bytes)           -> a buffer -> whole blocks by O_DIRECT, one buffer being filled while the
                               other is written
    lend(bytes), give_back     -> the same buffer, filled in place: nothing is copied
    finish                     -> what is left, through the cache -> fsync

If the system or the file system has no O_DIRECT, everything goes through the cache. Everything blocks.
"""

from __future__ import annotations

import contextlib
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

BUFFER_BYTES = 16 << 20  # rows of tables are made in such portions, and the disk works meanwhile
BLOCK_BYTES = 4096  # a multiple of any disk's block; mmap aligns buffers to it
EARLY_BYTES = BUFFER_BYTES // 2  # of lent memory: a buffer that is filled so far is written
LARGEST_LENT = BUFFER_BYTES - BLOCK_BYTES
WORD_BYTES = 8


class DirectFile(io.RawIOBase):
    """A file for writing at `path`, which must not exist yet. The content is on the disk only after `finish`.
    A later call may raise the error of an earlier write."""

    def __init__(self, path: Path) -> None:
        self.descriptor, self._direct = _create(path)
        self._filling, self._other = _buffer(), _buffer()
        self._filled = 0
        self._behind = ThreadPoolExecutor(1, "direct-file")
        self._written: Future[None] | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes all of `data` and returns its size. Raises OSError."""
        view = memoryview(data).cast("B")
        taken = 0
        while taken < view.nbytes:
            count = min(BUFFER_BYTES - self._filled, view.nbytes - taken)
            _copy(self._filling[self._filled : self._filled + count], view[taken : taken + count])
            self._filled += count
            taken += count
            if self._filled == BUFFER_BYTES:
                self._begin_to_put()
        return taken

    def lend(self, size: int) -> memoryview | None:
        """Memory for the next `size` bytes of the file, to be filled and given back before anything else is
        done. None: there is none, use `write`. It begins at a multiple of WORD_BYTES. Raises OSError."""
        if size > LARGEST_LENT or self._filled % WORD_BYTES:
            return None
        if self._filled + size > BUFFER_BYTES:
            self._begin_to_put()
        return self._filling[self._filled : self._filled + size]

    def give_back(self, size: int) -> None:
        """So many bytes of lent memory are filled, and part of the file now. Raises OSError."""
        self._filled += size
        if self._filled >= EARLY_BYTES:
            self._begin_to_put()

    def _begin_to_put(self) -> None:
        """All whole blocks of the buffer that is being filled; what is left of them begins the other one."""
        whole = self._filled - self._filled % BLOCK_BYTES
        left = self._filling[whole : self._filled]
        self._wait()
        self._other[: len(left)] = left
        self._written = self._behind.submit(self._put, self._filling[:whole])
        self._filling, self._other, self._filled = self._other, self._filling, len(left)

    def finish(self) -> None:
        """Nothing may be written after it. Raises OSError."""
        self._wait()
        if self._direct and self._filled:
            self._through_cache()
        self._put(self._filling[: self._filled])
        os.fsync(self.descriptor)

    def close(self) -> None:
        if not self.closed:
            self._behind.shutdown()
            os.close(self.descriptor)
        super().close()

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _put(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self.descriptor, left) :]
            except OSError as error:
                # a file system that opens with O_DIRECT but cannot write with it, or after a partial write
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()

    def _through_cache(self) -> None:
        import fcntl  # noqa: PLC0415  exists wherever O_DIRECT does

        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, 0)
        self._direct = False


def _copy(target: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock, which an assignment of memoryviews holds: this thread may have the
    lowest priority."""
    import numpy as np  # noqa: PLC0415  not for those who only read

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _buffer() -> memoryview:
    memory = mmap.mmap(-1, BUFFER_BYTES)  # it is used only once it is touched
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel has fewer pages to hold for each write
    return memoryview(memory)


def _create(path: Path) -> tuple[int, bool]:
    """The descriptor, and whether it bypasses the cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if sys.platform == "linux":
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        path.unlink(missing_ok=True)  # some systems create the file and then refuse
    return os.open(path, flags, 0o600), False
