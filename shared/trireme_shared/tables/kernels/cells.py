# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False
# mypy: check_untyped_defs=False, warn_return_any=False
"""Loops over ids: which row each has, and which ids come and go.

Each loop that looks for ids has the search written out: with one function for all of them a lookup took a
fifth longer.
"""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.hashing import GOLDEN
from trireme_shared.tables.kernels.parts import (
    ABSENT,
    AHEAD,
    EMPTY,
    ROW_MASK,
    STAMP_SHIFT,
    age_of,
    cells_at,
    compiled,
    fetch_cell,
    find_cell,
    hash_of,
    high_of,
    is_expired,
    link_at,
    mix,
    remove_cell,
    stamp_of,
    start_of,
    touched_word,
)


@compiled
def count_by_slot(ids, seed, counts):
    """Adds to `counts` (int64 (slots,)) how many of the ids each slot has."""
    slots = np.uint64(len(counts))
    for i in range(len(ids)):
        counts[hash_of(ids[i], seed) % slots] += 1


@compiled
def all_in(ids, seed, flags):
    """Whether the slots of all ids have their flag (bool (slots,))."""
    slots, found = np.uint64(len(flags)), True
    for i in range(len(ids)):
        found &= flags[hash_of(ids[i], seed) % slots]
    return found


@compiled
def look(cells, capacities, seed, secret, ids, wanted, rows):
    """The row of each id (int64 (n,)) into `rows` (int64 (n,)), expired ones too; ABSENT. Slots that are not
    `wanted` (bool (slots,)) are not searched: their ids are taken for absent."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        rows[i] = ABSENT
        if capacities[slot] == 0 or not wanted[slot]:
            continue
        own = cells_at(cells[slot], capacities[slot])
        place = find_cell(own, capacities[slot], ids[i], hashed, secret)
        if place >= 0:
            rows[i] = np.int64(own[2 * place + 1] & ROW_MASK) - 1


@compiled
def find_rows(cells, capacities, seed, secret, ids, version, ttl, rows):
    """The row of each id (int64 (n,)) into `rows` (int64 (n,)); ABSENT. Expired ones are absent."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            fetch_cell(cells, capacities, ids[i + AHEAD], seed, secret)
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        rows[i] = ABSENT
        if capacities[slot] == 0:
            continue
        own = cells_at(cells[slot], capacities[slot])
        place = find_cell(own, capacities[slot], ids[i], hashed, secret)
        if place >= 0:
            word = own[2 * place + 1]
            if not is_expired(word, version, ttl):
                rows[i] = np.int64(word & ROW_MASK) - 1


@compiled
def find_words(cells, capacities, seed, secret, ids, rows, words):
    """The row (int64 (n,)) and the word (uint64 (n,)) of each id, expired ones too; ABSENT and EMPTY."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        rows[i], words[i] = ABSENT, EMPTY
        if capacities[slot] == 0:
            continue
        own = cells_at(cells[slot], capacities[slot])
        place = find_cell(own, capacities[slot], ids[i], hashed, secret)
        if place >= 0:
            words[i] = own[2 * place + 1]
            rows[i] = np.int64(words[i] & ROW_MASK) - 1


@compiled
def put_words(cells, capacities, used, seed, secret, ids, words):
    """Sets the words of ids, whose slots have room for those that are new. Each id comes once."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        own = cells_at(cells[slot], capacities[slot])
        place = find_cell(own, capacities[slot], ids[i], hashed, secret)
        if place < 0:
            place = -place - 1
            own[2 * place] = np.uint64(ids[i])
            used[slot] += 1
        own[2 * place + 1] = words[i]


@compiled
def rehash(old, old_capacity, first, last, new, new_capacity, seed, secret):
    """Cells [first, last) of a slot into another table of it."""
    source, target = cells_at(old, old_capacity), cells_at(new, new_capacity)
    for i in range(first, last):
        if source[2 * i + 1] != EMPTY:
            key = source[2 * i]
            place = -find_cell(target, new_capacity, key, hash_of(key, seed), secret) - 1
            target[2 * place] = key
            target[2 * place + 1] = source[2 * i + 1]


@compiled
def admit(sketch, depth, seed, ids, rows, needed, admitted):
    """Counts each id without a row in a count-min sketch with conservative update (Estan, Varghese 2002):
    uint8 (slots, depth * cells). `admitted[i]`: it has a row, or has now been seen `needed` times. Estimates
    are never too low."""
    slots = np.uint64(sketch.shape[0])
    cells = sketch.shape[1] // depth
    for i in range(len(ids)):
        if rows[i] >= 0:
            admitted[i] = True
            continue
        hashed = hash_of(ids[i], seed)
        own = sketch[hashed % slots]
        lowest = np.uint8(255)
        for level in range(depth):
            place = level * cells + np.int64(mix(hashed + np.uint64(level + 1) * GOLDEN) % np.uint64(cells))
            lowest = min(lowest, own[place])
        if lowest < np.uint8(255):
            lowest += np.uint8(1)
            for level in range(depth):
                place = level * cells + np.int64(
                    mix(hashed + np.uint64(level + 1) * GOLDEN) % np.uint64(cells)
                )
                own[place] = max(own[place], lowest)
        admitted[i] = lowest >= needed


@compiled
def touch(cells, capacities, seed, secret, ids, step, rows, words):
    """Before a step: rows of `ids` get the stamp `step`, expired ones too. `words` (uint64 (n,)) has the old
    ones; EMPTY, and ABSENT in `rows`, for ids without a row."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            fetch_cell(cells, capacities, ids[i + AHEAD], seed, secret)
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        rows[i], words[i] = ABSENT, EMPTY
        if capacities[slot] == 0:
            continue
        own = cells_at(cells[slot], capacities[slot])
        place = find_cell(own, capacities[slot], ids[i], hashed, secret)
        if place >= 0:
            words[i] = own[2 * place + 1]
            rows[i] = np.int64(words[i] & ROW_MASK) - 1
            own[2 * place + 1] = touched_word(words[i], step, hashed)


@compiled
def insert(
    cells,
    capacities,
    used,
    seed,
    secret,
    ids,
    step,
    rows,
    admitted,
    chunks,
    shift,
    width,
    free,
    free_count,
    next_row,
):
    """Cells and rows for admitted ids without one: rows from the list that begins with `free`, see
    `give_back`, then from `next_row` on. There is room in all cells. Answers (free, free_count, next_row)."""
    slots = np.uint64(len(cells))
    for i in range(len(ids)):
        if rows[i] >= 0 or not admitted[i]:
            continue
        hashed = hash_of(ids[i], seed)
        slot = hashed % slots
        if free_count > 0:
            rows[i] = free
            free = np.int64(link_at(chunks, shift, width, free)[0])
            free_count -= 1
        else:
            rows[i] = next_row
            next_row += 1
        own = cells_at(cells[slot], capacities[slot])
        place = -find_cell(own, capacities[slot], ids[i], hashed, secret) - 1
        own[2 * place] = np.uint64(ids[i])
        own[2 * place + 1] = touched_word(np.uint64(rows[i] + 1), step, hashed)
        used[slot] += 1
    return free, free_count, next_row


@compiled
def give_back(chunks, shift, width, rows, free):
    """Rows that nobody has any more: each tells the one before in its own memory, so a list of them needs
    none. `free`: the last one until now, ABSENT: there was none. Answers the last one."""
    for i in range(len(rows)):
        link_at(chunks, shift, width, rows[i])[0] = np.int32(free)
        free = rows[i]
    return free


@compiled
def take_free(chunks, shift, width, free, rows):
    """Takes as many of the list as `rows` (int64) has places; answers the new last one."""
    for i in range(len(rows)):
        rows[i] = free
        free = np.int64(link_at(chunks, shift, width, free)[0])
    return free


@compiled
def expired(address, capacity, version, ttl, keys, words):
    """The cells of a slot that are expired at `version`, into `keys` (int64) and `words` (uint64); answers
    how many."""
    own = cells_at(address, capacity)
    found = 0
    for i in range(capacity):
        if own[2 * i + 1] != EMPTY and is_expired(own[2 * i + 1], version, ttl):
            keys[found] = np.int64(own[2 * i])
            words[found] = own[2 * i + 1]
            found += 1
    return found


@compiled
def remove(address, capacity, seed, secret, keys):
    """Cells that are there."""
    own = cells_at(address, capacity)
    for i in range(len(keys)):
        place = find_cell(own, capacity, keys[i], hash_of(keys[i], seed), secret)
        remove_cell(own, capacity, place, seed, secret)


@compiled
def leave(
    cells, capacities, used, seed, secret, slots, first, needed, queues, stamps, heads, lengths, keys, words
):
    """Removes the rows of slots that were changed longest ago: `needed[k]` (it counts down) of each
    `slots[k]` from `first` on, as `queues[slot]` has them in [heads[slot], lengths[slot]); one whose stamp is
    another than in `stamps` was changed since, and stays. Into `keys` and `words`. Answers the first k that
    lacks some still, and how many were removed: `keys` is full, or the slot's queue is at its end."""
    found = 0
    for k in range(first, len(slots)):
        slot = slots[k]
        own, capacity = cells_at(cells[slot], capacities[slot]), capacities[slot]
        while needed[k] > 0:
            if found == len(keys) or heads[slot] == lengths[slot]:
                return k, found
            key, stamp = queues[slot, heads[slot]], stamps[slot, heads[slot]]
            heads[slot] += 1
            place = find_cell(own, capacity, key, hash_of(key, seed), secret)
            if place < 0 or stamp_of(own[2 * place + 1]) != stamp:
                continue
            keys[found], words[found] = key, own[2 * place + 1]
            found += 1
            needed[k] -= 1
            used[slot] -= 1
            remove_cell(own, capacity, place, seed, secret)
    return len(slots), found


@compiled
def cells_of(address, capacity, keys, words):
    """The cells of a slot that are not empty, into `keys` (int64) and `words` (uint64); answers how many."""
    own = cells_at(address, capacity)
    found = 0
    for i in range(capacity):
        if own[2 * i + 1] != EMPTY:
            keys[found] = np.int64(own[2 * i])
            words[found] = own[2 * i + 1]
            found += 1
    return found


@compiled
def restamp(address, capacity, version, later):
    """All cells of a slot, which are of `version`, get stamps that are later by so many versions; not below
    0."""
    own = cells_at(address, capacity)
    marks = (np.uint64(1) << STAMP_SHIFT) - np.uint64(1)
    for i in range(capacity):
        word = own[2 * i + 1]
        if word != EMPTY:
            stamp = max(0, version + later - age_of(word, version))
            own[2 * i + 1] = (np.uint64(stamp) << STAMP_SHIFT) | (word & marks)


@compiled
def keep_oldest(address, capacity, version, oldest):
    """No cell of a slot is older than so many steps at `version`. Answers how many were."""
    own, found = cells_at(address, capacity), 0
    marks = (np.uint64(1) << STAMP_SHIFT) - np.uint64(1)
    for i in range(capacity):
        word = own[2 * i + 1]
        if word != EMPTY and age_of(word, version) > oldest:
            own[2 * i + 1] = (np.uint64(version - oldest) << STAMP_SHIFT) | (word & marks)
            found += 1
    return found


@compiled
def cells_with(address, capacity, seed, first, last, keys, words):
    """The cells of a slot whose ids have the high halves [first, last) of their hash, into `keys` (int64) and
    `words` (uint64); answers how many."""
    own = cells_at(address, capacity)
    found = 0
    for i in range(capacity):
        if own[2 * i + 1] != EMPTY and first <= np.int64(hash_of(own[2 * i], seed) >> np.uint64(32)) < last:
            keys[found] = np.int64(own[2 * i])
            words[found] = own[2 * i + 1]
            found += 1
    return found


@compiled
def cells_between(address, capacity, seed, secret, first, last, keys, words):
    """The cells of a slot whose ids have places in [first, last) (see `high_of`), into `keys` (int64) and
    `words` (uint64); answers how many. They lie behind the cell where the search for the first of them
    begins, up to the first empty cell behind that of the last."""
    own = cells_at(address, capacity)
    begin, end = start_of(np.uint64(first), capacity), start_of(np.uint64(last - 1), capacity)
    found = 0
    for step in range(capacity):
        i = begin + step
        if i >= capacity:
            i -= capacity
        if own[2 * i + 1] == EMPTY:
            if begin + step >= end:
                break
            continue
        high = np.int64(high_of(hash_of(own[2 * i], seed), secret))
        if first <= high < last:
            keys[found] = np.int64(own[2 * i])
            words[found] = own[2 * i + 1]
            found += 1
    return found


@compiled
def fill(address, capacity, seed, secret, keys, words):
    """Puts cells into an empty table of a slot."""
    own = cells_at(address, capacity)
    for i in range(len(keys)):
        place = -find_cell(own, capacity, keys[i], hash_of(keys[i], seed), secret) - 1
        own[2 * place] = np.uint64(keys[i])
        own[2 * place + 1] = words[i]
