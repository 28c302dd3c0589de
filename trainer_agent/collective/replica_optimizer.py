"""The optimizer of a replica: its state, and the step of all parameters.

    EachBlock       element-wise rules: block by block, with the bits of parameter servers
    EachParameter   rules that need whole parameters (LARS, LAMB): one parameter at a time, gathered out of its blocks

The state is that of blocks with both, for checkpoints and for trainers that join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainer_agent.model.compute import Compute
from trainer_agent.model.flat import Place
from trireme_shared.blocks.buffers import DTYPES, bytes_of, tensor_over
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.layout import Block
from trireme_shared.serving.core.geometry import ParameterParts
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options, arguments, block_optimizer
from trireme_shared.serving.optimizers.classes import OF_WHOLE_PARAMETERS, SCALAR, kinds_of

Gradients = Mapping[int, torch.Tensor | None]


class ReplicaOptimizer(Protocol):
    """`state(block)`: the tensors, not copies, by name."""

    def step(self, gradients: Gradients, factor: float | None, options: list[Options]) -> None:
        """Values of the compute's current vectors, stepped, into its staging vectors. `gradients[block]`: only read; None: there is none.
        `factor`: what gradients are multiplied by; None: this step is left out. `options`: of each group; []: as at first."""
        ...

    def state(self, block: int) -> dict[str, torch.Tensor]: ...

    def load(self, block: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`. Raises BadFrame: that is no state of this optimizer."""
        ...

    def add_state(self, block: int, name: str, payload: memoryview) -> bool:
        """Copy one tensor of a state to start with; whether this block has such a state, of that size."""
        ...


def optimizer_of(compute: Compute) -> ReplicaOptimizer:
    """Without state, or with the one that its class begins with. Raises InvalidArgument: there is no such optimizer."""
    if compute.layout.optimizer.name in OF_WHOLE_PARAMETERS:
        return EachParameter(compute)
    return EachBlock(compute)


class EachBlock:
    """The memory that each optimizer is made with is not read or written."""

    def __init__(self, compute: Compute) -> None:
        self._compute, layout = compute, compute.layout
        self._blocks = _of_parameters(compute)
        self._groups = [segment.group for segment in layout.segments]
        chosen, parts, name = _arguments(compute), ParameterParts(layout), layout.optimizer.name
        self._optimizers = {
            block.number: block_optimizer(name, chosen[block.segment], _staging(compute, block), parts.of(block))
            for block in self._blocks
        }

    def step(self, gradients: Gradients, factor: float | None, options: list[Options]) -> None:
        for block in self._blocks:
            gradient, optimizer = gradients[block.number], self._optimizers[block.number]
            if gradient is None or factor is None:
                self._compute.keep(block.number)
                continue
            own = options[self._groups[block.segment]] if options else {}
            if factor != 1.0:
                gradient = gradient * factor
            elif not optimizer.only_reads(own):
                gradient = gradient.clone()
            optimizer.step_into(_staging(self._compute, block), _current(self._compute, block), gradient, own)

    def state(self, block: int) -> dict[str, torch.Tensor]:
        return self._optimizers[block].state() if block in self._optimizers else {}

    def load(self, block: int, state: Mapping[str, torch.Tensor]) -> None:
        if (optimizer := self._optimizers.get(block)) is not None:
            optimizer.load(dict(state))

    def add_state(self, block: int, name: str, payload: memoryview) -> bool:
        optimizer = self._optimizers.get(block)
        return optimizer is not None and optimizer.add_state(name, payload)


class EachParameter:
    """State of the shape of parameters lies in one vector for each segment, so blocks and parameters are views of it. A number beside it
    (`step`) is kept for each parameter; a block has that of its first one, since all of them are stepped equally often."""

    def __init__(self, compute: Compute) -> None:
        self._compute, layout = compute, compute.layout
        self._blocks = {block.number: block for block in _of_parameters(compute)}
        self._segments = layout.segments
        blocks = list(self._blocks.values())
        self._places = [Gathered(place, blocks) for place in compute.places if place.elements]
        self._optimizers: list[BlockOptimizer] = []
        self._of_block: dict[int, list[BlockOptimizer]] = {number: [] for number in self._blocks}
        self._vectors: dict[tuple[int, str], torch.Tensor] = {}
        chosen = _arguments(compute)
        for place in self._places:
            nothing = torch.empty(0, dtype=DTYPES[layout.segments[place.segment].dtype])
            optimizer = BlockOptimizer(layout.optimizer.name, chosen[place.segment], nothing)
            optimizer.load(self._first_state(place, optimizer, nothing.dtype))
            self._optimizers.append(optimizer)
            for block, _, _ in place.parts:
                self._of_block[block.number].append(optimizer)

    def _first_state(self, place: Gathered, optimizer: BlockOptimizer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All of it is 0."""
        state, size = {}, self._segments[place.segment].elements
        (kinds,) = kinds_of(optimizer.torch_optimizer)
        for name, scalar in kinds.items():
            if scalar:
                state[name] = torch.zeros((), dtype=SCALAR)
            else:
                vector = self._vectors.setdefault((place.segment, name), torch.zeros(size, dtype=dtype))
                state[name] = vector[place.first : place.first + place.elements]
        return state

    def step(self, gradients: Gradients, factor: float | None, options: list[Options]) -> None:
        for number in self._blocks:
            self._compute.keep(number)  # also what lies between parameters
        if factor is None or any(gradients[number] is None for number in self._blocks):
            return
        current = {number: _current(self._compute, block) for number, block in self._blocks.items()}
        staging = {number: _staging(self._compute, block) for number, block in self._blocks.items()}
        for place, optimizer in zip(self._places, self._optimizers, strict=True):
            values, gradient = place.gathered(current), place.gathered(gradients)
            if factor != 1.0:
                gradient.mul_(factor)
            own = options[self._segments[place.segment].group] if options else {}
            optimizer.step(values, gradient, own)
            optimizer.forget_values()
            done = 0
            for block, first, count in place.parts:
                staging[block.number][first : first + count].copy_(values[done : done + count])
                done += count

    def state(self, block: int) -> dict[str, torch.Tensor]:
        if (place := self._blocks.get(block)) is None or not self._of_block[block]:
            return {}
        found = {}
        for name, value in self._of_block[block][0].state().items():
            vector = self._vectors.get((place.segment, name))
            found[name] = value if vector is None else vector[place.first : place.first + place.elements]
        return found

    def load(self, block: int, state: Mapping[str, torch.Tensor]) -> None:
        own = self.state(block)
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in state.items()}:
            msg = f"block {block} comes with the state {_shapes(state)}: its optimizer has {_shapes(own)}"
            raise BadFrame(msg)
        for name, value in state.items():
            self._write(block, name, value)

    def add_state(self, block: int, name: str, payload: memoryview) -> bool:
        like = self.state(block).get(name)
        if like is None or payload.nbytes != like.nbytes:
            return False
        value = torch.empty_like(like)
        bytes_of(value.reshape(-1))[:] = payload.cast("B")
        self._write(block, name, value)
        return True

    def _write(self, block: int, name: str, value: torch.Tensor) -> None:
        if value.dim():
            self.state(block)[name].copy_(value)
        else:
            for optimizer in self._of_block[block]:
                optimizer.state()[name].copy_(value)


class Gathered:
    """A parameter out of the blocks that it lies in. `blocks`: of all parameters, in order; `parts`: (block, first element in the block, count),
    in order."""

    def __init__(self, place: Place, blocks: Sequence[Block]) -> None:
        self.segment, self.first, self.elements = place.segment, place.first, place.elements
        end = place.first + place.elements
        self.parts = [
            (
                block,
                max(self.first - block.first, 0),
                min(end, block.first + block.elements) - max(self.first, block.first),
            )
            for block in blocks
            if block.segment == place.segment and block.first < end and self.first < block.first + block.elements
        ]

    def all_in(self, tensors: Gradients) -> bool:
        """Whether there is one for each of its blocks."""
        return all(tensors[block.number] is not None for block, _, _ in self.parts)

    def gathered(self, tensors: Gradients) -> torch.Tensor:
        """A copy of its elements, 1-d, as they lie in memory. `tensors`: of its blocks, 1-d."""
        found = []
        for block, first, count in self.parts:
            values = tensors[block.number]
            assert values is not None
            found.append(values[first : first + count])
        return torch.cat(found)


def _of_parameters(compute: Compute) -> list[Block]:
    layout = compute.layout
    return [block for block in layout.blocks() if layout.segments[block.segment].kind == "param"]


def _arguments(compute: Compute) -> dict[int, Options]:
    """Of each segment of parameters."""
    spec, segments = compute.layout.optimizer, compute.layout.segments
    return {
        number: arguments(spec, segment.group, segment.dtype, whole=True)
        for number, segment in enumerate(segments)
        if segment.kind == "param"
    }


def _current(compute: Compute, block: Block) -> torch.Tensor:
    return tensor_over(memoryview(compute.current(block.number)).cast("B").toreadonly(), block.dtype)


def _staging(compute: Compute, block: Block) -> torch.Tensor:
    return tensor_over(memoryview(compute.staging(block.number)).cast("B"), block.dtype)


def _shapes(state: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in sorted(state.items())) or "(none)"
