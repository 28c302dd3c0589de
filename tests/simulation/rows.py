"""A small embedding table beside the simulated model: the dense part depends on its rows, and the rows on the
dense part.

In asynchronous mode its first column counts: the row of record r has gradient -1/n there in a minibatch of n
records that holds r, as the blocks have (compute.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer_agent.tables.files import StoredTable, StoredTables
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Transported
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.lanes import LaneRows, mean_over_lanes
from trireme_shared.tables.snapshot import to_records
from trireme_shared.tables.table import Table, joined

SLOTS = 128
TABLE = TableSpec(
    name="id",
    dim=3,
    seed=11,
    optimizer=RowOptimizer(kind="adagrad", lr=0.125, follow_schedule=True),
    init=RowInit(kind="uniform", scale=0.5),
    admit_after=2,
    evict_after_steps=6,
)
COUNTING = TableSpec(
    name="id",
    dim=2,
    seed=11,
    optimizer=RowOptimizer(kind="sgd", lr=0.25),
    init=RowInit(kind="constant", scale=0.0),
)
Array = np.ndarray[Any, Any]


def table_of(mode: Mode) -> TableSpec:
    return TABLE if mode is Mode.SYNC else COUNTING


def ids_of(names: Sequence[int], mode: Mode = Mode.SYNC) -> Array:
    """Of these records: some are in many lanes, some in few; ascending. Asynchronous: each record's own."""
    if mode is Mode.ASYNC:
        return np.array(sorted(names), np.int64)
    return np.array(sorted({key for name in names for key in (name % 5, -1 - name // 3)}), np.int64)


def sum_of(rows: Array) -> float:
    """What the dense gradients see of the rows."""
    return math.fsum(rows.ravel().tolist())


def lane_rows(params: Sequence[Array], rows: Array, seed: int, names: Sequence[int]) -> LaneRows:
    """Gradients of the rows of a minibatch."""
    ids = ids_of(names)
    total = math.fsum(math.fsum(vector.tolist()) for vector in params[:3])
    noise = np.sin(np.arange(ids.size * TABLE.dim, dtype=np.float32) + np.float32(seed % 97)).reshape(
        -1, TABLE.dim
    )
    gradients = rows * np.float32(0.2) + noise * np.float32(0.3) + np.float32(total * 0.001)
    return LaneRows(ids, gradients.astype(np.float32), len(names))


def counting_rows(rows: Array, seed: int, names: Sequence[int]) -> LaneRows:
    """The same of an asynchronous job."""
    gradients = rows * np.float32(0.2) + np.float32(seed % 97) * np.float32(0.01)
    gradients[:, 0] = np.float32(-1 / len(names))
    return LaneRows(ids_of(names, Mode.ASYNC), gradients.astype(np.float32), len(names))


def gradients_of(
    mode: Mode, params: Sequence[Array], rows: Array, seed: int, names: Sequence[int]
) -> LaneRows:
    return lane_rows(params, rows, seed, names) if mode is Mode.SYNC else counting_rows(rows, seed, names)


def counted(table: Table) -> dict[int, float]:
    """Of each record with a row here: the sum of 1/n over the minibatches (of n records) applied to it."""
    rows = joined([table.read_slot(slot) for slot in table.slots()], COUNTING.row_words)
    applied = rows.content[:, 0] / np.float32(COUNTING.optimizer.lr)
    return dict(zip(rows.ids.tolist(), applied.tolist(), strict=True))


def no_rows(mode: Mode = Mode.SYNC) -> LaneRows:
    return LaneRows(np.empty(0, np.int64), np.empty((0, table_of(mode).dim), np.float32), 0)


class PinnedRows:
    """Those of a checkpoint that is evaluated."""

    def __init__(self, tables: Sequence[StoredTable], mode: Mode) -> None:
        self._source, self._mode = StoredTables(tables), mode

    def lookup(self, names: Sequence[int]) -> Array:
        return self._source.lookup(0, ids_of(names, self._mode))


class ReferenceRows:
    """The table of the undisturbed run, without versions, lanes' pushes and owners. Gradients of rows travel
    as `gradients`, rows as `values`."""

    def __init__(self, gradients: Transported = "float32", values: Transported = "float32") -> None:
        self._table, self._gradients, self._values = Table(TABLE, SLOTS), gradients, values

    def lookup(self, names: Sequence[int]) -> Array:
        ids = ids_of(names)
        found = np.empty((len(ids), TABLE.dim), np.float32)
        self._table.lookup(ids, found)
        return found

    def sent(self, names: Sequence[int]) -> Array:
        """As a trainer sees them."""
        return _travelled(self.lookup(names), self._values)

    def step(self, lanes: Sequence[LaneRows], factor: float) -> None:
        """`factor`: of the learning rate."""
        sent = [replace(lane, gradients=_travelled(lane.gradients, self._gradients)) for lane in lanes]
        self._table.step(*mean_over_lanes(sent, TABLE.dim), TABLE.optimizer.lr * factor)

    def records(self) -> bytes:
        return records_of([self._table])


def _travelled(values: Array, dtype: Transported) -> Array:
    there: Array = torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()
    return there


def records_of(tables: Sequence[Table]) -> bytes:
    """All rows of one table, wherever they lie: ids, stamps, values, state."""
    rows = [table.read_slot(slot) for table in tables for slot in table.slots()]
    return to_records(joined(rows, TABLE.row_words)).tobytes()
