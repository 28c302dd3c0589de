"""TorchCompute's gradients: block by block into the flat vector, the tree of a node, and what must not be
left in it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import records
from trainer_agent.model.gradient_tree import WATCHED_STEPS, all_finite, is_finite
from trainer_agent.model.watch.unshared_state import FIRST_LOOKS
from trireme_shared.protocol.lanes import combine
from trireme_shared.serving.transport.shared_memory import place_of


async def contributions(compute, node, batches, seed=3):
    """All blocks of a node, as they were announced and as tensors."""
    announced = DoneBlocks()
    for lane in range(*node):
        await compute.gradient(node, lane, seed + lane, batches[lane - node[0]], announced)
    values = []
    for block in compute.plan.blocks:
        dtype = {"float32": np.float32, "int64": np.int64}[block.dtype]
        values.append(torch.from_numpy(np.frombuffer(compute.contribution(node, block.number), dtype).copy()))
    return announced, values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_gradients_in_shared_memory_have_the_same_bits_and_lost_memory_is_not_written_to_again(
    build, dtype
):
    batches, node, spec = [records(4, lane) for lane in range(4)], (0, 4), {"gradient_dtype": dtype}
    plain, shared = build(spec), build(spec, shared=True)
    for lose in (False, True, False):
        for lane in range(*node):
            for compute in (plain, shared):
                await compute.gradient(node, lane, lane, batches[lane], DoneBlocks())
        views = [shared.contribution(node, block.number) for block in shared.plan.blocks]
        assert views == [plain.contribution(node, block.number) for block in plain.plan.blocks]
        (region,) = {place_of(view)[0] for view in views}
        before, region.lost = bytes(region), lose
        for compute in (plain, shared):
            compute.forget_nodes()
        batches.reverse()
        for lane in range(*node):
            await shared.gradient(node, lane, lane, batches[lane], DoneBlocks())
        shared.forget_nodes()
        assert (bytes(region) == before) is lose


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_trainer_that_owns_fewer_lanes_gives_gradient_vectors_back(build, dtype):
    async def step(compute, lanes):
        for lane in range(lanes):
            await compute.gradient((0, lanes), lane, lane, records(4, lane), DoneBlocks())
        found = [bytes(compute.contribution((0, lanes), block.number)) for block in compute.plan.blocks]
        compute.forget_nodes()
        return found

    compute = build({"gradient_dtype": dtype}, shared=True)
    first = await step(compute, 4)
    before = [weakref.ref(vector) for vector in compute.tree.slots]
    assert len(before) == 3
    for _ in range(2 * WATCHED_STEPS):  # one look, at least, saw only such steps
        await step(compute, 1)
    gc.collect()
    assert [vector() is None for vector in before] == [False, True, True]
    if dtype == "float32":  # nothing is added to what was left out
        assert await step(compute, 4) == first


async def test_blocks_are_announced_once_each_and_from_the_second_backward_on_while_it_runs(build):
    compute = build()
    everything = [block.number for block in compute.plan.blocks]
    first, _ = await contributions(compute, (0, 1), [records(4)])
    assert first == everything
    compute.forget_nodes()
    second, _ = await contributions(compute, (0, 1), [records(4)])
    assert sorted(second) == everything
    assert second != everything  # the last layer's blocks come first


async def test_little_blocks_wait_for_company_but_the_last_ones_for_nobody(build, monkeypatch):
    compute, calls = build(), []
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe

    def noted(callback, *arguments, **options):
        if getattr(callback, "__name__", "") == "_all_done":
            calls.append(arguments[0])
        return call_soon(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
    blocks = len(compute.plan.blocks)
    for worth, expected in ((1, [1] * blocks), (1 << 30, [blocks])):
        monkeypatch.setattr("trainer_agent.model.gradient_tree.TOLD_BYTES", worth)
        for _ in range(2):  # the first backward only watches
            calls.clear()
            compute.forget_nodes()
            announced, _ = await contributions(compute, (0, 1), [records(4)])
            assert [len(each) for each in calls] == expected
            assert [block for each in calls for block in each] == announced


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
    announced = DoneBlocks()
    result = await compute.gradient((2, 3), 2, 0, None, announced)
    assert (result.records, result.loss_sum) == (0, 0.0)
    assert sorted(announced) == [block.number for block in compute.plan.blocks]
    assert {compute.contribution((2, 3), block).nbytes for block in announced} == {0}


async def test_slots_are_reused_and_there_are_no_more_than_the_tree_needs(build):
    compute = build()
    for _ in range(3):
        compute.forget_nodes()
        await contributions(compute, (0, 8), [records(2, lane) for lane in range(8)])
    assert len(compute.tree.slots) == 4


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
    buffers = [
        block.number
        for block in compute.plan.blocks
        if compute.layout.segments[block.segment].kind == "buffer"
    ]
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
                self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)
                self.table = nn.Embedding(9, 3, sparse=True)

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
        found = [view.clone() for view in compute.minibatch.gradient_views]
        inputs = torch.from_numpy(np.stack([record["x"] for record in batch]))
        targets = torch.tensor([record["y"] for record in batch])
        loss, parameters = (
            nn.functional.cross_entropy(compute.model(inputs), targets),
            list(compute.model.parameters()),
        )
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        expected = [
            torch.zeros_like(p) if g is None else g.to_dense()
            for p, g in zip(parameters, gradients, strict=True)
        ]
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


async def test_sums_that_overflow_are_no_failure(build):
    """Finite gradients whose sum is not: all blocks are there."""
    compute = build(
        loss="def loss(model, batch):\n    total = sum(p.sum() for p in model.parameters())\n"
        "    return 3e38 * (total - total.detach())\n"
    )
    for _ in range(2):
        announced, values = await contributions(compute, (0, 1), [records(4)])
        assert sorted(announced) == [block.number for block in compute.plan.blocks]
        assert values[0].max() == torch.tensor(3e38)
        compute.forget_nodes()


PARTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.leave = nn.Linear(5, 700), nn.Linear(700, 3)
        self.conv = nn.Conv2d(5, 40, 3, padding=1).to(memory_format=torch.channels_last)
        self.table = nn.Embedding(300, 5, sparse=True)
        self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())

    def forward(self, x):
        image = self.conv(x[:, :, None, None].expand(-1, -1, 2, 2)).mean()
        return self.leave(self.wide(x + self.table(x[:, 0].abs().long()))) * image

def model():
    return Net()
"""


async def test_parameters_of_several_blocks_have_the_gradients_of_autograd(build):
    """Copied block by block, whatever their order in memory."""
    compute = build({"block_bytes": 1024}, model=PARTED)
    for number in range(3):  # the first backward copies whole parameters
        compute.forget_nodes()
        announced, _ = await contributions(compute, (0, 1), [records(4, number)])
        assert sorted(announced) == [block.number for block in compute.plan.blocks]
        found = {
            p.name: v.clone()
            for p, v in zip(compute.plan.parameters, compute.minibatch.gradient_views, strict=True)
        }
        inputs = torch.from_numpy(np.stack([record["x"] for record in records(4, number)]))
        targets = torch.tensor([record["y"] for record in records(4, number)])
        loss = nn.functional.cross_entropy(compute.model(inputs), targets)
        expected = torch.autograd.grad(loss, [compute.model.get_parameter(name) for name in found])
        assert [
            n for (n, f), e in zip(found.items(), expected, strict=True) if not torch.equal(f, e.to_dense())
        ] == []


@pytest.mark.parametrize(
    ("node", "options"), [((0, 1), {}), ((0, 2), {}), ((0, 2), {"on_nonfinite": "skip"})]
)
async def test_each_gradient_is_looked_at_once_while_backward_runs(build, monkeypatch, node, options):
    compute = build({"block_bytes": 1024, **options}, model=PARTED)
    batches = [records(4, lane) for lane in range(*node)]
    for _ in range(FIRST_LOOKS):  # at parameters too
        compute.forget_nodes()
        await contributions(compute, node, batches)
    looked: list[list[int]] = []
    run = torch.Tensor.backward

    def backward(loss):
        looked.append([])
        run(loss)
        looked[-1].append(0)  # from now on it is too late

    def look(values):
        assert looked[-1][-1:] != [0], "looked at after backward, when it has left the cache"
        looked[-1].append(values.numel())
        return is_finite(values)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr("trainer_agent.model.gradient_tree.is_finite", look)
    compute.forget_nodes()
    await contributions(compute, node, batches)
    gradients = sum(segment.elements for segment in compute.layout.segments if segment.kind == "param")
    assert [sum(each) for each in looked] == [gradients] * len(batches)
    assert max(map(max, looked)) == 1024 // 4


async def test_a_finite_sum_is_all_that_is_looked_at(monkeypatch):
    assert not is_finite(torch.tensor([1.0, float("nan")]))
    assert is_finite(torch.tensor([3e38, 3e38]))
    assert is_finite(torch.full((9,), 6e4, dtype=torch.float16))
    monkeypatch.delattr(torch, "isfinite")
    assert is_finite(torch.randn(1000))
    assert all_finite([torch.randn(1000), torch.full((9,), 6e4, dtype=torch.float16)])
