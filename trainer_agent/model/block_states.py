"""The state of an optimizer by blocks, as parameter servers have it, and by parameters, as torch has it.

optimizer.state ─fill─► blocks, sent with their first values
checkpoint ─► blocks ─give_back─► optimizer.state ─► training.pt
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_agent.model.devices import HOST
from trainer_agent.model.flat import Plan, Vector, bytes_of
from trainer_agent.model.optimizer import decode
from trainer_agent.start_values import without_wrappers
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.optimizers.classes import SCALAR, kinds_of


class BlockStates:
    """The state of each block that `optimizer` steps, in host memory. `fill` moves that of the optimizer
    here, `give_back` what was written here to the optimizer."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = dict(model.named_parameters())
        self._plan, self._optimizer = plan, optimizer
        self._parameters = [(place, named[place.name]) for place in plan.parameters]
        self._kinds = kinds_of(optimizer)
        names = {name for kinds in self._kinds for name, scalar in kinds.items() if not scalar}
        self._vectors = {name: Vector(plan, HOST) for name in sorted(names)}
        self._memory = {name: vector.memory() for name, vector in self._vectors.items()}
        self._scalars: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, block: int) -> Sequence[tuple[str, memoryview]]:
        """(name, bytes) of each tensor of a block's state, to read or to write; empty for buffers."""
        kinds = self._kinds_in(block)
        return [
            (name, self._bytes(block, name) if scalar else self._memory[name][block])
            for name, scalar in kinds.items()
        ]

    def memory(self) -> dict[tuple[int, str], memoryview]:
        """Of all that is to be written, by block and name."""
        return {
            (block.number, name): into for block in self._plan.blocks for name, into in self.of(block.number)
        }

    def fill(self) -> None:
        """Raises InvalidArgument: one block has parameters that were stepped differently often."""
        for place, parameter in self._parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if name in self._vectors:
                    self._vectors[name].view(place).copy_(value)
                elif isinstance(value, torch.Tensor):
                    for block in self._plan.blocks_of(place):
                        self._set_scalar(block, name, value, place.name)
        self._optimizer.state.clear()

    def give_back(self) -> None:
        """Raises InvalidArgument: a parameter lies in blocks that were stepped differently often."""
        self._optimizer.state = defaultdict(dict)  # while training went on, it refused to be read and written
        for place, parameter in self._parameters:
            blocks = self._plan.blocks_of(place)
            state: dict[str, torch.Tensor] = {}
            for name, scalar in self._kinds[self._plan.layout.segments[place.segment].group].items():
                if not scalar:
                    state[name] = self._vectors[name].view(place).clone()
                    continue
                for block in blocks[1:]:
                    self._set_scalar(block, name, self._scalars[blocks[0], name], place.name)
                state[name] = self._scalars[blocks[0], name].clone()
            self._optimizer.state[parameter] = state

    def _kinds_in(self, block: int) -> Mapping[str, bool]:
        segment = self._plan.layout.segments[self._plan.blocks[block].segment]
        return self._kinds[segment.group] if segment.kind == "param" else {}

    def _bytes(self, block: int, name: str) -> memoryview:
        return bytes_of(self._scalars.setdefault((block, name), torch.zeros((), dtype=SCALAR)).reshape(1))

    def _set_scalar(self, block: int, name: str, value: torch.Tensor, parameter: str) -> None:
        known = self._scalars.setdefault((block, name), value.detach().to("cpu", SCALAR).clone())
        if not torch.equal(known, value.detach().cpu()):
            raise InvalidArgument(
                f"the optimizer's {name} of {parameter} is {float(value):g}, that of a parameter "
                f"in the same block is {float(known):g}: "
                "a block has one",
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
        found["scheduler"] = decode(lane_zero.scheduler["state"])
    with files.write_atomic(url) as file:
        torch.save(found, file)
    return url
