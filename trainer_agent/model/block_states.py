"""The state of an optimizer by blocks, as parameter servers have it, and by parameters, as torch has it.

optimizer.state ─fill─► blocks, sent with their first values
checkpoint ─► blocks ─give_back─► optimizer.state ─► training.pt
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_agent.model.devices import HOST
from trainer_agent.model.flat import Place, Plan, Vector, bytes_of
from trainer_agent.model.optimizer import decode
from trainer_agent.start_values import without_wrappers
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.core.freezing import BEGUN, block_numbers, numbers_of
from trireme_shared.serving.core.geometry import ParameterParts
from trireme_shared.serving.core.optimizers import State
from trireme_shared.serving.optimizers.classes import SCALAR, kinds_of
from trireme_shared.serving.optimizers.several import forget_state


class BlockStates:
    """The state of each block that `optimizer` steps, in host memory. `fill` moves that of the optimizer
    here, `give_back` what was read here to the optimizer."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = dict(model.named_parameters())
        self._plan, self._optimizer = plan, optimizer
        self._parameters = [(place, named[place.name]) for place in plan.parameters]
        self._kinds = kinds_of(optimizer)
        names = {name for kinds in self._kinds for name, scalar in kinds.items() if not scalar}
        self._vectors = {name: Vector(plan, HOST) for name in sorted(names)}
        self._memory = {name: vector.memory() for name, vector in self._vectors.items()}
        #: by block: its numbers, and names of its vectors that have values
        self._numbers: dict[int, State] = {}
        self._filled: dict[int, set[str]] = {}
        parts = ParameterParts(plan.layout)
        self._in_blocks = {block.number: parts.numbers_in(block) for block in plan.blocks}

    def of(self, block: int) -> Sequence[tuple[str, memoryview]]:
        """(name, bytes) of each tensor of a block's state; empty for buffers, and for blocks without."""
        found = [(name, self._memory[name][block]) for name in sorted(self._filled.get(block, ()))]
        numbers = self._numbers.get(block, {})
        return [*((name, bytes_of(value.reshape(1))) for name, value in numbers.items()), *found]

    def into(self, block: int, name: str) -> memoryview | None:
        """See trireme_shared.checkpoints.stored.StatesRead."""
        kinds, (kind, _, place) = self._kinds_in(block), name.partition(".")
        if not place and kinds.get(name) is False:
            self._filled.setdefault(block, set()).add(name)
            return self._memory[name][block]
        if not kinds.get(kind, kind == BEGUN and bool(kinds)):
            return None
        number = self._numbers.setdefault(block, {})[name] = torch.zeros((), dtype=SCALAR)
        return bytes_of(number.reshape(1))

    def lacking(self) -> tuple[int, str] | None:
        """See trireme_shared.checkpoints.stored.StatesRead. A block whose parameters were always frozen has
        no state."""
        for block in self._plan.blocks:
            kinds, numbers = self._kinds_in(block.number), self._numbers.get(block.number, {})
            there = self._filled.get(block.number, set()) | {name.partition(".")[0] for name in numbers}
            is_needed = there or not (self._filled or self._numbers) or not self._plan.layout.sizes
            if is_needed and (lacks := sorted(kinds.keys() - there)):
                return block.number, lacks[0]
        return None

    def fill(self) -> None:
        """Raises InvalidArgument: one block has parameters that were stepped differently often, in a job in
        which all are stepped equally often."""
        states: dict[int, dict[str, Any]] = {}  # by number
        for place, parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
            for name, value in tensors.items():
                if name in self._vectors:
                    self._vectors[name].view(place).copy_(value)
            states[place.number] = {
                name: value if name in self._vectors else value.detach().to("cpu", SCALAR)
                for name, value in tensors.items()
            }
            for block in self._plan.blocks_of(place):
                self._filled.setdefault(block, set()).update(self._vectors.keys() & tensors.keys())
                if place.number < 0:
                    for name in tensors.keys() - self._vectors.keys():
                        self._set_number(block, name, states[place.number][name], place.name)
        for block, numbers in self._in_blocks.items() if self._plan.layout.sizes else ():
            if found := block_numbers([states[number] for number in numbers]):
                self._numbers[block] = found
        self._optimizer.state.clear()

    def give_back(self) -> None:
        """Raises InvalidArgument: a parameter lies in blocks that were stepped differently often."""
        forget_state(self._optimizer)  # while training went on, it refused to be read and written
        for place, parameter in self._parameters:
            found = [self._numbers_of(block, place) for block in self._plan.blocks_of(place)]
            if any(numbers is None for numbers in found):  # it was always frozen
                continue
            for numbers in found[1:]:
                _check_equal(place.name, numbers or {}, found[0] or {})
            kinds = self._kinds[self._plan.layout.segments[place.segment].group]
            vectors = {
                name: self._vectors[name].view(place).clone() for name, scalar in kinds.items() if not scalar
            }
            first = {name: each.clone() for name, each in ((found and found[0]) or {}).items()}
            self._optimizer.state[parameter] = first | vectors

    def _numbers_of(self, block: int, place: Place) -> State | None:
        """Of the parameter at `place`, in that block; None: it has no state."""
        vectors = {name: self._vectors[name].blocks[block] for name in self._filled.get(block, ())}
        state = {**self._numbers.get(block, {}), **vectors}
        if not self._kinds_in(block):
            return {}
        inside = self._in_blocks[block]
        return numbers_of(state, inside.index(place.number) if place.number in inside else 0)

    def _kinds_in(self, block: int) -> Mapping[str, bool]:
        segment = self._plan.layout.segments[self._plan.blocks[block].segment]
        return self._kinds[segment.group] if segment.kind == "param" else {}

    def _set_number(self, block: int, name: str, value: torch.Tensor, parameter: str) -> None:
        known = self._numbers.setdefault(block, {}).setdefault(name, value.clone())
        _check_equal(parameter, {name: value}, {name: known})


def _check_equal(parameter: str, mine: State, known: State) -> None:
    """Raises InvalidArgument."""
    for name, value in mine.items():
        if name not in known or not torch.equal(known[name], value):
            raise InvalidArgument(
                f"the optimizer's {name} of {parameter} is {float(value):g}, that of a parameter "
                f"in the same block is {float(known.get(name, math.nan)):g}: a block has one",
                hint="leave --init-optimizer out: then the optimizer's state starts fresh",
            )


def write_training(
    url: str, model: nn.Module, optimizer: torch.optim.Optimizer, lane_zero: LaneZero | None
) -> str:
    """All three as plain PyTorch loads them. `lane_zero`: has the scheduler's state; `optimizer` its own, and
    the options of its groups."""
    values = without_wrappers(model, model.state_dict())
    found: dict[str, Any] = {"model": values, "optimizer": optimizer.state_dict()}
    if lane_zero is not None and lane_zero.scheduler:
        state = decode(lane_zero.scheduler["state"])
        is_list = all(name.isdecimal() for name in state)  # of schedulers, see schedule.Schedulers
        found["scheduler"] = list(state.values()) if is_list else state
    with files.write_atomic(url) as file:
        torch.save(found, file)
    return url
