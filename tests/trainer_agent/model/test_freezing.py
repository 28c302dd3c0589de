"""What requires a gradient may change at any step: whoever steps leaves frozen parameters alone as plain
PyTorch does, whatever a block holds, and goes on so from a copy. Whole jobs: loops/test_left_alone.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.trainer_agent.done_blocks import DoneBlocks
from tests.trainer_agent.loops.test_left_alone import (
    CHANGES,
    LOSS,
    MODEL,
    ONE,
    OPTIMIZERS,
    WHOLE,
    script_with,
)
from tests.trainer_agent.scripts import differing, lane_batches, spec_for, train_plainly, write_script
from trainer_agent.collective.replica import Replica
from trainer_agent.model.block_states import BlockStates
from trainer_agent.model.compute import BeforeStep, node_result
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme.plain import run
from trireme_shared.blocks.buffers import tensor_over
from trireme_shared.protocol.errors import FrozenDiffer, UserCodeError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, NodeResult, StepRecord
from trireme_shared.protocol.wire.messages import InitHeader, PushBlock, PushHeader
from trireme_shared.serving.core.blocks import add_state
from trireme_shared.serving.core.store import is_same
from trireme_shared.serving.core.stores import store_of

POSITIONS = (LanePosition(lane=0),)
CASES = [
    *((each, "adamw") for each in CHANGES if each != "both ways"),
    *(("both ways", each) for each in OPTIMIZERS if each != "adamw"),
    ("used late", "sgd"),
]


class OnServers:
    """Steps on a parameter server. `copied`: blocks and states go on from there."""

    def __init__(
        self, compute: TorchCompute, record: StepRecord, copied: OnServers | None = None, lanes: int = 1
    ) -> None:
        self.compute, self.record = compute, record
        header = InitHeader(
            job="j",
            generation=0,
            mode=Mode.SYNC,
            lanes=lanes,
            layout=compute.layout,
            pserver=0,
            record=record,
        )
        self.store = store_of(header)
        for block in compute.layout.blocks():
            if copied is None:
                self.store.add_block(block.number, compute.current(block.number))
                for name, payload in compute.initial_state(block.number):
                    add_state(self.store.blocks, block.number, name, payload)
                continue
            before = copied.store.blocks[block.number]
            values = self.store.pool.take(block.dtype, block.elements)
            values.tensor.copy_(before.current.tensor)
            state = {name: each.clone() for name, each in before.optimizer_state().items()}
            self.store.place_block(block.number, values, state)
            compute.staging(block.number)[:] = values.view
        self.store.seal()
        if copied is not None:
            compute.swap()

    def step(self, number: int, lane_zero: Any, done: list[int], result: NodeResult) -> None:
        header = PushHeader(
            job="j",
            generation=0,
            mode=Mode.SYNC,
            trainer="t",
            step=number,
            positions=POSITIONS,
            lane_zero=lane_zero,
        )
        push = self.store.admit(header)
        push.results[0, 1] = result
        for block in done:
            item = PushBlock(block=block, count=self.compute.samples((0, 1)))
            payload = self.compute.contribution((0, 1), block)
            assert self.store.apply(push, item, payload) == "APPLIED"
        for block in range(len(done)):
            self.compute.staging(block)[:] = self.store.pull(block, number + 1).view
        found = self.store.history.record(number + 1)
        assert found is not None
        self.record = StepRecord.from_bytes(found.to_bytes())
        self.compute.swap()


class InReplica:
    """Steps in a trainer of a collective job."""

    def __init__(self, compute: TorchCompute, record: StepRecord, copied: InReplica | None = None) -> None:
        self.compute, self.replica = compute, Replica(compute)
        self.replica.begin(1)
        if copied is not None:
            share = copied.replica.copy_share(range(len(compute.plan.blocks)))
            for block, values in share.values.items():
                payload = memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
                self.replica.load(block, payload, share.states[block])
            self.replica.loaded(record, 0, "")
            assert self.replica.digest() == copied.replica.digest()

    @property
    def record(self) -> StepRecord:
        assert self.replica.record is not None
        return self.replica.record

    def step(self, number: int, lane_zero: Any, done: list[int], result: NodeResult) -> None:
        gradients: dict[int, torch.Tensor | None] = {}
        for block in done:
            payload = self.compute.contribution((0, 1), block)
            dtype = self.compute.plan.blocks[block].dtype
            gradients[block] = tensor_over(payload, dtype).clone() if payload.nbytes else None
        fields = {"frozen": result.frozen, "unused": result.unused, "resting": result.resting}
        record = StepRecord(version=number + 1, positions=POSITIONS, lane_zero=lane_zero, **fields)
        self.replica.step(gradients, record)
        self.replica.swap()


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as made:
        yield made


async def trained(kind, script, spec, executor, again_at=()):
    """What steps, after training. `again_at`: before these steps another trainer, and another server, go on
    from a copy."""
    compute = TorchCompute(load(script), spec, executor)
    first = StepRecord(version=0, positions=POSITIONS, lane_zero=compute.initial_lane_zero())
    made = kind(compute, first)
    for step, (batch,) in enumerate(lane_batches(script, spec)):
        if step in again_at:
            compute = TorchCompute(load(script), spec, executor)
            made = kind(compute, made.record, made)
            compute.restore(made.record.lane_zero)
        lane_zero = compute.begin_step(BeforeStep(version=made.record))
        compute.forget_nodes()
        rows = [{name: column[at].numpy() for name, column in batch.items()} for at in range(len(batch["y"]))]
        done = DoneBlocks()
        result = await compute.gradient((0, 1), 0, step, rows, done)
        assert sorted(done) == list(range(len(compute.plan.blocks)))
        made.step(step, lane_zero, done, node_result(result))
    return made


def parameters(made):
    return {name: value for name, value in made.compute.model.state_dict().items() if "steps" not in name}


@pytest.mark.parametrize(
    ("kind", "change", "optimizer"),
    [
        *(((OnServers, InReplica)[number % 2], *case) for number, case in enumerate(CASES)),
        *((kind, "both ways", "adamw") for kind in (OnServers, InReplica)),
        *((InReplica, "both ways", optimizer) for optimizer in WHOLE),
    ],
)
async def test_one_lane_has_the_bits_of_plain_pytorch_also_from_copies(
    tmp_path, executor, kind, change, optimizer
):
    script = script_with(tmp_path, change, optimizer)
    ring = {"strategy": "collective", "pservers": 0} if kind is InReplica else {}
    spec = spec_for(script, **ring, **ONE)
    plain = train_plainly(script, spec)
    assert differing(dict(run(load(script), spec).model.state_dict()), plain) == []
    plain.pop("steps")
    again = await trained(kind, script, spec, executor, range(1, 12, 2))
    assert differing(parameters(again), plain) == []


@pytest.mark.parametrize("size", [256, 1 << 20])
@pytest.mark.parametrize("kind", [OnServers, InReplica])
async def test_where_blocks_end_shows_in_no_bit(tmp_path, executor, kind, size):
    script = script_with(tmp_path, "both ways", "fused")
    ring = {"strategy": "collective", "pservers": 0} if kind is InReplica else {}
    spec = spec_for(script, **ring, **{**ONE, "block_bytes": size, "clip_lane_norm": 0.5})
    plain = train_plainly(script, spec)
    plain.pop("steps")
    assert differing(parameters(await trained(kind, script, spec, executor)), plain) == []


async def test_blocks_whose_parameters_are_all_frozen_are_not_sent(tmp_path, executor):
    """Nor are they pulled: a server knows that they are the same."""
    script = script_with(tmp_path, "thawed")
    compute = TorchCompute(load(script), spec_for(script, **{**ONE, "block_bytes": 256}), executor)
    first = StepRecord(version=0, positions=POSITIONS, lane_zero=compute.initial_lane_zero())
    made = OnServers(compute, first)
    rows = [{"x": torch.zeros(5).numpy(), "y": torch.tensor(1).numpy()}]
    done = DoneBlocks()
    lane_zero = compute.begin_step(BeforeStep(version=first))
    result = await compute.gradient((0, 1), 0, 0, rows, done)
    body = {block for place in compute.places[:2] for block in compute.plan.blocks_of(place)}
    moved = {block for place in compute.places[2:] for block in compute.plan.blocks_of(place)}
    sent = {block for block in done if compute.contribution((0, 1), block).nbytes}
    assert not sent & (body - moved)
    assert sent >= moved
    made.step(0, lane_zero, done, node_result(result))
    same = {block for block in body | moved if is_same(made.store, block, 1, 0)}
    assert same == body - moved


@pytest.mark.parametrize(
    ("kind", "change", "optimizer"),
    [
        (OnServers, "both ways", "adamw"),
        (InReplica, "frozen", "sgd"),
        (OnServers, "never used", "sgd"),
        (InReplica, "both ways", "adamw"),
    ],
)
async def test_a_job_begins_with_the_state_of_one_that_froze(tmp_path, executor, kind, change, optimizer):
    script = script_with(tmp_path, change, optimizer)
    begun = run(load(script), spec_for(script, **ONE))
    saved = {"model": begun.model.state_dict(), "optimizer": begun.optimizer.state_dict()}
    torch.save(saved, tmp_path / "begun.pt")
    ring = {"strategy": "collective", "pservers": 0} if kind is InReplica else {}
    spec = spec_for(script, init_from=str(tmp_path / "begun.pt"), init_optimizer=True, **ring, **ONE)
    plain = dict(run(load(script), spec).model.state_dict())
    plain.pop("steps")
    assert differing(parameters(await trained(kind, script, spec, executor)), plain) == []


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [("both ways", "sgd"), *((each, "adamw") for each in ("both ways", "once", "used late", "never"))],
)
async def test_the_exported_state_is_that_of_plain_pytorch(tmp_path, executor, change, optimizer):
    script = script_with(tmp_path, change, optimizer)
    spec = spec_for(script, **ONE)
    plain, made = run(load(script), spec), await trained(OnServers, script, spec, executor)
    compute = made.compute
    states = BlockStates(compute.plan, compute.model, compute.optimizer)
    assert states.lacking() is not None
    for number, block in made.store.blocks.items():
        for name, tensor in block.optimizer_state().items():
            into = states.into(number, name)
            assert into is not None
            into[:] = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    assert states.lacking() is None
    states.give_back()
    mine, theirs = compute.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in theirs.items():
        assert {name: value.tolist() for name, value in mine[number].items()} == {
            name: value.tolist() for name, value in state.items()
        }


async def test_lanes_of_a_trainer_that_disagree_are_told_with_the_name(build):
    change = "model.body.weight.requires_grad_(len(batch['y']) > 4)"
    compute = build({"lanes": 2}, model=MODEL, loss=LOSS.format(change=change))
    row = {"x": torch.zeros(5).numpy(), "y": torch.tensor(1).numpy()}
    compute.begin_step()
    await compute.gradient((0, 2), 0, 0, [row] * 4, DoneBlocks())
    with pytest.raises(UserCodeError, match=r"the parameter body\.weight requires a gradient") as caught:
        await compute.gradient((0, 2), 1, 0, [row] * 5, DoneBlocks())
    assert caught.value.details["fatal"]


def test_lanes_of_two_trainers_that_disagree_are_refused_by_the_server(tmp_path, executor):
    script = write_script(tmp_path, model=MODEL)
    compute = TorchCompute(load(script), spec_for(script, lanes=2), executor)
    positions = tuple(LanePosition(lane=lane) for lane in range(2))
    first = StepRecord(version=0, positions=positions, lane_zero=compute.initial_lane_zero())
    header = InitHeader(
        job="j", generation=0, mode=Mode.SYNC, lanes=2, layout=compute.layout, pserver=0, record=first
    )
    store = store_of(header)
    for block in compute.layout.blocks():
        store.add_block(block.number, compute.current(block.number))
    store.seal()
    for lane, frozen in ((0, ()), (1, ((2, 4),))):
        push = store.admit(
            PushHeader(
                job="j",
                generation=0,
                mode=Mode.SYNC,
                trainer=f"t{lane}",
                positions=(positions[lane],),
                lane_zero=first.lane_zero if not lane else None,
            )
        )
        push.results[lane, lane + 1] = NodeResult(frozen=frozen)
        item, payload = PushBlock(block=0, lanes=(lane, lane + 1), count=1), compute.current(0)
        if not lane:
            store.apply(push, item, payload)
            continue
        with pytest.raises(FrozenDiffer) as caught:
            store.apply(push, item, payload)
        assert caught.value.details["parameter"] == 2
    assert store.lowest == 0
