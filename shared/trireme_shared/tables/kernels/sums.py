# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, disallow_untyped_decorators=False, check_untyped_defs=False, warn_return_any=False
"""Loops over gradients and their ids: sums over an id's occurrences, and means over lanes."""

from __future__ import annotations

import numpy as np

from trireme_shared.tables.kernels.parts import (
    ABSENT,
    AHEAD,
    compiled,
    fetch,
)


@compiled
def segment_sums(order, starts, gradients, out):
    """`out[k]` is the sum of `gradients[order[i]]` for i in [starts[k], starts[k + 1]), in this order; float32 (n, dim)."""
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
    """Goes on with the union of two int64 arrays that ascend, each id once: from `left[i]` and `right[j]` on into `out[k]` and behind it, at most `most`
    ids. Answers (i, j, k) afterwards."""
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
    """Where each of `ids` is in `own` (both int64, ascending), or ABSENT, into `places` (int64). `own[first]` is the first that can be there, and all from
    there up to the last of `ids` are among these. Answers `first` for ids behind them."""
    for i in range(len(ids)):
        here = first < len(own) and own[first] == ids[i]
        places[i] = first if here else ABSENT
        first += here
    return first


@compiled
def add_into_tree(present, gradients, count, filled, nodes, counts):
    """Puts a lane's sums into level 0 of the tree `nodes` (float32 (depth, n, dim)); see lanes.py. `present[i]`: which of the lane's rows
    id i has, or ABSENT: then its gradient is zero. `filled`: bit k says that level k holds a left half, of `counts[k]` samples. Answers
    `filled` afterwards."""
    n, dim = nodes.shape[1], nodes.shape[2]
    level = 0
    while filled & (1 << level):
        level += 1
    # the lane's node moves up through all left halves that wait, one id at a time, while its row is in the cache
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
