"""The whole model with its optimizer in one trainer of a collective job, stepped as parameter servers step
their blocks: the same bits.

    version s in use ─step: mean gradients of all blocks─► version s + 1 in the staging vectors ─swap─► in use
    copy_share: some blocks of the version in use, for a checkpoint or a trainer that joins
        ─load, loaded─► another replica

Values lie in the compute's vectors, each optimizer's state here. One call at a time; `step` may run in a
thread of its own, beside forward and backward of the version in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from xxhash import xxh3_128

from trainer_agent.model.compute import Compute
from trainer_agent.model.flat import Place
from trireme_shared.blocks.buffers import DTYPES, bytes_of, tensor_over
from trireme_shared.blocks.gradient_norm import Clipping, norm_of, squares_of
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.protocol.records.step import LanePosition, ParameterNumbers, StepRecord, numbers_in
from trireme_shared.serving.core.freezing import (
    BEGUN,
    Freezing,
    block_numbers,
    block_optimizer,
    numbers_of,
    shapes_of,
)
from trireme_shared.serving.core.geometry import ParameterParts
from trireme_shared.serving.core.optimizers import (
    BlockOptimizer,
    Options,
    arguments,
    options_of,
)
from trireme_shared.serving.optimizers.classes import OF_WHOLE_PARAMETERS, SCALAR, kinds_of

if TYPE_CHECKING:
    from trainer_agent.collective.rows import ReplicaRows  # loads numba


State = Mapping[str, torch.Tensor]
Gradients = Mapping[int, torch.Tensor | None]


@dataclass(frozen=True)
class Share:
    """Copies of some blocks at the version of `record`. `values[block]`: 1-d, in the block's dtype.
    `states[block]`: of its optimizer, by name; empty for buffers, and before the first step of most
    classes."""

    record: StepRecord
    values: dict[int, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]


class Replica:
    """`record`: of the version in use, None as long as there is none; `stepped`: of the version in the
    staging vectors, if that is the next one. `timeline` and `checkpoint`: of both, see JobState. `stepping`:
    set before `step` is called in a thread: states are changing. `rows`: of all slots of the model's
    embedding tables, if it has some and there is a version; whoever calls `step` steps them, too, before
    `swap`."""

    def __init__(self, compute: Compute, clipping: Clipping | None = None) -> None:
        self._compute, self._clipping = compute, clipping or Clipping(None)
        self._blocks = tuple(compute.layout.blocks())
        segments = compute.layout.segments
        self._trained = [block for block in self._blocks if segments[block.segment].kind == "param"]
        self._buffers = [block for block in self._blocks if segments[block.segment].kind != "param"]
        self.record: StepRecord | None = None
        self.stepped: StepRecord | None = None
        self.timeline, self.checkpoint = 0, ""
        self.stepping = False
        self._optimizer = optimizer_of(compute)
        self.rows: ReplicaRows | None = None

    def __repr__(self) -> str:
        staged = f", {self.stepped.version} stepped" if self.stepped is not None else ""
        return (
            f"<Replica of {len(self._blocks)} blocks at version {self.version}{staged}, timeline "
            f"{self.timeline}>"
        )

    @property
    def version(self) -> int | None:
        """The version in use; None: none yet."""
        return self.record.version if self.record is not None else None

    @property
    def at_rest(self) -> bool:
        """Whether values in use and states are of one version, until the loop of events goes on."""
        return self.record is not None and self.stepped is None and not self.stepping

    # ------------------------------------------------------------ first values

    def begin(self, lanes: int) -> None:
        """Version 0: the values that the compute has at first, and the state that its optimizer starts with.
        Raises BadFrame: the optimizer has no such state."""
        self._optimizer = optimizer_of(self._compute)
        for block in self._blocks:
            for name, payload in self._compute.initial_state(block.number):
                if not self._optimizer.add_state(block.number, name, payload):
                    msg = (
                        f"state {name!r} of block {block.number}, {payload.nbytes} bytes: its "
                        "optimizer has no such state"
                    )
                    raise BadFrame(msg)
        positions = tuple(LanePosition(lane=lane) for lane in range(lanes))
        first = StepRecord(version=0, positions=positions, lane_zero=self._compute.initial_lane_zero())
        self.rows = rows_of(self._compute.layout, 0)
        self._is_at(first, 0, "")

    def digest(self) -> str:
        """Of all values in use and all states: the same for all trainers that may go on together from
        here."""
        found = xxh3_128()
        for block in self._blocks:
            found.update(self._compute.current(block.number))
            for name, tensor in sorted(self.state(block.number).items()):
                found.update(name.encode())
                found.update(bytes_of(tensor.detach().reshape(-1).contiguous()))
        return found.hexdigest()

    # ------------------------------------------------------------ steps

    def step(self, gradients: Mapping[int, torch.Tensor | None], record: StepRecord) -> float | None:
        """Make the version of `record`, the next one, in the staging vectors. `gradients[block]`: the mean
        over all lanes, 1-d; for buffers their values; None: no lane had data, or the buffer stays as it is.
        They are only read. Returns the norm of the whole gradient, if that is measured in this step."""
        assert self.record is not None
        assert record.version == self.record.version + 1
        norm = self._norm(gradients, record)
        factor = self._factor(norm)
        options = (
            [options_of(each) for each in record.lane_zero.options] if record.lane_zero is not None else []
        )
        self._optimizer.step(gradients, factor, options, record.left_alone)
        for block in self._buffers:
            self._put(block, gradients[block.number])
        self.stepped = record
        return norm

    def swap(self) -> None:
        """What was stepped is the version in use from now on."""
        assert self.stepped is not None
        self._compute.swap()
        self.record, self.stepped, self.stepping = self.stepped, None, False

    def factor(
        self, gradients: Mapping[int, torch.Tensor | None], record: StepRecord
    ) -> tuple[float | None, float | None]:
        """The norm of that step's whole gradient, if it is measured, and by which its gradients are
        multiplied; None: none of them is used."""
        norm = self._norm(gradients, record)
        return norm, self._factor(norm)

    def _factor(self, norm: float | None) -> float | None:
        return self._clipping.factor(norm) if self._clipping.holds and norm is not None else 1.0

    def _norm(self, gradients: Mapping[int, torch.Tensor | None], record: StepRecord) -> float | None:
        """The same bits as parameter servers and their trainers find together."""
        if not self._clipping.holds and not self._clipping.measures(record.version - 1):
            return None
        found = [gradients[block.number] for block in self._trained]
        return norm_of(0.0 if gradient is None else squares_of(gradient) for gradient in found)

    def _put(self, block: Block, values: torch.Tensor | None) -> None:
        if values is None:
            self._compute.keep(block.number)
        else:
            tensor_over(memoryview(self._compute.staging(block.number)).cast("B"), block.dtype).copy_(values)

    # ------------------------------------------------------------ shares of it

    def state(self, block: int) -> dict[str, torch.Tensor]:
        """Of a block's optimizer, not copies: of the version in use, and of the one that was stepped once
        that is there. Empty for buffers."""
        return self._optimizer.state(block)

    def copy_share(self, blocks: Iterable[int]) -> Share:
        """At the version in use. Only while nothing is stepped: states are those of the last step."""
        assert self.record is not None
        assert self.stepped is None
        values, states = {}, {}
        for number in blocks:
            payload = memoryview(self._compute.current(number)).cast("B").toreadonly()
            values[number] = tensor_over(payload, self._blocks[number].dtype).clone()
            states[number] = {name: tensor.detach().clone() for name, tensor in self.state(number).items()}
        return Share(self.record, values, states)

    def load(self, block: int, values: memoryview, state: State) -> None:
        """Copy the values of a block to the staging vectors; its optimizer goes on from `state`, whose
        tensors are its own from now on. Raises BadFrame: the layout has no such block, or one of another
        size, or the optimizer no such state."""
        place = self._blocks[block] if 0 <= block < len(self._blocks) else None
        if place is None or values.nbytes != place.bytes:
            expected = "no such block" if place is None else f"{place.bytes} bytes"
            msg = f"block {block} of {values.nbytes} bytes: the layout has {expected}"
            raise BadFrame(msg)
        self.record = self.stepped = None
        self._compute.staging(block)[:] = values.cast("B")
        self._optimizer.load(block, state)

    def loaded(
        self, record: StepRecord, timeline: int, checkpoint: str, rows: ReplicaRows | None = None
    ) -> None:
        """All blocks were loaded, at the version of `record`: it is in use from now on; `rows`: of the
        embedding tables, at that version. The loop that trains restores the schedule."""
        assert rows is not None or not self._compute.layout.tables
        self._compute.swap()
        self.rows = rows
        self._is_at(record, timeline, checkpoint)

    def forget(self) -> None:
        """What it has is no version any more: `load` all blocks, or `begin`."""
        self.record = self.stepped = self.rows = None
        self._optimizer = optimizer_of(self._compute)

    def _is_at(self, record: StepRecord, timeline: int, checkpoint: str) -> None:
        self.record, self.stepped, self.stepping = record, None, False
        self.timeline, self.checkpoint = timeline, checkpoint


def rows_of(layout: Layout, version: int) -> ReplicaRows | None:
    """Of all slots of the embedding tables, none yet; None: the model has no tables."""
    if not layout.tables:
        return None
    from trainer_agent.collective.rows import new_rows  # noqa: PLC0415  loads numba

    return new_rows(layout, version)


class ReplicaOptimizer(Protocol):
    """The optimizer of a replica: its state, and the step of all parameters. The state is that of blocks, for
    checkpoints and for trainers that join.

        EachBlock       element-wise rules: block by block, with the bits of parameter servers
        EachParameter   rules that need whole parameters (LARS, LAMB): one parameter at a time, gathered out
                        of its blocks

    `state(block)`: the tensors, not copies, by name."""

    def step(
        self,
        gradients: Gradients,
        factor: float | None,
        options: list[Options],
        frozen: ParameterNumbers = (),
    ) -> None:
        """Values of the compute's current vectors, stepped, into its staging vectors. `gradients[block]`:
        only read; None: there is none. `factor`: what gradients are multiplied by; None: this step is left
        out. `options`: of each group; []: as at first. `frozen`: the numbers of the parameters that stay as
        they are."""
        ...

    def state(self, block: int) -> dict[str, torch.Tensor]: ...

    def load(self, block: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`. Raises BadFrame: that is no state of this optimizer."""
        ...

    def add_state(self, block: int, name: str, payload: memoryview) -> bool:
        """Copy one tensor of a state to start with; whether this block has such a state, of that size."""
        ...


def optimizer_of(compute: Compute) -> ReplicaOptimizer:
    """Without state, or with the one that its class begins with. Raises InvalidArgument: there is no such
    optimizer."""
    if OF_WHOLE_PARAMETERS.keys() & compute.layout.optimizer.class_names:
        return EachParameter(compute)
    return EachBlock(compute)


class EachBlock:
    """The memory that each optimizer is made with is not read or written."""

    def __init__(self, compute: Compute) -> None:
        self._compute, layout = compute, compute.layout
        self._blocks = _of_parameters(compute)
        self._groups = [segment.group for segment in layout.segments]
        chosen, parts, spec = _arguments(compute), ParameterParts(layout), layout.optimizer
        self._freezing = Freezing(parts)
        self._optimizers = {
            block.number: block_optimizer(
                spec.class_of(self._groups[block.segment]),
                chosen[block.segment],
                _staging(compute, block),
                parts.of(block),
            )
            for block in self._blocks
        }

    def step(
        self,
        gradients: Gradients,
        factor: float | None,
        options: list[Options],
        frozen: ParameterNumbers = (),
    ) -> None:
        for block in self._blocks:
            gradient, optimizer = gradients[block.number], self._optimizers[block.number]
            if gradient is None or factor is None:
                self._compute.keep(block.number)
                continue
            own = options[self._groups[block.segment]] if options else {}
            own = self._freezing.options(block, own, frozen)
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
    """State of the shape of parameters lies in one vector for each segment, so blocks and parameters are
    views of it. A number beside it (`step`) is kept for each parameter; a block has one as long as all of its
    parameters are stepped equally often, and then one of each (see
    trireme_shared.serving.core.freezing)."""

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
            name = layout.optimizer.class_of(layout.segments[place.segment].group)
            optimizer = BlockOptimizer(name, chosen[place.segment], nothing)
            optimizer.load(self._first_state(place, optimizer, nothing.dtype))
            self._optimizers.append(optimizer)
            for block, _, _ in place.parts:
                self._of_block[block.number].append(optimizer)

    def _first_state(
        self, place: Gathered, optimizer: BlockOptimizer, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
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

    def step(
        self,
        gradients: Gradients,
        factor: float | None,
        options: list[Options],
        frozen: ParameterNumbers = (),
    ) -> None:
        for number in self._blocks:
            self._compute.keep(number)  # also what lies between parameters
        if factor is None:
            return
        left = set(numbers_in(frozen))
        current = {number: _current(self._compute, block) for number, block in self._blocks.items()}
        staging = {number: _staging(self._compute, block) for number, block in self._blocks.items()}
        for place, optimizer in zip(self._places, self._optimizers, strict=True):
            if place.number in left or not place.all_in(gradients):
                continue
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
        end = place.first + place.elements
        found = {
            name: vector[place.first : end]
            for (segment, name), vector in self._vectors.items()
            if segment == place.segment
        }
        return {**found, **block_numbers([each.state() for each in self._of_block[block]])}

    def load(self, block: int, state: Mapping[str, torch.Tensor]) -> None:
        own, optimizers = self.state(block), self._of_block.get(block, [])
        numbers = [numbers_of(state, place) for place in range(len(optimizers))]
        if shapes_of(own) != shapes_of(state) or None in numbers:
            msg = f"block {block} comes with the state {_shapes(state)}: its optimizer has {_shapes(own)}"
            raise BadFrame(msg)
        for name, value in state.items():
            if value.dim():
                own[name].copy_(value)
        for optimizer, found in zip(optimizers, numbers, strict=True):
            for name, value in (found or {}).items():
                optimizer.state()[name].copy_(value)

    def add_state(self, block: int, name: str, payload: memoryview) -> bool:
        kind, _, place = name.partition(".")
        optimizers = self._of_block.get(block, [])
        if place and not (place.isdecimal() and int(place) < len(optimizers)):
            return False
        if kind == BEGUN:
            return bool(place)
        chosen = [optimizers[int(place)]] if place else optimizers
        own = self.state(block)
        like = own.get(kind) if kind in own else chosen[0].state().get(kind) if chosen else None
        if like is None or payload.nbytes != like.nbytes or (place and like.dim()):
            return False
        value = torch.empty_like(like)
        bytes_of(value.reshape(-1))[:] = payload.cast("B")
        if value.dim():
            own[kind].copy_(value)
        else:
            for optimizer in chosen:
                optimizer.state()[kind].copy_(value)
        return True


class Gathered:
    """A parameter out of the blocks that it lies in. `blocks`: of all parameters, in order; `parts`: (block,
    first element in the block, count), in order."""

    def __init__(self, place: Place, blocks: Sequence[Block]) -> None:
        self.segment, self.first, self.elements = place.segment, place.first, place.elements
        self.number = place.number
        end = place.first + place.elements
        self.parts = [
            (
                block,
                max(self.first - block.first, 0),
                min(end, block.first + block.elements) - max(self.first, block.first),
            )
            for block in blocks
            if block.segment == place.segment
            and block.first < end
            and self.first < block.first + block.elements
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
