"""A run whose storage is S3: a killed parameter server's job goes back to a checkpoint there."""

from __future__ import annotations

import json

import fsspec
import pytest
import torch

from tests.end_to_end.command import wait_for, wait_for_step
from tests.end_to_end.scripts import EVALUATION, RECORDS, SLOWABLE_LOSS, write_script
from tests.equipment.s3 import S3Server, s3
from trireme_shared.platform.storage import files

__all__ = ["s3"]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
EPOCHS = 8
# nearly a minute until the job is over, for a busy machine to break it
LOSS = SLOWABLE_LOSS.replace("0.1", "0.3")


def test_a_job_on_s3_survives_its_pserver_and_exports_there(trireme, tmp_path, s3: S3Server):
    (tmp_path / "slow").touch()
    script = write_script(tmp_path, loss=LOSS, evaluation=EVALUATION)
    settings = (
        "--epochs",
        EPOCHS,
        "--trainers",
        1,
        "--pservers",
        2,
        "--set",
        "checkpoint_every_steps=3",
        "--no-check",
    )
    process = trireme.begin("run", script, *settings, "--storage", "s3://bucket/runs", "--json")
    wait_for(process, "^trainer-[01] joined")
    wait_for_step(trireme, 7)
    killed = trireme.run("chaos", "kill", "pserver-1", "--json")
    assert killed.code == 0, killed.err
    (tmp_path / "slow").unlink()
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert "rolled back to step" in done.err
    result = json.loads(done.out)
    assert result["records"] == EPOCHS * RECORDS
    with fsspec.open(result["exports"]["state_dict"], endpoint_url=s3.endpoint) as file:
        values = torch.load(file, weights_only=True)
    assert values["0.weight"].shape == (16, 8)
    verified = trireme.run("checkpoint", "verify", "--json")
    assert verified.code == 0, verified.err
    answer = json.loads(verified.out)
    assert answer["storage"].startswith("s3://bucket/runs/script/run-")
    assert len(answer["checkpoints"]) >= 1
    assert s3.uploads() == []
    assert all(key.startswith("runs/script/run-") for key in s3.objects())
    assert not (tmp_path / ".trireme" / "script" / "checkpoints").exists()
    files.remove_tree(s3.url)
