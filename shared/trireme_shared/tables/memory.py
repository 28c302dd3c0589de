"""The memory of a table: cells that say where a row is, and rows.

    slots --capacities--> cells: a hash table for each slot, which grows for itself
    chunks: up to 64 MiB of rows each

Rows never move. The tables of slots have different limits of load, so they do not all grow in the same step;
one that grows is filled some cells at a time, and until it is whole the old one can be read. Memory of rows
is touched ahead of its use (TouchedRows). What takes long is done in portions, and others have their turn
between two of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme_shared.platform.runtime.ids import secret_odd
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import LATER_STAMPS, MOST_ROWS, OLDEST, STAMPS
from trireme_shared.tables.kernels import cells as cell_loops
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.kernels import saving as saving_loops
from trireme_shared.tables.needs import AFTER_GROWTH, CELL_BYTES, LEAST_LOAD, LOADS

PIECE_BYTES = 2 << 20  # a large page
# at least, at the beginning of a table: no large pages, which are touched when they are used
SMALL_BYTES = 1 << 20
WAIT_S = 0.001  # between two values of `until`, if the memory is not there
MOST_WAITS = 5000  # then who needs it touches it
_threads: list[ThreadPoolExecutor] = []  # none or one


def _thread() -> ThreadPoolExecutor:
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, "first-touch"))
    return _threads[0]


os.register_at_fork(after_in_child=_threads.clear)  # the thread is not there


def small_bytes(address: int) -> int:
    """How many bytes at the beginning of a table are without large pages; then one may begin."""
    return SMALL_BYTES + -(address + SMALL_BYTES) % PIECE_BYTES


class TouchedRows:
    """How many rows of a table have memory that was touched already: a thread of the process does so before
    anybody needs them. `shift`: a chunk has 2 ** shift rows.

    The system gives a page when it is written for the first time. A large one (2 MiB) is given in one piece:
    0.2 ms at best, and 5 to 30 ms where a virtual machine gets the memory from its host in that moment. So
    nobody who serves others does it: a step that needs more rows than are there waits in its turns.

        rows of chunks --ask--> pieces --thread, one after the other--> there
    """

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
        """Whether the first `rows` can be written without waiting for the system; they have been asked
        for."""
        if self._there < rows and wait_s and self._pieces:
            wait([self._pieces[0][1]], wait_s)
        while self._pieces and self._pieces[0][1].done():
            self.touched = self._pieces.popleft()[0]
            self._there = max(self._there, self.touched)
        return self._there >= rows

    def until(self, rows: int) -> Iterator[None]:
        """Waits until they are there, WAIT_S between two values; but no longer than MOST_WAITS: then the
        thread is gone or starved, and whoever writes them touches them."""
        for _ in range(MOST_WAITS):
            if self.are_there(rows, WAIT_S):
                return
            yield
        self._there = max(self._there, rows)


def soon_touched(*shape: int) -> npt.NDArray[np.uint8]:
    """Zeros, uint8, whose memory the thread touches: ids come in no order, so the first of them would need
    all of it at once."""
    made = np.zeros(shape, np.uint8)
    if made.nbytes > SMALL_BYTES:
        _thread().submit(touch, made, 0, made.nbytes)
    return made


def touch(memory: np.ndarray, first: int, last: int) -> None:
    """It may be in use already: nothing in it changes."""
    row_loops.touch(np.uint64(memory.ctypes.data + first), last - first)


AT_ONCE = 4096  # rows, so that what is made of them stays in the processor's cache
BYTES_AT_ONCE = 4 << 20  # of wide rows fewer
COUNTED_AT_ONCE = 1 << 16  # ids of which nothing but their slots are computed: half a millisecond
TOLD_AT_ONCE = 1 << 15  # rows: a millisecond or two, if they are copied


def portions(count: int, at_once: int = AT_ONCE) -> Iterator[slice]:
    """Of so many rows, `at_once` after `at_once`."""
    return (slice(first, first + at_once) for first in range(0, count, at_once))


def rows_at_once(numbers: int) -> int:
    """Of rows with so many float32."""
    return max(1, min(AT_ONCE, BYTES_AT_ONCE // (4 * numbers)))


CHUNK_BYTES = 64 << 20
SMALLEST = 8  # cells of a slot that has rows
TOO_EMPTY = 0.2  # then a slot gets a smaller table
OWN_PAGES_BYTES = 32 << 10  # of a slot's cells, from which on they have pages of their own
HASHES = 1 << 32  # halves of hashes, and places of ids among the cells of a slot, are below
CELLS_AT_ONCE = 1 << 15  # that move, or are new, between two values of `reserve`: about a millisecond
# Of this process, for all its tables: says in which cell an id is, and nothing that anybody else sees.
SECRET = np.uint64(secret_odd())

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def ages_of(words: Words, version: int) -> Numbers:
    """By how many steps `version` is later than the one that changed each row last; negative: earlier."""
    stamps = (words >> parts.STAMP_SHIFT).astype(np.int64)
    return ((version + LATER_STAMPS - stamps) & (STAMPS - 1)) - LATER_STAMPS


def stamps_of(words: Words, version: int) -> Numbers:
    """The step that changed each row last, of a table that is, or was, at `version`."""
    return version - ages_of(words, version)


def frequencies_of(words: Words) -> Numbers:
    """About log2(1 + steps that changed it) of each row."""
    return ((words >> parts.FREQUENCY_SHIFT) & parts.FREQUENCY_MASK).astype(np.int64)


def places_of(words: Words) -> Numbers:
    """The number of each row."""
    return (words & parts.ROW_MASK).astype(np.int64) - 1


def with_places(words: Words, places: Numbers) -> Words:
    """The same marks, of rows with these numbers."""
    return (words & ~parts.ROW_MASK) | (places + 1).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class CellsOfSlots:
    """Copies. `slots`: int64 (k,). `ids`: int64, `words`: uint64, slot after slot; `ends`: int64 (k,), where
    those of each end."""

    slots: Numbers
    ids: Numbers
    words: Words
    ends: Numbers


class Rows:
    """`width` float32 a row, in chunks. A row's number stays its own until it is given back."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.shift = max(0, (CHUNK_BYTES // (4 * width)).bit_length() - 1)
        self._chunks: list[Floats] = []
        self.addresses = np.zeros(0, np.uint64)
        self._free, self.free_count = parts.ABSENT, 0  # a list in the memory of the free rows
        self.next = 0
        self._touched = TouchedRows(4 * width, self.shift)

    @property
    def bytes(self) -> int:
        """Of the rows that are, or have been, in use, or were touched; chunks beyond them have no memory
        yet."""
        return max(self.next, self._touched.touched) * self.width * 4

    def reserve(self, rows: int) -> None:
        """Room for so many more, whose memory is asked for, and that of as many again. Raises
        InvalidArgument."""
        needed = self._needed(rows)
        if needed > MOST_ROWS - 1:
            msg = (
                f"a table would have {needed} rows at one parameter server, at most {MOST_ROWS - 1} "
                "are possible"
            )
            raise InvalidArgument(msg, hint="use more parameter servers (trireme scale), or set max_rows")
        ahead = min(2 * needed - self.next, MOST_ROWS - 1)
        while len(self._chunks) << self.shift < ahead:
            self._chunks.append(_zeros(self.width << self.shift, first=not self._chunks))
            self.addresses = np.array([chunk.ctypes.data for chunk in self._chunks], np.uint64)
        self._touched.ask(self._chunks, ahead)

    def reserve_in_turns(self, rows: int) -> Iterator[None]:
        """`reserve`, and waits until the memory of these is there: a millisecond between two values. Raises
        InvalidArgument."""
        self.reserve(rows)
        yield from self._touched.until(self._needed(rows))

    def _needed(self, rows: int) -> int:
        return self.next + max(0, rows - self.free_count)

    def give_back(self, rows: Numbers) -> None:
        self._free = cell_loops.give_back(self.addresses, self.shift, self.width, rows, self._free)
        self.free_count += len(rows)

    def take(self, count: int) -> Numbers:
        """Numbers of rows for which there is room: int64 (count,)."""
        taken = np.empty(count, np.int64)
        reused = min(count, self.free_count)
        if reused:
            self._free = cell_loops.take_free(
                self.addresses, self.shift, self.width, self._free, taken[:reused]
            )
            self.free_count -= reused
        taken[reused:] = np.arange(self.next, self.next + count - reused)
        self.next += count - reused
        return taken

    def insert(
        self, cells: Cells, ids: Numbers, step: int, places: Numbers, admitted: npt.NDArray[np.bool_]
    ) -> None:
        """Rows, and cells, for admitted ids whose place is ABSENT; there is room for all."""
        self._free, self.free_count, self.next = cell_loops.insert(
            cells.addresses,
            cells.capacities,
            cells.used,
            cells.seed,
            cells.secret,
            ids,
            step,
            places,
            admitted,
            self.addresses,
            self.shift,
            self.width,
            self._free,
            self.free_count,
            self.next,
        )

    def read(self, rows: Numbers) -> Floats:
        """Copies: float32 (n, width)."""
        out = np.empty((len(rows), self.width), np.float32)
        row_loops.read_rows(self.addresses, self.shift, self.width, rows, out)
        return out

    def to_records(
        self, ids: Numbers, marks: Words, places: Numbers, kept: Floats, dim: int, records: Numbers
    ) -> bool:
        """See the loop. Whether all values are finite."""
        views = records, records.view(np.float32), records.view(np.int32)
        loop = saving_loops.to_records
        return bool(loop(self.addresses, self.shift, self.width, dim, ids, marks, places, kept, *views))

    def write(self, rows: Numbers, content: Floats) -> None:
        row_loops.write_rows(self.addresses, self.shift, self.width, rows, content)


class Cells:
    """The hash tables of all slots. `used`: int64 (slots,)."""

    def __init__(self, slot_count: int, seed: int) -> None:
        self.seed, self.secret = np.uint64(seed), SECRET
        self.addresses = np.zeros(slot_count, np.uint64)
        self.capacities = np.zeros(slot_count, np.int64)
        self.used = np.zeros(slot_count, np.int64)
        self._arrays: list[Words | None] = [None] * slot_count
        spread = (np.arange(slot_count) * 0.6180339887498949) % 1.0
        self._limits = LEAST_LOAD + LOADS * spread

    @property
    def bytes(self) -> int:
        return int(self.capacities.sum()) * CELL_BYTES

    def reserve(self, more: Numbers) -> Iterator[None]:
        """Room for `more[slot]` more ids in each slot; about a millisecond of work between two values,
        whatever the size."""
        new = 0
        for slot in np.flatnonzero(self.lack(more)).tolist():
            yield from self._move(slot, int(self.used[slot] + more[slot]))
            new += int(self.capacities[slot])
            if new >= CELLS_AT_ONCE:  # of small slots
                new = 0
                yield

    def lack(self, more: Numbers) -> npt.NDArray[np.bool_]:
        """Which slots have too few cells for `more[slot]` more ids."""
        return (self.used + more > self.capacities * self._limits) & (more > 0)

    def _move(self, slot: int, ids: int) -> Iterator[None]:
        """Into a table that is right for so many ids. Nothing else changes the slot meanwhile."""
        old, cells = int(self.capacities[slot]), _new_cells(ids)
        target, capacity = np.uint64(cells.ctypes.data), len(cells) // 2
        for first in range(0, old, CELLS_AT_ONCE):
            last = min(first + CELLS_AT_ONCE, old)
            source = self.addresses[slot], old, first, last
            cell_loops.rehash(*source, target, capacity, self.seed, self.secret)
            yield
        # what is moved touches the pages in order; ids that come would touch many of them at once
        if not old:
            for first in range(0, capacity, CELLS_AT_ONCE):
                some = min(CELLS_AT_ONCE, capacity - first)
                row_loops.touch(target + np.uint64(CELL_BYTES * first), CELL_BYTES * some)
                if some == CELLS_AT_ONCE:
                    yield
        self._have(slot, cells)

    def _have(self, slot: int, cells: Words) -> None:
        self._arrays[slot] = cells
        self.addresses[slot], self.capacities[slot] = cells.ctypes.data, len(cells) // 2

    def of_slot(self, slot: int, first: int = 0, last: int = HASHES) -> tuple[Numbers, Words]:
        """Copies of the ids and the words of a slot, in no order that means anything; of those whose hashes
        have high halves in [first, last), which are the same in every process."""
        used, address, capacity = int(self.used[slot]), self.addresses[slot], int(self.capacities[slot])
        ids, words = np.empty(used, np.int64), np.empty(used, np.uint64)
        if used and last - first < HASHES:
            found = cell_loops.cells_with(address, capacity, self.seed, first, last, ids, words)
            return ids[:found].copy(), words[:found].copy()
        if used:
            cell_loops.cells_of(address, capacity, ids, words)
        return ids, words

    def at_places(self, slot: int, first: int, last: int) -> tuple[Numbers, Words]:
        """As `of_slot`, of those with places in [first, last); only these cells are looked at. A place does
        not depend on the size of the slot, so this process can read a slot part after part though it grows
        meanwhile."""
        used, address, capacity = int(self.used[slot]), self.addresses[slot], int(self.capacities[slot])
        ids, words = np.empty(used, np.int64), np.empty(used, np.uint64)
        keys = self.seed, self.secret
        found = cell_loops.cells_between(address, capacity, *keys, first, last, ids, words) if used else 0
        return ids[:found].copy(), words[:found].copy()

    def collect(self, slots: Numbers, after: int, version: int) -> CellsOfSlots:
        """Those of slots with stamps in (after, version], in no order that means anything."""
        room = int(self.used[slots].sum())
        ids, words, ends = np.empty(room, np.int64), np.empty(room, np.uint64), np.empty(len(slots), np.int64)
        saving_loops.collect(self.addresses, self.capacities, slots, version, after, ids, words, ends)
        found = int(ends[-1]) if len(ends) else 0
        return CellsOfSlots(slots, ids[:found], words[:found], ends)

    def remove_expired(self, slot: int, version: int, ttl: int) -> tuple[Numbers, Words]:
        """Those of a slot that are expired at `version`: their ids and words."""
        used, address, capacity = int(self.used[slot]), self.addresses[slot], int(self.capacities[slot])
        ids, words = np.empty(used, np.int64), np.empty(used, np.uint64)
        found = cell_loops.expired(address, capacity, version, ttl, ids, words) if used else 0
        if found:
            cell_loops.remove(address, capacity, self.seed, self.secret, ids[:found])
            self.used[slot] -= found
        return ids[:found].copy(), words[:found].copy()

    def keep_oldest(self, slot: int, version: int) -> int:
        """Rows of a slot that are older than a stamp can tell are as old as it can tell; how many were."""
        return int(cell_loops.keep_oldest(self.addresses[slot], int(self.capacities[slot]), version, OLDEST))

    def shrink(self, slot: int) -> Iterator[None]:
        """Give memory back if most cells are empty."""
        used = int(self.used[slot])
        if not used:
            self.clear([slot])
        elif used < self.capacities[slot] * TOO_EMPTY and self.capacities[slot] > SMALLEST:
            yield from self._move(slot, used)

    def replace(self, slot: int, ids: Numbers, words: Words) -> None:
        """All cells of a slot."""
        self.used[slot] = len(ids)
        if not len(ids):
            self._arrays[slot] = None
            self.addresses[slot] = self.capacities[slot] = 0
            return
        self._have(slot, _new_cells(len(ids)))
        address, capacity = self.addresses[slot], int(self.capacities[slot])
        cell_loops.fill(address, capacity, self.seed, self.secret, ids, words)

    def take_out(self, slots: Numbers) -> list[Words]:
        """The slots have no ids any more: the cells that they had."""
        found = []
        for slot in slots.tolist():
            cells, self._arrays[slot] = self._arrays[slot], None
            if cells is not None:
                found.append(cells)
        self.addresses[slots] = self.capacities[slots] = self.used[slots] = 0
        return found

    def clear(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.replace(slot, np.empty(0, np.int64), np.empty(0, np.uint64))


def _new_cells(ids: int) -> Words:
    """An empty table for so many ids, and for those that come until it grows."""
    words = 2 * max(SMALLEST, int(ids / AFTER_GROWTH))
    if 8 * words < OWN_PAGES_BYTES:
        return np.zeros(words, np.uint64)
    return np.frombuffer(
        _pages(8 * words), np.uint64
    )  # they go back to the system: tables that grow leave gaps in a heap


def _zeros(count: int, *, first: bool) -> Floats:
    """float32 (count,), in large pages where the system has them: rows are read in no order. `first`: of a
    table, which may stay small."""
    pages = _pages(4 * count)
    found = np.frombuffer(pages, np.float32)
    start = min(4 * count, small_bytes(found.ctypes.data)) if first else 0
    if hasattr(mmap, "MADV_HUGEPAGE") and start < 4 * count:
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start)
    return found


def _pages(size: int) -> mmap.mmap:
    """Zeros."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
