"""Cuts of `make soak`: real processes broken in all ways, two at once and all at once; not one bit may differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.plan import ANYWHERE, DISKS, PACKETS, Kind, plan
from tests.soak.soak import disturbed, epochs_for, undisturbed
from tests.soak.verify import check_exactly_once, verify

SEED, FAULTS = 1579, 9  # a long freeze of a parameter server, a short one of a trainer; a spare server
EPOCHS = epochs_for(FAULTS)


@pytest.mark.processes
@pytest.mark.timeout(420)
async def test_a_job_that_is_broken_in_every_way_ends_with_the_undisturbed_runs_bits(tmp_path):
    left_alone = await undisturbed(tmp_path / "undisturbed", EPOCHS)
    check_exactly_once(left_alone, EPOCHS)
    broken, costs = await disturbed(tmp_path / "disturbed", EPOCHS, SEED, FAULTS, print)
    verify(left_alone, broken, costs, EPOCHS)
    assert len(costs) == FAULTS


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_lost_packets_and_full_disks_change_no_bit(transport):
    kinds = [kind for kind in Kind if kind in PACKETS | DISKS]
    done = command("--seed", "5", "--faults", str(len(kinds)), "--transport", transport, "--kinds", *kinds)
    assert done.returncode == 0, done.stdout
    assert "skipped:" not in done.stdout, done.stdout


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_an_asynchronous_job_that_is_broken_in_every_way_counts_each_minibatch_once():
    done = command("--seed", "1", "--faults", "9", "--mode", "async", "--kinds", *ANYWHERE)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kinds", [ANYWHERE, tuple(Kind), (Kind.CUT_ETCD, Kind.FREEZE_LONG)])
@pytest.mark.parametrize("seed", [1, 2, SEED])
def test_each_kind_of_fault_comes_first_once_and_a_seed_repeats_all(seed, kinds):
    faults = plan(seed, 30, kinds)
    assert sorted(fault.kind for fault in faults[: len(kinds)]) == sorted(kinds)
    assert {fault.kind for fault in faults} == set(kinds)
    assert plan(seed, 10, kinds) == faults[:10]
    assert plan(seed + 1, 30, kinds) != faults


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", *arguments],
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
        check=False,
    )
