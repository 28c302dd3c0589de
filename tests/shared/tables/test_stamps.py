"""Stamps of rows are numbers of steps modulo 2**28: tables go on as before where these numbers begin again,
and rows that nobody has changed for that long never look like new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.tables.dict_table import DictTable
from tests.shared.tables.test_changes import merged
from tests.shared.tables.test_table import EXACT, SLOTS, compare, drawn, spec_of
from trireme_shared.protocol.records.layout import AGED_STEPS, LATER_STAMPS, MOST_STEPS, OLDEST, STAMPS
from trireme_shared.tables.leaving import aged
from trireme_shared.tables.memory import ages_of, stamps_of
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import SlotGroup, TableSnapshot, from_records, new_lock, to_records
from trireme_shared.tables.table import RowsOfIds, Table, joined

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
FEW = np.arange(5)
ONES = np.ones((5, 3), np.float32)


def every_row(table: Table) -> RowsOfIds:
    return joined([table.read_slot(slot) for slot in table.slots()], table.width)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_come_and_go_as_before_where_the_stamps_begin_again(data: Any) -> None:
    more = {
        "max_rows": data.draw(st.sampled_from([None, 8, 16, 24])),
        "evict_after_steps": data.draw(st.sampled_from([None, 1, 3])),
        "admit_after": data.draw(st.sampled_from([1, 2])),
    }
    spec = spec_of(EXACT[0], **more)
    table, oracle = Table(spec, SLOTS), DictTable(spec, SLOTS)
    oracle.version = data.draw(st.sampled_from([1, 3])) * STAMPS - 4
    table.start_at(oracle.version)
    for _ in range(8):
        ids, gradients = drawn(data, spec.dim)
        for each in (table, oracle):
            each.step(ids, None if gradients is None else gradients.copy())
        compare(table, oracle)
    found = every_row(table)
    told = dict(zip(found.ids.tolist(), stamps_of(found.words, table.version).tolist(), strict=True))
    assert told == {key: entry.stamp for key, entry in oracle.entries.items()}


def in_parts(snapshot: TableSnapshot, counts: np.ndarray) -> list[RowsOfIds]:
    slots = np.flatnonzero(counts).tolist()
    found = [snapshot.read(SlotGroup(slot, slot + 1, int(counts[slot]))) for slot in slots]
    snapshot.close()
    return found


@pytest.mark.parametrize("before", range(1, 6))
def test_a_delta_across_the_wrap_has_all_rows_that_have_changed(before: int) -> None:
    table, lock, none = Table(spec_of(EXACT[0]), SLOTS), new_lock(), np.empty(0, np.int64)
    table.start_at(STAMPS - before)
    table.step(FEW, ONES)
    whole = TableSnapshot(table, lock)
    since, counts = table.version, table.counts_by_slot()
    for step in range(4):  # while the whole one is read: it still has the rows of its version
        table.step(FEW[step : step + 2], ONES[:2])
    base = in_parts(whole, counts)
    assert (joined(base, table.width).content[:, 0] == every_row(table).content[:, 0]).sum() == 0
    snapshot = TableSnapshot(table, lock)
    changes = snapshot.changes_since(since)
    assert changes is not None
    assert changes.counts.sum() == len(FEW)
    snapshot.narrow(changes)
    parts = in_parts(snapshot, changes.counts)
    links = [(parts, changes.removed, changes.expired), (base, none, none)]
    assert merged(links, table.width).content.tobytes() == every_row(table).content.tobytes()


def test_rows_leave_in_the_order_of_their_steps_across_the_wrap() -> None:
    table = Table(spec_of(EXACT[0], max_rows=SLOTS), SLOTS)  # one row in each slot
    table.start_at(STAMPS - 3)
    for step in range(6):
        table.step(np.arange(100 * step, 100 * step + 90), np.ones((90, 3), np.float32))
        stamps = stamps_of(every_row(table).words, table.version)
        assert set(stamps.tolist()) == {table.version}


@pytest.mark.parametrize("ttl", [None, 3, MOST_STEPS])
def test_a_row_that_nobody_changes_is_old_for_ever(ttl: int | None) -> None:
    """Several times as many steps as stamps can tell: those are made that look after stamps."""
    table = ShardedTable(spec_of(EXACT[0], evict_after_steps=ttl), SLOTS)
    table.step(FEW, ONES)
    cells, _ = table.memory
    ids = every_row(table).ids
    for turn in range(2 * STAMPS // AGED_STEPS * SLOTS):
        version = turn * (AGED_STEPS // SLOTS)
        table.start_at(max(1, version - 1))
        if ttl is None or ttl == MOST_STEPS:  # sweeps would remove them
            table.step(FEW[:0], None)
        else:
            table.start_at(version)
            for slot in aged(version, SLOTS):
                table.keep_oldest(slot)
        rows = every_row(table)
        ages = ages_of(rows.words, table.version)
        assert (ages == table.version - 1).all() or (ages > MOST_STEPS).all()
        out = np.empty((len(ids), 3), np.float32)
        table.lookup(ids, out)
        expired = ttl is not None and table.version - 1 > ttl
        initial = Table(table.spec, SLOTS)
        expected = np.empty_like(out)
        initial.lookup(ids, expected)
        assert (out == expected).all() == expired
    assert cells.used.sum() == len(FEW), "none was swept in the steps that were made"


def test_each_slot_is_looked_after_once_in_a_round_and_none_before_stamps_can_be_old() -> None:
    for slots in (1, 8, 1024):
        every = AGED_STEPS // slots
        first = OLDEST + AGED_STEPS - OLDEST % AGED_STEPS
        seen = [slot for turn in range(slots) for slot in aged(first + turn * every, slots)]
        assert sorted(seen) == list(range(slots))
        assert not any(aged(version, slots) for version in range(first + 1, first + min(every, 50)))
        assert not any(aged(turn * every, slots) for turn in range(0, OLDEST // every, 97))
    assert OLDEST + 2 * AGED_STEPS + LATER_STAMPS <= STAMPS, "a turn that is missed once changes nothing"


def test_rows_that_move_keep_their_age_though_stamps_begin_again() -> None:
    source, target = (ShardedTable(spec_of(EXACT[0]), SLOTS) for _ in range(2))
    source.start_at(STAMPS + 2)
    source.step(FEW, ONES)
    source.step(FEW[:2], ONES[:2])
    target.start_at(7)
    everywhere = np.ones(SLOTS, np.bool_)
    rows = every_row(source)
    target.put(from_records(to_records(rows), source.width))
    target.restamp(everywhere, source.version, target.version - source.version)
    assert ages_of(every_row(target).words, 7).tolist() == ages_of(rows.words, source.version).tolist()
    later = from_records(to_records(rows), source.width, STAMPS - 1)
    assert stamps_of(later.words, source.version + STAMPS - 1).tolist() == [
        stamp + STAMPS - 1 for stamp in stamps_of(rows.words, source.version).tolist()
    ]
