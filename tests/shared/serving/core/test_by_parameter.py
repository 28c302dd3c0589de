"""Steps of blocks have the bits of whole parameters stepped by plain torch, wherever parameters and blocks
end, in every dtype and with every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import (
    ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    Layout,
    OptimizerSpec,
    Segment,
)
from trireme_shared.serving.core.geometry import Geometry, ParameterParts, rounds_by_parameter
from trireme_shared.serving.core.optimizers import (
    BlockOptimizer,
    ByParameter,
    arguments,
    whole_block_optimizer,
)
from trireme_shared.serving.optimizers.classes import CLASSES

optimizers_without_compiler()
SIZES = (67, 1, 0, 33, 700, 64, 5, 32, 15, 421, 3)
BLOCK_BYTES = 448
RULES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("Adadelta", {"lr": 1.0, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
]
KERNELS = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
WITHOUT_FUSED = {"RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"}
CASES = [
    (name, {**options, **({} if name == "Lion" else how)}, dtype)
    for name, options in RULES
    for kernel, how in KERNELS.items()
    if not (kernel == "fused" and name in WITHOUT_FUSED) and not (kernel != "foreach" and name == "Lion")
    for dtype in ("float32", "bfloat16", "float16")
]


def laid_out(
    name: str, options: dict[str, Any], dtype: str, sizes: tuple[int, ...], block_bytes: int
) -> Layout:
    """As a trainer lays it out."""
    grain = ALIGNMENT_BYTES // ELEMENT_BYTES[dtype]
    elements = sum(-(-size // grain) * grain for size in sizes[:-1]) + sizes[-1]
    spec = OptimizerSpec(name=name, defaults=options, groups=({},))
    segment = Segment(kind="param", dtype=dtype, elements=elements, group=0)
    told = sizes if rounds_by_parameter(spec, segment) else ()
    segment = segment.model_copy(update={"parameters": told})
    return Layout(segments=(segment,), block_bytes=block_bytes, digest="d", optimizer=spec)


class Blocks:
    """All blocks of a layout."""

    def __init__(
        self, layout: Layout, values: torch.Tensor, states: list[dict[str, torch.Tensor]] | None = None
    ) -> None:
        self._layout, parts = layout, ParameterParts(layout)
        self._blocks = list(layout.blocks())
        chosen = arguments(layout.optimizer, 0, layout.segments[0].dtype)
        self.values = values.clone()
        self.optimizers = [
            whole_block_optimizer(layout.optimizer.name, chosen, part.clone(), parts.of(block))
            for block, part in zip(self._blocks, self._cut(values), strict=True)
        ]
        for optimizer, state in zip(self.optimizers, states or [], strict=False):
            optimizer.load(state)

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [vector[block.first : block.first + block.elements] for block in self._blocks]

    def step(self, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        out = torch.full_like(self.values, 7)
        cut = map(self._cut, (out, self.values, gradient.clone()))
        for optimizer, *vectors in zip(self.optimizers, *cut, strict=True):
            kept, reads = vectors[2].clone(), optimizer.only_reads(options)
            optimizer.step_into(*vectors, options)
            assert not reads or torch.equal(vectors[2], kept)
        self.values = out

    def saved(self) -> list[dict[str, torch.Tensor]]:
        return [{name: value.clone() for name, value in each.state().items()} for each in self.optimizers]

    def vector(self, name: str) -> torch.Tensor:
        return torch.cat([state[name] for state in self.saved()])


def views(vector: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    grain, first, found = ALIGNMENT_BYTES // vector.element_size(), 0, []
    for size in sizes:
        found.append(vector[first : first + size])
        first += -(-size // grain) * grain
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit: some of float16 are not finite."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def compare(
    name: str, options: dict[str, Any], dtype: str, sizes: tuple[int, ...], block_bytes: int, threads: int = 1
) -> None:
    layout = laid_out(name, options, dtype, sizes, block_bytes)
    numbers = torch.Generator().manual_seed(len(sizes) + block_bytes)
    whole = [torch.nn.Parameter(torch.randn(size, generator=numbers).to(DTYPES[dtype])) for size in sizes]
    start = torch.zeros(layout.segments[0].elements, dtype=DTYPES[dtype])
    for view, parameter in zip(views(start, sizes), whole, strict=True):
        view.copy_(parameter.detach())
    chosen, is_narrow = dict(options), dtype != "float32"
    if name == "SGD" and options.get("fused") and is_narrow:  # torch's depends on what was in memory before
        chosen.update(fused=False, foreach=True)
    plain, ours = CLASSES[name](whole, **chosen), Blocks(layout, start)
    for step in range(5):
        rate, gradient = options["lr"] / (step + 1), torch.zeros_like(start)
        for view, parameter in zip(views(gradient, sizes), whole, strict=True):
            view.copy_(torch.randn(len(view), generator=numbers))
            parameter.grad = view.clone()
        plain.param_groups[0]["lr"] = rate
        torch.set_num_threads(1)
        plain.step()
        torch.set_num_threads(threads)
        ours.step(gradient, {**options, "lr": rate})
        if step == 2:
            # from a checkpoint, or at another parameter server
            ours = Blocks(layout, ours.values, ours.saved())
    for view, parameter in zip(views(ours.values, sizes), whole, strict=True):
        assert same(view, parameter.detach())
    kept = {key for key, value in plain.state[whole[0]].items() if value is not None and value.dim()}
    assert kept == {key for key, value in ours.saved()[0].items() if value.dim()}
    for key in kept:
        for view, parameter in zip(views(ours.vector(key), sizes), whole, strict=True):
            assert same(view, plain.state[parameter][key]), key


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "options", "dtype"), CASES, ids=lambda each: str(each))
def test_blocks_have_the_bits_of_whole_parameters(name: str, options: dict[str, Any], dtype: str) -> None:
    compare(name, options, dtype, SIZES, BLOCK_BYTES)
    compare(name, options, dtype, SIZES * 6, 1 << 13)  # its ends together are several lines of 64 bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
        ("Lion", {"lr": 0.01}),
        ("AdamW", {"lr": 0.01, "fused": True}),
    ],
)
def test_the_number_of_threads_changes_no_bit_of_a_large_block(
    name: str, options: dict[str, Any], dtype: str
) -> None:
    compare(name, options, dtype, (40_001, 5, 70_003), 1 << 20, threads=3)


def test_only_blocks_that_need_it_are_stepped_by_parameter() -> None:
    """Others are one vector, however many parameters they hold: also those whose parameters end with whole
    lines of 64 bytes."""
    kinds = {}
    for dtype in ("float32", "bfloat16"):
        for options in ({"lr": 0.1}, {"lr": 0.1, "fused": True}):
            layout = laid_out("Adam", options, dtype, SIZES, 4096)
            optimizer = Blocks(
                layout, torch.zeros(layout.segments[0].elements, dtype=DTYPES[dtype])
            ).optimizers[0]
            kinds[dtype, "fused" in options] = type(optimizer)
    assert kinds.pop(("float32", False)) is BlockOptimizer
    assert set(kinds.values()) == {ByParameter}
    layout = laid_out("Adam", {"lr": 0.1, "fused": True}, "float32", (64, 16, 33), 4096)
    assert type(Blocks(layout, torch.zeros(layout.segments[0].elements)).optimizers[0]) is BlockOptimizer
    segment = Segment(kind="param", dtype="bfloat16", elements=3, group=0)
    assert not rounds_by_parameter(OptimizerSpec(name="LARS", defaults={"lr": 0.1}, groups=({},)), segment)
    assert not rounds_by_parameter(
        OptimizerSpec(name="Adam", defaults={}, groups=({},)),
        Segment(kind="buffer", dtype="float16", elements=3),
    )


def test_a_state_to_start_with_comes_one_tensor_at_a_time() -> None:
    layout = laid_out("Adam", {"lr": 0.1, "fused": True}, "float32", SIZES, 1 << 16)
    ours = Blocks(layout, torch.zeros(layout.segments[0].elements)).optimizers[0]
    given = {
        "exp_avg": torch.randn(layout.segments[0].elements),
        "exp_avg_sq": torch.rand(layout.segments[0].elements),
    }
    for name, value in given.items():
        assert ours.add_state(name, memoryview(value.numpy()).cast("B"))
    assert ours.add_state("step", memoryview(torch.tensor(3.0).reshape(1).numpy()).cast("B"))
    assert not ours.add_state("exp_avg", memoryview(b"1234"))
    assert not ours.add_state("other", memoryview(b"1234"))
    state = ours.state()
    assert all(torch.equal(state[name], value) for name, value in given.items())
    assert state["step"].item() == 3


def test_sizes_that_do_not_fill_their_segment_are_refused() -> None:
    layout = laid_out("SGD", {"lr": 0.1}, "bfloat16", SIZES, BLOCK_BYTES)
    segment = layout.segments[0].model_copy(update={"parameters": (5, 7)})
    with pytest.raises(InvalidArgument, match="the 2 parameters of segment 0 take 39 elements of"):
        Geometry(layout.model_copy(update={"segments": (segment,)}))
