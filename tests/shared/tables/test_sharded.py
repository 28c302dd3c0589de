"""Slots that come and go while a table steps, is read, and is written into a checkpoint."""

from __future__ import annotations

import numpy as np

from tests.equipment.replaced import replaced
from tests.shared.tables.test_snapshot import SLOTS, contents
from tests.shared.tables.test_table import EXACT, spec_of
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.memory import AT_ONCE, Cells
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import TableSnapshot, new_lock
from trireme_shared.tables.table import RowsOfIds, joined

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


def test_a_snapshot_has_rows_of_slots_that_leave_before_they_are_written_and_not_those_that_come_back() -> (
    None
):
    table, slots = filled(), np.arange(3)
    expected = contents([table.read_slot(slot) for slot in table.slots()], table.width)
    snapshot, leaving = (
        TableSnapshot(table, new_lock()),
        joined([table.read_slot(slot) for slot in range(3)], table.width),
    )
    table.drop_slots(slots)
    for _ in table.give_back():
        pass
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
    for _ in table.give_back():
        pass
    assert (table.rows, int(table.sketch.sum())) == (0, 0)  # type: ignore[union-attr]
    table.put(rows)
    table.remove(rows.ids[::2])
    assert table.rows == memory // 2
    assert np.array_equal(table.rows_of(IDS).ids, rows.ids[1::2])
    table.put(rows)
    assert contents([all_rows(table)], table.width) == contents([rows], table.width)


def own_gradients(ids: np.ndarray) -> np.ndarray:
    """The same of an id, whichever are with it."""
    return np.repeat((ids % 97).astype(np.float32)[:, None], 3, axis=1)


def test_slots_that_leave_give_their_memory_back_some_rows_at_a_time_and_steps_go_on_meanwhile() -> None:
    """All at once took as long as they have rows."""
    table, many = ShardedTable(spec_of(EXACT[0]), SLOTS), np.arange(120_000)
    other = ShardedTable(spec_of(EXACT[0]), SLOTS)
    gone = np.arange(SLOTS // 2)
    stays = slots_of(many, table.spec.seed, SLOTS) >= SLOTS // 2
    for each in (table, other):
        each.step(many, own_gradients(many))
    free = table.memory[1]
    table.drop_slots(gone)
    assert (table.rows, free.free_count, table.has_dropped) == (int(stays.sum()), 0, True)
    assert not len(table.rows_of(many[~stays]))
    turns, most, before = 0, 0, 0
    for turns, _ in enumerate(table.give_back(), 1):
        most, before = max(most, free.free_count - before), free.free_count
        if turns == 2:  # a step takes rows that are free already, and no others
            table.step(many[stays], own_gradients(many[stays]))
            other.step(many, own_gradients(many))
            more = many[: 3 * AT_ONCE] + len(many)
            coming = more[slots_of(more, table.spec.seed, SLOTS) >= SLOTS // 2]
            for each in (table, other):
                each.step(coming, own_gradients(coming))
            before = free.free_count
    assert not table.has_dropped
    assert most <= 4 * AT_ONCE
    assert turns >= (~stays).sum() // (4 * AT_ONCE)
    own = np.concatenate([many[stays], coming])
    assert contents([table.rows_of(own)], table.width) == contents([other.rows_of(own)], table.width)


def test_rows_of_a_slot_are_read_some_ids_at_a_time() -> None:
    """A part reads no more cells than it needs; rows that steps add to the slot meanwhile are no trouble."""
    table, ids = ShardedTable(spec_of(EXACT[0]), 1), np.arange(30_000)
    table.step(ids, gradients(ids))
    asked: list[int] = []
    at_places = Cells.at_places

    def noted(*arguments):  # type: ignore[no-untyped-def]
        found = at_places(*arguments)
        asked.append(len(found[0]))
        return found

    with replaced(Cells, "at_places", noted):
        found = []
        for number, rows in enumerate(table.read_in_parts(0, 1000)):
            found.append(rows)
            if number == 3:
                table.step(ids + len(ids), gradients(ids))
    assert max(asked) < 3000  # twice as many are there at the end
    assert max(map(len, found)) <= 1000
    there = np.sort(np.concatenate([rows.ids for rows in found]))
    assert len(there) == len(np.unique(there))
    assert np.isin(ids, there).all()
