"""A job that starts with what another one has learned: parameters, optimizer and scheduler of a checkpoint,
wherever they are stored."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import fsspec
import pytest
import torch

from tests.end_to_end.cluster_command import answered, good, job_when, up
from tests.end_to_end.command import Command, wait_for, wait_for_step
from tests.end_to_end.local_cluster import same_bits
from tests.end_to_end.scripts import EVALUATION, OPTIMIZER, SLOWABLE_LOSS, write_script
from tests.equipment.s3 import S3Server, s3
from trainer_agent.script.user_module import load
from trainer_agent.tables.files import read_table
from trireme import plain
from trireme_shared.platform.storage import files

__all__ = ["s3"]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
CONFIG = """
config = trireme.Config(
    epochs=2, global_batch_size=32, lanes=1, seed=3, records_per_task=16, block_bytes=256, trainers=1,
    pservers=1, checkpoint_every_steps=6, keep_checkpoints=3,
)
"""
SCHEDULER = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
"""
EPOCHS = 10
TAKES_ALL = ("--init-from", "script@24", "--init-optimizer")


TABLES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = trireme.nn.Embedding("user", 64, optimizer=trireme.nn.Adam(lr=0.05))
        self.item = trireme.nn.Embedding("item", 4, optimizer=trireme.nn.Ftrl(lr=0.1), max_rows=1024)
        self.deep = nn.Linear(64 + 4 + 8, 1)

    def forward(self, x):
        user, item = self.user((x[:, 0] * 1e6).long()), self.item((x[:, 1] * 50).long())
        return self.deep(torch.cat([user, item, x], 1))


def model():
    return Model()
"""


def begun(trireme: Command, folder: Path, *arguments: object) -> Path:
    script = write_script(
        folder, config=CONFIG, loss=SLOWABLE_LOSS, optimizer=OPTIMIZER + SCHEDULER, evaluation=EVALUATION
    )
    done = trireme.run("run", script, *arguments)
    assert done.code == 0, done.err
    return script


def alone(script: Path, file: Path, epochs: int) -> dict[str, torch.Tensor]:
    user = load(str(script))
    settings = {"init_from": str(file), "init_optimizer": True, "epochs": epochs}
    return dict(plain.run(user, plain.plain_spec(user, settings)).model.state_dict())


@pytest.mark.soak
def test_on_s3_killed_and_started_again_it_has_the_bits_of_plain_training_with_that_state(
    trireme, tmp_path, s3: S3Server
):
    place = ("--storage", "s3://bucket/runs")
    script = begun(trireme, tmp_path, *place)
    (tmp_path / "slow").touch()
    command = ("run", script, "--job", "tuned", *TAKES_ALL, *place, "--epochs", EPOCHS, "--json")
    process = trireme.begin(*command)
    wait_for_step(trireme, 7, job="tuned")
    for member in trireme.family():
        member.send_signal(signal.SIGKILL)
    trireme.end_of(process)
    (tmp_path / "slow").unlink()
    again = trireme.begin(*command)
    wait_for(again, "job tuned is unfinished: it resumes$")
    wait_for(again, r"rolled back to step \d+")
    result = good(trireme.end_of(again))
    spec = json.loads((tmp_path / ".trireme" / "tuned" / "spec.json").read_text())
    assert spec["init_from"].startswith("s3://bucket/runs/script/run-")
    assert spec["init_from"].endswith("/training.pt")
    copy = tmp_path / "training.pt"
    with fsspec.open(spec["init_from"], endpoint_url=s3.endpoint) as file:
        copy.write_bytes(file.read())
    with fsspec.open(result["exports"]["state_dict"], endpoint_url=s3.endpoint) as file:
        values = torch.load(file, weights_only=True)
    assert same_bits(values, alone(script, copy, EPOCHS))
    assert torch.load(copy, weights_only=True)["optimizer"]["state"][0]["step"] == 24
    wrong = trireme.run(*command[:4], "--init-from", "script@7", "--init-optimizer", *place)
    assert (wrong.code, "job script has no checkpoint 7 in s3://bucket" in wrong.err) == (3, True), wrong.err
    files.remove_tree(s3.url)


def test_a_job_of_a_cluster_takes_the_state_of_another_one(trireme, tmp_path):
    script = write_script(tmp_path, config=CONFIG, optimizer=OPTIMIZER + SCHEDULER)
    with up(trireme, "--trainers", 1, "--pservers", 1):
        good(answered(trireme, "submit", script, "--name", "script", "--json"))
        job_when(trireme, "script", lambda job: job["phase"] == "COMPLETED")
        good(answered(trireme, "submit", script, "--name", "tuned", *TAKES_ALL, "--json"))
        job = job_when(trireme, "tuned", lambda job: job["phase"] == "COMPLETED")
        file = Path(job["settings"]["init_from"])
        values = torch.load(job["result"]["exports"]["state_dict"], weights_only=True)
    assert file.name == "training.pt"
    assert same_bits(values, alone(script, file, 2))


@pytest.mark.soak
@pytest.mark.parametrize("options", [("--init-optimizer",), ()])
def test_rows_of_a_base_and_deltas_start_a_job_with_more_parameter_servers(trireme, tmp_path, options):
    """To the bits of plain training with the same files."""
    script = write_script(tmp_path, config=CONFIG, loss=SLOWABLE_LOSS, model=TABLES)
    (tmp_path / "slow").touch()
    often = ("--set", "checkpoint_every_steps=1", "--set", "deltas_per_base=100", "--epochs", 6)
    done = trireme.run("run", script, "--pservers", 2, *often)
    assert done.code == 0, done.err
    (tmp_path / "slow").unlink()
    found = json.loads(trireme.run("checkpoint", "list", "--json").out)["checkpoints"]
    step = next(one["step"] for one in found if one["kind"] == "delta")
    started = ("run", script, "--job", "tuned", "--init-from", f"script@{step}", *options, "--pservers", 3)
    assert trireme.run(*started).code == 0
    folder = tmp_path / ".trireme" / "tuned"
    settings = {
        "init_from": json.loads((folder / "spec.json").read_text())["init_from"],
        "init_optimizer": bool(options),
    }
    user = load(str(script))
    alone = plain.run(user, plain.plain_spec(user, settings))
    assert same_bits(
        torch.load(folder / "export" / "model.pt", weights_only=True), dict(alone.model.state_dict())
    )
    for table in alone.tables.stored():
        job = read_table(str(folder / "export" / "tables" / f"{table.spec.name}.safetensors"))
        assert (job.ids.tobytes(), job.values.tobytes()) == (table.ids.tobytes(), table.values.tobytes())
