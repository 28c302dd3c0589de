"""Parameters of a checkpoint are evaluated between two minibatches: the gradients after it are the same to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.trainer_agent.scripts import records
from trainer_agent.model.buffers import LiveBuffers
from trainer_agent.model.torch_compute import TorchCompute

PINNED = 0.5
MODEL = """
def model():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
"""


async def bits(compute, evaluate: bool) -> list[bytes]:
    """Of the contributions of two minibatches, with or without others' values evaluated between them."""
    found = []
    for step in range(2):
        await compute.gradient((0, 1), 0, step, records(4), lambda block: None)
        found += [bytes(compute.contribution((0, 1), block)) for block in range(len(compute.plan.blocks))]
        compute.forget_nodes()
        if evaluate:
            for block in range(len(compute.plan.blocks)):
                compute.pinned(block)[:] = bytes(
                    torch.full((len(compute.pinned(block)) // 4,), PINNED).numpy().data.cast("B")
                )
            await compute.evaluate(records(4), 7, pinned=True)
    return found


async def test_gradients_do_not_depend_on_evaluations_between_them(build):
    assert await bits(build(model=MODEL), False) == await bits(build(model=MODEL), True)


@pytest.mark.parametrize("left_out", ["parameters", "buffers", "mode"])
async def test_each_part_that_is_set_again_is_needed(build, left_out):
    load, train = LiveBuffers.load, torch.nn.Module.train
    one, other = build(model=MODEL), build(model=MODEL)

    def load_evaluated(self, vector):
        if vector.segments[0][0] == PINNED:
            load(self, vector)

    ablations = {
        "parameters": replaced(TorchCompute, "use_current", lambda self: None),
        "buffers": replaced(LiveBuffers, "load", load_evaluated),
        "mode": replaced(torch.nn.Module, "train", lambda self, mode=True: self if mode else train(self, mode)),
    }
    with ablations[left_out]:
        assert await bits(one, False) != await bits(other, True)
