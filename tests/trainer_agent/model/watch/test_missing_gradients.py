"""A parameter that has had a gradient and gets none is stepped with 0; where that shows, the user is told,
once. One that no step has used is left alone in synchronous jobs."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.model.compute import BeforeStep
from trainer_agent.model.watch.minibatch_rules import MOST_WARNINGS, MissingGradients
from trireme_shared.protocol.records.step import StepRecord

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
NEVER, AT_FIRST, LATE, ALWAYS = "False", "self.calls < 3", "self.calls > 2", "True"
FIRST = "the parameters other.weight, other.bias got a first gradient after steps that took 0"
BOTH = "the parameters other.weight, other.bias got no gradient from a minibatch"


def told_of(build, mode, used, optimizer):
    compute = build(
        {"mode": mode},
        model=MODEL.replace("USED", used),
        optimizer=f"def optimizer(model):\n    return torch.optim.{optimizer}\n",
    )
    told: list[str] = []
    version = None
    for number in range(5):
        compute.begin_step(BeforeStep(version=version))
        compute.forget_nodes()
        result = asyncio.run(compute.gradient((0, 1), 0, number, records(4, number), DoneBlocks()))
        told += result.warnings
        version = StepRecord(version=number + 1, positions=(), frozen=result.frozen, unused=result.unused)
    return told


@pytest.mark.parametrize(
    ("used", "optimizer", "cause"),
    [
        (AT_FIRST, "SGD(model.parameters(), lr=0.1, weight_decay=0.1)", "weight decay moves them"),
        (AT_FIRST, "AdamW(model.parameters())", "weight decay moves them"),
        (NEVER, "AdamW(model.parameters())", ""),
        (LATE, "AdamW(model.parameters())", ""),
        (
            AT_FIRST,
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
    told = told_of(build, "sync", used, optimizer)
    if not cause:
        assert told == []
        return
    (text,) = told
    assert text.startswith(BOTH)
    assert cause in text


@pytest.mark.parametrize(
    ("used", "optimizer", "begins"),
    [
        (NEVER, "AdamW(model.parameters())", BOTH),
        (NEVER, "Adam(model.parameters())", ""),
        (LATE, "Adam(model.parameters())", FIRST),
        (LATE, "SGD(model.parameters(), lr=0.1, momentum=0.9)", ""),
        (LATE, "SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)", FIRST),
    ],
)
def test_an_asynchronous_job_steps_all_and_tells_where_that_shows(build, used, optimizer, begins):
    told = told_of(build, "async", used, optimizer)
    assert [text.startswith(begins) for text in told] == ([True] if begins else [])


def test_no_more_than_some_warnings_are_told(build):
    """In a mixture of experts each minibatch may leave other ones out."""
    compute = build(optimizer="def optimizer(model):\n    return torch.optim.AdamW(model.parameters())\n")
    missing, number = MissingGradients(compute.plan), len(compute.plan.parameters)
    for left_out in range(number):
        missing.minibatch([each != left_out for each in range(number)])
    assert number > MOST_WARNINGS == len(missing.told())
