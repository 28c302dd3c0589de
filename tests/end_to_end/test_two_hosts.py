"""Real processes on two hosts; one is cut off in mid-job and comes back. Not one bit may change, and nobody
waits longer than a lease."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.command import MARK, Command
from tests.end_to_end.cut_off_host import EPOCHS, LEASE_S, write_job
from tests.end_to_end.local_cluster import same_bits
from tests.equipment import two_hosts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

BUSY_S = 5.0  # what a busy machine may take beyond what is promised
LIMIT_S = 300.0


@pytest.fixture(autouse=True)
def networks() -> None:
    if why := two_hosts.obstacle():
        pytest.skip(why)


def cut_off(trireme: Command, scenario: str) -> dict[str, Any]:
    """What happened, as cut_off_host.py reports it; the same parameters as those of `trireme run` alone."""
    script = write_job(trireme.folder)
    command = [sys.executable, "-m", "tests.end_to_end.cut_off_host", scenario, str(trireme.folder)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {MARK: trireme.mark},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + logs(trireme.folder)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{scenario}: next step {report['next_step_s']:.2f} s after the cut,", end=" ")  # noqa: T201
    print(f"leases of {LEASE_S:g} s", end=" ")  # noqa: T201
    print(f"(ended after {report['leases_end_s']:.2f} s);", end=" ")  # noqa: T201
    print(f"members are back {report['back_s']:.2f} s after its end")  # noqa: T201
    assert report["phase"] == "COMPLETED", report
    alone = trireme.run("run", script, "--epochs", EPOCHS, "--trainers", 1, "--pservers", 1, "--json")
    assert alone.code == 0, alone.err
    expected = torch.load(json.loads(alone.out)["exports"]["state_dict"], weights_only=True)
    assert same_bits(torch.load(report["state_dict"], weights_only=True), expected)
    return report


def logs(folder: Path) -> str:
    """The end of each process's log."""
    texts = {path.name: path.read_text(errors="replace") for path in sorted(folder.rglob("*.log"))}
    return "".join(f"\n== {name}\n{text[-1500:]}" for name, text in texts.items())


@pytest.mark.soak  # longer than 40 s
def test_a_host_with_trainers_is_cut_off_and_comes_back(trireme: Command) -> None:
    report = cut_off(trireme, "trainers")
    assert 1.0 < report["next_step_s"] < LEASE_S + BUSY_S
    assert report["timeline"] == 0, "no rollback"
    assert report["streams"] == {"one": ["unix"], "two": ["tcp"]}, "no socket of another host"


@pytest.mark.soak
def test_a_host_with_a_parameter_server_is_cut_off_while_another_one_is_in_reserve(trireme: Command) -> None:
    report = cut_off(trireme, "pserver")
    assert 1.0 < report["next_step_s"] < LEASE_S + BUSY_S
    assert report["timeline"] > 0, "a rollback"
    assert report["streams"] == {"one": ["tcp", "unix"], "two": ["tcp", "unix"]}


@pytest.mark.soak
def test_the_host_of_the_leading_master_is_cut_off(trireme: Command) -> None:
    report = cut_off(trireme, "leader")
    assert 1.0 < report["next_step_s"] < LEASE_S + BUSY_S
    assert report["timeline"] == 0, "no rollback"


@pytest.mark.soak
def test_a_host_of_a_cluster_is_cut_off_with_its_agent(trireme: Command) -> None:
    report = cut_off(trireme, "agents")
    assert 1.0 < report["next_step_s"] < LEASE_S + BUSY_S
    assert report["timeline"] > 0, "a rollback"
    assert report["streams"] == {"one": ["tcp", "unix"], "two": ["tcp", "unix"]}
