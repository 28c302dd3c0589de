# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False
# mypy: check_untyped_defs=False, warn_return_any=False
"""Loops that make the records of a checkpoint: cells of slots and rows that were kept, by id, with their
content.

In all of them `ends[i]` says where what belongs to the i-th slot ends; it begins where that of the slot
before ends.
"""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.kernels.parts import (
    AHEAD,
    EMPTY,
    ROW_MASK,
    age_of,
    cells_at,
    compiled,
    fetch_row,
    row_at,
)

DIGITS, VALUES = 8, 256  # of an id, for sorting
FEW = 48  # ids that are sorted by insertion
SIGN, BYTE = np.uint64(1 << 63), np.uint64(255)
# float32 as int32: from there on infinite or NaN
WITHOUT_SIGN, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@compiled
def collect(cells, capacities, slots, version, after, keys, words, ends):
    """The cells of `slots` (int64 (k,)) with stamps in (after, version] into `keys` (int64) and `words`
    (uint64), which have room for all cells."""
    found, newer = 0, version - after
    for i in range(len(slots)):
        slot = slots[i]
        own = cells_at(cells[slot], capacities[slot])
        for cell in range(capacities[slot]):
            word = own[2 * cell + 1]
            if word != EMPTY and 0 <= age_of(word, version) < newer:
                keys[found] = np.int64(own[2 * cell])
                words[found] = word
                found += 1
        ends[i] = found


@compiled
def _sort_few(keys, words):
    for i in range(1, len(keys)):
        key, word, place = keys[i], words[i], i
        while place > 0 and keys[place - 1] > key:
            keys[place], words[place] = keys[place - 1], words[place - 1]
            place -= 1
        keys[place], words[place] = key, word


@compiled
def _digit(key, digit):
    return np.int64(((np.uint64(key) ^ SIGN) >> np.uint64(8 * digit)) & BYTE)


@compiled
def sort_slots(keys, words, ends):
    """Those of each slot by their ids, in place and stable: by one digit after the other, the last one first,
    without those that all ids share."""
    longest = first = 0
    for end in ends:
        longest, first = max(longest, end - first), end
    other_keys, other_words = np.empty(longest, np.int64), np.empty(longest, np.uint64)
    counts = np.empty((DIGITS, VALUES), np.int64)
    first = 0
    for end in ends:
        n, source, source_words = end - first, keys[first:end], words[first:end]
        first = end
        if n <= FEW:
            _sort_few(source, source_words)
            continue
        counts[:] = 0
        for i in range(n):
            for digit in range(DIGITS):
                counts[digit, _digit(source[i], digit)] += 1
        target, target_words, moved = other_keys[:n], other_words[:n], False
        for digit in range(DIGITS):
            places, start = counts[digit], 0
            if places[_digit(source[0], digit)] == n:
                continue
            for value in range(VALUES):
                places[value], start = start, start + places[value]
            for i in range(n):
                value = _digit(source[i], digit)
                target[places[value]] = source[i]
                target_words[places[value]] = source_words[i]
                places[value] += 1
            source, source_words, target, target_words = target, target_words, source, source_words
            moved = not moved
        if moved:
            target[:] = source
            target_words[:] = source_words


@compiled
def merge(keys, words, ends, kept_keys, kept_words, kept_ends, ids, marks, places, counts):
    """Cells and kept rows, each sorted, into one: `ids` (int64), `marks` (uint64, without a row), `places`
    (int64): the row of a cell, or -1 minus the number of a kept row, which its word has instead. A kept row
    counts instead of a cell, and the first one of an id instead of others; if all were kept no cell counts: a
    slot that left and came back may have other rows with stamps as old as these. `counts` (int64 (k,)): how
    many each slot must have. Answers the first slot that has not, or k."""
    first = kept_first = found = 0
    for slot in range(len(ends)):
        i, j, last = first, kept_first, found + counts[slot]
        end, kept_end = ends[slot], kept_ends[slot]
        differ = 0
        for k in range(j, kept_end):
            differ += k == j or kept_keys[k] != kept_keys[k - 1]
        if differ == counts[slot]:
            i = end
        while i < end or j < kept_end:
            if found == last:
                return slot
            if j == kept_end or (i < end and keys[i] < kept_keys[j]):
                key, word, sign = keys[i], words[i], 1
            else:
                key, word, sign = kept_keys[j], kept_words[j], -1
            row = np.int64(word & ROW_MASK) - 1
            ids[found], marks[found], places[found] = key, word & ~ROW_MASK, row if sign > 0 else -1 - row
            found += 1
            while i < end and keys[i] == key:
                i += 1
            while j < kept_end and kept_keys[j] == key:
                j += 1
        if found != last:
            return slot
        first, kept_first = end, kept_end
    return len(ends)


@compiled
def to_records(chunks, shift, width, dim, ids, marks, places, kept, records, numbers, bits):
    """The records of rows, or of those in `kept` (float32 (m, width)), into `records` (int64 (n, k));
    `numbers` and `bits` are the same memory, float32 and int32 (n, 2 k). Answers whether the first `dim`
    numbers of all of them are finite."""
    last, largest = numbers.shape[1] - 1, np.int32(0)
    for i in range(len(ids)):
        if i + AHEAD < len(ids) and places[i + AHEAD] >= 0:
            fetch_row(chunks, shift, width, places[i + AHEAD], width)
        row = row_at(chunks, shift, width, places[i]) if places[i] >= 0 else kept[-1 - places[i]]
        numbers[i, last] = np.float32(0.0)
        records[i, 0] = ids[i]
        records[i, 1] = np.int64(marks[i])
        for j in range(width):
            numbers[i, 4 + j] = row[j]
        for j in range(dim):
            largest = max(largest, bits[i, 4 + j] & WITHOUT_SIGN)
    return largest < INFINITE


@compiled
def put_right(ids, places, ends, kept_keys, kept_places, kept_ends, kept, numbers):
    """Kept rows (float32 (m, width), those of `kept_keys` at `kept_places`) over what was read of them
    meanwhile; of an id the first one, and none over one that was kept already."""
    width = kept.shape[1]
    first = kept_first = 0
    for slot in range(len(ends)):
        own = ids[first : ends[slot]]
        for k in range(kept_ends[slot] - 1, kept_first - 1, -1):
            i = first + np.searchsorted(own, kept_keys[k])
            if i < ends[slot] and ids[i] == kept_keys[k] and places[i] >= 0:
                row = kept[kept_places[k]]
                for j in range(width):
                    numbers[i, 4 + j] = row[j]
        first, kept_first = ends[slot], kept_ends[slot]
