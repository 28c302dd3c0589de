# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False
# mypy: check_untyped_defs=False, warn_return_any=False
"""Loops over rows: initial values, lookups, steps; and over gradients and their ids: sums over an id's
occurrences, means over lanes."""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.hashing import GOLDEN
from trireme_shared.tables.kernels.cells import find_rows
from trireme_shared.tables.kernels.parts import (
    ABSENT,
    AHEAD,
    EMPTY,
    PAGE_BYTES,
    compiled,
    fetch,
    fetch_row,
    fma,
    hash_of,
    mix,
    row_at,
    touch_page,
)

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
SGD, ADAGRAD, ADAGRAD_ROW, ADAM, FTRL = 0, 1, 2, 3, 4
NORMAL_MEAN = np.float32(8 * 65535 / 2)
NORMAL_DEVIATION = 53509.913  # of the sum of eight whole numbers that are uniform in [0, 65535]
LOOKUP_BLOCK = 512


@compiled
def _initial(seed, key, kind, scale, values):
    """Fills `values` (float32 (dim,)) with the initial ones of an id."""
    if kind == CONSTANT:
        for j in range(len(values)):
            values[j] = scale
        return
    base = mix(hash_of(key, seed) ^ GOLDEN)
    if kind == UNIFORM:
        for j in range(len(values)):
            bits = mix(base + np.uint64(j) * GOLDEN) >> np.uint64(40)
            unit = np.float32(np.int64(bits)) * np.float32(1.0 / 8388608.0) - np.float32(1.0)
            values[j] = unit * scale
        return
    for j in range(len(values)):
        total = np.int64(0)
        for half in range(2):
            bits = mix(base + np.uint64(2 * j + half) * GOLDEN)
            for part in range(4):
                total += np.int64((bits >> np.uint64(16 * part)) & np.uint64(65535))
        values[j] = (np.float32(total) - NORMAL_MEAN) * scale


@compiled
def initial_values(seed, ids, kind, scale, out):
    """The initial values of each id into `out` (float32 (n, dim))."""
    for i in range(len(ids)):
        _initial(seed, ids[i], kind, scale, out[i])


@compiled
def gather(chunks, shift, width, seed, ids, rows, kind, scale, out):
    """The values of each row into `out` (float32 (n, dim)); initial ones where `rows` is ABSENT."""
    dim = out.shape[1]
    for i in range(len(rows)):
        if i + AHEAD < len(rows) and rows[i + AHEAD] >= 0:
            fetch_row(chunks, shift, width, rows[i + AHEAD], dim)
        if rows[i] < 0:
            _initial(seed, ids[i], kind, scale, out[i])
        else:
            row = row_at(chunks, shift, width, rows[i])
            for j in range(dim):
                out[i, j] = row[j]


@compiled
def touch(address, size):
    """All pages of `size` bytes at `address` (int64, uint64; a multiple of 4), so that the system gives them
    now. Nothing in them changes."""
    for first in range(np.uint64(0), np.uint64(size), PAGE_BYTES):
        touch_page(address + first)


@compiled
def lookup(cells, capacities, chunks, shift, width, seed, secret, ids, version, ttl, kind, scale, out):
    """`find_rows` and `gather`, some ids at a time: the processor then waits for many rows at once."""
    rows = np.empty(LOOKUP_BLOCK, np.int64)
    for first in range(0, len(ids), LOOKUP_BLOCK):
        last = min(first + LOOKUP_BLOCK, len(ids))
        some, found = ids[first:last], rows[: last - first]
        find_rows(cells, capacities, seed, secret, some, version, ttl, found)
        gather(chunks, shift, width, seed, some, found, kind, scale, out[first:last])


@compiled
def _update(kind, row, gradient, dim, s):
    """One step of a row, in place; of Adagrad and Adam only the state. `s`: float32 scalars, see
    trireme_shared.tables.table.scalars_of."""
    if kind == SGD:
        for j in range(dim):
            row[j] = fma(s[0], gradient[j], row[j])
    elif kind == ADAGRAD:
        for j in range(dim):
            row[dim + j] += gradient[j] * gradient[j]
    elif kind == ADAGRAD_ROW:
        total = np.float32(0.0)
        for j in range(dim):
            total += gradient[j] * gradient[j]
        row[dim] += total * s[2]
        root = np.sqrt(row[dim]) + s[1]
        for j in range(dim):
            row[j] = fma(s[0], gradient[j] / root, row[j])
    elif kind == ADAM:
        for j in range(dim):
            g, mean, square = gradient[j], row[dim + j], row[2 * dim + j]
            row[dim + j] = mean + (g - mean) * s[2]
            row[2 * dim + j] = square + (g * g - square) * s[3]
    else:
        for j in range(dim):
            g, z, total = gradient[j], row[dim + j], row[2 * dim + j]
            grown = total + g * g
            before, after = np.sqrt(total) * s[4], np.sqrt(grown) * s[4]
            z += g * s[0] - (after - before) * row[j]
            row[dim + j], row[2 * dim + j] = z, grown
            weight = s[3] + after + s[2]
            if abs(z) <= s[1]:
                row[j] = np.float32(0.0)
            elif weight > 0:  # else the square of its gradient is too small for a float32: it stays as it is
                bound = -s[1] if z > 0 else s[1]
                row[j] = -(z + bound) / weight


@compiled
def update(
    chunks,
    shift,
    width,
    seed,
    ids,
    rows,
    words,
    fresh,
    gradients,
    kind,
    scalars,
    init_kind,
    scale,
    state,
    before,
    squares,
):
    """One step of all rows. `words`: EMPTY for those without a past; what the others were goes into `before`
    (float32 (n, width)). `fresh[i]`: the row begins with initial values, and with `state` (float32 (width -
    dim,)) as its optimizer's state. Adagrad and Adam put the numbers whose roots they need into `squares`
    (float32 (n, dim)) and go on in `divide`: torch's root does not always round correctly, and theirs must be
    the same."""
    dim = gradients.shape[1]
    for i in range(len(rows)):
        if i + AHEAD < len(rows) and rows[i + AHEAD] >= 0:
            fetch_row(chunks, shift, width, rows[i + AHEAD], width)
        if rows[i] < 0:
            continue
        row = row_at(chunks, shift, width, rows[i])
        if words[i] != EMPTY:
            for j in range(width):
                before[i, j] = row[j]
        if fresh[i]:
            _initial(seed, ids[i], init_kind, scale, row[:dim])
            for j in range(dim, width):
                row[j] = state[j - dim]
        _update(kind, row, gradients[i], dim, scalars)
        if kind in (ADAGRAD, ADAM):
            for j in range(dim):
                squares[i, j] = row[width - dim + j]


@compiled
def divide(chunks, shift, width, rows, gradients, kind, scalars, roots):
    """The other half of `update`: `roots` are those of `squares`."""
    dim = gradients.shape[1]
    for i in range(len(rows)):
        if rows[i] < 0:
            continue
        row = row_at(chunks, shift, width, rows[i])
        if kind == ADAGRAD:
            for j in range(dim):
                row[j] = fma(scalars[0], gradients[i, j] / (roots[i, j] + scalars[1]), row[j])
        else:
            for j in range(dim):
                row[j] += scalars[0] * (row[dim + j] / (roots[i, j] + scalars[1]))


@compiled
def read_rows(chunks, shift, width, rows, out):
    """Whole rows into `out` (float32 (n, width))."""
    for i in range(len(rows)):
        row = row_at(chunks, shift, width, rows[i])
        for j in range(width):
            out[i, j] = row[j]


@compiled
def write_rows(chunks, shift, width, rows, content):
    """Whole rows from `content` (float32 (n, width))."""
    for i in range(len(rows)):
        row = row_at(chunks, shift, width, rows[i])
        for j in range(width):
            row[j] = content[i, j]


# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False
# mypy: check_untyped_defs=False, warn_return_any=False


@compiled
def segment_sums(order, starts, gradients, out):
    """`out[k]` is the sum of `gradients[order[i]]` for i in [starts[k], starts[k + 1]), in this order;
    float32 (n, dim)."""
    dim = gradients.shape[1]
    address, size = np.uint64(gradients.ctypes.data), np.uint64(4 * dim)
    for k in range(len(starts) - 1):
        for i in range(starts[k] + AHEAD, min(starts[k + 1] + AHEAD, len(order))):
            fetch(address + np.uint64(order[i]) * size)
        first = gradients[order[starts[k]]]
        for j in range(dim):
            out[k, j] = first[j]
        for i in range(starts[k] + 1, starts[k + 1]):
            more = gradients[order[i]]
            for j in range(dim):
                out[k, j] += more[j]


@compiled
def merge(left, right, i, j, out, k, most):
    """Goes on with the union of two int64 arrays that ascend, each id once: from `left[i]` and `right[j]` on
    into `out[k]` and behind it, at most `most` ids. Answers (i, j, k) afterwards."""
    last = min(k + most, len(out))
    while k < last and i < len(left) and j < len(right):
        a, b = left[i], right[j]
        out[k] = min(a, b)
        i += a <= b
        j += b <= a
        k += 1
    while k < last and i < len(left):
        out[k] = left[i]
        i += 1
        k += 1
    while k < last and j < len(right):
        out[k] = right[j]
        j += 1
        k += 1
    return i, j, k


@compiled
def places_among(own, first, ids, places):
    """Where each of `ids` is in `own` (both int64, ascending), or ABSENT, into `places` (int64). `own[first]`
    is the first that can be there, and all from there up to the last of `ids` are among these. Answers
    `first` for ids behind them."""
    for i in range(len(ids)):
        here = first < len(own) and own[first] == ids[i]
        places[i] = first if here else ABSENT
        first += here
    return first


@compiled
def add_into_tree(present, gradients, count, filled, nodes, counts):
    """Puts a lane's sums into level 0 of the tree `nodes` (float32 (depth, n, dim)); see lanes.py.
    `present[i]`: which of the lane's rows id i has, or ABSENT: then its gradient is zero. `filled`: bit k
    says that level k holds a left half, of `counts[k]` samples. Answers `filled` afterwards."""
    n, dim = nodes.shape[1], nodes.shape[2]
    level = 0
    while filled & (1 << level):
        level += 1
    # the lane's node moves up through all left halves that wait, one id at a time, while its row is in the
    # cache
    for i in range(n):
        carry = nodes[level, i]
        if present[i] < 0:
            for j in range(dim):
                carry[j] = np.float32(0.0)
        else:
            own = gradients[present[i]]
            for j in range(dim):
                carry[j] = own[j]
        total = count
        for k in range(level):
            left, other = nodes[k, i], counts[k]
            if total == 0:
                for j in range(dim):
                    carry[j] = left[j]
            elif other == total:
                for j in range(dim):
                    carry[j] = (left[j] + carry[j]) * np.float32(0.5)
            elif other > 0:
                a, b = np.float32(other), np.float32(total)
                share = np.float32(1.0 / np.float64(other + total))
                for j in range(dim):
                    carry[j] = (left[j] * a + carry[j] * b) * share
            total += other
    total = count
    for k in range(level):
        total += counts[k]
    counts[level] = total
    return (filled & ~((1 << level) - 1)) | (1 << level)
