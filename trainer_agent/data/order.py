"""The order in which a task's records are read: a function of (seed, epoch, task) alone, the same on every machine.

Records are sorted by splitmix64 of their number. A numpy generator is not used: its stream may change between versions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.lanes import step_seed

Indices = npt.NDArray[np.int64]


def minibatches_in(count: int, size: int) -> int:
    """Minibatches of `size` records in a task of `count`; the last one may be short."""
    return -(-count // size)


def minibatch_in(order: Indices | None, count: int, size: int, number: int) -> Indices:
    """Records of minibatch `number` (from 0) of a task of `count` records in this order (None: as they are), as int64 indices into its
    shard; read-only.

    Raises IndexError outside [0, minibatches_in(count, size)).
    """
    if not 0 <= number < minibatches_in(count, size):
        msg = f"minibatch {number} is outside [0, {minibatches_in(count, size)}): the task has {count} records"
        raise IndexError(msg)
    chosen = slice(number * size, min(count, (number + 1) * size))
    return order[chosen] if order is not None else np.arange(chosen.start, chosen.stop, dtype=np.int64)


def minibatch_indices(
    seed: int, epoch: int, task_number: int, count: int, size: int, number: int, *, shuffle: bool
) -> Indices:
    """As `minibatch_in`, for whoever reads one task after the other: the order of the last one is kept."""
    order = _last_order(seed, epoch, task_number, count) if shuffle else None
    return minibatch_in(order, count, size, number)


def evaluation_seed(seed: int, task_number: int, number: int) -> int:
    """Of minibatch `number` of an evaluation task: the same for every evaluation, and whoever does it."""
    return step_seed(seed, task_number, -2 - number)


def record_order(seed: int, epoch: int, task_number: int, count: int) -> Indices:
    """The permutation of [0, count) of one task in one epoch, read-only."""
    value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value += np.uint64(step_seed(seed, epoch, task_number))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    order = np.argsort(value, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


_last_order = lru_cache(maxsize=1)(record_order)
