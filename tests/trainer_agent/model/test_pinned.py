"""Parameters of a checkpoint are evaluated between two minibatches: the gradients after it are the same to
the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.equipment.replaced import replaced
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.model.flat import LiveBuffers
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.tables.files import StoredTable
from trainer_agent.tables.local import LocalTables

PINNED = 0.5
TABLE = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = trireme.nn.Embedding("item", 3)
            self.deep = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.deep(self.item((x[:, 0] > 0).long()))

    def model():
        return Model()
"""
MODEL = """
def model():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
"""


async def bits(compute, evaluate: bool) -> list[bytes]:
    """Of the contributions of two minibatches, with or without others' values evaluated between them."""
    found = []
    for step in range(2):
        await compute.gradient((0, 1), 0, step, records(4), DoneBlocks())
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


@pytest.mark.parametrize("left_out", ["parameters", "buffers"])
async def test_each_part_that_is_set_again_is_needed(build, left_out):
    load = LiveBuffers.load
    one, other = build(model=MODEL), build(model=MODEL)

    def load_evaluated(self, vector):
        if vector.segments[0][0] == PINNED:
            load(self, vector)

    ablations = {
        "parameters": replaced(TorchCompute, "use_current", lambda self: None),
        "buffers": replaced(LiveBuffers, "load", load_evaluated),
    }
    with ablations[left_out]:
        assert await bits(one, False) != await bits(other, True)


async def test_modes_are_put_back_after_an_evaluation(build):
    compute = build(model=MODEL)
    compute.minibatch.modes.set_training = bool  # as in a loop of one's own, which sets them itself
    compute.model[2].eval()
    await bits(compute, True)
    assert [module.training for module in compute.model.modules()] == [True, True, True, False, True]


async def test_rows_are_those_that_were_pinned_and_training_goes_on_with_its_own(build):
    """The loss of a model whose rows and parameters are all 1 is that of equal classes, whatever the servers
    have."""
    compute, reference = build(model=TABLE), build(model=TABLE)
    (spec,) = compute.layout.tables
    found = []
    for each in (compute, reference):
        each.read_rows(LocalTables([spec], 1024).rows)
        for step in range(2):
            await each.gradient((0, 1), 0, step, records(4), DoneBlocks())
            found += [each.lane_rows()[0].gradients.tobytes()]
            each.forget_nodes()
            if each is compute:
                for block in range(len(compute.plan.blocks)):
                    compute.pinned(block)[:] = bytes(
                        torch.ones(len(compute.pinned(block)) // 4).numpy().data.cast("B")
                    )
                compute.pin_rows([StoredTable(spec, 5, np.array([0, 1]), np.ones((2, 3), np.float32))])
                assert (await compute.evaluate(records(4), 7, pinned=True))["loss"] == pytest.approx(
                    4 * np.log(3)
                )
    assert found[:2] == found[2:]
