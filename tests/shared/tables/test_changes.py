"""Whole rows of an old version and what has changed since are the rows of the new one, while another step
goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.tables.test_snapshot import SLOTS, contents, copy_of, step, table_of
from tests.shared.tables.test_table import EXACT, spec_of
from trireme_shared.tables.leaving import LEAST_KEPT, RemovedIds
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import TOGETHER, Chain, SlotGroup, TableSnapshot, new_lock
from trireme_shared.tables.table import RowsOfIds, Table, joined, living


def read(snapshot: TableSnapshot, data: Any, table: Table, lock: Any) -> list[RowsOfIds]:
    """Slot by slot, with steps in between."""
    slots = np.flatnonzero(snapshot.changes.counts if snapshot.changes else table.counts_by_slot()).tolist()
    counts = snapshot.changes.counts if snapshot.changes else table.counts_by_slot()
    found = []
    for slot in slots:
        found.append(snapshot.read(SlotGroup(slot, slot + 1, int(counts[slot]))))
        if data.draw(st.booleans()):
            step(data, table, lock)
            with lock:
                table.sweep(data.draw(st.integers(0, SLOTS - 1)))
    snapshot.close()
    return found


def merged(links: list[tuple[list[RowsOfIds], np.ndarray, np.ndarray]], width: int) -> RowsOfIds:
    """`links`: newest first."""
    chain, found = Chain(), []
    for rows, removed, _ in links:
        found += [chain.rows(some) for some in rows]
        chain.gone(removed)
        chain.next_older()
    return joined(found, width)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_chain_of_changes_has_the_rows_of_its_version(data: Any) -> None:
    table, lock = table_of(data), new_lock()
    for _ in range(3):
        step(data, table, lock)
    none = np.empty(0, np.int64)
    since, version = TableSnapshot(table, lock), table.version
    living_before = living(
        joined([table.read_slot(slot) for slot in table.slots()], table.width), table.spec, version
    )
    links = [(read(since, data, table, lock), none, none)]
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            step(data, table, lock)
        expected, now = copy_of(table), table.version
        rows_now = living(
            joined([table.read_slot(slot) for slot in table.slots()], table.width), table.spec, now
        )
        snapshot = TableSnapshot(table, lock)
        if data.draw(st.booleans()):
            step(data, table, lock)
        changes = snapshot.changes_since(version)
        assert changes is not None
        snapshot.narrow(changes)
        parts = read(snapshot, data, table, lock)
        links.insert(0, (parts, changes.removed, changes.expired))
        assert contents([merged(links, table.width)], table.width) == expected
        gone = {*changes.removed.tolist(), *changes.expired.tolist()}
        gone |= {*joined(parts, table.width).ids.tolist()}  # a row that has changed and expired again
        assert {*living_before.ids.tolist()} - {*rows_now.ids.tolist()} <= gone
        assert {*rows_now.ids.tolist()}.isdisjoint(changes.expired.tolist())
        version, living_before = now, rows_now
    assert not table.leaving


def test_removed_ids_are_known_since_a_version_that_was_not_forgotten() -> None:
    removed = RemovedIds(3)
    removed.add(4, np.array([7, 5]), 0)
    removed.add(6, np.array([5]), 0)
    copy = removed.copy()
    assert removed.since(2) is None
    assert [removed.since(version).tolist() for version in (3, 4, 5, 6, 7)] == [[5, 7], [5, 7], [5], [5], []]
    removed.forget(5)
    assert removed.since(4) is None
    assert (removed.since(5).tolist(), removed.count) == ([5], 1)
    assert copy.since(4).tolist() == [5, 7]


@pytest.mark.parametrize(("rows", "most"), [(0, LEAST_KEPT), (8 * LEAST_KEPT, 2 * LEAST_KEPT)])
def test_too_many_removed_ids_are_not_kept(rows: int, most: int) -> None:
    removed = RemovedIds(0)
    removed.add(1, np.arange(most), rows)
    assert len(removed.since(0)) == most
    removed.add(2, np.arange(1), rows)
    assert (removed.since(0), removed.since(2), removed.count) == (None, None, 0)
    assert removed.since(3).tolist() == []


def test_rows_that_moved_in_or_out_leave_nothing_to_build_on() -> None:
    table = ShardedTable(spec_of(EXACT[0]), SLOTS)
    table.step(np.arange(5), np.ones((5, 3), np.float32))
    table.drop_slots(np.array([0]))
    for _ in table.give_back():
        pass
    assert TableSnapshot(table, new_lock()).changes_since(1) is None
    table.step(np.arange(5), np.ones((5, 3), np.float32))
    assert TableSnapshot(table, new_lock()).changes_since(2) is not None


class LockOfTurns:
    """As the lock of a thread that reads; `between` happens in front of each turn."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between, self._held = between, False

    def __enter__(self) -> None:
        if not self._held:
            self._held = True
            self._between()

    def __exit__(self, *_: object) -> None:
        self._held = False


def test_steps_while_changes_are_counted_lose_no_row_of_slots_that_were_counted_already() -> None:
    """With more slots than what is kept is sorted into at first."""
    table, ids = Table(spec_of(EXACT[0]), 4 * TOGETHER), np.arange(1000)
    table.step(ids, np.ones((1000, 3), np.float32))
    since = table.version
    table.step(ids[::2], np.ones((500, 3), np.float32))
    others = iter([*(ids[first::100] for first in range(100)), *[ids[:10]] * 1000])
    snapshot = TableSnapshot(
        table, LockOfTurns(lambda: table.step(next(others), np.ones((10, 3), np.float32)))
    )
    now = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    changes = snapshot.changes_since(since)
    assert changes is not None
    assert changes.counts.sum() == 500
    snapshot.narrow(changes)
    found = joined([snapshot.read(group) for group in snapshot.groups()], table.width)
    snapshot.close()
    in_order = found.where(np.argsort(found.ids))
    assert contents([in_order], table.width) == contents([now.where(now.ids % 2 == 0)], table.width)
