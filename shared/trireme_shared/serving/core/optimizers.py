"""Optimizers on blocks: the user's optimizer, built from data, with its own state for each block.

Only element-wise classes are allowed. So stepping blocks gives the same bits as stepping whole parameters,
and where the last few numbers of a parameter are rounded otherwise than the rest, ByParameter steps its end
by itself:

    block    | a parameter ... end | pad | a parameter ... end | pad | another one's begin ...
    step       all of it as one vector: right, but for the ends inside it
    ends       taken out before, stepped number by number, put back

A kernel computes 64 bytes at a time, and what is left at the end of a tensor number by number, which rounds
otherwise. So the block has the bits of whole parameters, for little more than one step of a vector. The
optimizer's state is one vector for the block, as elsewhere.

Steps of common optimizers call torch's kernels directly (`direct_step`): the same bits as torch.optim's step,
without its hundred lines of Python for each block and, where the kernel can write elsewhere, without a copy
of the values first. Kernels and their order are those of torch.optim.sgd and torch.optim.adam (single-tensor
and fused, versions 2.6 to 2.15; before 2.7 AdamW was no Adam, and no option told them apart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.serving.core.geometry import Parts, ends_of, is_narrow
from trireme_shared.serving.optimizers.classes import (
    ALL_CLASSES,
    CHOICES,
    CLASSES,
    OF_WHOLE_PARAMETERS,
    SCALAR,
    kinds_of,
    no_whole_parameters,
)

# elements of 16-bit numbers that torch computes in one thread; where it would cut more of them depends on the
# number of threads
SERIAL = 511 * 64
# the constructor fixes these; the rest may change with every step
_FIXED = {"params", "foreach", "fused", "capturable", "differentiable", "initial_accumulator_value"}
# for CUDA graphs and for gradients of gradients: not needed on a pserver
_OFF = {"capturable", "differentiable"}
Options = dict[str, Any]
State = dict[str, torch.Tensor]
DirectStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, State], None]
Tensors = list[torch.Tensor]
DirectSteps = Callable[[Tensors, Tensors, Mapping[str, Tensors]], None]
_EXTRAS_OF_SGD = ("maximize", "fused")
# foreach rounds some of them differently
_EXTRAS_OF_FOREACH_SGD = ("maximize", "fused", "momentum", "weight_decay")
_EXTRAS_OF_ADAM = ("amsgrad", "maximize", "foreach")


def options_of(given: Options) -> Options:
    """Options as torch wants them (lists become tuples). Raises InvalidArgument for anything but numbers,
    bools and None."""
    return {name: _plain(name, value) for name, value in given.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and all(isinstance(part, int | float) for part in value):
        return tuple(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    msg = (
        f"optimizer option {name}={value!r} is {type(value).__name__}: expected a number, a bool, None "
        "or a list of numbers"
    )
    raise InvalidArgument(msg)


def arguments(spec: OptimizerSpec, group: int, dtype: str = "float32", *, whole: bool = False) -> Options:
    """Constructor arguments of one parameter group, for parameters of `dtype`. `whole`: for whole parameters,
    not blocks. Raises InvalidArgument for an unknown class or group. With 16-bit parameters and momentum the
    result of SGD's fused kernel depends on memory that nobody has written, in plain PyTorch too: it becomes
    `foreach` there."""
    name = spec.class_of(group)
    cls: Any = (ALL_CLASSES if whole else CLASSES).get(name)
    if cls is None and name in OF_WHOLE_PARAMETERS:
        raise InvalidArgument(no_whole_parameters(name), hint=f"use strategy collective, or {CHOICES}")
    if cls is None:
        msg = f"optimizer {name!r} does not run on parameter servers; choose {CHOICES}"
        raise InvalidArgument(msg)
    if not 0 <= group < len(spec.groups):
        msg = f"optimizer group {group} of a segment: {name} has groups 0 to {len(spec.groups) - 1}"
        raise InvalidArgument(msg)
    known = set(cls([torch.nn.Parameter(torch.zeros(1))], lr=0.001).defaults)
    if name == "AdamW":
        known.discard("decoupled_weight_decay")  # in its defaults, but its constructor sets it
    merged = options_of({**spec.defaults, **spec.groups[group]})
    chosen = {name: value for name, value in merged.items() if name in known}
    chosen.update(dict.fromkeys(_OFF & chosen.keys(), False))
    if name == "SGD" and chosen.get("fused") and is_narrow(dtype):
        chosen.update(fused=False, foreach=True)
    try:
        cls([torch.nn.Parameter(torch.zeros(1))], **chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        msg = f"{name} refuses {chosen}: {error}"
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

    def step_into(
        self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
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
        """Step `values` **in place** with `gradient`, whose memory is scratch. `options`: the group's in this
        step."""
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


def whole_block_optimizer(name: str, chosen: Options, values: torch.Tensor, parts: Parts) -> BlockOptimizer:
    """For a block that is stepped as one. `parts`: see ParameterParts.of."""
    narrow, fused = values.element_size() == 2, bool(chosen.get("fused"))
    ends = ends_of(parts, values.numel(), values.element_size()) if narrow or fused else ()
    is_cut = bool(parts) and narrow and values.numel() > SERIAL and not fused
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

    def step_into(
        self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
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
                    own = {
                        name: value[piece] if value.dim() else value.clone() for name, value in state.items()
                    }
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
    """The ends of parameters, one behind the other in memory of their own. `take` them before the block is
    stepped, `put` them back afterwards.

    A fused kernel gets a list of them. Other kernels go number by number through memory with gaps, so they
    get all ends as one tensor."""

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


# ---------------------------------------------------------------- torch's kernels


def direct_step(optimizer: torch.optim.Optimizer) -> DirectStep | None:
    """A function of (out, values, gradient, state) for the options that the optimizer's only group has now;
    None: use torch.optim. `out` becomes `values` stepped with `gradient`; these two stay as they are, `state`
    is changed in place."""
    options = optimizer.param_groups[0]
    extras_of_sgd = _EXTRAS_OF_FOREACH_SGD if options.get("foreach") else _EXTRAS_OF_SGD
    match optimizer:
        case torch.optim.SGD() if not any(map(options.get, extras_of_sgd)):
            return partial(_sgd, options)
        case torch.optim.Adam() | torch.optim.AdamW() if not any(map(options.get, _EXTRAS_OF_ADAM)):
            decoupled = isinstance(optimizer, torch.optim.AdamW) or options.get(
                "decoupled_weight_decay", False
            )
            return partial(_adam, options, decoupled)
    return None


def direct_steps(optimizer: torch.optim.Optimizer) -> DirectSteps | None:
    """The same for several tensors, stepped in place by one call of a fused kernel. All of them have made as
    many steps as the first one."""
    options, direct = optimizer.param_groups[0], direct_step(optimizer)
    if isinstance(direct, partial) and direct.func is _adam and options["fused"]:
        return partial(_fused_adam, *direct.args)
    return None


def has_state(optimizer: torch.optim.Optimizer, state: State) -> bool:
    """Whether the state that a direct step needs exists: torch makes it in the first step."""
    return bool(state) or (
        isinstance(optimizer, torch.optim.SGD) and not optimizer.param_groups[0]["momentum"]
    )


def _sgd(
    options: Mapping[str, Any], out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, state: State
) -> None:
    """`out` also holds the gradient with momentum and decay added, until the values are written."""
    rate, momentum, decay = options["lr"], options["momentum"], options["weight_decay"]
    if decay:
        gradient = torch.add(gradient, values, alpha=decay, out=out)
    if momentum:
        buffer = state["momentum_buffer"].mul_(momentum).add_(gradient, alpha=1 - options["dampening"])
        gradient = torch.add(gradient, buffer, alpha=momentum, out=out) if options["nesterov"] else buffer
    torch.add(values, gradient, alpha=-rate, out=out)


def _adam(
    options: Mapping[str, Any],
    decoupled: bool,
    out: torch.Tensor,
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
) -> None:
    """The fused kernel rounds otherwise than the single operations, so each has its own arithmetic."""
    rate, (beta1, beta2), decay, eps = (
        options["lr"],
        options["betas"],
        options["weight_decay"],
        options["eps"],
    )
    mean, square, steps = state["exp_avg"], state["exp_avg_sq"], state["step"].add_(1)
    if options["fused"]:
        _fused(options, decoupled, [out.copy_(values)], [gradient], [mean], [square], steps)
        return
    step = steps.item()
    if decay and decoupled:
        values = values.mul(1 - rate * decay)
    elif decay:
        gradient = gradient.add(values, alpha=decay)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    torch.sqrt(square, out=out)  # the denominator, where the values will be
    out.div_((1 - beta2**step) ** 0.5).add_(eps)
    torch.addcdiv(values, mean, out, value=-(rate / (1 - beta1**step)), out=out)


def _fused_adam(
    options: Mapping[str, Any],
    decoupled: bool,
    values: Tensors,
    gradients: Tensors,
    state: Mapping[str, Tensors],
) -> None:
    _fused(
        options, decoupled, values, gradients, state["exp_avg"], state["exp_avg_sq"], state["step"][0].add_(1)
    )


def _fused(
    options: Mapping[str, Any],
    decoupled: bool,
    values: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    step: torch.Tensor,
) -> None:
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = options["betas"]
    numbers = {"lr": options["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": options["weight_decay"]}
    steps = [step] * len(values)
    kernel(
        values,
        gradients,
        means,
        squares,
        [],
        steps,
        **numbers,
        eps=options["eps"],
        amsgrad=False,
        maximize=False,
    )
