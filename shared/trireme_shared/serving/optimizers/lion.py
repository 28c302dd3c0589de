"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

Each number is updated by itself, so blocks can be stepped with the bits of whole parameters (see parameter_parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """`lr`: about a third to a tenth of AdamW's; `betas`: of the update, and of the momentum; `weight_decay`: decoupled, as AdamW's, so
    three to ten times AdamW's. One number of state for each parameter (AdamW has two). Raises ValueError for options that cannot be."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                msg = f"Lion: {name} is {value}; expected a number that is not negative"
                raise ValueError(msg)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            msg = f"Lion: betas are {tuple(betas)}; expected two numbers in [0, 1)"
            raise ValueError(msg)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of any torch.optim optimizer. Parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                momentum = state["exp_avg"]
                if decay:
                    parameter.mul_(1 - lr * decay)
                update = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
                parameter.add_(update, alpha=-lr)
                momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss
