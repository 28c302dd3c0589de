"""Records that make backward raise after part of a lane's gradient was pushed: no step may mix them with what
replaces them.

The task is tried again, discarded, and the lane goes on with its next task, in the same step. Blocks that had
been given the discarded data keep it, the others would get the replacement's: such a step must never be
trained on.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import TorchCluster
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.loops.sync import StepRepair
from trireme_shared.protocol.records import Phase
from trireme_shared.serving.core.history import History
from trireme_shared.serving.pserver import Pserver

POISON = 24  # a record of task 6, which is lane 0's in step 3
MODEL = """
import time


class Poisonous(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, x):
        ctx.poisoned = bool((x[:, 0] == POISON).any())
        if ctx.poisoned and WHERE == "forward":
            raise ValueError("poisoned record")
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.poisoned:
            time.sleep(0.1)  # what comes after this layer is final and on its way meanwhile
            raise ValueError("poisoned record")
        return gradient, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(5, 24)
        self.above = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.above(Poisonous.apply(torch.tanh(self.below(x)), x))


def model():
    return Model()
"""


@pytest.fixture(autouse=True)
def blocks_travel_at_once(monkeypatch):
    """As those of a large model do: little ones wait for company otherwise."""
    monkeypatch.setattr("trainer_agent.model.gradient_tree.TOLD_BYTES", 1)


class RestoringCluster(TorchCluster):
    """With parameter servers that write checkpoints and follow rollbacks."""

    async def start(self, group):
        self.pservers = []
        await super().start(group)
        for number in range(self.spec.pservers):
            pserver = Pserver(self.spec.job, f"pserver-{number}-x")
            etcd = self.etcd_of(f"pserver-{number}")
            process = self.make_pserver(pserver, "", etcd, self.offload, self.directory)
            self._background.append(group.create_task(process.member.run(20.0, 0.0)))
            while pserver.index < 0:
                await asyncio.sleep(0.01)
            self.pservers.append(pserver)


@asynccontextmanager
async def job_of(tmp_path, where, trainers=2, **settings):
    folder = tmp_path / where
    folder.mkdir()
    head = f"WHERE, POISON = {where!r}, torch.load({str(folder / 'poison.pt')!r}).item()\n"
    script = write_script(folder, name=f"script_{where}", setting=head, model=MODEL)
    x = torch.from_numpy(__import__("numpy").load(folder / "x.npy"))
    torch.save(x[POISON, 0], folder / "poison.pt")
    common = {
        "lanes": 2,
        "pservers": 2,
        "records_per_task": 4,
        "shuffle": False,
        "max_discarded_fraction": 0.5,
        "max_user_failures": 99,
        "checkpoint_every_steps": 1,
        "stragglers": "off",  # who helps depends on the machine
    }
    spec = spec_for(script, **{**common, **settings})
    async with asyncio.TaskGroup() as group:
        job = RestoringCluster(spec)
        await job.start(group)
        try:
            for number in range(trainers):
                job.add_trainer(f"trainer-{number}-x")
            yield job
        finally:
            await job.stop()


async def trained(tmp_path, where, **settings):
    """(values, events, the discarded) of a job that was completed."""
    async with job_of(tmp_path, where, **settings) as job:
        state = await job.ended()
        assert state.phase is Phase.COMPLETED, state
        discarded = (state.result.discarded_tasks, state.result.discarded_records)
        return job.exported(), [event.name for event in job.master.events.after(0, 1000)], discarded


async def test_a_task_that_fails_before_anything_of_it_is_pushed_costs_no_roll_back(tmp_path):
    _, events, discarded = await trained(tmp_path, "forward")
    assert "rolling_back" not in events
    assert discarded == (2, 8)


async def test_a_step_that_holds_a_part_of_a_discarded_task_is_gone_back_behind(tmp_path):
    clean, _, discarded = await trained(tmp_path, "forward")
    values, events, discarded_here = await trained(tmp_path, "backward")
    assert events.count("rolled_back") == 2, "once in each epoch"
    assert discarded_here == discarded
    assert differing(clean, values) == []


async def test_without_the_claim_the_step_is_torn(tmp_path):
    clean, _, _ = await trained(tmp_path, "forward")

    async def claims_nothing(*_):
        return None

    with replaced(StepRepair, "claim", claims_nothing), replaced(History, "agrees", lambda *_: True):
        values, events, _ = await trained(tmp_path, "backward")
    assert "rolling_back" not in events
    assert differing(clean, values) != []
