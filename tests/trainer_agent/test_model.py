"""TorchCompute: flat vectors with aligned views, schedules, and what it refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.errors import InvalidArgument, UserCodeError
from shared.records.layout import ALIGNMENT_BYTES
from tests.trainer_agent.scripts import records
from trainer_agent.model import optimizer_spec as optimizers
from trainer_agent.model.flat import Vector, plan

# ---------------------------------------------------------------- layout


def test_parameters_are_views_that_start_on_64_bytes_and_do_not_overlap(build):
    compute = build()
    places = sorted(compute.plan.parameters, key=lambda place: (place.segment, place.first))
    assert all(
        one.first + one.elements <= other.first for one, other in pairwise(places) if one.segment == other.segment
    )
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in compute.model.parameters())
    before = [parameter.clone() for parameter in compute.model.parameters()]
    for block in range(len(compute.plan.blocks)):
        compute.staging(block)[:] = compute.current(block)
    compute.swap()
    assert all(torch.equal(a, b) for a, b in zip(before, compute.model.parameters(), strict=True))
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in compute.model.parameters())


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([64, 256, 1024]),
    st.booleans(),
)
def test_every_element_lies_in_exactly_the_blocks_that_its_place_names(shapes, block_bytes, two_groups):
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    if not sum(parameter.numel() for parameter in parameters):
        return
    groups = (
        [{"params": list(parameters)[::2]}, {"params": list(parameters)[1::2]}]
        if two_groups and len(shapes) > 1
        else list(parameters)
    )
    found = plan(parameters, torch.optim.SGD(groups, lr=0.1), block_bytes, 128)
    vector = Vector(found, torch.device("cpu"))
    for number, place in enumerate(found.parameters):
        vector.view(place).fill_(number + 1)
    for number, place in enumerate(found.parameters):
        touched = [block.number for block in found.blocks if (vector.blocks[block.number] == number + 1).any()]
        assert touched == list(found.blocks_of(place))
        assert int((vector.segments[place.segment] == number + 1).sum()) == place.elements
        assert place.first * 4 % ALIGNMENT_BYTES == 0


def test_segments_follow_dtype_and_group_and_what_is_not_trained_stays_home(build):
    compute = build(
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.half = nn.Linear(5, 3).bfloat16()
                self.full = nn.Linear(5, 3)
                self.frozen = nn.Linear(3, 3).requires_grad_(False)
                self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
                self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
                self.register_buffer("mean", torch.zeros(3))

            def forward(self, x):
                self.seen += len(x)
                self.mean = 0.9 * self.mean + x.mean(0)[:3]
                return self.frozen(self.half(x.bfloat16()).float() + self.full(x))

        def model():
            return Net()
        """
    )
    kinds = [(s.kind, s.dtype, s.elements, s.group) for s in compute.layout.segments]
    assert kinds == [
        ("param", "bfloat16", 32 + 3, 0),
        ("param", "float32", 16 + 3, 0),
        ("buffer", "int64", 1, -1),
        ("buffer", "float32", 3, -1),
    ]


def test_the_digest_depends_on_names_shapes_and_dtypes(build):
    digests = {
        build(model=f"def model():\n    return {text}\n").layout.digest
        for text in (
            "nn.Sequential(nn.Linear(5, 3))",
            "nn.Sequential(nn.Linear(5, 3, bias=False))",
            "nn.Sequential(nn.Identity(), nn.Linear(5, 3))",
            "nn.Sequential(nn.Linear(5, 3).bfloat16())",
        )
    }
    assert len(digests) == 4
    assert build().layout.digest == build().layout.digest


# ---------------------------------------------------------------- schedules


def test_a_schedule_is_handed_over_as_json(build):
    import json

    from shared.records.step import LaneZero

    for text in (
        "torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], 0.5)",
        "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=40)",
        "torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)",
        "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)",
    ):
        one, other = (build(scheduler=f"def scheduler(optimizer):\n    return {text}\n") for _ in range(2))
        for _ in range(4):
            handed = one.begin_step()
        other.restore(LaneZero.model_validate(json.loads(handed.model_dump_json())))
        assert [one.begin_step() for _ in range(5)] == [other.begin_step() for _ in range(5)], text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.dictionaries(st.integers(), st.integers(1, 5)).map(__import__("collections").Counter)
        ),
        max_leaves=12,
    )
)
def test_scheduler_state_survives_json(state):
    import json

    assert optimizers.decode(json.loads(json.dumps(optimizers.encode(state)))) == state


def test_a_state_that_cannot_travel_is_refused_when_the_model_is_built(build):
    with pytest.raises(InvalidArgument, match="the scheduler's state holds object"):
        build(
            scheduler="""
            class Odd(torch.optim.lr_scheduler.StepLR):
                def state_dict(self):
                    return {"odd": object()}

            def scheduler(optimizer):
                return Odd(optimizer, 1)
            """
        )


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": "def model():\n    return 3\n"}, r"model\(\) returned int"),
        ({"model": "def model():\n    return nn.Linear(5, 3).double()\n"}, "weight has dtype torch.float64"),
        ({"model": "def model():\n    return nn.LazyLinear(3)\n"}, "weight is not initialised"),
        ({"optimizer": "def optimizer(model):\n    return 3\n"}, r"optimizer\(model\) returned int"),
        (
            {"optimizer": "def optimizer(model):\n    return torch.optim.LBFGS(model.parameters())\n"},
            "LBFGS cannot run on parameter servers",
        ),
        (
            {
                "optimizer": "def optimizer(model):\n    return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1)\n"
            },
            "the optimizer holds 1 parameters that are not the model's",
        ),
        (
            {"model": "def model():\n    return nn.Linear(5, 3).requires_grad_(False)\n"},
            "the model has no parameter to train",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_trained_is_refused_with_one_message(build, parts, message):
    with pytest.raises(InvalidArgument, match=message):
        build(**parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": "def loss(model, batch):\n    return 1.0\n"}, "returned float"),
        ({"loss": "def loss(model, batch):\n    return model(batch['x'])\n"}, r"returned a tensor of shape \(4, 3\)"),
        ({"loss": "def loss(model, batch):\n    return torch.ones(())\n"}, "does not depend on the parameters"),
        ({"loss": "def loss(model, batch):\n    return batch['z']\n"}, "KeyError: 'z'"),
        ({"collate": "def collate(records):\n    raise ValueError(len(records))\n"}, "ValueError: 4"),
    ],
)
async def test_what_goes_wrong_in_a_minibatch_is_the_users(build, parts, message):
    compute = build(**parts)
    with pytest.raises(UserCodeError, match=message):
        await compute.gradient((0, 1), 0, 0, records(4), lambda block: None)


async def test_without_evaluate_the_loss_is_evaluated(build):
    compute = build()
    sums = await compute.evaluate(records(4))
    assert sums["records"] == 4
    assert await compute.metrics(sums) == {"loss": sums["loss"] / 4}


async def test_sums_that_are_no_numbers_are_refused(build):
    compute = build(evaluation="def evaluate(model, batch):\n    return [1]\n")
    with pytest.raises(UserCodeError, match=r"evaluate\(model, batch\) returned list; return a dict of numbers"):
        await compute.evaluate(records(4))
