"""Optimizers on blocks: the user's optimizer, built from data, with its own state for each block.

Only element-wise classes are allowed. So stepping blocks gives the same bits as stepping whole parameters, and where the last few
numbers of a parameter are rounded otherwise than the rest, by_parameter.py keeps its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.serving.core.direct_steps import DirectStep, direct_step, has_state
from trireme_shared.serving.optimizers.classes import (
    ALL_CLASSES,
    CHOICES,
    CLASSES,
    OF_WHOLE_PARAMETERS,
    no_whole_parameters,
)
from trireme_shared.serving.optimizers.parameter_parts import is_narrow
from trireme_shared.serving.optimizers.state import SCALAR, kinds_of

# the constructor fixes these; the rest may change with every step
_FIXED = {"params", "foreach", "fused", "capturable", "differentiable", "initial_accumulator_value"}
_OFF = {"capturable", "differentiable"}  # for CUDA graphs and for gradients of gradients: not needed on a pserver

Options = dict[str, Any]


def options_of(given: Options) -> Options:
    """Options as torch wants them (lists become tuples). Raises InvalidArgument for anything but numbers, bools and None."""
    return {name: _plain(name, value) for name, value in given.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and all(isinstance(part, int | float) for part in value):
        return tuple(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    msg = f"optimizer option {name}={value!r} is {type(value).__name__}: expected a number, a bool, None or a list of numbers"
    raise InvalidArgument(msg)


def arguments(spec: OptimizerSpec, group: int, dtype: str = "float32", *, whole: bool = False) -> Options:
    """Constructor arguments of one parameter group, for parameters of `dtype`. `whole`: for whole parameters, not blocks. Raises InvalidArgument for
    an unknown class or group. With 16-bit parameters and momentum the result of SGD's fused kernel depends on memory that nobody has written, in plain
    PyTorch too: it becomes `foreach` there."""
    cls: Any = (ALL_CLASSES if whole else CLASSES).get(spec.name)
    if cls is None and spec.name in OF_WHOLE_PARAMETERS:
        raise InvalidArgument(no_whole_parameters(spec.name), hint=f"use strategy collective, or {CHOICES}")
    if cls is None:
        msg = f"optimizer {spec.name!r} does not run on parameter servers; choose {CHOICES}"
        raise InvalidArgument(msg)
    if not 0 <= group < len(spec.groups):
        msg = f"optimizer group {group} of a segment: {spec.name} has groups 0 to {len(spec.groups) - 1}"
        raise InvalidArgument(msg)
    known = set(cls([torch.nn.Parameter(torch.zeros(1))], lr=0.001).defaults)
    if spec.name == "AdamW":
        known.discard("decoupled_weight_decay")  # in its defaults, but its constructor sets it
    merged = options_of({**spec.defaults, **spec.groups[group]})
    chosen = {name: value for name, value in merged.items() if name in known}
    chosen.update(dict.fromkeys(_OFF & chosen.keys(), False))
    if spec.name == "SGD" and chosen.get("fused") and is_narrow(dtype):
        chosen.update(fused=False, foreach=True)
    try:
        cls([torch.nn.Parameter(torch.zeros(1))], **chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        msg = f"{spec.name} refuses {chosen}: {error}"
        raise InvalidArgument(msg) from error
    return chosen


class BlockOptimizer:
    """Steps one block. Its values may lie in other memory at each step; the state is kept here."""

    def __init__(
        self, name: str, chosen: Options, values: torch.Tensor, parts: Sequence[torch.nn.Parameter] = ()
    ) -> None:
        """`parts`: of the values, if each is to be stepped by itself."""
        make: Any = ALL_CLASSES[name]
        self._parameter = torch.nn.Parameter(values)
        self.torch_optimizer: torch.optim.Optimizer = make(parts or [self._parameter], **chosen)
        self._options: Options | None = None
        self._unhooked = _unhooked(type(self.torch_optimizer).step)
        self._direct: DirectStep | None = None

    def only_reads(self, options: Options) -> bool:
        """Whether `step_into` with these options leaves the gradient as it is."""
        if options != self._options:
            self._take(options)
        return self._direct is not None and has_state(self.torch_optimizer, self.state())

    def step_into(self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        """`out` = `values` stepped with `gradient`, whose memory is scratch. `values` stay as they are."""
        if options != self._options:
            self._take(options)
        state = self.state()
        if self._direct is not None and has_state(self.torch_optimizer, state):
            with torch.no_grad():
                self._direct(out, values, gradient, state)
        else:
            out.copy_(values)
            self.step(out, gradient, options)

    def step(self, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        """Step `values` **in place** with `gradient`, whose memory is scratch. `options`: the group's in this step."""
        if options != self._options:
            self._take(options)
        self._parameter.data = values
        self._parameter.grad = gradient
        with torch.no_grad():
            self._unhooked(self.torch_optimizer)
        self._parameter.grad = None

    def forget_values(self) -> None:
        """Keep the memory of the last step's values no longer."""
        self._parameter.data = self._parameter.new_empty(0)

    def state(self) -> dict[str, torch.Tensor]:
        """The state's tensors, not copies; empty before the first step of most classes."""
        found: dict[str, Any] = self.torch_optimizer.state.get(self._parameter, {})
        return {name: value for name, value in found.items() if value is not None}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a saved state; the tensors are the optimizer's from now on."""
        if state:
            self.torch_optimizer.state[self._parameter] = dict(state)

    def add_state(self, name: str, payload: memoryview) -> bool:
        """Copy one tensor of a state to start with; whether this class has such a state, of that size."""
        (kinds,) = kinds_of(self.torch_optimizer)
        if (scalar := kinds.get(name)) is None:
            return False
        like = torch.zeros((), dtype=SCALAR) if scalar else torch.empty_like(self._parameter.detach())
        if payload.nbytes != like.nbytes:
            return False
        bytes_of(like.reshape(-1))[:] = payload.cast("B")
        self.load({**self.state(), name: like})
        return True

    def _take(self, options: Options) -> None:
        group = self.torch_optimizer.param_groups[0]
        group.update({name: value for name, value in options.items() if name in group and name not in _FIXED})
        self._options = options
        self._direct = direct_step(self.torch_optimizer)


def _unhooked(step: Any) -> Any:
    """A class's `step` without torch's wrappers for the profiler, the compiler and no_grad."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
