"""A snapshot that another thread reads while steps go on is the table as it was; so is what a checkpoint
makes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels.saving import sort_slots
from trireme_shared.tables.memory import Rows
from trireme_shared.tables.snapshot import (
    Overwritten,
    SlotGroup,
    TableSnapshot,
    from_records,
    new_lock,
    record_words,
    to_records,
)
from trireme_shared.tables.table import RowsOfIds, Table, joined

SLOTS, DIM = 8, 3
IDS = st.sampled_from([0, -1, 2**63 - 1, -(2**63), *range(60)])


@pytest.fixture(scope="module", autouse=True)
def few_slots_are_kept_together() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trireme_shared.tables.snapshot.TOGETHER", 3)
        yield


def table_of(data: Any) -> Table:
    spec = TableSpec(
        name="t",
        dim=DIM,
        seed=9,
        optimizer=RowOptimizer(kind="adam", lr=0.1),
        init=RowInit(kind="uniform", scale=0.1),
        max_rows=data.draw(st.sampled_from([None, 8, 24, 64])),
        evict_after_steps=data.draw(st.sampled_from([None, 1, 3])),
        admit_after=data.draw(st.sampled_from([1, 1, 2])),
    )
    return Table(spec, SLOTS)


def step(data: Any, table: Table, lock: threading.Lock) -> None:
    ids = np.array(sorted(data.draw(st.sets(IDS, max_size=24))), np.int64)
    gradients = np.random.default_rng(table.version).standard_normal((len(ids), DIM)).astype(np.float32)
    with lock:
        table.step(ids, None if data.draw(st.integers(0, 7)) == 0 else gradients)


def contents(parts: list[RowsOfIds], width: int) -> bytes:
    whole = joined(parts, width)
    return to_records(whole).tobytes()


def copy_of(table: Table) -> bytes:
    return contents([table.read_slot(slot) for slot in table.slots()], table.width)


class Reading:
    """Reads a snapshot in a thread of its own, a group each time it is told to."""

    def __init__(self, table: Table, lock: threading.Lock) -> None:
        self.expected = copy_of(table)
        self.sketch = None if table.sketch is None else table.sketch.copy()
        self.updates, self.width = table.updates, table.width
        self.snapshot = TableSnapshot(table, lock)
        counts = table.counts_by_slot()  # a group for each slot: so steps come in between
        self._groups = [
            SlotGroup(slot, slot + 1, int(counts[slot])) for slot in np.flatnonzero(counts).tolist()
        ]
        self._go, self._failed = threading.Semaphore(0), []
        self.parts: list[RowsOfIds] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        self._go.release()

    def _read(self) -> None:
        try:
            for group in self._groups:
                assert self._go.acquire(timeout=20)
                self.parts.append(self.snapshot.read(group))
        except BaseException as error:
            self._failed.append(error)

    def check(self) -> None:
        for _ in self._groups:
            self.go_on()
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert not self._failed, self._failed
        self.snapshot.close()
        assert contents(self.parts, self.width) == self.expected
        assert self.snapshot.updates == self.updates
        assert (self.snapshot.sketch is None) == (self.sketch is None)
        if self.sketch is not None:
            assert np.array_equal(self.snapshot.sketch, self.sketch)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_snapshot_read_by_another_thread_is_a_copy_of_its_version(data: Any) -> None:
    table, lock = table_of(data), new_lock()
    readings: list[Reading] = []
    for _ in range(3):
        step(data, table, lock)
    for _ in range(data.draw(st.integers(2, 10))):
        if len(readings) < 3 and data.draw(st.booleans()):
            readings.append(Reading(table, lock))
        for reading in readings:
            for _ in range(data.draw(st.integers(0, 3))):
                reading.go_on()
        step(data, table, lock)
        slot = data.draw(st.integers(0, SLOTS - 1))
        with lock:
            table.sweep(slot)
        if len(readings) == 3 and data.draw(st.booleans()):
            readings.pop(data.draw(st.integers(0, 2))).check()
    for reading in readings:
        reading.check()
    assert not table.leaving


def full_table() -> tuple[Table, np.ndarray, np.ndarray]:
    init, optimizer = RowInit(kind="uniform", scale=0.1), RowOptimizer(kind="sgd", lr=0.1)
    table = Table(TableSpec(name="t", dim=DIM, seed=9, optimizer=optimizer, init=init), SLOTS)
    ids = np.arange(400)
    table.step(ids, np.ones((400, DIM), np.float32))
    return table, ids, np.ones((400, DIM), np.float32)


def test_what_is_kept_is_a_row_once_and_less_with_each_slot_that_is_read() -> None:
    table, ids, ones = full_table()
    expected, snapshot, sizes = copy_of(table), TableSnapshot(table, new_lock()), []
    counts, found = table.counts_by_slot().tolist(), []
    assert snapshot.kept_bytes == 0
    for slot in range(SLOTS):
        table.step(ids, ones)
        sizes.append(snapshot.kept_bytes)
        found.append(snapshot.read(SlotGroup(slot, slot + 1, counts[slot])))
    assert sizes[0] == 400 * (8 + 8 + 4 * DIM)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == SLOTS
    assert snapshot.kept_bytes == 0
    assert contents(found, DIM) == expected


def test_kept_rows_come_slot_by_slot_in_the_order_of_their_steps() -> None:
    """Without those of a slot that is not asked for: it got rows after the snapshot was made."""
    ids, kept = np.arange(40), Overwritten(5, 9, SLOTS, DIM)
    words = np.full(40, 3 << 36 | 1, np.uint64)
    slots = slots_of(ids, 9, SLOTS)
    for step in range(3):
        kept.add(RowsOfIds(ids, words, np.full((40, DIM), step, np.float32)))
    size, asked = kept.bytes, np.array([0, 2, 5])
    found, first = kept.take(asked), 0
    for slot, end in zip(asked, found.ends, strict=True):
        assert found.ids[first:end].tolist() == [
            *ids[slots == slot],
            *ids[slots == slot],
            *ids[slots == slot],
        ]
        own = found.content[found.places[first:end], 0]
        assert own.tolist() == sorted(own.tolist())
        first = int(end)
    assert first == 3 * np.isin(slots, asked).sum() == len(found.ids)
    assert kept.bytes == size - 3 * (slots <= 5).sum() * (16 + 4 * DIM), "slots before are forgotten"
    kept.add(RowsOfIds(ids[:0], words[:0], np.zeros((0, DIM), np.float32)))
    kept.read_until(6)
    kept.add(RowsOfIds(ids, words, np.zeros((40, DIM), np.float32)))
    assert len(kept.take(np.array([7])).ids) == 4 * (slots == 7).sum()
    assert kept.bytes == 0, "of slots that are read nothing is kept"


def test_records_are_made_in_the_memory_that_is_given() -> None:
    table, ids, ones = full_table()
    expected, snapshot = copy_of(table), TableSnapshot(table, new_lock())
    table.step(ids, ones)
    (group,) = snapshot.groups()
    place = np.zeros(group.rows * record_words(DIM), np.int64)
    records, _ = snapshot.records(group, place.data.cast("B"))
    assert np.shares_memory(records, place)
    rows = from_records(place.reshape(records.shape), DIM)
    assert contents([rows, joined([], DIM)], DIM) == expected


def test_who_reads_a_snapshot_that_was_given_up_hears_why() -> None:
    table, ids, ones = full_table()
    snapshot = TableSnapshot(table, new_lock())
    table.step(ids, ones)
    snapshot.give_up(InvalidArgument("too slow"))
    assert (snapshot.kept_bytes, snapshot.is_open, table.leaving) == (0, False, [])
    with pytest.raises(InvalidArgument, match="too slow"):
        snapshot.read(next(snapshot.groups()))


@pytest.mark.parametrize("number", [0.5, np.nan, np.inf, -np.inf])
def test_rows_that_a_step_changes_while_they_are_read_are_as_they_were(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, ids, ones = full_table()
    expected, snapshot, read = copy_of(table), TableSnapshot(table, new_lock()), Rows.to_records

    def after_a_step(self: Rows, *arguments: Any) -> bool:
        table.step(ids, number * ones)
        return read(self, *arguments)

    monkeypatch.setattr(Rows, "to_records", after_a_step)
    found = [(records.copy(), finite) for records, finite in map(snapshot.records, snapshot.groups())]
    rows = [from_records(records, DIM) for records, _ in found]
    assert contents([*rows, joined([], DIM)], DIM) == expected
    assert all(finite for _, finite in found)


@pytest.mark.parametrize("steps_meanwhile", [False, True])
def test_a_snapshot_tells_that_its_rows_are_not_finite(steps_meanwhile: bool) -> None:
    table, ids, ones = full_table()
    ones[7, DIM - 1] = np.nan
    table.step(ids, ones)
    snapshot = TableSnapshot(table, new_lock())
    if steps_meanwhile:
        table.step(ids, ones)
    assert [snapshot.records(group)[1] for group in snapshot.groups()] == [False]


def test_a_snapshot_that_is_closed_while_it_is_read_gives_no_rows() -> None:
    table, _, _ = full_table()
    snapshot = TableSnapshot(table, new_lock())
    snapshot.close()
    with pytest.raises(InvalidArgument, match="was closed"):
        snapshot.read(next(snapshot.groups()))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1 << 8, 1 << 20, 1 << 63])), max_size=5))
def test_ids_of_each_slot_are_sorted_as_numpy_sorts_them(sizes: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(len(sizes))
    slots = [rng.integers(-high, high, size) for size, high in sizes]
    ids = np.concatenate([*slots, np.empty(0, np.int64)])
    words, ends = np.arange(len(ids)).astype(np.uint64), np.cumsum([0, *(size for size, _ in sizes)])[1:]
    orders = [
        end - len(some) + np.argsort(some, kind="stable") for some, end in zip(slots, ends, strict=True)
    ]
    sort_slots(ids, words, ends)
    assert ids.tolist() == [number for some in slots for number in sorted(some.tolist())]
    assert words.tolist() == [place for order in orders for place in order.tolist()]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_come_back_from_their_records(data: Any) -> None:
    table, lock = table_of(data), new_lock()
    for _ in range(4):
        step(data, table, lock)
    rows = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    records = to_records(rows)
    assert records.shape == (len(rows), record_words(table.width))
    found = from_records(records, table.width)
    again = Table(table.spec, SLOTS, table.version)
    again.put_rows(found)
    assert copy_of(again) == copy_of(table)
    wanted = np.array([*range(-2, 62), 2**63 - 1, -(2**63)], np.int64)
    one, other = (np.empty((len(wanted), DIM), np.float32) for _ in range(2))
    table.lookup(wanted, one)
    again.lookup(wanted, other)
    assert np.array_equal(one, other)
