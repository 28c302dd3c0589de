"""Losses and gradients that are NaN or infinite: noticed before they are pushed.

A block is summed while the processor's cache still holds it: the sum of finite values is finite, unless it overflows itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

WHAT_TO_DO = (
    "lower the learning rate or look at the records; "
    "on_nonfinite = skip leaves such minibatches out, on_nonfinite = ignore trains with them"
)


class NonFiniteError(FloatingPointError):
    """The loss or a gradient of a minibatch is NaN or infinite."""


def check_loss(loss: float) -> None:
    """Raises NonFiniteError."""
    if not math.isfinite(loss):
        msg = f"the loss is {loss}; {WHAT_TO_DO}"
        raise NonFiniteError(msg)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


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
