"""What limits a table lets in, keeps and gives up, at millions of ids, beside exact counts of every id. `-s`
shows the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables import table as tables
from trireme_shared.tables.hashing import mix64, slots_of
from trireme_shared.tables.table import Table, joined, living

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
DIM, SLOTS, SEED = 2, 1024, 5
tell = print


def table_of(**limits: Any) -> Table:
    spec = {"name": "t", "dim": DIM, "seed": SEED, "optimizer": RowOptimizer(kind="sgd", lr=1.0), **limits}
    return Table(TableSpec(init=RowInit(kind="constant", scale=0.0), **spec), SLOTS)


class Stream:
    """Minibatches of numbers [0, universe), whose ids are in no order that a hash would see. `seen`:
    minibatches that each number was in; `last`: the last of them, counted from 1; 0: none."""

    def __init__(self, universe: int, exponent: float) -> None:
        self.ids = mix64(np.arange(universe, dtype=np.uint64)).view(np.int64)
        self.slots = slots_of(self.ids, SEED, SLOTS)
        self.seen, self.last = np.zeros(universe, np.int32), np.zeros(universe, np.int32)
        self._by_id = np.argsort(self.ids)
        self._sorted = self.ids[self._by_id]
        self._edges = np.cumsum(1 / np.arange(1, universe + 1) ** exponent) if exponent else None
        self._rng = np.random.default_rng(9)

    def minibatches(self, count: int, draws: int) -> Iterator[np.ndarray]:
        for step in range(1, count + 1):
            if self._edges is None:
                numbers = self._rng.integers(0, len(self.ids), draws)
            else:
                numbers = np.searchsorted(self._edges, self._rng.random(draws) * self._edges[-1])
            numbers = np.unique(numbers)
            self.seen[numbers] += 1
            self.last[numbers] = step
            yield numbers

    def there(self, ids: np.ndarray) -> np.ndarray:
        """Which numbers have one of these ids: bool (universe,)."""
        found = np.zeros(len(self.ids), np.bool_)
        found[self._by_id[np.searchsorted(self._sorted, ids)]] = True
        assert found.sum() == len(ids)
        return found


def step(table: Table, stream: Stream, numbers: np.ndarray) -> None:
    ids = np.sort(stream.ids[numbers])
    table.step(ids, np.ones((len(ids), DIM), np.float32))


def ids_in(table: Table, *, alive: bool = False) -> np.ndarray:
    rows = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    return (living(rows, table.spec, table.version) if alive else rows).ids


@pytest.mark.parametrize("needed", [2, 4])
def test_no_id_that_came_often_enough_is_refused_and_few_others_are_let_in(needed, monkeypatch):
    """Counts are halved now and then: an id must have a row whose own count, halved at the same moments, has
    reached the threshold."""
    halved: list[np.ndarray] = []
    forget = tables.forget_counts
    monkeypatch.setattr(tables, "forget_counts", lambda *some: halved.append(forget(*some)) or halved[-1])
    table, stream = table_of(admit_after=needed), Stream(20_000_000, 1.05)
    exact, due = np.zeros(len(stream.ids), np.uint8), np.zeros(len(stream.ids), np.bool_)
    for numbers in stream.minibatches(100, 250_000):
        counted = numbers[exact[numbers] < needed]
        exact[counted] += 1
        step(table, stream, numbers)
        due[counted] |= exact[counted] >= needed
        full = halved.pop()
        if full.any():
            forgotten = full[stream.slots] & ~due
            exact[forgotten] >>= 1
    there = stream.there(ids_in(table))
    rare = (stream.seen > 0) & (stream.seen < needed)
    refused, early = due & ~there, there & (stream.seen < needed)
    lost = ~there & (stream.seen >= needed)
    tell(
        f"admit_after {needed}: {(stream.seen > 0).sum():,} ids, {rare.sum():,} too rare, "
        f"{early.sum() / rare.sum():.3%} of them let in; "
        f"{due.sum():,} due, {refused.sum()} of them refused; {lost.sum():,} came often enough and "
        "were forgotten in between"
    )
    assert (stream.seen > 0).sum() > 3_000_000
    assert not refused.any()
    assert early.sum() < 0.02 * rare.sum()
    assert table.counts.admitted == there.sum()


def test_rows_live_exactly_as_long_as_they_should_and_their_memory_a_hundredth_longer():
    ttl = 256
    table, stream = table_of(evict_after_steps=ttl), Stream(12_000_000, 0.0)
    most = 0.0
    for numbers in stream.minibatches(3 * ttl, 30_000):
        step(table, stream, numbers)
        if table.version > ttl and table.version % 64 == 0:
            alive = (stream.last > 0) & (table.version - stream.last <= ttl)
            most = max(most, table.rows / alive.sum())
            assert alive.sum() <= table.rows <= 1.01 * alive.sum()
    assert np.array_equal(stream.there(ids_in(table, alive=True)), alive)
    tell(
        f"evict_after_steps {ttl}: {alive.sum():,} of {(stream.last > 0).sum():,} ids live, rows "
        f"at most {most - 1:.2%} more"
    )
    assert alive.sum() > 5_000_000


def test_a_full_table_has_the_ids_that_came_last():
    limit = 5_000_000
    table, stream = table_of(max_rows=limit), Stream(12_000_000, 0.0)
    for numbers in stream.minibatches(150, 100_000):
        step(table, stream, numbers)
        assert table.rows <= limit
    there = stream.there(ids_in(table))
    known = stream.last > 0
    tell(f"max_rows {limit:,}: {known.sum():,} ids, {table.rows:,} rows")
    assert known.sum() > 8_000_000
    assert table.rows == limit
    oldest_kept, newest_gone = np.full(SLOTS, 1 << 30, np.int32), np.zeros(SLOTS, np.int32)
    np.minimum.at(oldest_kept, stream.slots[there], stream.last[there])
    np.maximum.at(newest_gone, stream.slots[known & ~there], stream.last[known & ~there])
    assert (oldest_kept >= newest_gone).all()
