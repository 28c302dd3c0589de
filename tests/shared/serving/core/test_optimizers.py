"""Blocks stepped by torch.optim have the bits of whole parameters stepped by plain torch."""

import pytest
import torch

from tests.pserver_service.jobs import (
    JOB,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    payload_of,
    push_header,
    stream,
    values_of,
)
from trireme_shared.protocol.errors import InvalidArgument, LayoutMismatch
from trireme_shared.protocol.records.layout import OptimizerSpec, Segment
from trireme_shared.protocol.wire.messages import InitBlock
from trireme_shared.serving.core.optimizers import BlockOptimizer, arguments, options_of
from trireme_shared.serving.optimizers.classes import CLASSES
from trireme_shared.serving.pserver import Pserver

ELEMENTS = 1003
BLOCK_BYTES = 448  # 112 elements: not a multiple of any vector width, and a last block of 107
CASES = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "maximize": True, "foreach": False}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": [0.8, 0.95], "fused": True, "weight_decay": 1e-2}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    ("Adagrad", {"lr": 0.1, "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("RMSprop", {"lr": 0.01, "foreach": True}),
    ("Adadelta", {"lr": 1.0, "rho": 0.8}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Lion", {"lr": 0.01}),
    ("Lion", {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}),
]


def defaults_of(name: str) -> dict:
    """As a trainer sends them: all defaults of the class, lists for tuples."""
    defaults = CLASSES[name]([torch.nn.Parameter(torch.zeros(1))], lr=0.1).defaults
    return {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}


def given(options: dict) -> dict:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


@pytest.mark.parametrize(("name", "options"), CASES)
async def test_blocks_have_the_bits_of_plain_torch(name, options):
    layout = layout_of(
        ELEMENTS,
        block_bytes=BLOCK_BYTES,
        optimizer=OptimizerSpec(name=name, defaults=defaults_of(name), groups=(options,)),
    )
    pserver, values = await initialised(layout)
    whole = torch.nn.Parameter(torch.cat(list(values.values())))
    optimizer = CLASSES[name]([whole], **given(options))
    for step in range(6):
        gradient, rate = torch.randn(ELEMENTS), options["lr"] / (step + 1)
        whole.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        parts = torch.split(gradient, BLOCK_BYTES // 4)
        header = push_header(step, options=({**options, "lr": rate},))
        items = [item(number, part) for number, part in enumerate(parts)]
        answer = await pserver.push(header, stream(*items))
        assert answer.applied == len(parts) == len(pserver.store.blocks)
        lent = all(payload == payload_of(part) for (_, payload), part in zip(items, parts, strict=True))
        assert lent, "a payload that is only ours to read was written to"
    stepped = torch.cat([block.current.tensor for block in pserver.store.blocks.values()])
    assert torch.equal(stepped, whole.detach())
    check_invariants(pserver)


def test_sgd_fused_becomes_foreach_where_its_result_depends_on_memory_that_nobody_has_written():
    options = {"lr": 0.05, "momentum": 0.9, "fused": True}
    spec = OptimizerSpec(name="SGD", defaults=defaults_of("SGD"), groups=(options,))
    found = {dtype: arguments(spec, 0, dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert {dtype: (each["fused"], each["foreach"]) for dtype, each in found.items()} == {
        "float32": (True, None),
        "bfloat16": (False, True),
        "float16": (False, True),
    }


async def test_each_group_has_its_own_options():
    spec = OptimizerSpec(name="SGD", defaults=defaults_of("SGD"), groups=({"lr": 0.5}, {"lr": 0.25}))
    segments = [Segment(kind="param", dtype="float32", elements=4, group=group) for group in (1, 0)]
    pserver, values = await initialised(layout_of(*segments, optimizer=spec))
    ones = torch.ones(4)
    await pserver.push(push_header(0, options=({}, {})), stream(item(0, ones), item(1, ones)))
    await pserver.push(
        push_header(1, options=({"lr": 1.0}, {"lr": 2.0})), stream(item(0, ones), item(1, ones))
    )
    blocks = pserver.store.blocks
    assert torch.equal(blocks[0].current.tensor, values[0] - 0.25 - 2.0)
    assert torch.equal(blocks[1].current.tensor, values[1] - 0.5 - 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_parameters_are_stepped_as_plain_torch_does(dtype):
    kind = getattr(torch, dtype)
    segment = Segment(kind="param", dtype=dtype, elements=50, group=0)
    layout = layout_of(
        segment,
        optimizer=OptimizerSpec(
            name="SGD", defaults=defaults_of("SGD"), groups=({"lr": 0.1, "momentum": 0.9},)
        ),
    )
    values = torch.randn(50).to(kind)
    pserver = Pserver(JOB, "ps-1", index=0)
    parts = torch.split(values, 32)
    await pserver.init(
        init_header(layout), stream(*((InitBlock(block=k), payload_of(p)) for k, p in enumerate(parts)))
    )
    whole = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    for step in range(3):
        whole.grad = torch.randn(50).to(kind)
        await pserver.push(
            push_header(step), stream(*(item(k, p) for k, p in enumerate(torch.split(whole.grad, 32))))
        )
        optimizer.step()
    assert torch.equal(
        torch.cat([block.current.tensor for block in pserver.store.blocks.values()]), whole.detach()
    )


def test_options_of_how_a_step_is_computed_stay_as_constructed():
    optimizer = BlockOptimizer("Adam", {"lr": 0.1, "fused": True, "foreach": False}, torch.zeros(2))
    optimizer.step(torch.zeros(2), torch.ones(2), {"lr": 0.2, "fused": False, "initial_lr": 7.0})
    group = optimizer.torch_optimizer.param_groups[0]
    assert (group["lr"], group["fused"], "initial_lr" in group) == (0.2, True, False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "LBFGS",
            {},
            (
                "'LBFGS' does not run on parameter servers; choose one of torch.optim: SGD, Adam, "
                ".*trireme.optim.Lion"
            ),
        ),
        ("__import__", {}, "does not run on parameter servers"),
        ("SGD", {"lr": -1.0}, "SGD refuses"),
        ("SGD", {"nesterov": True}, "SGD refuses"),
        ("SGD", {"lr": "fast"}, "lr='fast' is str"),
        (
            "Lion",
            {"betas": [0.9, 1.0]},
            r"Lion refuses .*: Lion: betas are \(0.9, 1.0\); expected two numbers in \[0, 1\)",
        ),
        ("Lion", {"lr": -1.0}, "Lion refuses .*: Lion: lr is -1.0"),
        ("Adam", {"betas": ["a", "b"]}, "betas=.* is list"),
    ],
)
async def test_optimizers_that_cannot_run_here_are_refused(name, options, message):
    layout = layout_of(4, optimizer=OptimizerSpec(name=name, defaults={}, groups=(options,)))
    pserver = Pserver(JOB, "ps-1", index=0)
    with pytest.raises(InvalidArgument, match=message):
        await pserver.init(init_header(layout), stream())
    assert pserver.store is None


async def test_a_segment_without_its_group_is_refused():
    layout = layout_of(Segment(kind="param", dtype="float32", elements=4, group=1))
    with pytest.raises(InvalidArgument, match=r"group 1 of a segment: SGD has groups 0 to 0"):
        await Pserver(JOB, "ps-1", index=0).init(init_header(layout), stream())


async def test_a_push_with_options_of_other_groups_is_refused():
    pserver, values = await initialised(layout_of(4))
    with pytest.raises(LayoutMismatch, match="options of 2 groups: the optimizer has 1"):
        await pserver.push(push_header(0, options=({}, {})), stream(item(0, torch.ones(4))))
    assert torch.equal(pserver.store.blocks[0].current.tensor, values[0])


def test_values_are_the_same_for_the_same_seed():
    layout = layout_of(100)
    assert all(
        torch.equal(a, b) for a, b in zip(values_of(layout).values(), values_of(layout).values(), strict=True)
    )
    assert options_of({"betas": [0.9, 0.99], "lr": 1}) == {"betas": (0.9, 0.99), "lr": 1}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"weight_decay": 0.01},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ],
)
def test_direct_steps_of_sgd_have_the_bits_of_torch(extra, dtype, foreach):
    """Values, state and the untouched gradient, with a rate and a momentum that change; also after going on
    from a saved state."""
    torch.manual_seed(5)
    start = torch.randn(10_007).to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    plain = torch.optim.SGD([parameter], lr=0.1, foreach=foreach, **extra)
    ours = BlockOptimizer("SGD", {"lr": 0.1, "foreach": foreach, **extra}, start.clone())
    values, out = start.clone(), torch.empty_like(start)
    for step, rate in enumerate((0.1, 0.1, 0.03, 0.7, 0.003)):
        gradient = torch.randn(10_007).to(dtype)
        given = {"lr": rate, **extra}
        if "momentum" in extra:  # as cyclic schedulers change it; without any for a step
            given["momentum"] = 0.0 if step == 3 else extra["momentum"] / (step + 1)
        plain.param_groups[0].update(given)
        parameter.grad = gradient.clone()
        plain.step()
        kept, before = gradient.clone(), values.clone()
        direct = ours.only_reads(given)
        bare = not given.get("momentum") and "weight_decay" not in given
        assert direct == (bare if foreach else step > 0 or "momentum" not in extra)
        ours.step_into(out, values, gradient, given)
        assert torch.equal(values, before)
        assert not direct or torch.equal(gradient, kept)
        assert torch.equal(out, parameter.detach())
        for key, tensor in ours.state().items():
            assert torch.equal(tensor, plain.state[parameter][key]), key
        values, out = out, values
        if step == 2:
            saved = {key: tensor.clone() for key, tensor in ours.state().items()}
            ours = BlockOptimizer("SGD", {"lr": 0.1, "foreach": foreach, **extra}, values)
            ours.load(saved)


CHANGED = [
    ("SGD", {"lr": 0.1}, {"momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
    ("Adam", {"lr": 0.1}, {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-6}),
    ("AdamW", {"lr": 0.1, "fused": True}, {"weight_decay": 0.0}),
    ("Adagrad", {"lr": 0.1}, {"lr_decay": 0.1}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5}, {"alpha": 0.9, "momentum": 0.9}),
    ("Adadelta", {"lr": 0.1}, {"rho": 0.5}),
    ("Adamax", {"lr": 0.1}, {"betas": (0.8, 0.95)}),
    ("NAdam", {"lr": 0.1}, {"momentum_decay": 0.1}),
    ("RAdam", {"lr": 0.1}, {"weight_decay": 0.1}),
    ("Lion", {"lr": 0.1}, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options", "changes"), CHANGED)
def test_options_that_change_between_two_runs_have_the_bits_of_plain_torch(name, options, changes):
    """A block from a checkpoint, in an optimizer that is made with the new options."""
    torch.manual_seed(5)
    values, make = torch.randn(1003), CLASSES[name]
    parameter = torch.nn.Parameter(values.clone())
    plain, ours = make([parameter], **options), BlockOptimizer(name, options, values)
    now = {**options}
    for step in range(6):
        if step == 3:
            saved = {key: tensor.clone() for key, tensor in ours.state().items()}
            now = {**plain.defaults, **options, **changes}
            plain.param_groups[0].update(changes)
            ours = BlockOptimizer(name, {**options, **changes}, values)
            ours.load(saved)
        gradient = torch.randn(1003)
        parameter.grad = gradient.clone()
        plain.step()
        ours.step(values, gradient, now)
        assert torch.equal(values, parameter.detach()), step


ADAMS = [
    (name, {**how, **extra})
    for name in ("Adam", "AdamW")
    for how in ({"fused": True}, {"fused": False, "foreach": False}, {})
    for extra in ({}, {"weight_decay": 0.05}, {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6})
]


@pytest.mark.parametrize(("name", "options"), ADAMS)
def test_direct_steps_of_adam_have_the_bits_of_torch(name, options):
    """Values, state and the untouched gradient, with a rate that changes; also after going on from a saved
    state."""
    torch.manual_seed(5)
    start = torch.randn(10_007)
    parameter = torch.nn.Parameter(start.clone())
    plain = getattr(torch.optim, name)([parameter], lr=0.1, **options)
    ours = BlockOptimizer(name, {"lr": 0.1, **options}, start.clone())
    values, out = start.clone(), torch.empty_like(start)
    for step, rate in enumerate((0.1, 0.1, 0.03, 0.7, 0.003)):
        gradient = torch.randn(10_007)
        plain.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        plain.step()
        kept, before = gradient.clone(), values.clone()
        given = {"lr": rate, **options}
        assert ours.only_reads(given) == (step > 0)
        ours.step_into(out, values, gradient, given)
        assert torch.equal(values, before)
        assert torch.equal(gradient, kept)
        assert torch.equal(out, parameter.detach())
        for key, tensor in plain.state[parameter].items():
            assert torch.equal(ours.state()[key], tensor), key
        values, out = out, values
        if step == 2:
            saved = {key: tensor.clone() for key, tensor in ours.state().items()}
            ours = BlockOptimizer(name, {"lr": 0.1, **options}, values)
            ours.load(saved)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Adam", {"amsgrad": True}),
        ("Adam", {"maximize": True}),
        ("Adam", {"foreach": True}),
        ("SGD", {"maximize": True}),
    ],
)
def test_what_has_no_direct_step_is_left_to_torch(name, extra):
    ours = BlockOptimizer(name, {"lr": 0.1, **extra}, torch.zeros(3))
    ours.step_into(torch.zeros(3), torch.zeros(3), torch.ones(3), {"lr": 0.1, **extra})
    assert not ours.only_reads({"lr": 0.1, **extra})


THREADED = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "fused": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 1e-2}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("Adagrad", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("elements", [100_003, 262_144, 1_048_589])
@pytest.mark.parametrize(("name", "options"), THREADED)
def test_the_number_of_threads_changes_no_bit(name, options, elements):
    """torch gives each thread a part of a block; a part's last elements take another path than whole vectors
    do."""
    chosen = arguments(OptimizerSpec(name=name, defaults={**defaults_of(name), **options}, groups=({},)), 0)
    numbers = torch.Generator().manual_seed(1)
    first, *gradients = (torch.randn(elements, generator=numbers) for _ in range(4))
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            values, out = first.clone(), torch.empty_like(first)
            optimizer = BlockOptimizer(name, chosen, values)
            for gradient in gradients:
                optimizer.step_into(out, values, gradient.clone(), {})
                values, out = out, values
            found.append([values, *optimizer.state().values()])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
