"""Tables that grow, are full, or whose rows expire: in bounded portions, within their limits, and the same
whatever happened to their memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.equipment.replaced import replaced
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables import table as tables
from trireme_shared.tables.memory import AT_ONCE, CELLS_AT_ONCE, HASHES, PIECE_BYTES, stamps_of
from trireme_shared.tables.needs import needs_of
from trireme_shared.tables.table import Table, joined

DIM = 3
ADAM = RowOptimizer(kind="adam", lr=0.01)


def table_of(slots: int, **more: Any) -> Table:
    spec = {"name": "t", "dim": DIM, "seed": 5, "optimizer": RowOptimizer(kind="sgd", lr=1.0), **more}
    return Table(TableSpec(init=RowInit(kind="constant", scale=0.0), **spec), slots)


def some_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.unique(rng.integers(-(2**63), 2**63 - 1, count))


def gradients_of(ids: np.ndarray) -> np.ndarray:
    """After one step a row has its id in all columns."""
    return np.repeat(-ids.astype(np.float32)[:, None], DIM, axis=1)


def looked_up(table: Table, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), DIM), np.float32)
    table.lookup(ids, out)
    return out


def everything(table: Table) -> bytes:
    rows = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    return rows.ids.tobytes() + stamps_of(rows.words, table.version).tobytes() + rows.content.tobytes()


def test_a_slot_grows_some_cells_at_a_time_and_all_its_rows_can_be_read_meanwhile() -> None:
    table, rng = table_of(1), np.random.default_rng(1)
    old = some_ids(rng, 100_000)
    table.step(old, gradients_of(old))
    new = np.setdiff1d(some_ids(rng, 100_000), old)
    turns = 0
    for turns, _ in enumerate(table.prepare(new), 1):
        if turns % 8 == 0:
            assert np.array_equal(looked_up(table, old), -gradients_of(old))
    assert turns >= len(new) // AT_ONCE + 100_000 // CELLS_AT_ONCE
    assert sum(1 for _ in table.steps(new, gradients_of(new))) >= 2 * (len(new) // AT_ONCE)
    both = np.concatenate([old, new])
    assert np.array_equal(looked_up(table, both), -gradients_of(both))


def test_a_full_table_has_exactly_max_rows_and_never_more() -> None:
    table, rng = table_of(16, max_rows=1_003), np.random.default_rng(2)
    for _ in range(30):
        ids = some_ids(rng, 300)
        table.step(ids, gradients_of(ids))
        assert table.rows <= 1_003
        assert np.array_equal(looked_up(table, ids), -gradients_of(ids))
    assert table.rows == 1_003
    assert table.counts.admitted - table.counts.evicted == table.rows


def test_of_a_minibatch_with_more_ids_of_a_slot_than_it_may_have_rows_the_last_get_none() -> None:
    table, ids = table_of(1, max_rows=50), np.arange(80)
    table.step(ids[10:40], gradients_of(ids[10:40]))
    table.step(ids, gradients_of(ids))
    assert table.rows == 50
    assert table.counts.refused == 30
    assert set(table.read_slot(0).ids.tolist()) == set(range(50))
    table.step(ids[70:], gradients_of(ids[70:]))
    assert table.rows == 50
    assert set(range(70, 80)) <= set(table.read_slot(0).ids.tolist())


def test_expired_rows_that_have_memory_still_are_less_than_a_hundredth() -> None:
    ttl, a_step = 640, 10
    table = table_of(8, evict_after_steps=ttl)
    for step in range(2 * ttl):
        ids = np.arange(step * a_step, (step + 1) * a_step)
        table.step(ids, gradients_of(ids))
    living = (ttl + 1) * a_step
    assert living <= table.rows <= 1.01 * living
    cells = table.bytes
    for _ in range(ttl + 10):
        table.step(np.arange(0), None)
    assert table.rows == 0
    assert table.bytes < cells - 16 * living  # nor have they cells


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_which_rows_leave_does_not_depend_on_where_they_lie(data: Any) -> None:
    """As for those that came out of a checkpoint, or from another parameter server."""
    more = {
        "max_rows": data.draw(st.sampled_from([9, 40, 100])),
        "evict_after_steps": data.draw(st.sampled_from([None, 3, 300])),
    }
    one, other = table_of(3, **more), table_of(3, **more)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    for _ in range(data.draw(st.integers(2, 12))):
        ids = np.unique(rng.integers(0, 300, data.draw(st.integers(0, 40))))
        for table in (one, other):
            table.step(ids, gradients_of(ids))
        assert everything(one) == everything(other)
        if data.draw(st.booleans()):
            again = Table(other.spec, 3, other.version)
            again.updates = other.updates
            for slot in other.slots():
                again.put_rows(other.read_slot(slot))
            other = again


@pytest.mark.parametrize(
    "more", [{}, {"max_rows": 60_000}, {"admit_after": 2}, {"dim": 16, "optimizer": ADAM}]
)
def test_a_table_takes_no_more_memory_than_is_said_beforehand(more: dict[str, Any]) -> None:
    table, rng = table_of(64, **more), np.random.default_rng(6)
    for _ in range(12):
        ids = some_ids(rng, 5_000)
        for _ in range(table.spec.admit_after):
            table.step(ids, np.ones((len(ids), table.spec.dim), np.float32))
        needs = needs_of(table.spec, table.rows, len(ids), 64)
        assert table.bytes <= needs.total - needs.other + PIECE_BYTES  # a page that is begun, see `other`
    per_row = (needs.rows + needs.cells) / table.rows
    assert table.spec.dim < 16 or per_row <= 1.35 * (16 * 3 * 4 + 16)


@pytest.mark.parametrize("needed", [2, 3])
def test_admission_lets_in_what_comes_often_and_few_rare_ids_however_many_there_were(needed: int) -> None:
    """Ids as Zipf draws them: the rare ones are many times as many as the counts of a slot can tell apart."""
    table, rng, seen = table_of(8, admit_after=needed), np.random.default_rng(8), np.zeros(400_000, np.int64)
    edges = np.cumsum(1 / np.arange(1, len(seen) + 1) ** 1.05)
    for _ in range(120):
        ids = np.unique(np.searchsorted(edges, rng.random(1_500) * edges[-1]))
        seen[ids] += 1
        table.step(ids, gradients_of(ids))
    there = np.zeros(len(seen), np.bool_)
    there[np.concatenate([table.read_slot(slot).ids for slot in table.slots()])] = True
    rare = (seen > 0) & (seen < needed)
    assert rare.sum() > 4 * 8 * 1024 * (needed - 1) * 0.5
    assert there[rare].mean() < 0.02
    assert there[seen >= 5 * needed].mean() > 0.99


def test_rows_stay_found_while_others_leave_from_cells_beside_them() -> None:
    table, rng = table_of(2, max_rows=20_000), np.random.default_rng(4)
    for _ in range(25):
        ids = some_ids(rng, 3_000)
        table.step(ids, gradients_of(ids))
        there = joined([table.read_slot(slot) for slot in table.slots()], table.width)
        assert len(there) == len(np.unique(there.ids)) == table.rows
        assert np.array_equal(looked_up(table, there.ids), -gradients_of(there.ids))


@pytest.mark.parametrize("cuts", [(), (1 << 31,), (1, 1 << 30, 3 << 30, (1 << 32) - 1)])
def test_a_slot_can_be_read_in_parts_while_it_grows(cuts: tuple[int, ...]) -> None:
    rng, table = np.random.default_rng(3), table_of(2)
    first = some_ids(rng, 3000)
    table.step(first, gradients_of(first))
    bounds, found = [0, *cuts, HASHES], []
    for part, (low, high) in enumerate(itertools.pairwise(bounds)):
        if part == 1:
            more = some_ids(rng, 9000)
            table.step(more, gradients_of(more))
        found += [table.read_slot(slot, low, high) for slot in range(2)]
    ids = np.concatenate([rows.ids for rows in found])
    assert len(set(ids.tolist())) == len(ids)
    assert set(first.tolist()) <= set(ids.tolist())
    whole = joined([table.read_slot(slot) for slot in range(2)], table.width)
    for rows in found[2 * bool(cuts) :]:  # those of the first part are of the version before
        at = np.searchsorted(whole.ids, rows.ids)
        assert np.array_equal(whole.ids[at], rows.ids)
        assert np.array_equal(whole.content[at], rows.content)


def test_a_lookup_of_the_version_before_moves_no_rows_that_left() -> None:
    """Full tables give up as many rows as come: a late trainer would have held up everybody while they were
    put in order."""
    table, rng = table_of(4, max_rows=30_000), np.random.default_rng(7)
    known = some_ids(rng, 30_000)
    for _ in range(3):
        ids = np.setdiff1d(some_ids(rng, 20_000), known)
        before = np.concatenate([known, ids])
        expected = looked_up(table, before)
        table.step(ids, gradients_of(ids))
        with replaced(tables, "joined", lambda *_: pytest.fail("rows were put in order")):
            out = np.empty((len(before), DIM), np.float32)
            table.lookup(before, out, table.version - 1)
        assert np.array_equal(out, expected)
        known = before
    assert table.counts.evicted > 20_000
