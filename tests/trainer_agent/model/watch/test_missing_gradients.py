"""A parameter without a gradient is stepped with 0; where that moves it, the user is told, once."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.model.watch.minibatch_rules import MOST_WARNINGS, MissingGradients

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) + (self.other(x) if USED else 0)

def model():
    return Model()
"""
NEVER, AT_FIRST, ALWAYS = "False", "self.calls < 3", "True"
BOTH = "the parameters other.weight, other.bias got no gradient from a minibatch"


@pytest.mark.parametrize(
    ("used", "optimizer", "cause"),
    [
        (NEVER, "SGD(model.parameters(), lr=0.1, weight_decay=0.1)", "weight decay moves them"),
        (NEVER, "AdamW(model.parameters())", "weight decay moves them"),
        (
            NEVER,
            (
                "SGD([{'params': model.body.parameters(), 'weight_decay': 1}, {'params': "
                "model.other.parameters()}], lr=0.1)"
            ),
            "",
        ),
        (NEVER, "Adam(model.parameters())", ""),
        (AT_FIRST, "Adam(model.parameters())", "what the optimizer has kept moves them"),
        (AT_FIRST, "SGD(model.parameters(), lr=0.1, momentum=0.9)", "what the optimizer has kept moves them"),
        (AT_FIRST, "SGD(model.parameters(), lr=0.1)", ""),
        (ALWAYS, "AdamW(model.parameters())", ""),
    ],
)
def test_it_is_told_where_a_gradient_of_zero_moves_it(build, used, optimizer, cause):
    compute = build(
        model=MODEL.replace("USED", used),
        optimizer=f"def optimizer(model):\n    return torch.optim.{optimizer}\n",
    )
    told: list[str] = []
    for number in range(5):
        compute.forget_nodes()
        told += asyncio.run(compute.gradient((0, 1), 0, number, records(4, number), DoneBlocks())).warnings
    if not cause:
        assert told == []
        return
    (text,) = told
    assert text.startswith(BOTH)
    assert cause in text


def test_no_more_than_some_warnings_are_told(build):
    """In a mixture of experts each minibatch may leave other ones out."""
    compute = build(optimizer="def optimizer(model):\n    return torch.optim.AdamW(model.parameters())\n")
    missing, number = MissingGradients(compute.plan), len(compute.plan.parameters)
    for left_out in range(number):
        missing.minibatch([each != left_out for each in range(number)])
    assert number > MOST_WARNINGS == len(missing.told())
