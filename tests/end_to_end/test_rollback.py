"""Roll-back and resume with real processes: whatever is killed, the trained model is the undisturbed run's, bit for bit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.end_to_end.command import Command, Done
from tests.end_to_end.scripts import EVALUATION, RECORDS, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EPOCHS = 12
STEPS = EPOCHS * RECORDS // 32
SLOW_LOSS = """
import time


def loss(model, batch):
    time.sleep(0.1 if (HERE / "slow").exists() else 0)
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])
"""
SETTINGS = ("--epochs", EPOCHS, "--trainers", 2, "--set", "checkpoint_every_steps=7", "--no-check")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = Command(folder).run("run", script_in(folder, slow=False), *SETTINGS, "--pservers", 1, "--json")
    assert done.code == 0, done.err
    return parameters(done)


def script_in(folder: Path, *, slow: bool = True) -> Path:
    """Slow until `folder / "slow"` is removed."""
    if slow:
        (folder / "slow").touch()
    return write_script(folder, loss=SLOW_LOSS, evaluation=EVALUATION)


def parameters(done: Done) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = torch.load(json.loads(done.out)["exports"]["state_dict"], weights_only=True)
    return values


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read stderr until a line matches."""
    seen = []
    assert process.stderr is not None
    for line in process.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    pytest.fail(f"ended without {pattern!r}: {''.join(seen)}")


def wait_for_step(trireme: Command, step: int) -> int:
    """Until the master has heard of `step`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = trireme.run("status", "--json")
        if done.code == 0 and (at := json.loads(done.out)["progress"].get("step") or 0) >= step:
            return int(at)
        time.sleep(0.05)
    pytest.fail(f"step {step} was not reached")


def test_a_pserver_killed_in_mid_training_costs_no_bit(trireme, tmp_path, undisturbed):
    """By `trireme chaos kill` from a second terminal, whose receipt says how the job got over it."""
    process = trireme.start("run", script_in(tmp_path), *SETTINGS, "--pservers", 2, "--json")
    wait_for(process, "generation 1")
    at = wait_for_step(trireme, 15)
    killed = trireme.run("chaos", "kill", "pserver-1", "--json")
    assert killed.code == 0, killed.err
    (tmp_path / "slow").unlink()
    receipt = json.loads(killed.out)
    back = receipt["rolled_back_to"]
    assert (receipt["killed"], receipt["records_lost"]) == ("pserver-1", 0)
    assert at - 12 <= back < receipt["next_step"] <= STEPS
    assert back % 7 == 0 or back % (RECORDS // 32) == 0
    assert 0 <= receipt["noticed_s"] <= receipt["next_step_s"]
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert f"rolled back to step {back} in " in done.err
    assert (json.loads(done.out)["records"], json.loads(done.out)["restarts"]) == (EPOCHS * RECORDS, {"pserver-1": 1})
    assert_same(parameters(done), undisturbed)


def test_chaos_says_what_it_could_kill_and_ctrl_c_only_interrupts(trireme, tmp_path):
    nothing = trireme.run("chaos", "kill", "--random")
    assert (nothing.code, nothing.out) == (3, "")
    process = trireme.start("run", script_in(tmp_path), "--epochs", 100_000, "--no-check")
    wait_for(process, "generation 1")
    wait_for_step(trireme, 1)
    unknown = trireme.run("chaos", "kill", "pserver-7")
    assert unknown.code == 3
    assert "there are etcd, master-0, pserver-0, trainer-0, trainer-1" in unknown.err
    killed = trireme.run("chaos", "kill", "trainer-0")
    assert killed.code == 0, killed.err
    assert re.search(r"noticed +[\d.]+ s later: the launcher saw it exit", killed.out)
    assert re.search(r"next committed step [\d.]+ s \(step \d+\)\nrecords replayed +0\nrecords lost +0\n", killed.out)
    process.send_signal(signal.SIGINT)
    stopped = trireme.end_of(process)
    assert (stopped.code, "is unfinished; the same command goes on with it" in stopped.err) == (130, True)
    again = trireme.start("run", tmp_path / "script.py", "--epochs", 100_000, "--no-check")
    wait_for(again, r"job script is unfinished: it goes on$")
    wait_for(again, r"rolled back to step \d+")
    again.send_signal(signal.SIGINT)
    assert trireme.end_of(again).code == 130


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3)])
def test_after_everything_was_killed_the_same_command_goes_on(trireme, tmp_path, undisturbed, before, after):
    script = script_in(tmp_path)
    process = trireme.start("run", script, *SETTINGS, "--pservers", before, "--json")
    wait_for(process, "generation 1")
    at = wait_for_step(trireme, 15)
    everybody = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    assert any("etcd" in victim.name() for victim in everybody)
    for victim in everybody:
        victim.kill()
    trireme.end_of(process)
    (tmp_path / "slow").unlink()
    process = trireme.start("run", script, *SETTINGS, "--pservers", after, "--json")
    members = "" if before == after else rf" \({before} -> {after} pservers\)"
    wait_for(process, rf"job script is unfinished: it goes on{members}")
    back = wait_for(process, r"rolled back to step (\d+)")
    assert at - 12 <= int(back[1]) < STEPS
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert json.loads(done.out)["records"] == EPOCHS * RECORDS
    assert_same(parameters(done), undisturbed)
    again = trireme.run("run", script, *SETTINGS, "--pservers", after, "--json")
    assert (again.code, json.loads(again.out)) == (0, json.loads(done.out))
    assert "job script is completed already; --fresh trains it anew" in again.err
    other = trireme.run("run", script, *SETTINGS, "--epochs", 3, "--json")
    assert other.code == 4
    assert f"completed with epochs = {EPOCHS}; now epochs = 3 is asked for" in other.err
