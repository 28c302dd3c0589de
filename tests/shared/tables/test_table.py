"""A table does what a dict of rows does, whose steps are torch's; hypothesis draws ids and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.tables.dict_table import DictTable
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.table import Table, joined

# torch says it once, of its own optimizers
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SLOTS = 8
IDS = st.sampled_from(
    [0, 1, -1, 2, 3, 5, 8, 13, 2**62, -(2**63), 2**63 - 1, 1 << 53, (1 << 53) + 1, *range(100, 140)]
)
EXACT = [
    RowOptimizer(kind="sgd", lr=0.1),
    RowOptimizer(kind="adagrad", lr=0.05, initial_accumulator_value=0.1),
    RowOptimizer(kind="adam", lr=0.01, eps=1e-8),
]
CLOSE = [
    RowOptimizer(kind="adagrad", lr=0.05, per_row=True),
    RowOptimizer(kind="ftrl", lr=0.1, l1=0.01, l2=0.1, beta=1.0, initial_accumulator_value=0.1),
]


def spec_of(optimizer: RowOptimizer, **more: Any) -> TableSpec:
    init = more.pop("init", RowInit(kind="uniform", scale=0.05))
    return TableSpec(**({"name": "t", "dim": 3, "seed": 77, "optimizer": optimizer, "init": init} | more))


def drawn(data: Any, dim: int) -> tuple[np.ndarray, np.ndarray | None]:
    ids = np.array(sorted(data.draw(st.sets(IDS, max_size=20))), np.int64)
    if data.draw(st.integers(0, 9)) == 0:
        return ids, None
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    return ids, rng.standard_normal((len(ids), dim)).astype(np.float32)


def compare(table: Table, oracle: DictTable, *, exact: bool = True) -> None:
    every = np.array([0, 1, -1, 2, 3, 5, 7, 2**62, -(2**63), 2**63 - 1, *range(95, 145), 0], np.int64)
    for version in (table.version, table.version - 1) if table.before is not None else (table.version,):
        out = np.empty((len(every), table.spec.dim), np.float32)
        table.lookup(every, out, version)
        expected = oracle.lookup(every, version)
        if exact:
            assert np.array_equal(out.view(np.int32), expected.view(np.int32))
        else:
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


def run(data: Any, spec: TableSpec, steps: int, *, exact: bool = True) -> tuple[Table, DictTable]:
    table, oracle = Table(spec, SLOTS), DictTable(spec, SLOTS)
    for _ in range(steps):
        ids, gradients = drawn(data, spec.dim)
        for each in (table, oracle):
            each.step(ids, None if gradients is None else gradients.copy())
        compare(table, oracle, exact=exact)
    return table, oracle


@pytest.mark.parametrize("optimizer", EXACT, ids=lambda each: each.kind)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_both_versions_have_the_bits_of_torchs_sparse_steps(optimizer: RowOptimizer, data: Any) -> None:
    run(data, spec_of(optimizer), 5)


@pytest.mark.parametrize("optimizer", CLOSE, ids=lambda each: each.kind)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_rules_that_torch_lacks_follow_their_papers(optimizer: RowOptimizer, data: Any) -> None:
    run(data, spec_of(optimizer), 5, exact=False)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_come_and_go_as_the_settings_say(data: Any) -> None:
    more = {
        "max_rows": data.draw(st.sampled_from([None, 8, 16, 24])),
        "evict_after_steps": data.draw(st.sampled_from([None, 1, 3])),
        "admit_after": data.draw(st.sampled_from([1, 2, 3])),
        "init": RowInit(kind=data.draw(st.sampled_from(["uniform", "normal", "constant"])), scale=0.1),
    }
    table, oracle = run(data, spec_of(EXACT[0], **more), 8)
    assert table.rows == len(oracle.entries)
    for slot in range(SLOTS):
        table.sweep(slot)
    compare(table, oracle)
    assert table.rows == sum(
        not oracle.is_expired(entry, table.version - 1) for entry in oracle.entries.values()
    )


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_rows_that_moved_slot_by_slot_go_on_as_if_they_had_stayed(data: Any) -> None:
    spec = spec_of(EXACT[2], evict_after_steps=4)
    table, oracle = run(data, spec, 4)
    parts = [Table(spec, SLOTS, table.version) for _ in range(3)]
    for slot in list(table.slots()):
        parts[slot % 3].put_rows(table.read_slot(slot))
    for part in parts:
        part.updates = oracle.updates
    for _ in range(3):
        ids, gradients = drawn(data, spec.dim)
        oracle.step(ids, gradients)
        owners = slots_of(ids, spec.seed, SLOTS) % 3
        for index, part in enumerate(parts):
            own = owners == index
            part.step(ids[own], None if gradients is None else gradients[own])
            for version in (part.version, part.version - 1):
                out = np.empty((int(own.sum()), spec.dim), np.float32)
                part.lookup(ids[own], out, version)
                assert np.array_equal(out, oracle.lookup(ids[own], version))


def test_many_rows_are_found_again_while_cells_and_memory_grow() -> None:
    spec, rng = (
        spec_of(RowOptimizer(kind="sgd", lr=1.0), init=RowInit(kind="constant", scale=0.0)),
        np.random.default_rng(1),
    )
    table = Table(spec, 128)
    for _ in range(20):
        ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 5_000))
        table.step(ids, np.repeat(-ids.astype(np.float32)[:, None], 3, axis=1))
    everything = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    assert table.rows == len(everything) == len(np.unique(everything.ids))
    assert np.array_equal(everything.content[:, 0], everything.ids.astype(np.float32))


def test_a_limit_that_slots_cannot_share_out_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_rows is 7, and the job has 8 slots"):
        Table(spec_of(EXACT[0], max_rows=7), 8)
