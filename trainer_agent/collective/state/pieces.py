"""What a trainer that joins steps by itself, as it comes from others: a block, or, for rules that need whole
parameters, a parameter.

blocks of a piece, all at one version ─made─► Piece ─step─► ...
    ─► all pieces at one version ─whole_blocks─► blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer_agent.collective.replica import Gathered, Gradients
from trainer_agent.model.compute import Compute
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.protocol.records.step import ParameterNumbers, is_among
from trireme_shared.serving.core.freezing import Freezing, block_numbers, block_optimizer, numbers_of
from trireme_shared.serving.core.geometry import ParameterParts
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options, arguments
from trireme_shared.serving.optimizers.classes import OF_WHOLE_PARAMETERS

Tensors = Mapping[int, torch.Tensor]
States = Mapping[int, Mapping[str, torch.Tensor]]


class Piece(Protocol):
    version: int

    def step(
        self, gradients: Gradients, factor: float | None, options: Sequence[Options], frozen: ParameterNumbers
    ) -> None:
        """To the next version, with the bits of Replica.step. `factor` None: the gradients of parameters are
        not used. `options`: of each group; []: as at first. `frozen`: see StepRecord."""
        ...

    def write(self, into: WholeBlocks) -> None:
        """Values and state."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A piece that is to be made. `blocks`: of which it needs all, at one version. `made(version, values,
    states)`: it; both by block."""

    blocks: tuple[int, ...]
    made: Callable[[int, Tensors, States], Piece]


class WholeBlocks:
    """Where pieces are written to."""

    def __init__(self, layout: Layout) -> None:
        self._blocks = tuple(layout.blocks())
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {block.number: {} for block in self._blocks}
        #: by block and place in it: the state of each parameter, whose numbers are the block's
        self.numbers: dict[int, dict[int, Mapping[str, torch.Tensor]]] = {}

    def part(self, block: Block, first: int, count: int) -> torch.Tensor:
        if block.number not in self.values:
            self.values[block.number] = torch.zeros(block.elements, dtype=DTYPES[block.dtype])
        return self.values[block.number][first : first + count]

    def state_part(self, block: Block, name: str, like: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Of a tensor of the state that has the shape of the values."""
        state = self.states[block.number]
        if name not in state:
            state[name] = torch.zeros(block.elements, dtype=like.dtype)
        return state[name][first : first + count]


def wanted_pieces(compute: Compute) -> list[Wanted]:
    """All that a replica consists of. Raises InvalidArgument: there is no such optimizer."""
    layout = compute.layout
    spec, whole = layout.optimizer, bool(OF_WHOLE_PARAMETERS.keys() & layout.optimizer.class_names)
    chosen = [
        arguments(spec, segment.group, segment.dtype, whole=whole) if segment.kind == "param" else None
        for segment in layout.segments
    ]
    found, trained, parts = [], [], ParameterParts(layout)
    for block in layout.blocks():
        if whole and chosen[block.segment] is not None:
            trained.append(block)
        else:
            found.append(_of_block(layout, block, chosen[block.segment], parts))
    counts: Counter[int] = Counter()  # by block: parameters in it
    for place in compute.places if whole else ():
        if place.elements:
            gathered = Gathered(place, trained)
            order = {block.number: counts[block.number] for block, _, _ in gathered.parts}
            counts.update(order.keys())
            found.append(_of_parameter(layout, gathered, chosen[place.segment] or {}, order))
    return found


def _of_block(layout: Layout, block: Block, chosen: Options | None, parts: ParameterParts) -> Wanted:
    group, freezing = layout.segments[block.segment].group, Freezing(parts)

    def made(version: int, values: Tensors, states: States) -> Piece:
        optimizer = None
        if chosen is not None:
            name = layout.optimizer.class_of(group)
            optimizer = block_optimizer(name, chosen, values[block.number], parts.of(block))
            optimizer.load(dict(states[block.number]))
        return _Block(block, version, values[block.number], optimizer, group, freezing)

    return Wanted((block.number,), made)


def _of_parameter(layout: Layout, place: Gathered, chosen: Options, order: Mapping[int, int]) -> Wanted:
    """`order`: by block, its place among the block's parameters."""
    group = layout.segments[place.segment].group

    def made(version: int, values: Tensors, states: States) -> Piece:
        own = place.gathered(values)
        optimizer = BlockOptimizer(layout.optimizer.class_of(group), chosen, own)
        numbers = [block.number for block, _, _ in place.parts]
        state = {}
        for name, first in states[numbers[0]].items():
            if first.dim():
                state[name] = place.gathered({number: states[number][name] for number in numbers})
        found = numbers_of(states[numbers[0]], order[numbers[0]]) or {}
        state |= {name: value.clone() for name, value in found.items()}
        optimizer.load(state)
        return _Parameter(place, version, own, optimizer, group, order)

    return Wanted(tuple(block.number for block, _, _ in place.parts), made)


class _Block:
    def __init__(
        self,
        block: Block,
        version: int,
        values: torch.Tensor,
        optimizer: BlockOptimizer | None,
        group: int,
        freezing: Freezing,
    ) -> None:
        self.version, self._freezing = version, freezing
        self._block, self._values, self._optimizer, self._group = block, values, optimizer, group
        self._spare = torch.empty_like(values)

    def step(
        self, gradients: Gradients, factor: float | None, options: Sequence[Options], frozen: ParameterNumbers
    ) -> None:
        self.version += 1
        gradient = gradients[self._block.number]
        if gradient is None or (self._optimizer is not None and factor is None):
            return
        if self._optimizer is None:
            self._values.copy_(gradient)
            return
        scaled = gradient * factor if factor is not None and factor != 1.0 else gradient.clone()
        own = self._freezing.options(self._block, options[self._group] if options else {}, frozen)
        self._optimizer.step_into(self._spare, self._values, scaled, own)
        self._values, self._spare = self._spare, self._values

    def write(self, into: WholeBlocks) -> None:
        into.values[self._block.number] = self._values
        if self._optimizer is not None:
            into.states[self._block.number] = self._optimizer.state()


class _Parameter:
    def __init__(
        self,
        place: Gathered,
        version: int,
        values: torch.Tensor,
        optimizer: BlockOptimizer,
        group: int,
        order: Mapping[int, int],
    ) -> None:
        self.version, self._order = version, order
        self._place, self._values, self._optimizer, self._group = place, values, optimizer, group

    def step(
        self, gradients: Gradients, factor: float | None, options: Sequence[Options], frozen: ParameterNumbers
    ) -> None:
        self.version += 1
        if factor is None or is_among(self._place.number, frozen) or not self._place.all_in(gradients):
            return
        gradient = self._place.gathered(gradients)
        if factor != 1.0:
            gradient.mul_(factor)
        self._optimizer.step(self._values, gradient, options[self._group] if options else {})

    def write(self, into: WholeBlocks) -> None:
        done = 0
        for block, first, count in self._place.parts:
            into.part(block, first, count).copy_(self._values[done : done + count])
            for name, value in self._optimizer.state().items():
                if value.dim():
                    into.state_part(block, name, value, first, count).copy_(value[done : done + count])
            into.numbers.setdefault(block.number, {})[self._order[block.number]] = self._optimizer.state()
            done += count


def whole_blocks(
    layout: Layout, pieces: Sequence[Piece]
) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """Number, values and state of each block, out of all pieces."""
    into = WholeBlocks(layout)
    for piece in pieces:
        piece.write(into)
    for number, of_each in into.numbers.items():
        into.states[number] |= block_numbers([dict(state) for _, state in sorted(of_each.items())])
    for number, values in sorted(into.values.items()):
        yield number, values, into.states[number]
