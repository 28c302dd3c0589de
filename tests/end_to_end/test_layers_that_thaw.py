"""Layers thaw and freeze while a job trains, and its processes are killed: with one lane the model is plain
PyTorch's, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.command import wait_for, wait_for_step
from tests.end_to_end.scripts import CONFIG, RECORDS, write_script
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EPOCHS = 12
STEPS = EPOCHS * RECORDS // 32
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.trunk.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


def model():
    return Net()
"""
LOSS = f"""
import time


def loss(model, batch):
    time.sleep(0.3 if (HERE / "slow").exists() else 0)
    if model.training:
        model.steps += 1
    step = int(model.steps)
    if step == 12:  # once: whoever joins later knows it from the version alone
        model.trunk.requires_grad_(True)
    if step in (20, {STEPS // 2}):
        model.head.bias.requires_grad_(step > 20)
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])
"""


@pytest.mark.parametrize("killed", [("pserver-1", "trainer-0"), ("trainer-0", "trainer-1")])
def test_processes_that_are_killed_do_not_show_in_the_bits(
    trireme, tmp_path: Path, killed: tuple[str, str]
) -> None:
    script = write_script(tmp_path, model=MODEL, loss=LOSS, config=CONFIG.replace("lanes=4", "lanes=1"))
    user = load(script)
    plain = run(user, plain_spec(user, {"epochs": EPOCHS})).model.state_dict()
    (tmp_path / "slow").touch()
    servers = killed[0].startswith("pserver")
    strategy = ("--pservers", 2) if servers else ("--strategy", "collective")
    arguments = ("--epochs", EPOCHS, "--trainers", 2, "--set", "checkpoint_every_steps=7", "--no-check")
    process = trireme.begin("run", script, *arguments, *strategy, "--json")
    wait_for(process, "^trainer-[01] joined")
    for name, step in zip(killed, (15, 24), strict=True):
        wait_for_step(trireme, step)
        done = trireme.run("chaos", "kill", name, "--json")
        assert done.code == 0, done.err
    (tmp_path / "slow").unlink()
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert not servers or "rolled back to step" in done.err
    report = json.loads(done.out)
    assert report["restarts"] == dict.fromkeys(killed, 1), done.err
    values = torch.load(report["exports"]["state_dict"], weights_only=True)
    assert [name for name, value in plain.items() if not torch.equal(value, values[name])] == []
