"""The optimizers by name, optimizers of our own, and what each keeps for a parameter.

CLASSES have element-wise update rules, Lion too, so blocks can be stepped with the bits of whole parameters
(see geometry.py). OF_WHOLE_PARAMETERS (LARS and LAMB) need norms of whole parameters: members of collective
jobs step them, parameter servers cut parameters into blocks and cannot. Their norms are taken in the order in
which parameters lie in memory, and no bit of them depends on the number of threads: plain PyTorch and every
member of a collective job find the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from trireme_shared.blocks.gradient_norm import in_float64, squares_of
from trireme_shared.serving.optimizers.several import class_names


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization
    Algorithms", algorithm 2). `lr`: about a third to a tenth of AdamW's; `betas`: of the update, and of the
    momentum; `weight_decay`: decoupled, as AdamW's, so three to ten times AdamW's. One number of state for
    each parameter (AdamW has two). Raises ValueError for options that cannot be."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check_numbers("Lion", lr=lr, weight_decay=weight_decay)
        _check_betas("Lion", betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of any torch.optim optimizer. Parameters without a gradient stay as they are."""
        loss = _loss(closure)
        for group, parameter, state in _trained(self):
            lr, (beta1, beta2), decay, gradient = (
                group["lr"],
                group["betas"],
                group["weight_decay"],
                parameter.grad,
            )
            assert gradient is not None
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            momentum = state["exp_avg"]
            if decay:
                parameter.mul_(1 - lr * decay)
            update = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
            parameter.add_(update, alpha=-lr)
            momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional
    Networks", algorithm 1):

        rate = trust_coefficient |w| / (|g| + weight_decay |w|)
            1 if |w| or |g| is 0, or without `layerwise`
        v = momentum v + lr rate (g + weight_decay w)
        w = w - v

    The learning rate is inside of the momentum, as in the paper, so a schedule acts on later gradients alone.
    Give biases and parameters of normalisation a group with `layerwise=False` (SGD with momentum). One number
    of state for each parameter. Raises ValueError for options that cannot be."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        layerwise: bool = True,
    ) -> None:
        _check_numbers("LARS", lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        if not 0 <= momentum < 1:
            msg = f"LARS: momentum is {momentum}; expected a number in [0, 1)"
            raise ValueError(msg)
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "layerwise": layerwise,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of any torch.optim optimizer. Parameters without a gradient stay as they are. Raises
        RuntimeError for sparse gradients."""
        loss = _loss(closure)
        for group, parameter, state in _trained(self):
            gradient = _dense(parameter)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            decay, rate = group["weight_decay"], 1.0
            if group["layerwise"]:
                size, slope = _norm(parameter, parameter), _norm(gradient, parameter)
                if size > 0 and slope > 0:
                    rate = group["trust_coefficient"] * size / (slope + decay * size)
            if decay:
                gradient = gradient.add(parameter, alpha=decay)
            momentum = (
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"] * rate)
            )
            parameter.sub_(momentum)
        return loss


class LAMB(torch.optim.Optimizer):
    """Adam with layer-wise rates (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2;
    its function phi is the identity):

        m, v, r = as Adam, r = m' / (sqrt(v') + eps) with the bias corrected
        u = r + weight_decay x
        x = x - lr (|x| / |u|) u        the ratio is 1 if |x| or |u| is 0, or without `layerwise`

    Give biases and parameters of normalisation a group with `layerwise=False, weight_decay=0` (Adam). Two
    numbers of state for each parameter. Raises ValueError for options that cannot be."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        layerwise: bool = True,
    ) -> None:
        _check_numbers("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas("LAMB", betas)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "layerwise": layerwise},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of any torch.optim optimizer. Parameters without a gradient stay as they are. Raises
        RuntimeError for sparse gradients."""
        loss = _loss(closure)
        for group, parameter, state in _trained(self):
            gradient, (beta1, beta2) = _dense(parameter), group["betas"]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            steps = state["step"].add_(1).item()
            root = square.div(1 - beta2**steps).sqrt_().add_(group["eps"])
            update = mean.div(1 - beta1**steps).div_(root)
            if group["weight_decay"]:
                update.add_(parameter, alpha=group["weight_decay"])
            ratio = 1.0
            if group["layerwise"]:
                size, length = _norm(parameter, parameter), _norm(update, parameter)
                if size > 0 and length > 0:
                    ratio = size / length
            parameter.add_(update, alpha=-group["lr"] * ratio)
        return loss


def _loss(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _trained(
    optimizer: torch.optim.Optimizer,
) -> Iterable[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
    """Group, parameter and state of each parameter that has a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, optimizer.state[parameter]


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        msg = (
            f"a gradient is {gradient.layout}: LARS and LAMB take dense gradients; make the layer "
            "without sparse=True"
        )
        raise RuntimeError(msg)
    return gradient


def _norm(tensor: torch.Tensor, parameter: torch.Tensor) -> float:
    """Of all elements of `tensor`, in the order in which `parameter` has them in memory."""
    stride = torch.empty_like(parameter, device="meta").stride()  # without gaps
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return math.sqrt(in_float64(flat) if flat.dtype is torch.float64 else squares_of(flat))


def _check_numbers(name: str, **values: float) -> None:
    for option, value in values.items():
        if not value >= 0:
            msg = f"{name}: {option} is {value}; expected a number that is not negative"
            raise ValueError(msg)


def _check_betas(name: str, betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        msg = f"{name}: betas are {tuple(betas)}; expected two numbers in [0, 1)"
        raise ValueError(msg)


OF_TORCH = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in OF_TORCH},
    "Lion": Lion,
}
OF_WHOLE_PARAMETERS: dict[str, type[torch.optim.Optimizer]] = {"LARS": LARS, "LAMB": LAMB}
ALL_CLASSES = CLASSES | OF_WHOLE_PARAMETERS
CHOICES = (
    f"one of torch.optim: {', '.join(OF_TORCH)}; or trireme.optim.Lion; with strategy collective also "
    "trireme.optim.LARS and LAMB"
)


def no_whole_parameters(name: str) -> str:
    """Why a job with parameter servers cannot have this class of OF_WHOLE_PARAMETERS."""
    return (
        f"optimizer {name} needs the norm of each whole parameter, and parameter servers have blocks "
        "that cut them"
    )


# ---------------------------------------------------------------- what an optimizer keeps for each parameter

SCALAR = torch.float32  # of numbers beside the parameter (`step`); tensors of its shape have its dtype

Kinds = Mapping[str, bool]


def kinds_of(optimizer: torch.optim.Optimizer) -> list[Kinds]:
    """Of each group: its state after a step, by name: True if it is one float32 number, False if it has the
    parameter's shape and dtype. Empty for classes without state (SGD without momentum)."""
    return [
        _kinds(
            name,
            tuple(
                (option, _hashable(value))
                for option, value in group.items()
                if option not in ("params", "param_names")
            ),
        )
        for name, group in zip(class_names(optimizer), optimizer.param_groups, strict=True)
    ]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _kinds(name: str, options: tuple[tuple[str, Any], ...]) -> Kinds:
    """By a step of such an optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    make: Any = ALL_CLASSES[name]
    optimizer = make([{**dict(options), "params": [parameter]}])
    optimizer.step()
    found: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {name: value.dim() == 0 for name, value in found.items() if isinstance(value, torch.Tensor)}
