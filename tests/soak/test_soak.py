"""Cuts of `make soak`: real processes broken in all ways, two at once and all at once; not one bit may
differ."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.soak.plan import ANYWHERE, CREWS, DISKS, KINDS, PACKETS, Kind, harmless, plan
from tests.soak.soak import disturbed, epochs_for, undisturbed
from tests.soak.verify import check_bits, check_exactly_once, check_records, verify
from tests.soak.workload import WORKLOADS
from trireme_shared.protocol.records import Strategy

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
    kinds = [kind for kind in Kind if kind in (PACKETS | DISKS) - harmless(transport)]
    done = command("--seed", "5", "--faults", str(len(kinds)), "--transport", transport, "--kinds", *kinds)
    assert done.returncode == 0, done.stdout
    assert "skipped:" not in done.stdout, done.stdout


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_an_asynchronous_job_that_is_broken_in_every_way_counts_each_minibatch_once():
    done = command("--seed", "1", "--faults", "9", "--mode", "async", "--kinds", *ANYWHERE)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_collective_job_has_faults_of_its_own_and_no_parameter_servers(seed):
    kinds = KINDS[Strategy.COLLECTIVE]
    crew = replace(CREWS[Strategy.COLLECTIVE], spared=frozenset({"trainer-0"}))
    faults = plan(seed, 60, kinds, crew)
    assert {fault.kind for fault in faults} == set(kinds)
    victims = {name for fault in faults for name in fault.victims}
    assert victims >= {"trainer-1", "trainer-2", "trainer-3", "master-0", "etcd"}
    assert not [name for name in victims if name.startswith("pserver") or name == "trainer-0"]
    assert {fault.trainers for fault in faults if fault.kind is Kind.RESIZE} <= {1, 2, 3}


@pytest.mark.parametrize(
    "kinds", [ANYWHERE, KINDS[Strategy.PARAMETER_SERVER], (Kind.CUT_ETCD, Kind.FREEZE_LONG)]
)
@pytest.mark.parametrize("seed", [1, 2, SEED])
def test_each_kind_of_fault_comes_first_once_and_a_seed_repeats_all(seed, kinds):
    faults = plan(seed, 30, kinds)
    assert sorted(fault.kind for fault in faults[: len(kinds)]) == sorted(kinds)
    assert {fault.kind for fault in faults} == set(kinds)
    assert plan(seed, 10, kinds) == faults[:10]
    assert plan(seed + 1, 30, kinds) != faults


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_a_collective_job_that_is_broken_in_every_way_has_the_bits_of_one_with_a_parameter_server():
    kinds = [kind for kind in KINDS[Strategy.COLLECTIVE] if kind not in PACKETS]
    options = ["--strategy", "collective", "--workload", "digits", "--kinds", *kinds]
    done = command("--seed", "21", "--faults", "15", *options)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(WORKLOADS))
async def test_one_two_three_and_four_trainers_give_the_bits_of_a_job_with_a_parameter_server(tmp_path, name):
    options = {"workload": WORKLOADS[name]}
    expected = await undisturbed(tmp_path / "server", 2, **options)
    for trainers in range(1, 5):
        options |= {"strategy": Strategy.COLLECTIVE, "trainers": trainers}
        found = await undisturbed(tmp_path / str(trainers), 2, **options)
        check_records(found, 2)
        check_bits(expected, found, "those of the job with a parameter server")


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(300)
async def test_one_lane_gives_the_bits_of_the_script_under_plain_python(tmp_path):
    workload = WORKLOADS["digits"]
    found = await undisturbed(tmp_path / "one", 2, strategy=Strategy.COLLECTIVE, workload=workload, lanes=1)
    environment = os.environ | {"DIGITS_DATA": str(tmp_path / "text")}
    settings = {
        "global_batch_size": workload.batch,
        "lanes": 1,
        "epochs": 2,
        "records_per_task": workload.records_per_task,
    }
    flags = [word for setting in settings.items() for word in ("--set", "{}={}".format(*setting))]
    root, out = Path(__file__).parents[2], tmp_path / "plain"
    words = [sys.executable, "examples/digits/digits.py", *flags, "--export", out]
    done = subprocess.run(
        [*map(str, words)], cwd=root, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    state = torch.load(next(out.rglob("*.pt")), weights_only=True)
    check_bits(replace(found, parameters=state), found, "those of the plain loop")


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", *arguments],
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
        check=False,
    )
