"""Where ids belong: of one table, of several at once, and by the compiled loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.hashing import slots_of, slots_of_tables
from trireme_shared.tables.sharded import ShardedTable

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(lambda found: np.array(found, np.int64))
SEEDS = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(IDS, SEEDS), min_size=1, max_size=4), st.integers(1, 100))
def test_slots_of_several_tables_are_those_of_each(
    tables: list[tuple[np.ndarray, int]], slot_count: int
) -> None:
    before = [some.copy() for some, _ in tables]
    found = slots_of_tables([some for some, _ in tables], [seed for _, seed in tables], slot_count)
    assert found.tolist() == [
        slot for some, seed in tables for slot in slots_of(some, seed, slot_count).tolist()
    ]
    assert all(np.array_equal(some, old) for (some, _), old in zip(tables, before, strict=True))


@settings(deadline=None)  # the first time it is compiled
@given(IDS, SEEDS, st.lists(st.booleans(), min_size=8, max_size=8))
def test_ids_are_all_in_slots_if_each_of_them_is(ids: np.ndarray, seed: int, flags: list[bool]) -> None:
    optimizer, init = RowOptimizer(kind="sgd", lr=0.1), RowInit(kind="constant", scale=0.1)
    table = ShardedTable(TableSpec(name="t", dim=2, seed=seed, optimizer=optimizer, init=init), len(flags))
    chosen = np.array(flags)
    assert table.are_all_in(chosen, ids) == bool(table.are_in(chosen, ids).all())
