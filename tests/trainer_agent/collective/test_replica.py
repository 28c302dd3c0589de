"""A replica steps the whole model to the bits of parameter servers, whatever was copied to it from another
one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.simulation.compute import Speed, TinyCompute, Trace
from trainer_agent.collective.replica import Replica
from trireme_shared.blocks.buffers import tensor_over
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, LaneZero, NodeResult, StepRecord
from trireme_shared.protocol.wire.messages import InitHeader, PushBlock, PushHeader, StepNorm
from trireme_shared.serving.core.stores import store_of

OPTIONS = ({"lr": 0.25}, {"lr": 0.125})


def compute() -> TinyCompute:
    return TinyCompute(Mode.SYNC, Trace(), random.Random(0), Speed())


def begun(clipping: Clipping | None = None) -> tuple[TinyCompute, Replica]:
    made = compute()
    replica = Replica(made, clipping)
    replica.begin(lanes=1)
    return made, replica


def record(version: int) -> StepRecord:
    return StepRecord(version=version, positions=(LanePosition(lane=0),), lane_zero=LaneZero(options=OPTIONS))


def gradients(made: TinyCompute, step: int) -> dict[int, torch.Tensor | None]:
    """The last step changes no buffer, and has no data of parameters."""
    generator = torch.Generator().manual_seed(step)
    found: dict[int, torch.Tensor | None] = {}
    for block in made.layout.blocks():
        value = torch.randn(block.elements, generator=generator)
        found[block.number] = value if block.dtype == "float32" else torch.arange(block.elements) + step + 1
    return found if step < 3 else dict.fromkeys(found)


def on_a_parameter_server(clipping: Clipping, steps: int) -> dict[int, bytes]:
    made = compute()
    first = StepRecord(version=0, positions=(LanePosition(lane=0),), lane_zero=made.initial_lane_zero())
    header = InitHeader(
        job="j", generation=0, mode=Mode.SYNC, lanes=1, layout=made.layout, pserver=0, record=first
    )
    store = store_of(header, clipping=clipping)
    for block in made.layout.blocks():
        store.add_block(block.number, made.current(block.number))
    store.seal()
    for step in range(steps):
        push = store.admit(
            PushHeader(
                job="j",
                generation=0,
                mode=Mode.SYNC,
                trainer="t",
                step=step,
                positions=(LanePosition(lane=0),),
                lane_zero=LaneZero(options=OPTIONS),
            )
        )
        for number, value in gradients(made, step).items():
            payload = memoryview(b"") if value is None else memoryview(bytearray(value.numpy().tobytes()))
            count = 0 if value is None else 2
            store.apply(
                push, PushBlock(block=number, lanes=(0, 1), count=count, result=NodeResult()), payload
            )
        if clipping.holds:
            store.learn_norm(StepNorm(timeline=0, step=step, norm=norm_at(made, step)), 0)
            for number in store.blocks:
                store.settle(number)
    return {number: bytes(state.current.view) for number, state in store.blocks.items()}


def norm_at(made: TinyCompute, step: int) -> float:
    replica = Replica(made, Clipping(None, every=1))
    replica.begin(lanes=1)
    replica.record = record(step)
    found = replica.step(gradients(made, step), record(step + 1))
    assert found is not None
    return found


def content(made: TinyCompute) -> dict[int, bytes]:
    return {block.number: bytes(made.current(block.number)) for block in made.layout.blocks()}


def train(made: TinyCompute, replica: Replica, steps: range) -> None:
    for step in steps:
        replica.step(gradients(made, step), record(step + 1))
        replica.swap()


@pytest.mark.parametrize("clipping", [Clipping(None), Clipping(0.5)])
def test_its_values_are_those_of_parameter_servers(clipping):
    made, replica = begun(clipping)
    train(made, replica, range(4))
    assert content(made) == on_a_parameter_server(clipping, 4)
    assert replica.version == 4


def test_a_gradient_whose_norm_is_not_finite_is_left_out_but_buffers_are_not():
    made, replica = begun(Clipping(1.0, "skip"))
    before = content(made)
    found = gradients(made, 0)
    assert found[0] is not None
    found[0][3] = float("inf")
    replica.step(found, record(1))
    replica.swap()
    changed = {number for number, values in content(made).items() if values != before[number]}
    assert changed == {
        block.number for block in made.layout.blocks() if made.layout.segments[block.segment].kind == "buffer"
    }


def test_gradients_are_only_read():
    made, replica = begun(Clipping(0.5))
    found = gradients(made, 0)
    kept = {number: value.clone() for number, value in found.items() if value is not None}
    replica.step(found, record(1))
    assert all(torch.equal(found[number], kept[number]) for number in kept)


def test_a_replica_that_got_all_blocks_from_others_goes_on_with_the_same_bits():
    made, replica = begun()
    train(made, replica, range(2))
    other_compute, other = begun()
    numbers = [block.number for block in made.layout.blocks()]
    for part in (numbers[::2], numbers[1::2]):
        share = replica.copy_share(part)
        for number in part:
            payload = memoryview(share.values[number].numpy()).cast("B")
            other.load(number, payload, share.states[number])
    other.loaded(share.record, 3, "a")
    assert (other.version, other.timeline, other.checkpoint, other.digest()) == (2, 3, "a", replica.digest())
    train(made, replica, range(2, 3))
    train(other_compute, other, range(2, 3))
    assert content(made) == content(other_compute)
    assert replica.digest() == other.digest()


def test_what_was_copied_does_not_change_in_later_steps():
    made, replica = begun()
    train(made, replica, range(1))
    share = replica.copy_share([0])
    before = share.values[0].clone(), share.states[0]["momentum_buffer"].clone()
    train(made, replica, range(1, 3))
    assert torch.equal(share.values[0], before[0])
    assert torch.equal(share.states[0]["momentum_buffer"], before[1])


def test_the_digest_tells_values_and_states_apart():
    _, one = begun()
    made, other = begun()
    assert one.digest() == other.digest()
    tensor_over(made.staging(0), "float32").fill_(1.0)
    made.swap()
    assert one.digest() != other.digest()


@pytest.mark.parametrize(("block", "size"), [(99, 256), (0, 255), (-1, 256)])
def test_a_block_that_does_not_fit_is_refused(block: int, size: int):
    _, replica = begun()
    state: dict[str, Any] = {}
    with pytest.raises(BadFrame, match=f"block {block} of {size} bytes: the layout has"):
        replica.load(block, memoryview(bytes(size)), state)
