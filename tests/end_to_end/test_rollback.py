"""Rollback and resume with real processes: whatever is killed, the trained model is the undisturbed run's,
bit for bit."""

from __future__ import annotations

import csv
import json
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from tests.end_to_end.command import Command, Done, wait_for, wait_for_step
from tests.end_to_end.once import made_once
from tests.end_to_end.scripts import EVALUATION, RECORDS, SLOWABLE_LOSS, write_script
from tests.equipment.forked import ForkedProcess

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EPOCHS = 12
STEPS = EPOCHS * RECORDS // 32
SETTINGS = ("--epochs", EPOCHS, "--trainers", 2, "--set", "checkpoint_every_steps=7", "--no-check")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    def trained(folder: Path) -> dict[str, torch.Tensor]:
        done = Command(folder).run("run", script_in(folder, slow=False), *SETTINGS, "--pservers", 1, "--json")
        assert done.code == 0, done.err
        return parameters(done)

    return made_once("rollback", tmp_path_factory, trained)


def script_in(folder: Path, *, slow: bool = True) -> Path:
    """Slow until `folder / "slow"` is removed."""
    if slow:
        (folder / "slow").touch()
    return write_script(folder, loss=SLOWABLE_LOSS, evaluation=EVALUATION)


def parameters(done: Done) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = torch.load(
        json.loads(done.out)["exports"]["state_dict"], weights_only=True
    )
    return values


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_pserver_killed_in_mid_training_costs_no_bit(trireme, tmp_path, undisturbed):
    """With `trireme chaos kill` from a second terminal; its receipt shows how the job recovered."""
    process = trireme.begin(
        "run", script_in(tmp_path), *SETTINGS, "--pservers", 2, "--json", "--tracker", "csv"
    )
    wait_for(process, "^trainer-[01] joined")
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
    report = json.loads(done.out)
    assert (report["records"], report["restarts"]) == (EPOCHS * RECORDS, {"pserver-1": 1}), done.err
    assert_same(parameters(done), undisturbed)
    with (tmp_path / ".trireme" / "script" / "metrics" / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["metric"] == "loss"]
    assert steps == list(range(STEPS))  # the tracker has each once, those that were trained again, too


def test_chaos_says_what_it_could_kill_and_ctrl_c_only_interrupts(trireme, tmp_path):
    nothing = trireme.run("chaos", "kill", "--random")
    assert (nothing.code, nothing.out) == (3, "")
    process = trireme.begin("run", script_in(tmp_path), "--epochs", 100_000, "--no-check")
    wait_for(process, "^trainer-[01] joined")
    wait_for_step(trireme, 1)
    unknown = trireme.run("chaos", "kill", "pserver-7")
    assert unknown.code == 3
    assert "alive are etcd, master-0, pserver-0, trainer-0, trainer-1" in unknown.err
    killed = trireme.run("chaos", "kill", "trainer-0")
    assert killed.code == 0, killed.err
    assert re.search(r"noticed +[\d.]+ s later: the launcher saw it exit", killed.out)
    assert re.search(
        r"next committed step [\d.]+ s \(step \d+\)\nrecords replayed +0\nrecords lost +0\n", killed.out
    )
    process.send_signal(signal.SIGINT)
    stopped = trireme.end_of(process)
    assert stopped.code == 130
    assert re.search(r"^saved step \d+; stopping$", stopped.err, re.MULTILINE)
    words = "job script is unfinished; resume it with: trireme run script.py --epochs 100000 --no-check"
    assert words in stopped.err.replace(f"{tmp_path}/", "")
    again = trireme.begin("run", tmp_path / "script.py", "--epochs", 100_000, "--no-check")
    wait_for(again, r"job script is unfinished: it resumes$")
    wait_for(again, r"rolled back to step \d+")
    again.send_signal(signal.SIGINT)
    assert trireme.end_of(again).code == 130


def test_after_everything_was_killed_the_same_command_goes_on(trireme, tmp_path, undisturbed):
    before, after = 2, 1
    script = script_in(tmp_path)
    process = trireme.begin("run", script, *SETTINGS, "--pservers", before, "--json")
    wait_for(process, "^trainer-[01] joined")
    at = wait_for_step(trireme, 15)
    everybody = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    assert any("etcd" in victim.name() for victim in everybody)
    for victim in everybody:
        victim.kill()
    trireme.end_of(process)
    (tmp_path / "slow").unlink()
    orphan = (
        tmp_path / ".trireme" / "script" / "checkpoints" / ".pserver-0.x.safetensors.killed-while-writing.tmp"
    )
    orphan.touch()
    process = trireme.begin("run", script, *SETTINGS, "--pservers", after, "--json")
    wait_for(process, rf"job script is unfinished: it resumes \({before} -> {after} pservers\)")
    back = wait_for(process, r"rolled back to step (\d+)")
    assert at - 12 <= int(back[1]) < STEPS
    assert not orphan.exists()
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert json.loads(done.out)["records"] == EPOCHS * RECORDS
    assert_same(parameters(done), undisturbed)
    again = trireme.run("run", script, *SETTINGS, "--pservers", after, "--json")
    assert (again.code, json.loads(again.out)) == (0, json.loads(done.out))
    assert (
        "job script is completed; --epochs with a higher number trains it longer, --fresh again" in again.err
    )
    other = trireme.run("run", script, *SETTINGS, "--epochs", 3, "--json")
    assert other.code == 4
    assert f"completed with epochs = {EPOCHS}; now epochs = 3 is asked for" in other.err


def test_saved_gone_back_and_interrupted_with_three_one_and_four_parameter_servers_it_loses_no_bit(
    trireme, tmp_path, undisturbed
):
    """Checkpoints on demand only; a Ctrl-C saves one itself. The same command goes on each time."""
    script = script_in(tmp_path)
    settings = (
        "--epochs",
        EPOCHS,
        "--trainers",
        1,
        "--no-check",
        "--set",
        "checkpoint_every_epochs=1000",
        "--json",
    )
    process = trireme.begin("run", script, *settings, "--pservers", 3)
    wait_for(process, "^trainer-[01] joined")
    at = wait_for_step(trireme, 5)
    created = trireme.run("checkpoint", "create", "--json")
    assert created.code == 0, created.err
    assert "waiting for the next step but one" in created.err
    made = json.loads(created.out)
    assert (made["state"], made["attempt"]) == ("DONE", 1)
    assert at < made["step"] < STEPS
    nowhere = trireme.run("checkpoint", "restore", "77777")
    assert (nowhere.code, f"there are: step {made['step']} (" in nowhere.err) == (3, True)
    back = trireme.run("checkpoint", "restore", made["step"], "--json")
    assert back.code == 0, back.err
    assert json.loads(back.out)["reason"] == f"the job goes on from step {made['step']}"
    interrupted_at = interrupt(trireme, process)

    process = trireme.begin("run", script, *settings, "--pservers", 1)
    wait_for(process, rf"rolled back to step {interrupted_at} ")
    wait_for_step(trireme, interrupted_at + 3)
    interrupted_at = interrupt(trireme, process)
    assert not list((tmp_path / ".trireme").rglob("*.tmp"))

    (tmp_path / "slow").unlink()
    process = trireme.begin("run", script, *settings, "--pservers", 4)
    wait_for(process, rf"rolled back to step {interrupted_at} ")
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert json.loads(done.out)["records"] == EPOCHS * RECORDS
    assert_same(parameters(done), undisturbed)


def interrupt(trireme: Command, process: ForkedProcess) -> int:
    """Ctrl-C; the step that was saved."""
    process.send_signal(signal.SIGINT)
    saved = wait_for(process, r"^saved step (\d+); stopping")
    done = trireme.end_of(process)
    assert (done.code, "is unfinished; resume it with: trireme run " in done.err) == (130, True)
    return int(saved[1])
