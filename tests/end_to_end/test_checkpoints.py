"""Checkpoints of a real job: verified and exported without it; the export is the trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.scripts import write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_a_jobs_checkpoints_are_good_and_the_last_one_is_the_trained_model(trireme, tmp_path):
    script = write_script(tmp_path)
    settings = ("--set", "checkpoint_every_steps=4", "--set", "keep_checkpoints=3")
    done = trireme.run("run", script, "--trainers", 1, "--pservers", 2, "--json", *settings)
    assert done.code == 0, done.err

    verified = trireme.run("checkpoint", "verify", "--json")
    assert verified.code == 0, verified.out
    answer = json.loads(verified.out)
    steps = [row["step"] for row in answer["checkpoints"]]
    assert 1 <= len(steps) <= 3
    assert set(steps) <= {0, 4, 6, 8, 12}
    folder = Path(answer["storage"]) / "checkpoints"
    assert {path.name for path in folder.iterdir()} >= {row["checkpoint"] for row in answer["checkpoints"]}

    exported = trireme.run("export", "--out", tmp_path / "out", "--json")
    assert exported.code == 0, exported.err
    answer = json.loads(exported.out)
    values = load_file(answer["exports"]["safetensors"])
    again = torch.load(answer["exports"]["state_dict"], weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    if answer["step"] == 12:  # the last version is due; the job may end before it is committed
        final = load_file(json.loads(done.out)["exports"]["safetensors"])
        assert values.keys() == final.keys()
        assert all(torch.equal(values[name], value) for name, value in final.items())
