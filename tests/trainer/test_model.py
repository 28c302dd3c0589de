"""TorchCompute: flat vectors with aligned views, gradients block by block, buffers, schedules, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.errors import InvalidArgument, UserCodeError
from shared.lanes import combine
from shared.shared_memory import place_of
from shared.slots import ALIGNMENT_BYTES
from tests.trainer.scripts import spec_for, write_script
from trainer_agent import optimizer as optimizers
from trainer_agent.flat import Vector, plan
from trainer_agent.model import TorchCompute
from trainer_agent.user_module import load


@pytest.fixture
def build(tmp_path):
    executor = ThreadPoolExecutor(1)

    def make(spec=None, shared=False, **parts):
        script = write_script(tmp_path, **parts)
        return TorchCompute(load(script), spec_for(script, **(spec or {})), executor, shared=shared)

    yield make
    executor.shutdown()


def records(count, seed=0):
    numbers = np.random.default_rng(seed)
    return [{"x": numbers.standard_normal(5).astype(np.float32), "y": int(numbers.integers(3))} for _ in range(count)]


async def contributions(compute, node, batches, seed=3):
    """All blocks of a node, as they were announced and as tensors."""
    announced: list[int] = []
    for lane in range(*node):
        await compute.gradient(node, lane, seed + lane, batches[lane - node[0]], announced.append)
    values = []
    for block in compute.plan.blocks:
        dtype = {"float32": np.float32, "int64": np.int64}[block.dtype]
        values.append(torch.from_numpy(np.frombuffer(compute.contribution(node, block.number), dtype).copy()))
    return announced, values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_gradients_in_shared_memory_have_the_same_bits_and_lost_memory_is_not_written_to_again(build, dtype):
    batches, node, spec = [records(4, lane) for lane in range(4)], (0, 4), {"gradient_dtype": dtype}
    plain, shared = build(spec), build(spec, shared=True)
    for lose in (False, True, False):
        for lane in range(*node):
            for compute in (plain, shared):
                await compute.gradient(node, lane, lane, batches[lane], bool)
        views = [shared.contribution(node, block.number) for block in shared.plan.blocks]
        assert views == [plain.contribution(node, block.number) for block in plain.plan.blocks]
        (region,) = {place_of(view)[0] for view in views}
        before, region.lost = bytes(region), lose
        for compute in (plain, shared):
            compute.forget_nodes()
        batches.reverse()
        for lane in range(*node):
            await shared.gradient(node, lane, lane, batches[lane], bool)
        shared.forget_nodes()
        assert (bytes(region) == before) is lose


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


# ---------------------------------------------------------------- gradients


async def test_blocks_are_announced_once_each_and_from_the_second_backward_on_while_it_runs(build):
    compute = build()
    everything = [block.number for block in compute.plan.blocks]
    first, _ = await contributions(compute, (0, 1), [records(4)])
    assert first == everything
    compute.forget_nodes()
    second, _ = await contributions(compute, (0, 1), [records(4)])
    assert sorted(second) == everything
    assert second != everything  # the last layer's blocks come first


async def test_a_nodes_contribution_is_the_tree_of_its_lanes(build):
    compute = build()
    batches = [records(4, 0), records(3, 1), None, records(4, 2)]
    single = []
    for lane, batch in enumerate(batches):
        compute.forget_nodes()
        _, values = await contributions(compute, (lane, lane + 1), [batch])
        single.append((values, len(batch or ())))

    def tree(first, last):
        if last - first == 1:
            return [value.clone() for value in single[first][0]], single[first][1]
        (left, n), (right, m) = tree(first, (first + last) // 2), tree((first + last) // 2, last)
        return [combine(a, n, b, m)[0] for a, b in zip(left, right, strict=True)], n + m

    compute.forget_nodes()
    _, whole = await contributions(compute, (0, 4), batches)
    assert all(torch.equal(a, b) for a, b in zip(whole, tree(0, 4)[0], strict=True))


async def test_an_empty_node_has_no_bytes_and_is_announced(build):
    compute = build()
    announced: list[int] = []
    result = await compute.gradient((2, 3), 2, 0, None, announced.append)
    assert (result.records, result.loss_sum) == (0, 0.0)
    assert sorted(announced) == [block.number for block in compute.plan.blocks]
    assert {compute.contribution((2, 3), block).nbytes for block in announced} == {0}


async def test_slots_are_reused_and_there_are_no_more_than_the_tree_needs(build):
    compute = build()
    for _ in range(3):
        compute.forget_nodes()
        await contributions(compute, (0, 8), [records(2, lane) for lane in range(8)])
    assert len(compute._tree._slots) == 4


async def test_the_same_seed_gives_the_same_bits_and_dropout_follows_it(build):
    compute = build()
    found = []
    for seed in (3, 3, 4):
        compute.forget_nodes()
        found.append((await contributions(compute, (0, 1), [records(4)], seed))[1])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


async def test_every_lane_starts_from_the_same_buffers_and_contributes_its_own(build):
    compute = build()
    norm = compute.model[1]
    buffers = [block.number for block in compute.plan.blocks if compute.layout.segments[block.segment].kind == "buffer"]
    _, first = await contributions(compute, (0, 1), [records(4)])
    compute.forget_nodes()
    _, second = await contributions(compute, (0, 1), [records(4)])
    assert all(torch.equal(first[block], second[block]) for block in buffers)
    assert torch.equal(norm.num_batches_tracked, torch.tensor(1))


async def test_parameters_without_gradient_push_zeros(build):
    compute = build(
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.idle = nn.Linear(5, 3), nn.Linear(50, 3)

            def forward(self, x):
                return self.used(x)

        def model():
            return Net()
        """
    )
    for _ in range(2):
        compute.forget_nodes()
        announced, values = await contributions(compute, (0, 1), [records(4)])
        assert sorted(announced) == [block.number for block in compute.plan.blocks]
    idle = compute.plan.parameters[2]
    flat = torch.cat(values)
    assert torch.equal(flat[idle.first : idle.first + idle.elements], torch.zeros(idle.elements))
    assert flat[: compute.plan.parameters[0].elements].abs().sum() > 0


async def test_reentrant_checkpointing_is_announced_only_when_backward_is_over(build):
    compute = build(
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.leave = nn.Linear(5, 5), nn.Linear(5, 3)

            def forward(self, x):
                from torch.utils.checkpoint import checkpoint
                x = x.requires_grad_()
                for _ in range(2):
                    x = checkpoint(self.inner, x, use_reentrant=True)
                return self.leave(x)

        def model():
            return Net()
        """
    )
    for _ in range(3):
        compute.forget_nodes()
        announced, _ = await contributions(compute, (0, 1), [records(4)])
        assert announced == [block.number for block in compute.plan.blocks]


async def test_no_gradient_of_an_earlier_minibatch_is_left_in_a_slot(build):
    compute = build(
        model="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.table = nn.Linear(5, 3), nn.Linear(5, 3), nn.Embedding(9, 3, sparse=True)

            def forward(self, x):
                chosen = self.first if x[0, 0] > 0 else self.second
                return chosen(x) + self.table((x[:, 0].abs() * 3).long().clamp(max=8))

        def model():
            return Net()
        """
    )
    batches = [[record | {"x": sign * np.abs(record["x"])} for record in records(4)] for sign in (1, -1, 1)]
    for batch in batches:
        compute.forget_nodes()
        await contributions(compute, (0, 1), [batch])
        found = [home.clone() for home in compute._homes]
        compute.model.zero_grad(set_to_none=True)
        inputs = torch.from_numpy(np.stack([record["x"] for record in batch]))
        targets = torch.tensor([record["y"] for record in batch])
        hooks, compute._homes = compute._homes, [torch.empty_like(home) for home in found]
        nn.functional.cross_entropy(compute.model(inputs), targets).backward()
        compute._homes = hooks
        expected = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in compute.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


async def test_a_gradient_that_comes_in_parts_is_their_sum(build):
    model = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(5, 5)

            def forward(self, x):
                from torch.utils.checkpoint import checkpoint
                x = x.requires_grad_()
                for _ in range(2):
                    x = checkpoint(self.inner, x, use_reentrant=REENTRANT)
                return x

        def model():
            return Net()
        """
    found = []
    for reentrant in ("True", "False"):
        compute = build(model=model.replace("REENTRANT", reentrant))
        found.append((await contributions(compute, (0, 1), [records(4)]))[1])
    for in_parts, at_once in zip(*found, strict=True):
        torch.testing.assert_close(in_parts, at_once)


# ---------------------------------------------------------------- schedules


def test_a_schedule_is_handed_over_as_json(build):
    import json

    from shared.messages import LaneZero

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
