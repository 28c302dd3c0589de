"""Slots that come and go while a table steps, is read, and is written into a checkpoint."""

from __future__ import annotations

import numpy as np

from shared.tables.hashing import slots_of
from shared.tables.saving.snapshot import TableSnapshot, new_lock
from shared.tables.sharded import ShardedTable
from shared.tables.table import RowsOfIds, joined
from tests.shared.tables.test_snapshot import SLOTS, contents
from tests.shared.tables.test_table import EXACT, spec_of

SPEC = spec_of(EXACT[2], admit_after=2)
IDS = np.arange(400)


def gradients(ids: np.ndarray) -> np.ndarray:
    return np.linspace(-1, 1, 3 * len(ids), dtype=np.float32).reshape(-1, 3)


def filled(steps: int = 2) -> ShardedTable:
    table = ShardedTable(SPEC, SLOTS)
    for _ in range(steps):
        table.step(IDS, gradients(IDS))
    return table


def all_rows(table: ShardedTable) -> RowsOfIds:
    return joined([table.read_slot(slot) for slot in table.slots()], table.width)


def test_a_snapshot_has_rows_of_slots_that_leave_before_they_are_written_and_not_those_that_come_back() -> None:
    table, slots = filled(), np.arange(3)
    expected = contents([table.read_slot(slot) for slot in table.slots()], table.width)
    snapshot, leaving = (
        TableSnapshot(table, new_lock()),
        joined([table.read_slot(slot) for slot in range(3)], table.width),
    )
    table.drop_slots(slots)
    table.put(leaving)
    table.step(IDS, gradients(IDS))
    found = [snapshot.read(group) for group in snapshot.groups()]
    assert contents([*found, joined([], table.width)], table.width) == expected  # by ids


def test_rows_that_come_take_no_memory_from_a_step_that_is_prepared() -> None:
    table, other = ShardedTable(SPEC, SLOTS), filled()
    own = slots_of(IDS, SPEC.seed, SLOTS) >= SLOTS // 2
    mine, coming = IDS[own], np.arange(SLOTS // 2)
    table.apart[coming] = True
    table.step(mine, gradients(IDS)[own])
    for _ in table.prepare(mine):
        pass
    for slot in coming.tolist():
        for rows in other.read_in_parts(slot, 7):
            table.put(rows)
    assert table.rows == 0
    for _ in table.steps(mine, gradients(IDS)[own]):
        pass
    table.apart[coming] = False
    assert contents([all_rows(table)], table.width) == contents([all_rows(other)], table.width)


def test_slots_that_are_apart_are_neither_counted_nor_read_nor_given_back() -> None:
    table = ShardedTable(SPEC.model_copy(update={"evict_after_steps": 1, "admit_after": 1}), SLOTS)
    table.step(IDS, gradients(IDS))
    table.apart[:] = True
    for _ in range(2 * SLOTS):
        table.step(IDS[:0], gradients(IDS[:0]))
    assert (table.rows, list(table.slots()), TableSnapshot(table, new_lock()).rows) == (0, [], 0)
    table.apart[:] = False
    assert table.rows == len(IDS)
    table.step(IDS[:0], gradients(IDS[:0]))
    assert table.rows < len(IDS)


def test_rows_that_leave_again_leave_nothing_behind() -> None:
    table, slots = filled(), np.arange(SLOTS)
    memory = table.rows
    rows = all_rows(table)
    table.drop_slots(slots)
    assert (table.rows, int(table.sketch.sum())) == (0, 0)  # type: ignore[union-attr]
    table.put(rows)
    table.remove(rows.ids[::2])
    assert table.rows == memory // 2
    assert np.array_equal(table.rows_of(IDS).ids, rows.ids[1::2])
    table.put(rows)
    assert contents([all_rows(table)], table.width) == contents([rows], table.width)
