"""A trainer that joins has the right values of buffers: those that every lane changes, some lanes change, or
none does in a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equipment.replaced import replaced
from tests.trainer_agent.collective.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.collective.state import giving
from trireme_shared.protocol.records import JobSpec, Phase, Strategy

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
        self.register_buffer("seldom", torch.zeros(100))
        self.register_buffer("constant", torch.arange(100.0))
    def forward(self, x):
        if self.training and x[0, 0] > 0.6:
            self.seldom += x.sum()
        return self.body(x) + self.seldom.mean().detach()

def model():
    return Model()
"""
STEPS_BEFORE = 4
A, B, C, D = "trainer-0-x", "trainer-1-x", "trainer-2-x", "trainer-3-x"


def spec_of(tmp_path: Any, folder: str, **given: Any) -> JobSpec:
    common = {
        "strategy": Strategy.COLLECTIVE,
        "pservers": 0,
        "lanes": 4,
        "global_batch_size": 12,
        "block_bytes": 256,
    }
    settings = {"records_per_task": 6, "epochs": 20, "storage": str(tmp_path / folder), **given}
    return spec_for(write_script(tmp_path, model=MODEL), **common, **settings)


@pytest.mark.parametrize("exchange", ["direct", "native"])
async def test_joiners_that_own_the_blocks_of_buffers_go_on_with_their_values(tmp_path, exchange):
    """One trainer of two is replaced, and then the other one: nobody is left that has had them from the
    beginning."""
    undisturbed = await trained(spec_of(tmp_path, "undisturbed"))
    with replaced(giving, "PORTION_BYTES", 1):
        async with cluster(spec_of(tmp_path, "job", exchange=exchange), 2) as made:
            for leaves, comes in ((A, C), (B, D)):
                stores = [share.store for share in made.shares.values() if share.store is not None]
                before = max([store.has for store in stores], default=0)
                await made.version(before + STEPS_BEFORE)
                made.add_trainer(comes)
                await made.directory.wait_for(
                    lambda view, comes=comes: comes in view.trainers, 20.0, f"{comes} joins"
                )
                await made.version(before + 2 * STEPS_BEFORE)
                await made.kill(leaves)
            assert (await made.ended()).phase is Phase.COMPLETED
            found = made.exported()
    assert undisturbed["seldom"].any()
    assert differing(found, undisturbed) == []
