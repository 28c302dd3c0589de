"""Buffers of the user's model: what forward changes is the mean over lanes, what it does not change keeps its
bits and is not sent."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.scripts import RECORDS, differing, records, spec_for, write_script
from trireme_shared.protocol.records import Phase
from trireme_shared.serving.core import calls

CONSTANTS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 24), NORM, nn.ReLU(), nn.Linear(24, 3))
        self.register_buffer("mask", torch.full((7,), torch.finfo(torch.float32).min))
        self.register_buffer("hidden", torch.tensor([float("-inf"), 0.0, -0.0, float("nan")]))
        self.register_buffer("table", torch.arange(1, 200).float().mul(0.37).sin())
        self.register_buffer("small", torch.full((5,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16))
        self.register_buffer("places", torch.arange(9))
    def forward(self, x):
        return self.body(x) + 0 * self.table.sum()

def model():
    return Model()
"""
NAMES = ("mask", "hidden", "table", "small", "places")


def script_with(folder, norm="nn.BatchNorm1d(24)", **parts):
    return write_script(folder, model=CONSTANTS.replace("NORM", norm), **parts)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("norm", ["nn.BatchNorm1d(24)", "nn.Identity()"])
@pytest.mark.parametrize(("mode", "lanes"), [("sync", 4), ("sync", 1), ("async", 1)])
async def test_buffers_that_forward_leaves_alone_keep_every_bit(tmp_path, mode, lanes, norm):
    """Also beside others in the same block, and in lanes with different numbers of records."""
    script = script_with(tmp_path, norm)
    spec = spec_for(
        script, mode=mode, lanes=lanes, block_bytes=4096, records_per_task=7, global_batch_size=16
    )
    async with cluster(spec, 2) as made:
        initial = {name: made.computes["trainer-0-x"].model.get_buffer(name).clone() for name in NAMES}
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
    assert {name: bits(exported[name]) for name in NAMES} == {name: bits(initial[name]) for name in NAMES}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_they_are_not_sent_either(build, dtype, mode):
    for norm, sent in (("nn.Identity()", False), ("nn.BatchNorm1d(24)", True)):
        model = CONSTANTS.replace("NORM", norm)
        compute = build({"block_bytes": 4096, "gradient_dtype": dtype, "mode": mode}, model=model)
        for lane in range(4):
            await compute.gradient((0, 4), lane, lane, records(3 + lane, lane), DoneBlocks())
        segments = compute.layout.segments
        sizes = {
            (segments[block.segment].kind, block.dtype): len(compute.contribution((0, 4), block.number))
            for block in compute.plan.blocks
        }
        assert sizes.pop(("param", "float32")) > 0
        assert {kind: size > 0 for kind, size in sizes.items()} == {
            ("buffer", "float32"): sent,
            ("buffer", "bfloat16"): False,
            ("buffer", "int64"): sent,
        }


LARGE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
        self.register_buffer("table", torch.arange(1, 40_000).float().mul(0.37).sin())
    def forward(self, x):
        return self.body(x) + 0 * self.table.sum()

def model():
    return Model()
"""
TABLE_BYTES = 4 * 39_999


async def pulled_with_a_large_constant(tmp_path, mode, name):
    """(bytes pulled, number of pulls, what was exported) of a job one of whose trainers dies; another
    joins."""
    script = write_script(tmp_path, model=LARGE)
    spec = spec_for(
        script,
        mode=mode,
        lanes=4 if mode == "sync" else 1,
        epochs=4,
        block_bytes=4096,
        storage=str(tmp_path / name),
    )
    async with cluster(spec, 2) as made:
        (pserver,) = made.pservers
        if mode == "sync":
            await made.version(8)
            await made.kill("trainer-0-x")
            made.add_trainer("trainer-2-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        return pserver.counters.bytes_pulled, pserver.counters.pulls, made.exported()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_large_constant_is_pulled_once_by_each_trainer(tmp_path, mode):
    pulled, pulls, exported = await pulled_with_a_large_constant(tmp_path, mode, "named")
    with replaced(calls, "moment_of", lambda *_: None):
        whole, all_pulls, as_ever = await pulled_with_a_large_constant(tmp_path, mode, "whole")
    assert min(pulls, all_pulls) > 20
    assert whole > (all_pulls - 6) * TABLE_BYTES, (
        "a few were still waiting when their trainer died or was done"
    )
    assert pulled < 8 * TABLE_BYTES + pulls * 4096, (
        f"{pulls} pulls by three trainers, which joined a few times"
    )
    assert bits(exported["table"]) == bits(as_ever["table"])
    if mode == "sync":
        assert differing(exported, as_ever) == []


SOMETIMES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("seen", torch.full((3,), 0.1))
        self.register_buffer("table", torch.arange(1, 200).float().mul(0.37).sin())
    def forward(self, x):
        if self.training and x[0, 0] > 0:
            self.seen += x.mean()
        return self.body(x)

def model():
    return Model()
"""


async def test_lanes_that_leave_a_buffer_alone_count_with_its_value(tmp_path):
    """Whatever the blocks are, and whoever computes the lanes."""
    script = write_script(tmp_path, model=SOMETIMES)
    found = []
    for trainers, block_bytes in ((1, 256), (1, 4096), (3, 256), (3, 4096)):
        storage = str(tmp_path / f"{trainers}-{block_bytes}")
        spec = spec_for(script, lanes=4, block_bytes=block_bytes, storage=storage, records_per_task=7)
        found.append(await trained(spec, trainers))
    assert [differing(found[0], other) for other in found[1:]] == [[], [], []]
    assert not torch.equal(found[0]["seen"], torch.full((3,), 0.1))


@pytest.mark.parametrize(("trainers", "push_every", "pull_every"), [(1, 1, 1), (3, 1, 1), (2, 3, 2)])
async def test_integers_of_an_asynchronous_job_count_every_minibatch(
    tmp_path, trainers, push_every, pull_every
):
    script = script_with(tmp_path)
    spec = spec_for(
        script,
        mode="async",
        push_every=push_every,
        pull_every=pull_every,
        global_batch_size=3,
        records_per_task=20,
    )
    async with cluster(spec, trainers) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
    assert exported["body.1.num_batches_tracked"] == spec.epochs * 7 * (RECORDS // 20)
    assert bool(exported["body.1.running_var"].isfinite().all())
    assert (exported["body.1.running_var"] > 0).all()


async def test_also_if_a_trainer_dies(tmp_path):
    spec = spec_for(
        script_with(tmp_path), mode="async", push_every=2, global_batch_size=3, records_per_task=20
    )
    async with cluster(spec, 2) as made:
        async with asyncio.timeout(30):
            while sum(pserver.store.updates if pserver.store else 0 for pserver in made.pservers) < 40:
                await asyncio.sleep(0.001)
        await made.kill("trainer-0-x")
        made.add_trainer("trainer-2-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
    assert exported["body.1.num_batches_tracked"] == spec.epochs * 7 * (RECORDS // 20)
