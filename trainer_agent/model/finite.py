"""Losses and gradients that are NaN or infinite: noticed before they are pushed.

A block is summed right after it was written, while the processor's cache holds it, which costs a third of reading it again later:
the sum of finite values is finite, unless it overflows itself. Only then each value is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

WHAT_TO_DO = (
    "lower the learning rate or look at the records; "
    "on_nonfinite = skip leaves such minibatches out, on_nonfinite = ignore trains with them"
)


class NonFiniteError(FloatingPointError):
    """The loss or a gradient of a minibatch is NaN or infinite."""


class LeftOutError(NonFiniteError):
    """The script's GradScaler found such a gradient, and left the step out."""

    def __init__(self) -> None:
        super().__init__("GradScaler found a gradient that is not finite, and left the step of this minibatch out")


def check_loss(loss: float) -> None:
    """Raises NonFiniteError."""
    if not math.isfinite(loss):
        msg = f"the loss is {loss}; {WHAT_TO_DO}"
        raise NonFiniteError(msg)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return math.isfinite(values.sum(dtype=torch.float32).item()) or bool(torch.isfinite(values).all())


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """As `is_finite`. On a GPU they are waited for once."""
    sums = [values.sum(dtype=torch.float32) for values in tensors]
    return not sums or math.isfinite(torch.stack(sums).sum().item()) or all(map(is_finite, tensors))


def check_gradients(gradients: Mapping[str, torch.Tensor]) -> None:
    """By names of parameters. Raises NonFiniteError, which names the first one that is not finite."""
    for name, gradient in gradients.items():
        if not is_finite(gradient):
            bad = gradient[~torch.isfinite(gradient)]
            msg = (
                f"the gradient of {name} has {bad.numel()} of {gradient.numel()} values that are not finite "
                f"(the first is {bad[0].item()}); {WHAT_TO_DO}"
            )
            raise NonFiniteError(msg)
