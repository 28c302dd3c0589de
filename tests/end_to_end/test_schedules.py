"""A plateau, Lion and bf16 with real processes: a trainer and a parameter server are killed, and the model is
that of `python script.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.end_to_end.command import wait_for, wait_for_step
from tests.end_to_end.scripts import EVALUATION, RECORDS, SLOWABLE_LOSS, write_script
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EPOCHS = 6
SETTINGS = {"evaluate_every": 5, "plateau_metric": "mse", "precision": "bf16", "checkpoint_every_steps": 7}
LION = """
def optimizer(model):
    return trireme.optim.Lion(model.parameters(), lr=0.01, weight_decay=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.2)
"""


@pytest.mark.soak
def test_one_lane_under_kills_and_a_rollback_is_the_model_of_plain_python(trireme, tmp_path):
    script = write_script(tmp_path, optimizer=LION, loss=SLOWABLE_LOSS, evaluation=EVALUATION)
    user = load(script)
    plain = run(
        user, plain_spec(user, {"epochs": EPOCHS}, [f"{name}={value}" for name, value in SETTINGS.items()])
    )
    assert plain.optimizer.param_groups[0]["lr"] < 0.01 * 0.7**2
    (tmp_path / "slow").touch()
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    process = trireme.begin(
        "run",
        script,
        "--epochs",
        EPOCHS,
        "--trainers",
        2,
        "--pservers",
        2,
        "--set",
        "lanes=1",
        *settings,
        "--json",
    )
    wait_for(process, "^trainer-[01] joined")
    wait_for_step(trireme, 16)
    receipts: list[dict[str, Any]] = []
    for victim in ("trainer-0", "pserver-1"):
        killed = trireme.run("chaos", "kill", victim, "--json")
        assert killed.code == 0, killed.err
        receipts.append(json.loads(killed.out))
    (tmp_path / "slow").unlink()
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert receipts[1]["rolled_back_to"] > 0
    report = json.loads(done.out)
    assert (report["records"], report["metrics"]) == (EPOCHS * RECORDS, plain.metrics)
    found = torch.load(report["exports"]["state_dict"], weights_only=True)
    for name, values in plain.model.state_dict().items():
        assert torch.equal(found[name], values), name
