"""The loops of embedding tables, compiled or loaded before anybody waits for them: that takes seconds, in
which an event loop would be still and a lease could expire."""

from __future__ import annotations

from collections import deque
from functools import cache

import numpy as np

from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.lanes import LaneRows, mean_over_lanes, sums_of_ids
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import TableSnapshot, new_lock
from trireme_shared.tables.table import Table

SLOTS, IDS, DIM, STEPS = 4, 64, 4, 12


@cache
def compile_loops() -> None:
    """Once in a process; blocks. numba keeps on disk what it has compiled: the next process takes tenths of a
    second."""
    values = np.zeros((IDS, DIM), np.float32)
    row_loops.touch(np.uint64(values.ctypes.data), values.nbytes)
    kept = Table(_spec({"admit_after": 2, "evict_after_steps": 3}), SLOTS)
    full = Table(_spec({"max_rows": IDS}), SLOTS)
    for step in range(STEPS):
        ids, gradients = sums_of_ids(np.arange(IDS, dtype=np.int64) // 2 + step // 4 * IDS, values)
        mean = mean_over_lanes([LaneRows(ids, gradients, IDS), LaneRows(ids[:1], gradients[:1], IDS)], DIM)
        for table in (kept, full):
            table.lookup(ids, gradients)
            table.step(*mean)
            table.lookup(ids, gradients, table.version - 1)
    snapshot = TableSnapshot(full, new_lock())
    copy = ShardedTable(_spec({}), SLOTS)
    rows = [snapshot.read(slots) for slots in snapshot.groups()]
    snapshot.close()
    for _ in range(2):  # the second time into memory that was given back
        for some in rows:
            copy.put_rows(some)
            copy.read_slot(0, 0, 1)
            deque(copy.read_in_parts(0, 2), 0)
            copy.put(copy.rows_of(some.ids))
            copy.remove(some.ids[:1])
        copy.are_all_in(np.ones(SLOTS, np.bool_), rows[0].ids)
        copy.restamp(np.ones(SLOTS, np.bool_), 0, 1)
        copy.keep_oldest(0)
        copy.drop_slots(np.arange(SLOTS))
        for _ in copy.give_back():
            pass


def _spec(limits: dict[str, int]) -> TableSpec:
    optimizer, init = RowOptimizer(kind="adam", lr=0.1), RowInit(kind="uniform", scale=0.1)
    return TableSpec(name="first", dim=DIM, seed=0, optimizer=optimizer, init=init, **limits)
