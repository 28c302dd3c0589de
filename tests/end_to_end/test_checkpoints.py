"""Checkpoints of a real job: verified and exported without it; the export is the trained model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.scripts import write_script
from trainer_agent.script.user_module import load
from trireme import plain

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_a_jobs_checkpoints_are_good_and_an_export_is_the_model_that_plain_pytorch_trains(trireme, tmp_path):
    script = write_script(tmp_path)
    settings = ("--lanes", 1, "--set", "keep_checkpoints=3", "--set", "checkpoint_checksum=md5")
    done = trireme.run("run", script, "--trainers", 1, "--pservers", 2, "--json", *settings)
    assert done.code == 0, done.err

    verified = trireme.run("checkpoint", "verify", "--json")
    assert verified.code == 0, verified.out
    answer = json.loads(verified.out)
    steps = [row["step"] for row in answer["checkpoints"]]
    assert len(steps) > 1
    # both epochs and the beginning; the job may end before the last one is committed
    assert set(steps) <= {0, 12, 24}
    folder = Path(answer["storage"]) / "checkpoints"
    manifest = next(folder.glob("*/manifest-*.json"))
    assert all(part["checksum"].startswith("md5:") for part in json.loads(manifest.read_bytes())["parts"])
    assert {path.name for path in folder.iterdir()} >= {row["checkpoint"] for row in answer["checkpoints"]}

    exported = trireme.run("export", "--out", tmp_path / "out", "--json")
    assert exported.code == 0, exported.err
    answer = json.loads(exported.out)
    assert (answer["step"], answer["checkpoint"]) == (
        steps[0],
        json.loads(verified.out)["checkpoints"][0]["checkpoint"],
    )
    values = torch.load(answer["exports"]["state_dict"], weights_only=True)
    assert all(
        torch.equal(values[name], value)
        for name, value in load_file(answer["exports"]["safetensors"]).items()
    )
    assert_same_model(script, answer["step"] // 12, values)
    if answer["step"] == 24:
        assert_same_model(script, 2, load_file(json.loads(done.out)["exports"]["safetensors"]))


def assert_same_model(script: Path, epochs: int, values: dict[str, torch.Tensor]) -> None:
    """Plain PyTorch loads `values`; the model's output equals that of a model which one process trained for
    as many steps."""
    user = load(str(script))
    reference = plain.run(user, plain.plain_spec(user, {"lanes": 1, "epochs": epochs})).model
    model = user.call("model")
    model.load_state_dict(values)
    batch = torch.from_numpy(np.load(script.parent / "x.npy"))
    with torch.no_grad():
        assert torch.equal(model.eval()(batch), reference.eval()(batch))
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in values.items())
