"""Where blocks and parameters end shows in no bit: 16-bit models and fused kernels train as in plain PyTorch,
with either strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer_agent import cluster
from tests.trainer_agent.collective import cluster as collective
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.protocol.records import Strategy

HALF = """
    class Half(nn.Sequential):
        def forward(self, x):
            return super().forward(x.{dtype}()).float()

    def model():
        return Half(nn.Linear(5, 23), nn.ReLU(), nn.Linear(23, 37), nn.Tanh(), nn.Linear(37, 3)).{dtype}()
"""
SMALL = {"block_bytes": 256, "epochs": 2}


def optimizer(text: str) -> str:
    return f"def optimizer(model):\n    return torch.optim.{text}\n"


CASES = [
    ("bfloat16", "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)"),
    ("bfloat16", "RMSprop(model.parameters(), lr=0.01, momentum=0.9)"),
    ("half", "SGD(model.parameters(), lr=0.1)"),
    ("float", "AdamW(model.parameters(), lr=0.01, fused=True)"),
    ("float", "SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"),
]


@pytest.mark.parametrize(("dtype", "text"), CASES)
async def test_one_lane_has_the_bits_of_plain_pytorch(tmp_path: Any, dtype: str, text: str) -> None:
    script = write_script(tmp_path, model=HALF.format(dtype=dtype), optimizer=optimizer(text))
    spec = spec_for(script, pservers=3, **SMALL)
    plain = train_plainly(script, spec)
    assert differing(await cluster.trained(spec), plain) == []
    assert differing(dict(run(load(script), spec).model.state_dict()), plain) == []
    ring = spec_for(script, strategy=Strategy.COLLECTIVE, pservers=0, **SMALL, storage=str(tmp_path / "ring"))
    assert differing(await collective.trained(ring, 2), plain) == []


async def test_16_bit_models_have_the_same_bits_with_any_number_of_members(tmp_path: Any) -> None:
    script = write_script(tmp_path, model=HALF.format(dtype="bfloat16"), optimizer=optimizer(CASES[0][1]))
    values = {**SMALL, "lanes": 4, "global_batch_size": 12, "records_per_task": 6}
    alone = await cluster.trained(spec_for(script, **values, storage=str(tmp_path / "alone")))
    assert {value.dtype for value in alone.values()} == {torch.bfloat16}
    many = spec_for(script, **values, pservers=3, storage=str(tmp_path / "many"))
    assert differing(await cluster.trained(many, 3), alone) == []
    ring = spec_for(
        script, **values, strategy=Strategy.COLLECTIVE, pservers=0, storage=str(tmp_path / "ring")
    )
    assert differing(await collective.trained(ring, 3), alone) == []
