"""Every row optimizer over its whole option space against an independent one: torch's own where torch has it,
else its paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.tables.papers import FtrlProximal, RowAdagrad
from trainer_agent.tables.files import StoredTable, write_tables
from trireme.nn import SGD, Adagrad, Adam, Ftrl
from trireme_shared.checkpoints.start_tables import StartTable, fit_tables, put_rows
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.table import Table, initial_values

# torch says it once, of its own optimizers
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
DIM, SLOTS = 3, 8
EVERY = np.array([-(2**63), -7, 0, 1, 2, 99, 2**62], np.int64)
RATES = st.sampled_from([1.0, 0.1, 0.013])
SUMS = st.sampled_from([0.0, 0.1, 3.0])
OF_TORCH = st.one_of(
    st.builds(RowOptimizer, kind=st.just("sgd"), lr=RATES),
    st.builds(
        RowOptimizer,
        kind=st.just("adagrad"),
        lr=RATES,
        eps=st.sampled_from([1e-10, 0.1]),
        initial_accumulator_value=SUMS,
    ),
    st.builds(
        RowOptimizer,
        kind=st.just("adam"),
        lr=RATES,
        eps=st.sampled_from([1e-8, 0.1]),
        betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.5, 0.999])),
    ),
)
OF_PAPERS = st.one_of(
    st.builds(
        RowOptimizer,
        kind=st.just("adagrad"),
        per_row=st.just(True),
        lr=RATES,
        eps=st.sampled_from([1e-10, 0.1]),
        initial_accumulator_value=SUMS,
    ),
    st.builds(
        RowOptimizer,
        kind=st.just("ftrl"),
        lr=RATES,
        l1=st.sampled_from([0.0, 0.2, 1.0]),
        l2=st.sampled_from([0.0, 0.3]),
        beta=st.sampled_from([0.0, 1.0, 2.5]),
        initial_accumulator_value=SUMS,
    ),
)
STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(EVERY.tolist()), min_size=1), st.sampled_from([1.0, 0.5, 2.0, 1 / 3, 1 / 7])
    ),
    min_size=1,
    max_size=6,
)
"""Ids of each step, so some rows appear late and some wait, and what its learning rate is multiplied by."""


def spec_of(optimizer: RowOptimizer, init: float = 0.5) -> TableSpec:
    return TableSpec(
        name="t", dim=DIM, seed=77, optimizer=optimizer, init=RowInit(kind="uniform", scale=init)
    )


def values_of(table: Table | ShardedTable, ids: np.ndarray = EVERY) -> np.ndarray:
    found = np.empty((len(ids), DIM), np.float32)
    table.lookup(ids, found)
    return found


def moved(table: Table) -> Table:
    """Its rows as a checkpoint or another parameter server has them."""
    other = Table(table.spec, SLOTS, table.version)
    for slot in table.slots():
        other.put_rows(table.read_slot(slot))
    other.updates = table.updates
    return other


class SparseTorch:
    """An nn.Embedding(sparse=True) whose rows are those of EVERY."""

    def __init__(self, spec: TableSpec) -> None:
        self._weight = torch.nn.Parameter(torch.from_numpy(initial_values(spec, EVERY)))
        own, weight = spec.optimizer, [self._weight]
        match own.kind:
            case "sgd":
                self._optimizer: Any = torch.optim.SGD(weight, lr=own.lr)
            case "adagrad":
                more = {"eps": own.eps, "initial_accumulator_value": own.initial_accumulator_value}
                self._optimizer = torch.optim.Adagrad(weight, lr=own.lr, **more)
            case _:
                self._optimizer = torch.optim.SparseAdam(weight, lr=own.lr, betas=own.betas, eps=own.eps)

    def step(self, places: np.ndarray, gradients: np.ndarray, lr: float) -> None:
        shape = len(EVERY), DIM
        self._weight.grad = torch.sparse_coo_tensor(
            places[None], gradients, shape, is_coalesced=True, check_invariants=False
        )
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def values(self) -> np.ndarray:
        return self._weight.detach().numpy()


class OfPaper:
    def __init__(self, spec: TableSpec) -> None:
        make = FtrlProximal if spec.optimizer.kind == "ftrl" else RowAdagrad
        self._rows = [make(spec.optimizer, values) for values in initial_values(spec, EVERY)]

    def step(self, places: np.ndarray, gradients: np.ndarray, lr: float) -> None:
        for place, gradient in zip(places, gradients, strict=True):
            self._rows[place].step(gradient, lr)

    def values(self) -> np.ndarray:
        return np.stack([row.values for row in self._rows])


def trained(optimizer: RowOptimizer, steps: Any, seed: int, other: SparseTorch | OfPaper) -> Table:
    table, rng = Table(spec_of(optimizer), SLOTS), np.random.default_rng(seed)
    for number, (ids, factor) in enumerate(steps):
        chosen = np.array(sorted(ids), np.int64)
        gradients = rng.standard_normal((len(chosen), DIM)).astype(np.float32)
        gradients[rng.random(gradients.shape) < 0.2] = 0
        other.step(np.searchsorted(EVERY, chosen), gradients.copy(), optimizer.lr * factor)
        table.step(chosen, gradients, optimizer.lr * factor)
        if number == len(steps) // 2:
            table = moved(table)
    return table


@settings(max_examples=60, deadline=None)
@given(optimizer=OF_TORCH, steps=STEPS, seed=st.integers(0, 2**32 - 1))
def test_optimizers_of_torch_have_its_bits(optimizer: RowOptimizer, steps: Any, seed: int) -> None:
    expected = SparseTorch(spec_of(optimizer))
    table = trained(optimizer, steps, seed, expected)
    assert np.array_equal(values_of(table).view(np.int32), expected.values().view(np.int32))


@settings(max_examples=60, deadline=None)
@given(optimizer=OF_PAPERS, steps=STEPS, seed=st.integers(0, 2**32 - 1))
def test_others_do_what_their_papers_say(optimizer: RowOptimizer, steps: Any, seed: int) -> None:
    expected = OfPaper(spec_of(optimizer))
    table = trained(optimizer, steps, seed, expected)
    np.testing.assert_allclose(values_of(table), expected.values(), rtol=1e-3, atol=1e-4)


ALL = [
    SGD(lr=0.1),
    Adagrad(lr=0.1, initial_accumulator_value=0.1),
    Adagrad(lr=0.1, per_row=True),
    Adam(lr=0.1),
    Ftrl(lr=0.1, initial_accumulator_value=0.1),
    Ftrl(lr=0.1, l1=0.01, l2=0.5, beta=0.5),
]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda each: f"{each.kind} {each.per_row} {each.l1}")
def test_a_push_that_is_late_moves_rows_by_a_share_of_what_it_would_have(optimizer: RowOptimizer) -> None:
    """`lr_staleness_modulation` divides the learning rate of one step, for rows that many steps made."""
    rng = np.random.default_rng(3)
    begun = Table(spec_of(optimizer), SLOTS)
    for _ in range(20):
        begun.step(EVERY, rng.standard_normal((len(EVERY), DIM)).astype(np.float32) + 2)
    before, gradients = values_of(begun), rng.standard_normal((len(EVERY), DIM)).astype(np.float32)
    changes = []
    for share in (1, 16):
        table = moved(begun)
        table.step(EVERY, gradients, optimizer.lr / share)
        changes.append(values_of(table) - before)
    assert np.abs(changes[0]).min() > 0
    np.testing.assert_allclose(changes[1], changes[0] / 16, atol=2e-6)


def stored(folder: Any, table: Table, *, states: bool) -> StartTable:
    """What `init_from` reads of a table's file."""
    rows = [table.read_slot(slot) for slot in table.slots()]
    order = np.argsort(ids := np.concatenate([each.ids for each in rows]))
    content = np.concatenate([each.content for each in rows])[order]
    state = {"state": content[:, DIM:].copy(), "updates": table.updates} if states else {}
    write_tables(
        [StoredTable(table.spec, table.version, ids[order], content[:, :DIM].copy(), **state)], str(folder)
    )
    return fit_tables([table.spec], str(folder / "model.safetensors"), states=states).tables[0]


@pytest.mark.parametrize(
    ("now", "states"),
    [
        (Ftrl(lr=0.1, l1=0.1), False),
        (Ftrl(lr=0.4, l1=0.1, l2=0.3, beta=0.2, initial_accumulator_value=0.5), False),
        (Ftrl(lr=0.4, l1=0.2, beta=0.5), True),
        (Ftrl(lr=0.1, l1=0.1), True),
    ],
)
def test_ftrl_rows_that_a_job_starts_with_keep_their_values(
    tmp_path, now: RowOptimizer, states: bool
) -> None:
    """Also at another rate than their sums were made with. A gradient of 0 leaves them as they are."""
    rng, before = np.random.default_rng(5), Table(spec_of(Ftrl(lr=0.1, l1=0.1)), SLOTS)
    for _ in range(5):
        before.step(EVERY, rng.standard_normal((len(EVERY), DIM)).astype(np.float32))
    table = ShardedTable(spec_of(now), SLOTS)
    put_rows(table, stored(tmp_path, before, states=states))
    table.step(EVERY, np.zeros((len(EVERY), DIM), np.float32))
    np.testing.assert_allclose(values_of(table), values_of(before), atol=1e-6)
    assert np.array_equal(values_of(table) == 0, values_of(before) == 0)


def test_a_square_too_small_for_a_number_of_ftrl_leaves_its_row() -> None:
    table = Table(spec_of(Ftrl(lr=0.1, beta=0.0)), SLOTS)
    before = values_of(table)
    table.step(EVERY, np.full((len(EVERY), DIM), 1e-30, np.float32))
    assert np.array_equal(values_of(table), before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ftrl(lr=0.0), "ftrl divides by its learning rate, and lr is 0.0: give one above 0"),
        (lambda: Ftrl(lr=1e-40), "ftrl divides by its learning rate, and lr is 1e-40"),
        (
            lambda: Adam(eps=0.0),
            "adam divides by eps where a gradient is 0, and eps is 0.0: give one above 0",
        ),
        (
            lambda: Adagrad(lr=0.1, eps=0.0),
            "adagrad divides by eps where a gradient is 0, and eps is 0.0: give one above 0, or an",
        ),
        (lambda: Adagrad(lr=0.1, eps=1e-50, per_row=True), "eps is 1e-50"),
    ],
)
def test_options_that_would_divide_by_zero_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make()
    assert Adagrad(lr=0.1, eps=0.0, initial_accumulator_value=0.1).eps == 0
