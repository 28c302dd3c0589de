"""The norm of a whole gradient that one process has, with the bits that parameter servers find: block by block (trireme_shared.blocks.gradient_norm)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainer_agent.model.finite import WHAT_TO_DO, NonFiniteError
from trainer_agent.model.flat import Plan, Vector
from trireme_shared.blocks.gradient_norm import clip_factor, norm_of, squares_of


def norm_of_vector(plan: Plan, gradients: Vector) -> float:
    """Of the blocks of parameters."""
    segments = plan.layout.segments
    blocks = (gradients.blocks[b.number] for b in plan.blocks if segments[b.segment].kind == "param")
    return norm_of(squares_of(block.cpu()) for block in blocks)


def clip(plan: Plan, gradients: Vector, limit: float, *, any_norm: bool) -> None:
    """In place. Raises NonFiniteError, unless `any_norm`: then a NaN makes all NaN, as in nn.utils.clip_grad_norm_."""
    norm = norm_of_vector(plan, gradients)
    if not any_norm and not math.isfinite(norm):
        msg = f"the norm of the mean gradient is {norm}, although that of each minibatch is finite; {WHAT_TO_DO}"
        raise NonFiniteError(msg)
    if (factor := clip_factor(norm, limit)) != 1.0:
        for segment, values in zip(plan.layout.segments, gradients.segments, strict=True):
            if segment.kind == "param":
                values.mul_(factor)


class GradientClipper:
    """Clips gradients of `plan`'s parameters that lie anywhere, as training without any service has them."""

    def __init__(self, plan: Plan, limit: float, device: torch.device) -> None:
        self._plan, self._limit = plan, limit
        self._vector = Vector(plan, device)
        self._views = self._vector.views(plan.parameters)

    def clip(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """In place. `gradients`: in the order of the plan's parameters. Returns their norm, before."""
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        norm = norm_of_vector(self._plan, self._vector)
        if (factor := clip_factor(norm, self._limit)) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return norm
