"""Ids that somebody has chosen so that they all begin at one cell of one slot cost no more than others, and
what cells depend on for that shows in no bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.equipment.replaced import replaced
from tests.shared.tables.test_table import EXACT, SLOTS, spec_of
from trireme_shared.tables import memory
from trireme_shared.tables.hashing import FIRST, GOLDEN, SECOND, hashes_of
from trireme_shared.tables.memory import HASHES
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import TableSnapshot, new_lock
from trireme_shared.tables.table import Table

MANY = 20_000
MODULO = 1 << 64


def ids_with(hashes: np.ndarray, seed: int) -> np.ndarray:
    """The ids that have these hashes: splitmix64 backwards."""

    def unshifted(values: np.ndarray, by: int) -> np.ndarray:
        found = values
        for _ in range(64 // by):
            found = values ^ (found >> np.uint64(by))
        return found

    with np.errstate(over="ignore"):
        values = unshifted(hashes, 31) * np.uint64(pow(int(SECOND), -1, MODULO))
        values = unshifted(values, 27) * np.uint64(pow(int(FIRST), -1, MODULO))
        found = (unshifted(values, 30) - GOLDEN) ^ np.uint64(seed)
    return np.sort(found.view(np.int64))


def walked(table: Table, ids: np.ndarray) -> float:
    """How many cells a search for one of the ids, all of slot 0, passes on average."""
    cells, _ = table.memory
    capacity = np.uint64(cells.capacities[0])
    memory_of_slot = (ctypes.c_uint64 * (2 * int(capacity))).from_address(int(cells.addresses[0]))
    own = np.frombuffer(memory_of_slot, np.uint64).reshape(-1, 2)
    used = np.flatnonzero(own[:, 1])
    assert np.array_equal(np.sort(own[used, 0].view(np.int64)), ids)
    with np.errstate(over="ignore"):
        high = (hashes_of(own[used, 0].view(np.int64), table.spec.seed) * cells.secret) >> np.uint64(32)
    begin = ((high * capacity) >> np.uint64(32)).astype(np.int64)
    return float(((used - begin) % len(own)).mean())


@pytest.mark.parametrize("every", [1, 3, 1 << 14])
def test_ids_that_were_chosen_to_begin_at_one_cell_do_not(every: int) -> None:
    table = Table(spec_of(EXACT[0]), SLOTS)
    low = np.arange(MANY, dtype=np.uint64) * np.uint64(SLOTS * every)
    ids = ids_with(np.uint64(7 << 32) + low % np.uint64(1 << 32), table.spec.seed)
    assert len(np.unique(ids)) == MANY
    assert set((hashes_of(ids, table.spec.seed) % np.uint64(SLOTS)).tolist()) == {0}
    table.step(ids, np.ones((MANY, 3), np.float32))
    assert walked(table, ids) < 100, "of 20,000"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_bit_depends_on_the_secret_of_a_process(data: Any) -> None:
    secrets = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=2, unique=True))
    seed, found = data.draw(st.integers(0, 2**32 - 1)), []
    for secret in secrets:
        with replaced(memory, "SECRET", np.uint64(2 * secret + 1)):
            spec = spec_of(EXACT[2], max_rows=400, evict_after_steps=3, admit_after=2)
            table, rng = Table(spec, SLOTS), np.random.default_rng(seed)
            for _ in range(8):
                ids = np.unique(rng.integers(0, 900, 150))
                table.step(ids, rng.standard_normal((len(ids), 3)).astype(np.float32))
        snapshot = TableSnapshot(table, new_lock())
        records = b"".join(snapshot.records(group)[0].tobytes() for group in snapshot.groups())
        snapshot.close()
        of_hashes = [
            table.read_slot(0, first, first + HASHES // 4).ids.tolist()
            for first in range(0, HASHES, HASHES // 4)
        ]
        found.append((records, of_hashes, table.counts, table.removed.since(4).tolist()))
    assert found[0] == found[1]


def test_a_slot_is_read_in_parts_by_places_and_nothing_is_left_out() -> None:
    table = ShardedTable(spec_of(EXACT[0]), 1)
    ids = np.unique(np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 5000))
    table.step(ids, np.ones((len(ids), 3), np.float32))
    parts = [rows.ids for rows in table.read_in_parts(0, 300)]
    assert max(map(len, parts)) <= 300
    assert np.array_equal(np.sort(np.concatenate(parts)), ids)
