"""Lanes are gradient accumulation: one trainer with several lanes does what plain PyTorch does in several
backwards before a step."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.scripts import differing, lane_batches, spec_for, write_script
from trainer_agent.script.user_module import load

WITHOUT_BATCH_NORM = """
    def model():
        return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
"""
BATCH_SIZE = 5  # of which tasks of 15 records have three whole ones


def accumulate(script, spec, batches_of_a_step) -> dict[str, torch.Tensor]:
    """Plain PyTorch."""
    user = load(script)
    torch.set_num_threads(spec.threads_per_trainer)
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    for batches in lane_batches(script, spec):
        assert [len(batch["y"]) for batch in batches] == [BATCH_SIZE] * batches_of_a_step
        optimizer.zero_grad()
        for batch in batches:
            (user.call("loss", model, batch) / batches_of_a_step).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("accumulated", [2, 4])
async def test_lanes_are_the_minibatches_that_are_accumulated(tmp_path, accumulated):
    script = write_script(tmp_path, model=WITHOUT_BATCH_NORM)
    spec = spec_for(
        script, lanes=accumulated, global_batch_size=BATCH_SIZE * accumulated, records_per_task=15
    )
    ours, plain = await trained(spec), accumulate(script, spec, accumulated)
    if accumulated == 2:
        assert differing(ours, plain) == []
    for name, values in plain.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-5, atol=1e-6)
    if accumulated == 4:
        spread = await trained(spec.model_copy(update={"storage": f"{spec.storage}/spread"}), trainers=4)
        assert differing(spread, ours) == []
