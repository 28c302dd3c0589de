"""Embedding tables in a loop of one's own: rows have the bits of the same script with functions, under
trainers and under plain Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.equipment.cluster import direct_ports
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.own_loop.source import run_as_main
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.user_module import LoopModule, load
from trainer_agent.tables.files import write_tables
from trireme import plain
from trireme_shared.protocol.records import Phase

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            adam = trireme.nn.Adam(lr=0.05, follow_schedule=True)
            self.user = trireme.nn.Embedding("user", 4, optimizer=adam, init="uniform(0.1)")
            self.tags = trireme.nn.EmbeddingBag("tag", 3, mode="mean", optimizer=trireme.nn.Adagrad(lr=0.1))
            self.deep = nn.Sequential(nn.Linear(4 + 3 + 5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

        def forward(self, x):
            ids = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(ids[:, 0] * 10**15), self.tags(ids[:, 1:4]), x], 1))
"""
WARM_UP = "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)"
LOOP = {
    "model": MODEL
    + """
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = trireme.data.Npy({folder!r} + "/x.npy", {folder!r} + "/y.npy", aligned=True)
    """,
    "prepare": f"""
    scheduler = {WARM_UP}
    model, optimizer, batches = trireme.prepare(model, optimizer, dataset, scheduler=scheduler)
    """,
    "after": "",
}
IDS = """
    def ids(batch):
        found = (batch["x"] * 4).floor().long()
        return {"user": found[:, 0] * 10**15, "tag": found[:, 1:4]}
"""
FUNCTIONS = {
    "model": MODEL + "\n    def model():\n        return Model()\n",
    "scheduler": f"def scheduler(optimizer):\n    return {WARM_UP}\n",
}


async def trained(spec, trainers: int = 1, *, kill: bool = False):
    """The exported model, and the files of tables."""
    async with cluster(spec, trainers) as job:
        if kill:
            await job.version(3)
            await job.kill("trainer-0-x")
        state = await job.ended()
        assert state.phase is Phase.COMPLETED, state
        exports = state.result.exports
        return job.exported(), {name: Path(exports[f"table {name}"]).read_bytes() for name in ("user", "tag")}


async def test_the_bits_are_those_of_functions_whoever_computes_and_who_dies(tmp_path):
    four = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "pservers": 2}
    loop, functions = write_loop(tmp_path, **LOOP), write_script(tmp_path, **FUNCTIONS)
    expected = await trained(spec_for(functions, **four, storage=str(tmp_path / "functions")))
    for trainers, kill in ((1, False), (2, True)):
        storage = str(tmp_path / f"loop-{trainers}")
        found = await trained(spec_for(loop, **four, storage=storage), trainers, kill=kill)
        assert differing(found[0], expected[0]) == []
        assert found[1] == expected[1]


async def test_a_scaled_loss_does_not_scale_the_gradients_of_rows(tmp_path):
    scaled = """
        scaler = torch.amp.GradScaler("cpu")
        for batch in batches:
            optimizer.zero_grad()
            trireme.backward(scaler.scale(F.cross_entropy(model(batch["x"]), batch["y"])))
            scaler.step(optimizer)
            scaler.update()
    """
    plain_loop, scaling = (
        write_loop(tmp_path, **LOOP),
        write_loop(tmp_path, "scaled", **LOOP | {"loop": scaled}),
    )
    expected = await trained(spec_for(plain_loop, storage=str(tmp_path / "plain")))
    found = await trained(spec_for(scaling, storage=str(tmp_path / "scaled")))
    assert differing(found[0], expected[0]) == []
    assert found[1] == expected[1]
    user = LoopModule(scaling, script=partial(run_as_main, scaling))
    torch.manual_seed(7)
    alone = plain.run(user, spec_for(scaling))
    user.loop.close()
    write_tables(alone.tables.stored(), str(tmp_path))
    assert found[1] == {name: (tmp_path / "tables" / f"{name}.safetensors").read_bytes() for name in found[1]}


async def test_one_lane_has_the_bits_of_plain_python(tmp_path, monkeypatch):
    """Its rows come in one request for both tables of a minibatch."""
    requests, whole = [], direct_ports.lookup

    async def counted(pserver, request, payload):
        requests.append(request.rows)
        return await whole(pserver, request, payload)

    monkeypatch.setattr(direct_ports, "lookup", counted)
    named = LOOP | {
        "prepare": IDS + LOOP["prepare"].replace("scheduler=scheduler", "scheduler=scheduler, ids=ids")
    }
    loop, functions = write_loop(tmp_path, **named), write_script(tmp_path, **FUNCTIONS)
    spec = spec_for(loop, storage=str(tmp_path / "loop"))
    _, tables = await trained(spec)
    assert len(requests) == 2 * 8
    assert all(all(counts) for counts in requests)
    alone = plain.run(load(functions), spec_for(functions))
    write_tables(alone.tables.stored(), str(tmp_path))
    assert tables == {name: (tmp_path / "tables" / f"{name}.safetensors").read_bytes() for name in tables}


def test_the_script_is_tried_before_a_job_begins(tmp_path, capsys):
    assert inspect_script(str(write_loop(tmp_path, **LOOP)), check=True, settings=[]) == 0, (
        capsys.readouterr()
    )
