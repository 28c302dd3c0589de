"""Buffers (BatchNorm statistics …): every lane starts a step from the same values, and its changed values are pushed.

    current vector ──load──► the module's buffers ──forward changes them──► store ──► buffer segments of the gradient slot

Asynchronous jobs push what was added to integer buffers. Other buffers (bool, int32, …) are constants of the model.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer_agent.model.flat import Plan, Vector


class LiveBuffers:
    """The module's buffers that are in the plan; a module may replace a buffer by a new tensor at any time. `counts`: integer
    ones are stored as what was added to them."""

    def __init__(self, model: nn.Module, plan: Plan, *, counts: bool = False) -> None:
        self._counts = counts
        split = [(place, *place.name.rpartition(".")) for place in plan.buffers]
        self._homes = [(place, model.get_submodule(path), name) for place, path, _, name in split]

    def load(self, vector: Vector) -> None:
        """Buffers of `vector` into the modules."""
        with torch.no_grad():
            for place, module, name in self._homes:
                module.get_buffer(name).copy_(vector.view(place))

    def store(self, vector: Vector, loaded: Vector) -> None:
        """The modules' buffers into `vector`; they were loaded from `loaded`."""
        with torch.no_grad():
            for place, module, name in self._homes:
                view = vector.view(place).copy_(module.get_buffer(name))
                if self._counts and not view.is_floating_point():
                    view.sub_(loaded.view(place))
