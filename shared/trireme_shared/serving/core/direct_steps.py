"""Steps of common optimizers that call torch's kernels directly: the same bits as torch.optim's step, without its hundred
lines of Python for each block and, where the kernel can write elsewhere, without a copy of the values first.

    direct_step(optimizer) -> a function of (out, values, gradient, state), or None: use torch.optim

`out` becomes `values` stepped with `gradient`. `values` and `gradient` stay as they are; `state` is changed in place.
Kernels and their order are those of torch.optim.sgd and torch.optim.adam (single-tensor and fused, versions 2.6 to 2.15;
before 2.7 AdamW was no Adam, and no option told them apart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

State = Mapping[str, torch.Tensor]
DirectStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, State], None]
Tensors = list[torch.Tensor]
DirectSteps = Callable[[Tensors, Tensors, Mapping[str, Tensors]], None]
_EXTRAS_OF_SGD = ("maximize", "fused")
_EXTRAS_OF_FOREACH_SGD = ("maximize", "fused", "momentum", "weight_decay")  # foreach rounds some of them differently
_EXTRAS_OF_ADAM = ("amsgrad", "maximize", "foreach")


def direct_step(optimizer: torch.optim.Optimizer) -> DirectStep | None:
    """For the options that the optimizer's only group has now."""
    options = optimizer.param_groups[0]
    extras_of_sgd = _EXTRAS_OF_FOREACH_SGD if options.get("foreach") else _EXTRAS_OF_SGD
    match optimizer:
        case torch.optim.SGD() if not any(map(options.get, extras_of_sgd)):
            return partial(_sgd, options)
        case torch.optim.Adam() | torch.optim.AdamW() if not any(map(options.get, _EXTRAS_OF_ADAM)):
            decoupled = isinstance(optimizer, torch.optim.AdamW) or options.get("decoupled_weight_decay", False)
            return partial(_adam, options, decoupled)
    return None


def direct_steps(optimizer: torch.optim.Optimizer) -> DirectSteps | None:
    """The same for several tensors, stepped in place by one call of a fused kernel. All of them have made as many steps as the first one."""
    options, direct = optimizer.param_groups[0], direct_step(optimizer)
    if isinstance(direct, partial) and direct.func is _adam and options["fused"]:
        return partial(_fused_adam, *direct.args)
    return None


def has_state(optimizer: torch.optim.Optimizer, state: State) -> bool:
    """Whether the state that a direct step needs exists: torch makes it in the first step."""
    return bool(state) or (isinstance(optimizer, torch.optim.SGD) and not optimizer.param_groups[0]["momentum"])


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
    rate, (beta1, beta2), decay, eps = options["lr"], options["betas"], options["weight_decay"], options["eps"]
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
    options: Mapping[str, Any], decoupled: bool, values: Tensors, gradients: Tensors, state: Mapping[str, Tensors]
) -> None:
    _fused(options, decoupled, values, gradients, state["exp_avg"], state["exp_avg_sq"], state["step"][0].add_(1))


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
    kernel(values, gradients, means, squares, [], steps, **numbers, eps=options["eps"], amsgrad=False, maximize=False)
