"""Memory of rows that a thread of the process touches before anybody needs it.

The system gives a page when it is written for the first time. A large one (2 MiB) is given in one piece: 0.2 ms at best, and 5 to 30 ms where a virtual machine gets
the memory from its host in that moment. So nobody who serves others does it: a step that needs more rows than are there waits in its turns.

    rows of chunks --ask--> pieces --thread, one after the other--> there
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from trireme_shared.tables.kernels import rows as row_loops

PIECE_BYTES = 2 << 20  # a large page
SMALL_BYTES = 1 << 20  # at least, at the beginning of a table: no large pages, which are touched when they are used
WAIT_S = 0.001  # between two values of `until`, if the memory is not there
MOST_WAITS = 5000  # then who needs it touches it
NAME = "first-touch"

Floats = npt.NDArray[np.float32]

_threads: list[ThreadPoolExecutor] = []  # none or one


def _thread() -> ThreadPoolExecutor:
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, NAME))
    return _threads[0]


os.register_at_fork(after_in_child=_threads.clear)  # the thread is not there


def small_bytes(address: int) -> int:
    """How many bytes at the beginning of a table are without large pages; then one may begin."""
    return SMALL_BYTES + -(address + SMALL_BYTES) % PIECE_BYTES


class TouchedRows:
    """How many rows of a table are there. `row_bytes`; `shift`: a chunk has 2 ** shift rows."""

    def __init__(self, row_bytes: int, shift: int) -> None:
        self._row_bytes, self._shift = row_bytes, shift
        self._pieces: deque[tuple[int, Future[None]]] = deque()  # rows that are there when it is done
        self._asked = self._offset = 0  # rows; bytes of the chunk that has the last of them
        self._there = 0
        self.touched = 0  # by the thread

    def __repr__(self) -> str:
        return f"<TouchedRows: {self._there} of {self._asked}>"

    def ask(self, chunks: Sequence[Floats], rows: int) -> None:
        """The first `rows`, which are in the chunks, shall be there soon."""
        while self._asked < rows:
            number = self._asked >> self._shift
            chunk, first_row = chunks[number], number << self._shift
            if self._offset >= chunk.nbytes:
                self._offset = 0
            address = chunk.ctypes.data
            if not self._asked and not self._offset:
                self._offset = min(chunk.nbytes, small_bytes(address))
                self._there = self._asked = min(1 << self._shift, self._offset // self._row_bytes)
                continue
            end = min(chunk.nbytes, self._offset + PIECE_BYTES - (address + self._offset) % PIECE_BYTES)
            done = _thread().submit(touch, chunk, self._offset, end)
            self._offset, self._asked = end, first_row + end // self._row_bytes
            self._pieces.append((self._asked, done))

    def are_there(self, rows: int, wait_s: float = 0.0) -> bool:
        """Whether the first `rows` can be written without waiting for the system; they have been asked for."""
        if self._there < rows and wait_s and self._pieces:
            wait([self._pieces[0][1]], wait_s)
        while self._pieces and self._pieces[0][1].done():
            self.touched = self._pieces.popleft()[0]
            self._there = max(self._there, self.touched)
        return self._there >= rows

    def until(self, rows: int) -> Iterator[None]:
        """Waits until they are there, WAIT_S between two values; but no longer than MOST_WAITS: then the thread is gone or starved, and whoever writes them
        touches them."""
        for _ in range(MOST_WAITS):
            if self.are_there(rows, WAIT_S):
                return
            yield
        self._there = max(self._there, rows)


def soon_touched(*shape: int) -> npt.NDArray[np.uint8]:
    """Zeros, uint8, whose memory the thread touches: ids come in no order, so the first of them would need all of it at once."""
    made = np.zeros(shape, np.uint8)
    if made.nbytes > SMALL_BYTES:
        _thread().submit(touch, made, 0, made.nbytes)
    return made


def touch(memory: np.ndarray, first: int, last: int) -> None:
    """It may be in use already: nothing in it changes."""
    row_loops.touch(np.uint64(memory.ctypes.data + first), last - first)
