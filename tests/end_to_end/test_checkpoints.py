"""Checkpoints of a real job: they are listed, verified and exported without it; the export is the trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.scripts import write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_checkpoints_are_listed_verified_and_exported(trireme, tmp_path):
    script = write_script(tmp_path)
    settings = ("--set", "checkpoint_every_steps=4", "--set", "keep_checkpoints=3")
    done = trireme.run("run", script, "--trainers", 1, "--pservers", 2, "--json", *settings)
    assert done.code == 0, done.err
    exports = json.loads(done.out)["exports"]

    listed = json.loads(trireme.run("checkpoint", "list", "--json").out)
    steps = [row["step"] for row in listed["checkpoints"]]
    assert 1 <= len(steps) <= 3
    assert steps == sorted(steps, reverse=True)
    assert all(row["pservers"] == 2 for row in listed["checkpoints"])
    folder = Path(listed["storage"]) / "checkpoints"
    assert {path.name for path in folder.iterdir()} >= {row["checkpoint"] for row in listed["checkpoints"]}

    verified = trireme.run("checkpoint", "verify", "--json")
    assert verified.code == 0
    assert [row["damage"] for row in json.loads(verified.out)["checkpoints"]] == [None] * len(steps)

    exported = trireme.run("export", str(steps[0]), "--out", tmp_path / "out", "--json")
    assert exported.code == 0, exported.err
    values = load_file(json.loads(exported.out)["exports"]["safetensors"])
    again = torch.load(json.loads(exported.out)["exports"]["state_dict"], weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    if steps[0] == 12:  # the last version is due; the job may end before it is committed
        final = load_file(exports["safetensors"])
        assert values.keys() == final.keys()
        assert all(torch.equal(values[name], value) for name, value in final.items())

    damaged = next((folder / listed["checkpoints"][0]["checkpoint"]).glob("pserver-0.*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    verified = trireme.run("checkpoint", "verify")
    assert verified.code == 1
    assert "were written" in verified.out
    refused = trireme.run("export", str(steps[0]))
    assert refused.code != 0
    assert "cannot be used" in refused.err
    assert trireme.run("export", "99").code == 3

    changed = script.read_text(encoding="utf-8").replace("nn.Linear(16, 1)", "nn.Linear(16, 1, bias=False)")
    script.write_text(changed, encoding="utf-8")
    refused = trireme.run("export", str(steps[-1]))
    assert "this trainer's model is not the job's" in refused.err or len(steps) == 1
