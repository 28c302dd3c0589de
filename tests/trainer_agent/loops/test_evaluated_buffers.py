"""A model that changes its buffers in evaluation mode, too: each minibatch of an evaluation finds those of
the version, in a job and in one process, and training goes on as if nobody had evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_agent.collective.cluster import cluster
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.script.user_module import load
from trireme.plain import run

MODEL = """
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x):
            {moves}
            return self.layer(x - self.mean)

    def model():
        return Moves()

    def evaluation_dataset():
        return dataset()
"""


@pytest.mark.parametrize(
    "moves", ["self.mean.lerp_(x.mean(0), 0.5)", "self.mean = 0.5 * self.mean + 0.5 * x.mean(0)"]
)
async def test_an_evaluation_begins_each_minibatch_with_the_buffers_of_its_version(
    tmp_path: Path, moves: str
) -> None:
    script = write_script(tmp_path, model=MODEL.replace("{moves}", moves))
    more = {"strategy": "collective", "pservers": 0, "evaluate_every": 3}
    spec = spec_for(script, evaluation_dataset=spec_for(script).dataset, **more)
    alone = run(load(script), spec)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        found = made.exported()
    assert state.result.metrics == alone.metrics
    assert differing(found, dict(alone.model.state_dict())) == []
