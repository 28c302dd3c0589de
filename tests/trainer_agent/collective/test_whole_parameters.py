"""Every member of a collective job steps whole parameters, wherever blocks cut them, to the bits of plain
PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.collective.replica import Replica
from trainer_agent.script.user_module import load
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.protocol.errors import BadFrame, InvalidArgument
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.records.step import LanePosition, LaneZero, StepRecord
from trireme_shared.serving.core.optimizers import arguments

COLLECTIVE = {"strategy": "collective", "pservers": 0}
MODEL = """
    def model():
        convolution = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)
        return nn.Sequential(convolution, nn.BatchNorm2d(9), nn.Flatten(), nn.Linear(9, 77), nn.Linear(77, 3))
"""
OPTIMIZER = """
    def optimizer(model):
        large = [p for p in model.parameters() if p.dim() > 1]
        small = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {{"params": large, "weight_decay": 0.01}},
            {{"params": small, "layerwise": False, "lr": 0.05}},
        ]
        return trireme.optim.{name}(groups, lr=0.1)
"""
NAMES = ["LARS", "LAMB"]


def parts(name):
    return {"model": MODEL, "optimizer": OPTIMIZER.format(name=name)}


def gradient_of(place, step):
    """In the order of memory."""
    generator = torch.Generator().manual_seed(step * 1000 + place.first + place.segment)
    return torch.randn(place.elements, generator=generator)


def gradients(compute, step):
    """Of all blocks; buffers stay as they are."""
    layout = compute.layout
    vectors = [torch.zeros(s.elements, dtype=DTYPES[s.dtype]) for s in layout.segments]
    for place in compute.places:
        vectors[place.segment][place.first : place.first + place.elements] = gradient_of(place, step)
    return {
        block.number: vectors[block.segment][block.first : block.first + block.elements]
        if layout.segments[block.segment].kind == "param"
        else None
        for block in layout.blocks()
    }


def record(version, rate):
    options = ({"lr": rate}, {"lr": rate / 2})
    return StepRecord(version=version, positions=(LanePosition(lane=0),), lane_zero=LaneZero(options=options))


def train(compute, replica, steps):
    for step in steps:
        replica.step(gradients(compute, step), record(step + 1, 0.1 / (step + 1)))
        replica.swap()


def begun(compute, clipping=None):
    replica = Replica(compute, clipping)
    replica.begin(1)
    return replica


def plainly(compute, folder, steps):
    """The parameters after plain PyTorch's steps, by name."""
    user, spec = (
        load(write_script(folder, **parts(compute.layout.optimizer.name))),
        spec_for(folder / "script.py"),
    )
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer, named = user.call("optimizer", model), dict(model.named_parameters())
    for step in range(steps):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (step + 1) / (1 + number)
        for place in compute.places:
            flat = gradient_of(place, step)
            named[place.name].grad = flat.as_strided(place.shape, place.stride)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize("block_bytes", [256, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_plain_pytorch_whatever_the_size_of_blocks(build, tmp_path, name, block_bytes):
    compute = build({**COLLECTIVE, "block_bytes": block_bytes}, **parts(name))
    assert (len(compute.plan.blocks_of(compute.places[4])) > 1) is (block_bytes == 256)
    train(compute, begun(compute), range(4))
    expected, found = plainly(compute, tmp_path, 4), dict(compute.model.named_parameters())
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    assert not torch.equal(found["3.weight"], plainly(compute, tmp_path, 3)["3.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_a_member_that_got_the_shares_of_others_goes_on_with_the_same_bits(build, name):
    compute, other = build(COLLECTIVE, **parts(name)), build(COLLECTIVE, **parts(name))
    replica, follower = begun(compute), begun(other)
    train(compute, replica, range(2))
    numbers = [block.number for block in compute.plan.blocks]
    for share in (replica.copy_share(numbers[::2]), replica.copy_share(numbers[1::2])):
        for number, values in share.values.items():
            follower.load(number, memoryview(values.view(torch.uint8).numpy()), share.states[number])
    follower.loaded(replica.record, 0, "")
    assert follower.digest() == replica.digest()
    train(compute, replica, range(2, 4))
    train(other, follower, range(2, 4))
    assert follower.digest() == replica.digest()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_data_changes_neither_values_nor_state(build, name):
    compute = build(COLLECTIVE, **parts(name))
    replica = begun(compute)
    train(compute, replica, range(1))
    before = replica.digest()
    replica.step(dict.fromkeys(gradients(compute, 1)), record(2, 0.1))
    replica.swap()
    assert (replica.digest(), replica.version) == (before, 2)


def test_gradients_are_clipped_before_and_only_read(build):
    compute, clipped = build(COLLECTIVE, **parts("LARS")), build(COLLECTIVE, **parts("LARS"))
    small, large = begun(compute), begun(clipped, Clipping(1.0))
    found = gradients(clipped, 0)
    kept = {number: value.clone() for number, value in found.items() if value is not None}
    norm = large.step(found, record(1, 0.1))
    assert all(torch.equal(found[number], value) for number, value in kept.items())
    factor = Clipping(1.0).factor(norm)
    small.step({number: None if v is None else v * factor for number, v in found.items()}, record(1, 0.1))
    small.swap()
    large.swap()
    assert norm > 1
    assert small.digest() == large.digest()


def test_a_state_of_another_optimizer_is_refused(build):
    replica = begun(compute := build(COLLECTIVE, **parts("LAMB")))
    values = memoryview(bytearray(compute.plan.blocks[0].bytes))
    with pytest.raises(
        BadFrame, match=r"block 0 comes with the state momentum_buffer \(3,\): its optimizer has exp_avg "
    ):
        replica.load(0, values, {"momentum_buffer": torch.zeros(3)})


async def test_a_state_to_begin_with_is_taken_over(build, tmp_path):
    """As init_optimizer: it was made in plain PyTorch."""
    compute = build(COLLECTIVE, **parts("LAMB"))
    train(compute, replica := begun(compute), range(2))
    states = {block.number: replica.state(block.number) for block in compute.plan.blocks}
    compute.initial_state = lambda number: [
        (key, memoryview(value.reshape(-1).view(torch.uint8).numpy()))
        for key, value in states[number].items()
    ]
    second = begun(compute)
    assert second.digest() == replica.digest()
    assert second.state(0)["step"].item() == 2


@pytest.mark.parametrize("name", NAMES)
def test_parameter_servers_cannot_step_them_and_one_message_says_so(build, name):
    message = (
        f"optimizer {name} needs the norm of each whole parameter, and parameter servers have blocks "
        "that cut them"
    )
    with pytest.raises(InvalidArgument, match=f"^{message}$") as refused:
        build(**parts(name))
    assert refused.value.hint == "use --strategy collective, or AdamW or Lion with a warm-up"
    with pytest.raises(InvalidArgument, match=message):
        arguments(OptimizerSpec(name=name, defaults={}, groups=({},)), 0)
