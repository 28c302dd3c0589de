"""What forward may not change is noticed, and what it may change is left alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time

import pytest
import torch

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records, spec_for, write_script
from trainer_agent.model.watch.unshared_state import LOOK_EVERY, digest
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import Phase

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 5, max_norm=MAX_NORM)
        self.body = nn.Linear(5, 3)
        self.teacher = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("allowed", torch.ones(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        CHANGE
        return self.body(x + self.table(torch.arange(5).remainder(9))[0])

def model():
    return Model()
"""
CHANGES = {
    "self.teacher.weight.mul_(0.9)": "parameter teacher.weight, which is not trained",
    "self.teacher.weight.data = self.body.weight.detach() * 0.5": (
        "parameter teacher.weight, which is not trained"
    ),
    "self.teacher.bias.data.add_(0.1)": "parameter teacher.bias, which is not trained",
    "self.body.weight.data.clamp_(-0.01, 0.01)": (
        "parameter body.weight; only the optimizer may change parameters"
    ),
    "self.allowed[0] = False": (
        "buffer allowed of torch.bool; trainers share floating-point and int64 buffers only"
    ),
    "self.allowed = torch.zeros(4, dtype=torch.bool)": "buffer allowed of torch.bool",
    "self.count.data.add_(1)": "buffer count of torch.int32",
    "self.count = self.count + 1": "buffer count of torch.int32",
}


def model_that(change, max_norm="None"):
    return MODEL.replace("CHANGE", f"with torch.no_grad():\n            {change}").replace(
        "MAX_NORM", max_norm
    )


async def minibatch(compute, number=0):
    compute.forget_nodes()
    await compute.gradient((0, 1), 0, number, records(4, number), DoneBlocks())


async def test_an_error_that_nobody_waits_for_any_more_is_not_reported(build):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    began = threading.Event()
    CALLED["began"] = began
    slow = (
        "__import__('tests.trainer_agent.model.watch.test_unshared_state', fromlist=['x']).slowly(); "
        "self.teacher.bias.data.add_(0.1)"
    )
    computing = asyncio.ensure_future(minibatch(build(model=model_that(slow))))
    await asyncio.to_thread(began.wait, 60)
    computing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await computing
    del computing
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


CALLED: dict[str, threading.Event] = {}


def slowly() -> None:
    """Called by a script's forward."""
    CALLED["began"].set()
    time.sleep(0.2)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_refused_with_the_name(build, change):
    with pytest.raises(UserCodeError, match=CHANGES[change]) as refused:
        await minibatch(build(model=model_that(change)))
    assert refused.value.details["fatal"]


async def test_an_embedding_with_max_norm_is_refused(build):
    with pytest.raises(UserCodeError, match=r"parameter table\.weight; .* with max_norm: leave that out"):
        await minibatch(build(model=model_that("pass", max_norm="0.1")))


@pytest.mark.parametrize(
    "change",
    [
        "pass",
        "self.steps += 1; self.mean.mul_(0.5).add_(1); self.mean = self.mean + 1",
        "self.allowed = torch.ones(3, dtype=torch.bool)",
        "self.count.zero_()",
        "torch.nn.functional.dropout(self.teacher(x), 0.5)",
    ],
)
async def test_what_is_shared_or_stays_equal_may_be_written(build, change):
    compute = build(model=model_that(change))
    for number in range(LOOK_EVERY + 2):
        await minibatch(compute, number)


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [("[model.body.weight, model.body.bias, model.table.weight]", LOOK_EVERY), ("model.parameters()", 10)],
)
async def test_a_late_change_through_data_is_noticed_at_the_next_look(build, optimizer, number):
    """Of a parameter that the optimizer holds, in any minibatch, though it is frozen."""
    compute = build(
        model=model_that("self.calls > 10 and self.teacher.bias.data.add_(0.1)"),
        optimizer=f"def optimizer(model):\n    return torch.optim.SGD({optimizer}, lr=0.1)\n",
    )
    for before in range(number):
        await minibatch(compute, before)
    with pytest.raises(UserCodeError, match=r"parameter teacher\.bias"):
        await minibatch(compute, number)


async def test_the_job_fails_at_once(tmp_path):
    script = write_script(tmp_path, model=model_that("self.calls > 2 and self.teacher.bias.add_(0.1)"))
    async with cluster(spec_for(script, lanes=2), 2) as made:
        state = await made.ended()
    assert state.phase is Phase.FAILED
    assert state.failure.error_type == "RuntimeError"
    assert "teacher.bias" in state.reason
    assert torch.isfinite(made.pservers[0].store.blocks[0].current.tensor).all()


@pytest.mark.parametrize("shape", [(4,), (5,), (3, 4), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_value_is_in_the_digest(shape, dtype):
    values = (
        torch.arange(1, 16)
        .view(3, 5)[: shape[0]]
        .flatten()[: torch.Size(shape).numel()]
        .view(shape)
        .to(dtype)
    )
    if len(shape) == 2:
        values = values[:, ::2]
    for stored in (
        values.clone(),
        values.t().contiguous().t(),
        values.repeat(2, *[1] * (len(shape) - 1))[::2],
    ):
        before = int(digest(stored))
        for place in itertools.product(*map(range, stored.shape)):
            stored[place] += 1
            assert int(digest(stored)) != before
            stored[place] -= 1
        assert int(digest(stored)) == before
