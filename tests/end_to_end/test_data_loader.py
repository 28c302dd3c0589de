"""A script's DataLoader in real processes: `trireme run` trains what plain PyTorch trains, and no death
changes which records an epoch draws by weight."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.end_to_end.local_cluster import (
    cluster_of,
    completed,
    completed_in_spite_of_deaths,
    same_bits,
    spec_of,
)
from tests.end_to_end.scripts import RECORDS, write_script
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records.datasets import MapStyle

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]
LOADED = """
import numpy as np
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def items():
    return TensorDataset(*(torch.from_numpy(np.load(HERE / name)) for name in ("x.npy", "y.npy")))


def dataset():
    return DataLoader(items(), 32, {more}num_workers=2, pin_memory=True)


of_columns = loss


def loss(model, batch):
    x, y = batch
    return of_columns(model, {{"x": x, "y": y}})
"""
WEIGHTED = "sampler=WeightedRandomSampler(1.0 + torch.arange(192) % 3, 192), "
CONFIG = "config = trireme.Config(epochs=2, lanes=1, seed=3, block_bytes=256)"


def plainly_trained(folder: Path) -> dict[str, torch.Tensor]:
    """By the loop that the script had before."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    items = TensorDataset(*(torch.from_numpy(np.load(folder / name)) for name in ("x.npy", "y.npy")))
    for step, (x, y) in enumerate([batch for _ in range(2) for batch in DataLoader(items, 32)]):
        torch.manual_seed(step_seed(3, step, 0))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
    return model.state_dict()


def test_a_run_trains_what_a_loop_over_the_loader_trains(trireme, tmp_path):
    script = write_script(tmp_path, config=CONFIG, evaluation="")
    with script.open("a") as text:
        text.write(LOADED.format(more=""))
    done = trireme.run("run", script, "--trainers", 2, "--pservers", 1, "--json")
    assert done.code == 0, done.err
    assert (
        f"the DataLoader of {script.stem}:dataset decides global_batch_size = 32, shuffle = False" in done.err
    )
    assert "data_workers = 2" in done.err
    assert "not used: pin_memory=True" in done.err
    result = json.loads(done.out)
    assert (result["phase"], result["records"]) == ("COMPLETED", 2 * RECORDS)
    found = torch.load(result["exports"]["state_dict"], weights_only=True)
    assert same_bits(found, plainly_trained(tmp_path))


def weighted_job(folder: Path, **changes):
    folder.mkdir()
    spec = spec_of(folder, **changes)
    with Path(spec.script).open("a") as script:
        script.write(LOADED.format(more=WEIGHTED))
    return spec.with_fields(
        dataset=MapStyle(f"{Path(spec.script).stem}:dataset", records=RECORDS, loader=True),
        evaluation_dataset=None,
    )


async def test_neither_killed_trainers_nor_processes_that_read_change_a_record_that_weights_draw(tmp_path):
    async with cluster_of(
        weighted_job(tmp_path / "calm", trainers=1, pservers=1), tmp_path / "calm"
    ) as cluster:
        undisturbed = await completed(cluster)
    killed = weighted_job(tmp_path / "killed").with_fields(data_workers=2)
    async with cluster_of(killed, tmp_path / "killed") as cluster:
        found = await completed_in_spite_of_deaths(cluster, "trainer-0", "trainer-1")
    assert same_bits(found, undisturbed)
