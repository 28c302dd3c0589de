"""The memory of a table: cells that say where a row is, and rows; both grow without moving what is there.

    slots --capacities--> cells: a hash table for each slot, which grows for itself     chunks: 64 MiB of rows each

The tables of slots have different limits of load, so they do not all grow in the same step.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidArgument
from shared.records.layout import MOST_ROWS
from shared.tables.kernels import cells as cell_loops
from shared.tables.kernels import rows as row_loops

CHUNK_BYTES = 64 << 20
SMALLEST = 8  # cells of a slot that has rows
LEAST_LOAD, LOADS = 0.55, 0.20  # a slot's limit lies between the first and their sum
AFTER_GROWTH = 0.42

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Rows:
    """`width` float32 a row, in chunks. A row's number stays its own until it is given back."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.shift = max(0, (CHUNK_BYTES // (4 * width)).bit_length() - 1)
        self._chunks: list[Floats] = []
        self.addresses = np.zeros(0, np.uint64)
        self.free = np.zeros(1024, np.int64)
        self.free_count = 0
        self.next = 0

    @property
    def bytes(self) -> int:
        """Of the rows that are, or have been, in use; chunks beyond them have no memory yet."""
        return self.next * self.width * 4 + self.free.nbytes

    def reserve(self, rows: int) -> None:
        """Room for so many more. Raises InvalidArgument."""
        needed = self.next + max(0, rows - self.free_count)
        if needed > MOST_ROWS - 1:
            msg = f"a table would have {needed} rows at one parameter server, at most {MOST_ROWS - 1} are possible"
            raise InvalidArgument(msg, hint="use more parameter servers (trireme scale), or set max_rows")
        while len(self._chunks) << self.shift < needed:
            self._chunks.append(_zeros(self.width << self.shift))
            self.addresses = np.array([chunk.ctypes.data for chunk in self._chunks], np.uint64)

    def give_back(self, rows: Numbers) -> None:
        if self.free_count + len(rows) > len(self.free):
            grown = np.zeros(max(2 * len(self.free), self.free_count + len(rows)), np.int64)
            grown[: self.free_count] = self.free[: self.free_count]
            self.free = grown
        self.free[self.free_count : self.free_count + len(rows)] = rows
        self.free_count += len(rows)

    def read(self, rows: Numbers) -> Floats:
        """Copies: float32 (n, width)."""
        out = np.empty((len(rows), self.width), np.float32)
        row_loops.read_rows(self.addresses, self.shift, self.width, rows, out)
        return out

    def write(self, rows: Numbers, content: Floats) -> None:
        row_loops.write_rows(self.addresses, self.shift, self.width, rows, content)


class Cells:
    """The hash tables of all slots. `used`: int64 (slots,)."""

    def __init__(self, slot_count: int, seed: int) -> None:
        self.seed = np.uint64(seed)
        self.addresses = np.zeros(slot_count, np.uint64)
        self.capacities = np.zeros(slot_count, np.int64)
        self.used = np.zeros(slot_count, np.int64)
        self._arrays: list[Words | None] = [None] * slot_count
        spread = (np.arange(slot_count) * 0.6180339887498949) % 1.0
        self._limits = LEAST_LOAD + LOADS * spread

    @property
    def bytes(self) -> int:
        return int(self.capacities.sum()) * 16

    def reserve(self, more: Numbers) -> None:
        """Room for `more[slot]` more ids in each slot."""
        needed = self.used + more
        for slot in np.flatnonzero(needed > self.capacities * self._limits):
            if more[slot]:
                self._grow(int(slot), int(needed[slot]))

    def _grow(self, slot: int, ids: int) -> None:
        old, old_capacity = self._arrays[slot], int(self.capacities[slot])
        capacity = self._new(slot, ids)
        if old is not None:
            cell_loops.rehash(np.uint64(old.ctypes.data), old_capacity, self.addresses[slot], capacity, self.seed)

    def _new(self, slot: int, ids: int) -> int:
        capacity = max(SMALLEST, int(ids / AFTER_GROWTH))
        cells = self._arrays[slot] = np.zeros(2 * capacity, np.uint64)
        self.addresses[slot], self.capacities[slot] = cells.ctypes.data, capacity
        return capacity

    def of_slot(self, slot: int) -> tuple[Numbers, Words]:
        """Copies of the ids and the words of a slot, in no order that means anything."""
        used = int(self.used[slot])
        ids, words = np.empty(used, np.int64), np.empty(used, np.uint64)
        if used:
            cell_loops.cells_of(self.addresses[slot], int(self.capacities[slot]), ids, words)
        return ids, words

    def replace(self, slot: int, ids: Numbers, words: Words) -> None:
        """All cells of a slot."""
        self.used[slot] = len(ids)
        if not len(ids):
            self._arrays[slot] = None
            self.addresses[slot] = self.capacities[slot] = 0
            return
        capacity = self._new(slot, len(ids))
        cell_loops.fill(self.addresses[slot], capacity, self.seed, ids, words)

    def clear(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.replace(slot, np.empty(0, np.int64), np.empty(0, np.uint64))


def _zeros(count: int) -> Floats:
    """float32 (count,) in pages of its own, large ones where the system has them: rows are read in no order."""
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.float32)
