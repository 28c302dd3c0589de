"""A cut of `make soak`: real processes killed and frozen in all ways, two at once and all at once; not one bit may differ."""

from __future__ import annotations

import pytest

from tests.soak.plan import Kind, plan
from tests.soak.soak import disturbed, epochs_for, undisturbed, verify

SEED, FAULTS = 371, 12  # each kind; a frozen trainer and a frozen parameter server; a spare one
EPOCHS = epochs_for(FAULTS)


@pytest.mark.processes
@pytest.mark.timeout(420)
async def test_a_job_that_is_broken_in_every_way_ends_with_the_undisturbed_runs_bits(tmp_path):
    left_alone = await undisturbed(tmp_path / "undisturbed", EPOCHS)
    broken, receipts = await disturbed(tmp_path / "disturbed", EPOCHS, SEED, FAULTS, print)
    verify(left_alone, broken, receipts, EPOCHS)
    assert len(receipts) == FAULTS


@pytest.mark.parametrize("seed", [1, 2, SEED])
def test_each_kind_of_fault_comes_first_once_and_a_seed_repeats_all(seed):
    faults = plan(seed, 30)
    assert {fault.kind for fault in faults[: len(Kind)]} == set(Kind)
    assert plan(seed, 10) == faults[:10]
    assert plan(seed + 1, 30) != faults
