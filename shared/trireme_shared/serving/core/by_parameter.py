"""Steps of a block whose bits depend on where parameters end.

    block    | a parameter ... end | pad | a parameter ... end | pad | another one's begin ...
    step       all of it as one vector: right, but for the ends inside it
    ends       taken out before, stepped number by number, put back

A kernel takes 64 bytes at a time, and what is left at the end of a tensor number by number, which rounds otherwise. So the block has the bits
of whole parameters, for little more than one step of a vector. The optimizer's state is one vector for the block, as elsewhere.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch

from trireme_shared.serving.core.direct_steps import DirectSteps, direct_steps, has_state
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options
from trireme_shared.serving.optimizers.parameter_parts import Parts, ends_of

SERIAL = 511 * 64
"""Elements of 16-bit numbers that torch computes in one thread: where it would cut more of them depends on the number of threads."""

State = dict[str, torch.Tensor]


def block_optimizer(name: str, chosen: Options, values: torch.Tensor, parts: Parts) -> BlockOptimizer:
    """`parts`: see ParameterParts.of."""
    ends = ends_of(parts, values.numel(), values.element_size())
    is_cut = bool(parts) and values.element_size() == 2 and values.numel() > SERIAL and not chosen.get("fused")
    if not ends and not is_cut:
        return BlockOptimizer(name, chosen, values)
    return ByParameter(name, chosen, values, ends, SERIAL if is_cut else values.numel())


class ByParameter(BlockOptimizer):
    """`ends`: (first element, how many) inside the block. Several threads step `most` elements at a time."""

    def __init__(self, name: str, chosen: Options, values: torch.Tensor, ends: Parts, most: int) -> None:
        self._pieces = [slice(first, first + most) for first in range(0, values.numel(), most)]
        self._parameters = [torch.nn.Parameter(values[each]) for each in self._pieces]
        self._vectors: State = {}
        self._ends = _Ends(name, chosen, values.dtype, ends) if ends else None
        super().__init__(name, chosen, values, self._parameters)

    def step_into(self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        if not self.only_reads(options):
            out.copy_(values)
            self.step(out, gradient, options)
            return
        assert self._direct is not None
        state = self.state()
        if self._ends is not None:
            self._ends.take(values, gradient, state)
        with torch.no_grad():
            if len(self._pieces) == 1 or torch.get_num_threads() == 1:
                self._direct(out, values, gradient, state)
            else:
                for piece in self._pieces:
                    own = {name: value[piece] if value.dim() else value.clone() for name, value in state.items()}
                    self._direct(out[piece], values[piece], gradient[piece], own)
                for name in [name for name, value in state.items() if not value.dim()]:
                    state[name].copy_(own[name])
        if self._ends is not None:
            self._ends.put(out, state, options)

    def step(self, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        if options != self._options:
            self._take(options)
        if self._ends is not None:
            self._ends.take(values, gradient, self.state())
        for parameter, piece in zip(self._parameters, self._pieces, strict=True):
            parameter.data, parameter.grad = values[piece], gradient[piece]
            for name in [name for name, value in self._state_of(0).items() if not value.dim()]:
                self.torch_optimizer.state[parameter][name].copy_(self._state_of(0)[name])
        with torch.no_grad():
            self._unhooked(self.torch_optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        if self._ends is not None:
            self._ends.put(values, self.state(), options)

    def state(self) -> State:
        if not self._vectors:
            self._gather()
        numbers = {name: value for name, value in self._state_of(0).items() if not value.dim()}
        return {**numbers, **self._vectors}

    def load(self, state: State) -> None:
        self._vectors |= {name: value for name, value in state.items() if value.dim()}
        for piece, parameter in zip(self._pieces, self._parameters, strict=True):
            own = {name: value[piece] if value.dim() else value.clone() for name, value in state.items()}
            self.torch_optimizer.state[parameter] = {**self.torch_optimizer.state.get(parameter, {}), **own}

    def _state_of(self, piece: int) -> State:
        found: dict[str, Any] = self.torch_optimizer.state.get(self._parameters[piece], {})
        return {name: value for name, value in found.items() if value is not None}

    def _gather(self) -> None:
        """torch has made the state of each piece: it moves into vectors."""
        for name, first in self._state_of(0).items():
            if first.dim():
                self._vectors[name] = torch.zeros(self._parameter.numel(), dtype=first.dtype)
                for piece, parameter in zip(self._pieces, self._parameters, strict=True):
                    state = self.torch_optimizer.state[parameter]
                    self._vectors[name][piece] = state[name]
                    state[name] = self._vectors[name][piece]


class _Ends(BlockOptimizer):
    """The ends of parameters, one behind the other in memory of their own. `take` them before the block is stepped, `put` them back afterwards.

    A fused kernel gets a list of them. Other kernels go number by number through memory with gaps, so they get all ends as one tensor."""

    def __init__(self, name: str, chosen: Options, dtype: torch.dtype, ends: Parts) -> None:
        self._numbers = torch.cat([torch.arange(first, first + count) for first, count in ends])
        self._cuts = [slice(*both) for both in pairwise(accumulate((count for _, count in ends), initial=0))]
        self._apart = 1 if chosen.get("fused") else 2
        self._values, self._out, self._gradient = (self._memory(dtype) for _ in range(3))
        self._cut_values, self._cut_gradients = self._cut(self._values), self._cut(self._gradient)
        self._parameters = [torch.nn.Parameter(each) for each in self._cut_values]
        for parameter, gradient in zip(self._parameters, self._cut_gradients, strict=True):
            parameter.grad = gradient
        self._kept: dict[str, torch.Tensor] = {}  # the state of all of them; a number (`step`) of each
        self._state: State = {}  # the same, with one number
        self._lists: dict[str, list[torch.Tensor]] = {}  # by end
        self._many: DirectSteps | None = None
        super().__init__(name, chosen, self._values, self._parameters)

    def take(self, values: torch.Tensor, gradient: torch.Tensor, state: State) -> None:
        """`values`, `gradient` and `state`: of the block."""
        with torch.no_grad():
            torch.index_select(values, 0, self._numbers, out=self._values)
            torch.index_select(gradient, 0, self._numbers, out=self._gradient)
            for name, value in state.items():
                if name not in self._kept:
                    self._keep(name, value)
                if value.dim():
                    torch.index_select(value, 0, self._numbers, out=self._kept[name])
                else:
                    self._kept[name].copy_(value)

    def put(self, values: torch.Tensor, state: State, options: Options) -> None:
        """Step them, and write them to `values` and `state` of the block."""
        if options != self._options:
            self._take(options)
            self._many = direct_steps(self.torch_optimizer)
        with torch.no_grad():
            values.index_copy_(0, self._numbers, self._stepped())
            for name, value in state.items():
                if value.dim() and name in self._kept:
                    value.index_copy_(0, self._numbers, self._kept[name])
                elif value.dim():  # torch has made it in this step
                    made = torch.cat([self.torch_optimizer.state[each][name] for each in self._parameters])
                    value.index_copy_(0, self._numbers, made)

    def _stepped(self) -> torch.Tensor:
        if not has_state(self.torch_optimizer, self._state):
            self._unhooked(self.torch_optimizer)
        elif self._many is not None:
            self._many(self._cut_values, self._cut_gradients, self._lists)
        elif self._direct is not None and self._apart > 1:
            self._direct(self._out, self._values, self._gradient, self._state)
            return self._out
        else:
            self._unhooked(self.torch_optimizer)
        return self._values

    def _keep(self, name: str, value: torch.Tensor) -> None:
        """A part of the state, from now on in this memory."""
        if value.dim():
            kept = self._memory(value.dtype)
            self._lists[name] = self._cut(kept)
        else:
            kept = value.repeat(len(self._parameters))
            self._lists[name] = list(kept.unbind())
        self._kept[name], self._state[name] = kept, kept if value.dim() else kept[0]
        for parameter, each in zip(self._parameters, self._lists[name], strict=True):
            self.torch_optimizer.state[parameter][name] = each

    def _memory(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(self._numbers) * self._apart, dtype=dtype)[:: self._apart]

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [vector[each] for each in self._cuts]
