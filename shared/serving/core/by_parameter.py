"""Steps of a block whose bits depend on where parameters end: each part of a parameter is a tensor of its own.

    block    | a parameter's end | pad | a parameter | pad | another one's begin ...
    steps      ^^^^^^^^^^^^^^^^^         ^^^^^^^^^^^         ^^^^^^^^^^^^^^^^^^^     with the bits of whole parameters

The optimizer's state is one vector for the block, as elsewhere, and parts are views of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from shared.optimizers.parameter_parts import Parts
from shared.serving.core.direct_steps import has_state
from shared.serving.core.optimizers import BlockOptimizer, Options

SERIAL = 511 * 64
"""Elements of 16-bit numbers that torch computes in one thread: where it would cut more of them depends on the number of threads."""


def block_optimizer(name: str, chosen: Options, values: torch.Tensor, parts: Parts) -> BlockOptimizer:
    """`parts`: see ParameterParts.of."""
    return ByParameter(name, chosen, values, parts) if parts else BlockOptimizer(name, chosen, values)


class ByParameter(BlockOptimizer):
    """What lies between parameters keeps its values, and has 0 as its state."""

    def __init__(self, name: str, chosen: Options, values: torch.Tensor, parts: Parts) -> None:
        most = SERIAL if values.element_size() == 2 else values.numel()
        self._slices = [
            slice(first, min(first + most, start + count))
            for start, count in parts
            for first in range(start, start + count, most)
        ]
        ends = [0, *(end for each in self._slices for end in (each.start, each.stop)), values.numel()]
        self._sizes = [end - start for start, end in pairwise(ends)]  # a gap, a part, a gap ...
        self._gaps = [place for place in range(0, len(self._sizes), 2) if self._sizes[place]]
        self._parameters = [torch.nn.Parameter(values[each]) for each in self._slices]
        self._vectors: dict[str, torch.Tensor] = {}
        super().__init__(name, chosen, values, self._parameters)

    def only_reads(self, options: Options) -> bool:
        if options != self._options:
            self._take(options)
        return self._direct is not None and has_state(self.torch_optimizer, self._state_of(0))

    def step_into(self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        several = len(self._parameters) > 1 and self.torch_optimizer.param_groups[0].get("fused")
        if several or not self.only_reads(options):
            out.copy_(values)  # a fused kernel is called once for all parts
            self.step(out, gradient, options)
            return
        assert self._direct is not None
        states = [self.torch_optimizer.state[parameter] for parameter in self._parameters]
        outs, before, gradients = (vector.split_with_sizes(self._sizes) for vector in (out, values, gradient))
        with torch.no_grad():
            for gap in self._gaps:
                outs[gap].copy_(before[gap])
            for part in zip(outs[1::2], before[1::2], gradients[1::2], states, strict=True):
                self._direct(*part)

    def step(self, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        if options != self._options:
            self._take(options)
        parts = (vector.split_with_sizes(self._sizes)[1::2] for vector in (values, gradient))
        for parameter, own, slope in zip(self._parameters, *parts, strict=True):
            parameter.data, parameter.grad = own, slope
        with torch.no_grad():
            self._unhooked(self.torch_optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        if not self._vectors:
            self._gather()

    def state(self) -> dict[str, torch.Tensor]:
        if not self._vectors:
            self._gather()
        numbers = {name: value for name, value in self._state_of(0).items() if not value.dim()}
        return {**numbers, **self._vectors}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self._vectors |= {name: value for name, value in state.items() if value.dim()}
        for part, parameter in zip(self._slices, self._parameters, strict=True):
            own = {name: value[part] if value.dim() else value.clone() for name, value in state.items()}
            self.torch_optimizer.state[parameter] = {**self.torch_optimizer.state.get(parameter, {}), **own}

    def _state_of(self, part: int) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = self.torch_optimizer.state.get(self._parameters[part], {})
        return {name: value for name, value in found.items() if value is not None}

    def _gather(self) -> None:
        """torch has made the state of each part: it moves into vectors."""
        for name, first in self._state_of(0).items():
            if first.dim():
                self._vectors[name] = torch.zeros(self._parameter.numel(), dtype=first.dtype)
                for part, parameter in zip(self._slices, self._parameters, strict=True):
                    state = self.torch_optimizer.state[parameter]
                    self._vectors[name][part] = state[name]
                    state[name] = self._vectors[name][part]
