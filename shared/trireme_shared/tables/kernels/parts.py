# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False
# mypy: check_untyped_defs=False, warn_return_any=False
"""What the loops over ids and rows have in common: hashes, cells, words; compiled by numba into the loops
themselves.

numba keeps compiled loops on disk, and would look only at the file of a loop to see whether they are still
good. What is in a loop comes from all files of this folder, so it looks at them all (`STAMP`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from trireme_shared.protocol.records.layout import LATER_STAMPS, STAMPS
from trireme_shared.tables import hashing
from trireme_shared.tables.hashing import FIRST, GOLDEN, SECOND

ABSENT = -1
AHEAD = 12  # rows and cells that are fetched before their turn: memory takes as long as some of them
LINE_BYTES = np.uint64(64)
PAGE_BYTES = np.uint64(4096)  # no system has smaller ones
EMPTY = np.uint64(0)
ROW_MASK = np.uint64((1 << 31) - 1)
STAMP_SHIFT = np.uint64(36)
LATER, STAMP_MASK = np.int64(LATER_STAMPS), np.int64(STAMPS - 1)
FREQUENCY_SHIFT = np.uint64(31)
FREQUENCY_MASK = np.uint64(31)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:  # noqa: ARG001  numba calls it so
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:  # noqa: ARG001
    """x * y + z, rounded once; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def fetch(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """The cache line at an address will be needed soon: the processor reads it while the loop goes on. Any
    address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        ir, place = cgutils.ir, cgutils.voidptr_t
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (place,), kind)
        read, soonest, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(hint, [builder.inttoptr(arguments[0], place), read, soonest, data])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@intrinsic
def touch_page(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Writes to an address without changing what is there, whoever writes to it meanwhile: 0 is replaced by
    0, as one operation."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        zero = cgutils.ir.Constant(cgutils.ir.IntType(32), 0)
        place = builder.inttoptr(arguments[0], zero.type.as_pointer())
        builder.cmpxchg(place, zero, zero, "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def _stamp() -> str:
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(hashing.__file__)]
    numbers = f"{LATER_STAMPS} {STAMPS}".encode()
    return hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), numbers])).hexdigest()


STAMP = _stamp()


def compiled(function: Any) -> Any:
    """Compiled at the first call, by itself or as a part of another loop, and kept on disk: beside the
    module, in the user's cache folder, or in NUMBA_CACHE_DIR."""
    try:
        made = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # none of these folders can be written: it is compiled in each process
        return njit(nogil=True, error_model="numpy")(function)
    made._cache._cache_file._source_stamp = STAMP  # noqa: SLF001  numba has no other name for it
    return made


@compiled
def mix(value):
    value = (value ^ (value >> np.uint64(30))) * FIRST
    value = (value ^ (value >> np.uint64(27))) * SECOND
    return value ^ (value >> np.uint64(31))


@compiled
def hash_of(key, seed):
    return mix((np.uint64(key) ^ seed) + GOLDEN)


@compiled
def cells_at(address, capacity):
    return carray(pointer(address), 2 * capacity, np.uint64)


@compiled
def high_of(hashed, secret):
    """Says where an id is among the cells of its slot: in [0, 2**32). `secret`: odd, of this process. Whoever
    chooses ids knows their hashes, and could choose many that begin at one cell: each search would pass them
    all. So bits of a product with a secret choose the cell (multiply-shift: Dietzfelbinger et al. 1997)."""
    return (hashed * secret) >> np.uint64(32)


@compiled
def start_of(high, capacity):
    """Where the search for an id begins."""
    return np.int64((high * np.uint64(capacity)) >> np.uint64(32))


@compiled
def stamp_of(word):
    """The number of a step modulo STAMPS."""
    return np.int64(word >> STAMP_SHIFT)


@compiled
def age_of(word, version):
    """By how many steps `version` is later than the one that changed the row last; negative: earlier."""
    return ((version + LATER - stamp_of(word)) & STAMP_MASK) - LATER


@compiled
def is_expired(word, version, ttl):
    return ttl >= 0 and age_of(word, version) > ttl


@compiled
def row_at(chunks, shift, width, number):
    """float32 (width,) of a row, in place."""
    offset = np.uint64((number & ((1 << shift) - 1)) * width * 4)
    return carray(pointer(chunks[number >> shift] + offset), width, np.float32)


@compiled
def link_at(chunks, shift, width, number):
    """int32 (1,) in the memory of a row that nobody has: the free row before it."""
    offset = np.uint64((number & ((1 << shift) - 1)) * width * 4)
    return carray(pointer(chunks[number >> shift] + offset), 1, np.int32)


@compiled
def fetch_row(chunks, shift, width, number, count):
    """The first `count` numbers of a row will be needed soon."""
    first = chunks[number >> shift] + np.uint64((number & ((1 << shift) - 1)) * width * 4)
    last = first + np.uint64(4 * count - 1)
    line = first
    while line < last:
        fetch(line)
        line += LINE_BYTES
    fetch(last)


@compiled
def fetch_cell(cells, capacities, key, seed, secret):
    """The cell where the search for an id begins will be needed soon."""
    hashed = hash_of(key, seed)
    slot = hashed % np.uint64(len(cells))
    if capacities[slot] > 0:
        fetch(cells[slot] + np.uint64(16 * start_of(high_of(hashed, secret), capacities[slot])))


@compiled
def find_cell(cells, capacity, key, hashed, secret):
    """The cell of an id, or, negative minus one, the empty one where it would be put."""
    place = start_of(high_of(hashed, secret), capacity)
    while True:
        word = cells[2 * place + 1]
        if word == EMPTY:
            return -place - 1
        if cells[2 * place] == np.uint64(key):
            return place
        place += 1
        if place == capacity:
            place = 0


@compiled
def remove_cell(cells, capacity, place, seed, secret):
    """Empties a cell; those behind it that would not be found any more move up (Knuth, volume 3, 6.4,
    algorithm R)."""
    hole = i = place
    while True:
        i += 1
        if i == capacity:
            i = 0
        if cells[2 * i + 1] == EMPTY:
            break
        home = start_of(high_of(hash_of(cells[2 * i], seed), secret), capacity)
        from_home, from_hole = i - home, i - hole
        if from_home < 0:
            from_home += capacity
        if from_hole < 0:
            from_hole += capacity
        if from_home >= from_hole:
            cells[2 * hole] = cells[2 * i]
            cells[2 * hole + 1] = cells[2 * i + 1]
            hole = i
    cells[2 * hole + 1] = EMPTY


@compiled
def touched_word(word, step, hashed):
    """The word of a row that step `step` changes. The frequency is a logarithm: it grows with a chance of one
    half to its power."""
    frequency = (word >> FREQUENCY_SHIFT) & FREQUENCY_MASK
    if frequency < np.uint64(31):
        chance = mix(hashed + np.uint64(step))
        if chance & ((np.uint64(1) << frequency) - np.uint64(1)) == np.uint64(0):
            frequency += np.uint64(1)
    return (np.uint64(step) << STAMP_SHIFT) | (frequency << FREQUENCY_SHIFT) | (word & ROW_MASK)
