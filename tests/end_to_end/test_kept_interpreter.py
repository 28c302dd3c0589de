"""Code of the user that keeps Python's interpreter for longer than the lease: in dataset(), and while records
are read."""

from __future__ import annotations

import pytest

from tests.end_to_end.local_cluster import cluster_of
from trireme.view.child_events import read_events
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.datasets import MapStyle

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TTL_S, KEPT_S = 2.0, 6
SCRIPT = """
import ctypes
import torch, trireme
from torch.nn import functional as F

def keep(): ctypes.PyDLL(None).sleep({kept_s})  # a call of C that does not release the interpreter

class Points(torch.utils.data.Dataset):
    def __init__(self): keep()
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 40: keep()
        return {{"x": torch.tensor([i / 64.0]), "y": torch.tensor([i / 32.0])}}

def dataset(): return trireme.data.MapStyle("kept:Points", records=64)
def model(): return torch.nn.Linear(1, 1)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
def loss(model, batch): return F.mse_loss(model(batch["x"]), batch["y"])
"""


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("collective", marks=pytest.mark.soak)])
async def test_no_lease_is_lost_and_nobody_is_started_again(tmp_path, strategy):
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "kept.py").write_text(SCRIPT.format(kept_s=KEPT_S))
    spec = JobSpec(
        job="kept",
        script=str(folder / "kept.py"),
        dataset=MapStyle("kept:Points", records=64),
        storage=str(tmp_path / "run"),
        strategy=strategy,
        pservers=int(strategy == "parameter_server"),
        trainers=2,
        global_batch_size=8,
        lanes=2,
        records_per_task=16,
        shuffle=False,
        lease_ttl_s=TTL_S,
    )
    async with cluster_of(spec, tmp_path) as cluster:
        state = await cluster.wait(180)
        happened = read_events(tmp_path / "run")
    assert state.phase is Phase.COMPLETED, state.reason
    assert {event["what"] for event in happened} <= {"started", "finished", "held_up"}
    assert any(event["what"] == "held_up" for event in happened)
